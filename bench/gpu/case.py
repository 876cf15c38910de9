"""A case of the GPU lane, and comparisons for cases, with messages that tell how far off a result is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# A case may return what it has measured, as rows for JSON.
LaneCase = Callable[[torch.device], list[dict[str, Any]] | None]

REHEARSED = 1 << 16  # elements on a CPU, in place of more than 2^31


class Skipped(Exception):
    """A case cannot run here; the message says why."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise unless two tensors have equal bits, every NaN taken for the same."""
    if actual.dtype.is_complex:
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    different = ~((actual == expected) & (actual.signbit() == expected.signbit()))
    if actual.is_floating_point():
        different &= ~(actual.isnan() & expected.isnan())
    if different.any():
        at = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {actual.numel()} elements differ; the first, at {at}, is "
            f"{actual[at].item()!r}, expected {expected[at].item()!r}"
        )


def same_twice(run: Callable[[Any], Sequence[Tensor]], ours: Any, reference: Any, what: str) -> None:
    """Raise unless ``run(ours)`` gives the bits of ``run(reference)``, and again when it is repeated."""
    for first, second, expected in zip(run(ours), run(ours), run(reference), strict=True):
        same(first, second, f"{what}, run twice")
        same(first, expected, what)


def within(actual: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    """Raise unless every element is as close to ``expected``, fp64, as ``bound`` says."""
    error = (actual.double() - expected).abs()
    wrong = ~(error <= bound)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {actual.numel()} elements are out of bounds; the first, at {at}, is "
            f"{actual[at].item()!r}, expected {expected[at].item()!r} within {bound[at].item()!r}"
        )


def at_offset(values: Tensor, offset: int) -> Tensor:
    """A contiguous copy of ``values``, ``offset`` elements past an aligned address."""
    buffer = torch.empty(offset + values.numel(), dtype=values.dtype, device=values.device)
    return buffer[offset:].view(values.shape).copy_(values)


def require(is_so: object, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


def large_numel(device: torch.device, nbytes_per_element: int) -> int:
    """More than 2^31 elements, if there is memory for them; on a CPU, `REHEARSED`."""
    if device.type != "cuda":
        return REHEARSED
    numel, free = (1 << 31) + 4097, torch.cuda.mem_get_info(device)[0]
    if numel * nbytes_per_element * 1.1 > free:
        raise Skipped(f"needs {numel * nbytes_per_element / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    return numel


def skip_if_rehearsed(numel: int) -> None:
    """Raise `Skipped` after a case that passed with the numel of a rehearsal."""
    if numel == REHEARSED:
        raise Skipped(f"right with {numel:,} elements; 2^31 take a GPU")
