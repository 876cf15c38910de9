"""Validation of checkpoints of hook states: every entry is checked before the state is modified.

Each function raises a ValueError that names the entry, its value and the expectation.
"""

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.compress._options import check_whole_number
from gradwire.compress.policy import MatrixShape
from gradwire.kernels import MAX_EXPONENT

MAX_COUNT = 2**62  # half of int64's range, so that a kernel can add one; a count stays there
MAX_ERROR = torch.finfo(torch.bfloat16).max  # errors are kept in fp32 or bf16, those of fp64 gradients in fp64
MAX_FACTOR = 1 + 2.0**-10  # columns have unit length, up to rounding
ARITHMETIC_DTYPES = (torch.float32, torch.float64)


class Expected(NamedTuple):
    """The shapes that the memory of one parameter must fit.

    Attributes:
        error: shape of its gradient, complex numbers as real pairs.
        matrices: its matrices; None if it is not compressed.
    """

    error: torch.Size
    matrices: MatrixShape | None


def check_powersgd_state(state: object, parameters: Mapping[str, Expected]) -> None:
    """Raise ValueError unless ``state`` is a `PowerSGDState.state_dict` of a model with these parameters.

    Args:
        state: the argument of ``load_state_dict``.
        parameters: the known ones, by name. Entries of unknown parameters must fit each other.
    """
    state = _entries(state, "PowerSGDState", ("iter", "errors", "q", "p", "numel"))
    check_count("iter", state["iter"])
    numel = state["numel"]
    if not isinstance(numel, list) or len(numel) != 2:
        raise _wrong("numel", numel, "a list of two whole numbers")
    for i, count in enumerate(numel):
        check_count(f"numel[{i}]", count)
    _check_errors(state["errors"])
    for key in ("q", "p"):
        for entry, factor in _tensors(key, state[key]):
            _check_factor(entry, factor)
    check_powersgd_shapes(state["errors"], state["q"], state["p"], parameters)


def check_powersgd_shapes(
    errors: Mapping[str, Tensor], q: Mapping[str, Tensor], p: Mapping[str, Tensor], parameters: Mapping[str, Expected]
) -> None:
    """Raise ValueError unless errors and factors fit the known parameters, and each other for unknown ones.

    Factors may have another rank r: they then start from scratch, as when r changes during training.
    """
    for name, error in errors.items():
        expected = parameters.get(name)
        if expected is not None and error.shape != expected.error:
            raise ValueError(
                f"The error memory of {name} has shape {tuple(error.shape)}, its gradient {tuple(expected.error)}: "
                f"errors[{name!r}] belongs to another model. Load the state of this model, or start with a new one."
            )
    for name in sorted(q.keys() | p.keys()):
        expected = parameters.get(name)
        if expected is not None and expected.matrices is not None:
            _check_factors(name, q, p, expected.matrices)
        elif expected is not None:
            _check_size_of_factors(name, q, p, expected.error.numel(), "its gradient")
        elif name in errors:
            _check_size_of_factors(name, q, p, errors[name].numel(), f"errors[{name!r}]")
        elif name in q and name in p:
            _check_size_of_factors(name, q, p, q[name].shape[0] * q[name].shape[2] * p[name].shape[2], f"q[{name!r}]")


def check_memory(
    state: object, owner: str, declared: Mapping[str, Mapping[str, tuple[int, ...]]], limited: Collection[str]
) -> None:
    """Raise ValueError unless ``state`` is the `HookState.state_dict` of a state.

    Args:
        state: the loaded object.
        owner: name of the class.
        declared: shapes of the tensors of known parameters, by entry and name.
        limited: the entries whose tensors are kept in fp32 or less, whatever the dtype of the gradients.
    """
    state = _entries(state, owner, ("iter", *declared))
    check_count("iter", state["iter"])
    for key, shapes in declared.items():
        for entry, tensor in _tensors(key, state[key]):
            _check_elements(entry, tensor, tensor.isfinite(), "a finite number")
        for name, tensor in state[key].items():
            if key in limited:
                check_range(name, tensor)
            if name in shapes and tensor.shape != shapes[name]:
                raise ValueError(
                    f"The error memory of {name} has shape {tuple(tensor.shape)}, its gradient {shapes[name]}: "
                    f"{key}[{name!r}] belongs to another model. Load the state of this model, or begin with a new one."
                )


