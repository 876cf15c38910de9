"""Comparison to the bit of nested results: tensors, lists, dictionaries and plain values."""

from dataclasses import fields, is_dataclass

import torch


def raw(tensor):
    """The bytes of the elements, in row-major order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(raw(left), raw(right))


def differences(actual, expected, path=""):
    """One line for each place where two nested values differ."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if same_bits(actual, expected):
            return []
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return [f"{path}: {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
        wrong = (actual != expected).sum().item()
        largest = (actual - expected).abs().max().item() if actual.numel() else 0.0
        return [f"{path}: {wrong} of {actual.numel()} elements differ, by up to {largest:.3g}"]
    if type(actual) is not type(expected):
        return [f"{path}: {actual!r}, not {expected!r}"]
    if is_dataclass(expected):
        return [
            line
            for field in fields(expected)
            for line in differences(getattr(actual, field.name), getattr(expected, field.name), f"{path}.{field.name}")
        ]
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return [f"{path}: keys {sorted(actual)}, not {sorted(expected)}"]
        return [line for key in expected for line in differences(actual[key], expected[key], f"{path}[{key!r}]")]
    if isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return [f"{path}: {len(actual)} entries, not {len(expected)}"]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [line for i, (a, e) in pairs for line in differences(a, e, f"{path}[{i}]")]
    return [] if actual == expected else [f"{path}: {actual!r}, not {expected!r}"]


def assert_same_bits(actual, expected):
    lines = differences(actual, expected)
    assert not lines, "\n".join(lines[:20])


def assert_same_on_all_ranks(results):
    for rank, result in enumerate(results):
        lines = differences(result, results[0])
        assert not lines, f"rank {rank} differs from rank 0:\n" + "\n".join(lines[:20])
