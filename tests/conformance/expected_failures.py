"""Tests that PyTorch's class passes on the CPU and gradwire's fails on purpose, each with the reason: none.

The list is strict: a listed test that passes fails the run, and so does an unlisted test that fails.
"""

EXPECTED_FAILURES: dict[str, str] = {}
