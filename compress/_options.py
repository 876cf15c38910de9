"""Validation of options, counters and error memory: a ValueError states the name, the value and the expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


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


def check_error_shape(name: str, error: Tensor, layout: Tensor) -> None:
    """Raise ValueError unless the error memory of parameter ``name`` has the shape of its gradient."""
    if error.shape != layout.shape:
        raise ValueError(
            f"The error memory of {name} has shape {tuple(error.shape)}, its gradient {tuple(layout.shape)}. "
            "Load the state of this model, or begin with a new one."
        )
