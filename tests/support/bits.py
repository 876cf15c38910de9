"""Assertions about bitwise equal results: tensors, and lists, dictionaries and dataclasses of them."""

from gradwire.testing._bits import differences, raw, same_bits

__all__ = ["assert_same_bits", "assert_same_on_all_ranks", "differences", "raw", "same_bits"]


def assert_same_bits(actual, expected):
    lines = differences(actual, expected)
    assert not lines, "\n".join(lines[:20])


def assert_same_on_all_ranks(results):
    for rank, result in enumerate(results):
        lines = differences(result, results[0])
        assert not lines, f"rank {rank} differs from rank 0:\n" + "\n".join(lines[:20])
