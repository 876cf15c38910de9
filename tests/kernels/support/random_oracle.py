"""An oracle of the random numbers: SplitMix64 in Python's integers, after the paper."""

import torch

MASK = 2**64 - 1


def at(step, device="cpu"):
    """A step as the library keeps it: one int64 on the device."""
    return torch.tensor([step], device=device)


def splitmix64(state):
    """The generator of Steele, Lea and Flood: the next state, and the number that comes out."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def uniform_oracle(key, step, numel, first=0):
    """Numbers ``first`` and on of a stream: SplitMix64, seeded with the number after ``step - 1`` of another."""
    _, state = splitmix64((key + (step - 1) * 0x9E3779B97F4A7C15) & MASK)
    state = (state + first * 0x9E3779B97F4A7C15) & MASK
    result = []
    for _ in range(numel):
        state, z = splitmix64(state)
        result.append((2 * (z >> 40) + 1) / 2**24 - 1)
    return torch.tensor(result, dtype=torch.float64)
