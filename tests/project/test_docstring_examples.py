"""Examples in docstrings that need no process group are run as they are written."""

import doctest

import pytest
import torch

from gradwire.compress import powersgd


@pytest.mark.parametrize("module", [powersgd], ids=lambda module: module.__name__)
def test_docstring_examples_match_output(module):
    torch.manual_seed(0)
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
