"""Validation of options and of entries of a checkpoint: a ValueError states name, value and expectation."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

MAX_COUNT = 2**62  # half of int64's range, so that a kernel can add one; a count stays there
MAX_ERROR = torch.finfo(torch.bfloat16).max  # errors are kept in fp32 or bf16, those of fp64 gradients in fp64
Init = TypeVar("Init", bound=Callable[..., None])


def check_keywords(init: Init) -> Init:
    """Decorate an ``__init__``: for an unknown keyword argument, the TypeError suggests the option that is meant."""
    options = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if unknown := [name for name in kwargs if name not in options]:
            name, meant = unknown[0], closest(unknown[0], options)
            hint = f"Did you mean {meant}={reprlib.repr(kwargs[name])}?" if meant else f"Expected {', '.join(options)}."
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}. {hint}")
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def closest(name: str, known: Sequence[str]) -> str | None:
    """The known name that contains ``name`` as whole words, or is contained in it, or else is spelled like it."""
    related = (each for each in known if f"_{name}_" in f"_{each}_" or f"_{each}_" in f"_{name}_")
    return next(related, None) or next(iter(difflib.get_close_matches(name, known, 1)), None)


def check_choice(name: str, value: object, choices: Iterable[object], or_else: str = "", hint: str = "") -> None:
    """Raise ValueError unless ``value`` is one of ``choices``; the error lists them and suggests the nearest.

    ``or_else`` names further values that the caller accepts; ``hint`` ends the error.
    """
    choices = list(choices)
    if value in choices:
        return
    spelled = {str(choice).lower(): choice for choice in choices}
    nearest = closest(str(value).lower(), list(spelled))
    meant = "" if nearest is None else f" Did you mean {spelled[nearest]!r}?"
    *first, last = [*map(repr, choices), *filter(None, [or_else])]
    raise ValueError(f"{name} is {value!r}; expected {', '.join(first)} or {last}.{meant}{hint and f' {hint}'}")


def check_whole_number(
    name: str, value: object, expected: str, lowest: int | None = None, highest: int | None = None
) -> None:
    """Raise ValueError unless ``value`` is an int, not a bool, from ``lowest`` to ``highest``."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (lowest is not None and value < lowest)
        or (highest is not None and value > highest)
    ):
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def check_count(entry: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a number of steps or elements."""
    check_whole_number(entry, value, "a whole number from 0 to 2**62", 0, MAX_COUNT)


def check_counts(entry: str, value: object, length: int) -> None:
    """Raise ValueError unless ``value`` is a list of ``length`` counts."""
    if not isinstance(value, list) or len(value) != length:
        raise wrong(entry, value, f"a list of {length} whole numbers")
    for i, count in enumerate(value):
        check_count(f"{entry}[{i}]", count)


def check_number(name: str, value: object, expected: str, lowest: float = -math.inf) -> None:
    """Raise ValueError unless ``value`` is a finite int or float of at least ``lowest``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -math.inf < value < math.inf or value < lowest:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected True or False.")


def check_patterns(name: str, value: object, expected: str, lowest: int) -> None:
    """Raise ValueError unless ``value`` maps strings to whole numbers of at least ``lowest``."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; expected a dictionary from name patterns to numbers.")
    for pattern, number in value.items():
        if not isinstance(pattern, str):
            raise ValueError(f"{name} has the pattern {pattern!r}; expected a string.")
        check_whole_number(f"{name}[{pattern!r}]", number, expected, lowest)


def check_memory_shape(entry: str, name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless the memory ``entry`` of parameter ``name`` has the shape that its gradient asks for."""
    if tensor.shape != tuple(shape):
        raise ValueError(
            f"The error memory of {name} has shape {tuple(tensor.shape)}, its gradient {tuple(shape)}: "
            f"{entry}[{name!r}] belongs to another model. Load the state of this model, or start with a new one."
        )


def check_entries(state: object, owner: str, names: Sequence[str]) -> None:
    """Raise ValueError unless ``state`` is a dictionary with these entries; others are ignored."""
    expected = f"{', '.join(names[:-1])} and {names[-1]}, as {owner}.state_dict() returns them"
    if not isinstance(state, Mapping):
        raise ValueError(f"The state is {_describe(state)}; expected {expected}.")
    if missing := [name for name in names if name not in state]:
        raise ValueError(f"The state has no entry {missing[0]!r}, only {list(state)}; expected {expected}.")


def check_tensor(
    entry: str, value: object, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None = None
) -> None:
    """Raise ValueError unless ``value`` is a plain dense tensor, not meta, of one of the dtypes and of ``shape``."""
    expected = f"a dense tensor of {' or '.join(map(str, dtypes))}"
    if shape is not None:
        expected += f" and shape {shape}"
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.is_nested
        or value.is_meta
        or value.dtype not in dtypes  # excludes quantized tensors
        or type(value.detach()) is not Tensor  # excludes subclasses such as DTensor; a Parameter passes
        or (shape is not None and value.shape != shape)
    ):
        raise wrong(entry, value, expected)


def check_elements(entry: str, tensor: Tensor, is_good: Tensor, expected: str) -> None:
    """Raise ValueError if an element of ``is_good`` is False; the message shows that element of ``tensor``."""
    if not bool(is_good.all()):
        index = (~is_good).nonzero()[0].tolist()
        raise wrong(f"{entry}{index}" if index else entry, tensor[tuple(index)].item(), expected)


def checked_tensors(key: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a dictionary by parameter name, each with the name of its entry, once it is checked."""
    if not isinstance(value, Mapping):
        raise wrong(key, value, "a dictionary from parameter names to tensors")
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise ValueError(f"{key} has the name {reprlib.repr(name)}; expected a string.")
        check_tensor(f"{key}[{name!r}]", tensor, (torch.float32, torch.float64))
        yield f"{key}[{name!r}]", tensor


def check_range(entry: str, error: Tensor) -> None:
    """Raise ValueError if an element exceeds the range of the dtype in which an error is kept."""
    check_elements(entry, error, error.abs() <= MAX_ERROR, f"-{MAX_ERROR:.6g} to {MAX_ERROR:.6g}")


def wrong(entry: str, value: object, expected: str) -> ValueError:
    """The error for an entry of the wrong type or value."""
    return ValueError(f"{entry} is {_describe(value)}; expected {expected}.")


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    shape = "" if value.is_nested else f" of shape {tuple(value.shape)}"
    return f"a {kind} {type(value).__name__} of {value.dtype}{shape} on {value.device}"
