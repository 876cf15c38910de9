"""`CallSite`: collective, operation, wire, layouts and names of a call, which must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compress.policy import wire_name
from gradwire.exchange.handshake import digest
from gradwire.kernels import WIRE_FORMATS, is_dense

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
MAX_SHOWN = 3  # shapes in an error
_STAMP_BITS = 29
_GOLDEN = 0x9E3779B1  # odd: multiples modulo a power of two are all different


def is_mean_or_sum(op: Any) -> bool:
    """Whether an operation is AVG or SUM. A ``ReduceOp`` equals them, but they do not equal it."""
    return any(op == known for known in (AVG, SUM))


@dataclass(frozen=True)
class CallSite:
    """Calls with equal call sites are served by one compressor.

    Attributes:
        collective: name of the function.
        op: "AVG" or "SUM".
        wire: a format of `gradwire.kernels.WIRE_FORMATS`.
        dtype, device: those of the tensors.
        layouts: shape and strides of each tensor.
        names: those of the memory; empty without memory.
        options: names and values of the options of `Memory`; empty without memory.
    """

    collective: str
    op: str
    wire: str
    dtype: torch.dtype
    device: torch.device
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    names: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    @classmethod
    def of(
        cls,
        collective: str,
        op: Any,
        wire: str,
        tensors: Sequence[Tensor],
        names: tuple[str, ...] = (),
        options: tuple[tuple[str, object], ...] = (),
    ) -> CallSite:
        """The call site of a call.

        Raises:
            TypeError: a tensor is not a dense floating-point tensor, or they differ in dtype or device.
            ValueError: there are no tensors, or the operation or the wire is unknown.
        """
        if not is_mean_or_sum(op):
            remedy = f" Pass wire={op!r}." if isinstance(op, str) and op in WIRE_FORMATS else ""
            raise ValueError(f"op is {op!r}; expected ReduceOp.AVG or ReduceOp.SUM.{remedy}")
        _check_tensors(tensors)
        layouts = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
        name, first = "SUM" if op == SUM else "AVG", tensors[0]
        return cls(collective, name, wire_name("wire", wire), first.dtype, first.device, layouts, names, options)

    def check_layouts(self) -> None:
        """Raise ValueError if several elements of a tensor, which is overwritten, are the same memory."""
        for i, (shape, stride) in enumerate(self.layouts):
            if not is_dense(shape, stride):
                touched = torch.zeros(_extent(shape, stride), dtype=torch.bool)
                touched.as_strided(shape, stride).fill_(True)
                if int(touched.sum()) < shape.numel():
                    raise ValueError(
                        f"Tensor {i} of shape {tuple(shape)} has strides {stride}: several of its elements are the "
                        "same memory. Pass tensor.contiguous()."
                    )

    @property
    def scale(self) -> float:
        """The factor of the sum over the ranks, for `gradwire.compress.Step`."""
        return 1.0 if self.op == "SUM" else 0.0

    def facts(self) -> dict[str, str]:
        """Facts that the ranks compare in the first call, by name."""
        facts: dict[str, object] = {"op": self.op, "collective": self.collective, "wire": self.wire}
        facts |= {"memory": ", ".join(self.names) or "none", **dict(self.options)}
        facts |= {"dtype": self.dtype, "device": self.device.type, "number of tensors": len(self.layouts)}
        for i, (shape, stride) in enumerate(self.layouts):
            facts |= {f"shape of tensor {i}": tuple(shape), f"strides of tensor {i}": stride}
        return {name: str(fact) for name, fact in facts.items()}

    @cached_property
    def _digest(self) -> int:
        return int(digest(sorted(self.facts().items())), 16)

    def stamp(self, number: int, mark: bool) -> int:
        """The number in the messages of call ``number``, for `gradwire.compress.Stamp`: a hash, and ``mark``."""
        hashed: int = (self._digest + number * _GOLDEN) % 2**_STAMP_BITS
        return 1 << 30 | hashed << 1 | mark

    def __str__(self) -> str:
        shapes = [str(list(shape)) for shape, _ in self.layouts]
        shown = ", ".join(shapes[:MAX_SHOWN]) + (f" and {len(shapes) - MAX_SHOWN} more" if shapes[MAX_SHOWN:] else "")
        memory = f" with memory[{', '.join(map(repr, self.names))}]" if self.names else ""
        return f"{self.collective} ({self.op}) of {self.dtype} {shown} in {self.wire}{memory}"


def is_other_call(stamp: int, other: int) -> bool:
    """Whether two numbers of `CallSite.stamp` differ in more than their mark."""
    return (stamp ^ other) >> 1 != 0


def is_marked(stamp: int) -> bool:
    """Whether a number of `CallSite.stamp` has the mark."""
    return stamp & 1 == 1


def _check_tensors(tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor):
        raise TypeError("Got one tensor; expected a list of tensors. Call all_reduce for one tensor.")
    if not tensors:
        raise ValueError("There are no tensors to reduce.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.is_floating_point():
            found = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"Got {found}; expected dense floating-point tensors. Reduce others with torch.distributed."
            )
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise TypeError(
                f"Tensors of {tensors[0].dtype} on {tensors[0].device} and of {tensor.dtype} on {tensor.device}; "
                "expected one dtype and device. Make a call for each."
            )


def check_separate(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if two of the tensors, which are overwritten, share elements."""
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
    for members in by_storage.values():
        if len(members) > 1:
            _check_elements({i: tensors[i] for i in members})


def _check_elements(tensors: Mapping[int, Tensor]) -> None:
    """Raise ValueError if two of these tensors of one storage, by position, share elements."""
    ends = [t.storage_offset() + _extent(t.shape, t.stride()) for t in tensors.values()]
    first = min(tensor.storage_offset() for tensor in tensors.values())
    owner = torch.full((max(ends) - first,), -1)
    for i, tensor in tensors.items():
        elements = owner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)
        others = elements[elements >= 0]
        if others.numel() > 0:
            raise ValueError(
                f"Tensors {int(others[0])} and {i} share memory, which would be reduced twice. Pass each tensor once: "
                "model.parameters() has tied weights once."
            )
        elements.fill_(i)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last one in memory, of a tensor that has some."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
