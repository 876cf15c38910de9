"""Bitwise comparison of nested results: tensors, lists, dictionaries, dataclasses and plain values."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """The bytes of the elements, in row-major order."""
    elements = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return elements.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one element may have any stride


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(raw(left), raw(right))


def differences(actual: Any, expected: Any, path: str = "") -> list[str]:
    """One line for each place where two nested values differ."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return [] if same_bits(actual, expected) else [f"{path}: {_difference_of_tensors(actual, expected)}"]
    if type(actual) is not type(expected):
        return [f"{path}: {actual!r}, not {expected!r}"]
    if is_dataclass(expected):
        actual, expected = _attributes(actual), _attributes(expected)
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


def _attributes(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _difference_of_tensors(actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    wrong = (actual != expected).sum().item()
    wide = torch.complex128 if actual.is_complex() else torch.float64
    largest = (actual.to(wide) - expected.to(wide)).abs().max().item() if actual.numel() else 0.0
    return f"{wrong} of {actual.numel()} elements differ, by up to {largest:.3g}"