def check_model(errors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if an error belongs to no parameter of this model, or is too large for its dtype.

    Args:
        errors: error memory by parameter name.
        parameters: all parameters of the model, by name.
    """
    if unknown := [name for name in errors if name not in parameters]:
        raise ValueError(
            f"{len(unknown)} of {len(errors)} entries of the error memory belong to parameters that this model does "
            f"not have, such as {unknown[0]!r}; it has {next(iter(parameters), 'none')!r} and others. It belongs to "
            "another model. Load the state of this model, or start with a new one."
        )
    for name, error in errors.items():
        if parameters[name].dtype.to_real() != torch.float64:
            check_range(name, error)


def check_range(name: str, error: Tensor) -> None:
    """Raise ValueError if an element of an error is beyond the range of the dtype in which it is kept."""
    _check_elements(f"errors[{name!r}]", error, error.abs() <= MAX_ERROR, f"-{MAX_ERROR:.6g} to {MAX_ERROR:.6g}")


def check_auto_state(state: object) -> None:
    """Raise ValueError unless ``state`` is an `AutoState.state_dict`, except for its states of hooks."""
    state = _entries(state, "AutoState", ("iter", "plan", "chosen", "states"))
    check_count("iter", state["iter"])
    check_count("chosen", state["chosen"])
    for key, kind in (("plan", str), ("states", Mapping)):
        entries = state[key]
        expected = "a dictionary from parameter names to candidates" if key == "plan" else "a dictionary of states"
        if not isinstance(entries, Mapping) or not all(
            isinstance(name, str) and isinstance(value, kind) for name, value in entries.items()
        ):
            raise _wrong(key, entries, expected)
    if len(state["plan"]) != state["chosen"]:
        raise ValueError(
            f"The plan has {len(state['plan'])} parameters, but {state['chosen']} were saved. "
            "torch.distributed.checkpoint loads only entries that the state has before: create it with the plan of the "
            "saved run, AutoState(plan=...)."
        )


def check_scaled_cast_state(state: object) -> None:
    """Raise ValueError unless ``state`` is a `ScaledCastState.state_dict`."""
    state = _entries(state, "ScaledCastState", ("names", "exponents", "counters"))
    names, exponents, counters = state["names"], state["exponents"], state["counters"]
    if not isinstance(names, list):
        raise _wrong("names", names, "a list of parameter names")
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str) or name in seen:
            raise _wrong(f"names[{i}]", name, "strings, each of them once")
        seen.add(name)
    _check_tensor("exponents", exponents, (torch.int32,), (len(names), 2))
    exponent, is_calibrated = exponents.unbind(1)
    in_range = (exponent >= -MAX_EXPONENT) & (exponent <= MAX_EXPONENT)
    is_flag = (is_calibrated == 0) | (is_calibrated == 1)
    expected = f"an exponent from -{MAX_EXPONENT} to {MAX_EXPONENT}, then 0 or 1"
    _check_elements("exponents", exponents, torch.stack([in_range, is_flag], 1), expected)
    _check_tensor("counters", counters, (torch.int64,), (4,))
    _check_elements("counters", counters, (counters >= 0) & (counters <= MAX_COUNT), "0 to 2**62")
    if int(counters[3]) > 1:
        raise _wrong("counters[3]", int(counters[3]), "0 or 1")


def _entries(state: object, owner: str, names: Sequence[str]) -> Mapping[str, Any]:
    expected = f"{', '.join(names[:-1])} and {names[-1]}, as {owner}.state_dict() returns them"
    if not isinstance(state, Mapping):
        raise ValueError(f"The state is {_describe(state)}; expected {expected}.")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"The state has the entries {list(state)} and no {missing[0]!r}; expected {expected}.")
    return state


def check_count(entry: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a number of steps or elements."""
    check_whole_number(entry, value, "a whole number from 0 to 2**62", 0, MAX_COUNT)


def _tensors(key: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a dictionary by parameter name, each with the name of its entry, once it is checked."""
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "a dictionary from parameter names to tensors")
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise ValueError(f"{key} has the name {reprlib.repr(name)}; expected a string.")
        entry = f"{key}[{name!r}]"
        _check_tensor(entry, tensor, ARITHMETIC_DTYPES)
        yield entry, tensor


def _check_errors(errors: object) -> None:
    for entry, error in _tensors("errors", errors):
        _check_elements(entry, error, error.isfinite(), "a finite number")


def _check_tensor(
    entry: str, value: object, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None = None
) -> None:
    """Raise unless ``value`` is a plain dense tensor, not meta, of one of the dtypes and of ``shape``."""
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
        raise _wrong(entry, value, expected)


def _check_elements(entry: str, tensor: Tensor, is_good: Tensor, expected: str) -> None:
    """Raise if an element of ``is_good`` is False; the message shows that element of ``tensor``."""
    if not bool(is_good.all()):
        place = (~is_good).nonzero()[0].tolist()
        raise _wrong(f"{entry}{place}" if place else entry, tensor[tuple(place)].item(), expected)


def _check_factor(entry: str, factor: Tensor) -> None:
    """Raise unless ``factor`` has the shape matrices x rank x length, with columns of unit length."""
    if factor.dim() != 3 or factor.shape[0] < 1 or not 1 <= factor.shape[1] <= factor.shape[2]:
        raise _wrong(entry, factor, "matrices x rank x length, with a rank from 1 to that length")
    _check_elements(entry, factor, factor.abs() <= MAX_FACTOR, "-1 to 1: a column has length 1")


def _check_factors(name: str, q: Mapping[str, Tensor], p: Mapping[str, Tensor], shape: MatrixShape) -> None:
    for side, factors, length in (("q", q, shape.columns), ("p", p, shape.rows)):
        if name in factors:
            matrices, rank, found = factors[name].shape
            highest = min(shape.rows, shape.columns)
            if (matrices, found) != (shape.matrices, length) or not 1 <= rank <= highest:
                raise ValueError(
                    f"{side}[{name!r}] has shape {tuple(factors[name].shape)}; expected ({shape.matrices}, rank, "
                    f"{length}) with a rank of 1 to {highest}. Load the state of this model and its stacks, or leave "
                    "this entry out: its factors then start from scratch."
                )


def _check_size_of_factors(name: str, q: Mapping[str, Tensor], p: Mapping[str, Tensor], numel: int, whose: str) -> None:
    """Raise unless the factors fit matrices with ``numel`` elements in total, of any numbers of rows and columns."""
    remedy = "Load the state of this model, or leave these factors out: they then start from scratch."
    for side, factors in (("q", q), ("p", p)):
        if name in factors:
            matrices, rank, length = factors[name].shape
            if numel % (matrices * length) != 0 or rank > numel // (matrices * length):
                raise ValueError(
                    f"{side}[{name!r}] has shape {tuple(factors[name].shape)}; expected matrices x rank x length, of "
                    f"matrices with the {numel} elements of {whose}. {remedy}"
                )
    if name in q and name in p:
        sides = [tuple(factors[name].shape) for factors in (q, p)]
        if sides[0][0] != sides[1][0] or sides[0][0] * sides[0][2] * sides[1][2] != numel:
            raise ValueError(
                f"q[{name!r}] and p[{name!r}] have the shapes {sides[0]} and {sides[1]}; expected matrices x rank x "
                f"columns and matrices x rank x rows, of matrices with the {numel} elements of {whose}. {remedy}"
            )


def _wrong(entry: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{entry} is {_describe(value)}; expected {expected}.")


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    shape = "" if value.is_nested else f" of shape {tuple(value.shape)}"
    return f"a {kind} {type(value).__name__} of {value.dtype}{shape} on {value.device}"
