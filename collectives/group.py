"""`compressed_group`: a process group that compresses large all-reduces and reduce-scatters, and passes on the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.algorithms._validation import check_choice, check_whole_number
from gradwire.algorithms.policy import wire_name
from gradwire.collectives.functions import AVG, SUM, all_reduce, is_mean_or_sum, reduce_scatter_tensor
from gradwire.comm.torch_internals import default_group
from gradwire.hooks._decorators import check_process_group

BACKEND = "gradwire"
WITHOUT_MEMORY = ("int8", "fp8", "int6", "bf16", "fp16")  # formats that need no error memory
MIN_NUMEL = 65_536
# The methods of a process group that are passed on as they are.
PASSED = (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)


class CompressedGroup(dist.ProcessGroup):
    """The process group of `compressed_group`.

    Attributes:
        compressed, passed: bytes of tensors that were compressed, and of those that were passed on, by operation.
    """

    def __init__(self, group: dist.ProcessGroup, wire: str, min_numel: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self.wire, self.min_numel = group, wire, min_numel
        self.compressed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {nbytes:,} B" for name, nbytes in self.compressed.items()) or "nothing yet"
        return f"CompressedGroup({self.wire}, compressed: {counts})"

    def getBackendName(self) -> str:
        """Name of the backend, for PyTorch's messages."""
        return BACKEND

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """The all-reduce, compressed if the tensor is large and floating, and the operation is AVG or SUM."""
        operation = SUM if options is None else options.reduceOp
        if len(tensors) == 1 and self._is_compressed("all_reduce", tensors[0], operation):
            work = all_reduce(tensors[0], AVG if operation == AVG else SUM, self.group, True, wire=self.wire)
            assert work is not None
            return work
        return self.group.allreduce(tensors, options) if options is not None else self.group.allreduce(tensors)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any = None) -> dist.Work:
        operation = SUM if options is None else options.reduceOp
        fits = output.is_contiguous() and input.is_contiguous()
        if fits and self._is_compressed("reduce_scatter_tensor", input, operation):
            kind = AVG if operation == AVG else SUM
            work = reduce_scatter_tensor(output, input, kind, self.group, True, wire=self.wire)
            assert work is not None
            return work
        return self.group._reduce_scatter_base(output, input, *([] if options is None else [options]))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  # its name since torch 2.13

    def _is_compressed(self, name: str, tensor: Tensor, operation: Any) -> bool:
        """Whether a tensor is compressed; counts its bytes."""
        is_compressed = (
            tensor.numel() >= self.min_numel
            and tensor.layout == torch.strided
            and tensor.is_floating_point()
            and is_mean_or_sum(operation)
        )
        (self.compressed if is_compressed else self.passed)[name] += tensor.nbytes
        return is_compressed


def _passed(name: str) -> Any:
    def method(self: CompressedGroup, *args: Any, **kwargs: Any) -> Any:
        self.passed[name.strip("_")] += _nbytes(args)
        return getattr(self.group, name)(*args, **kwargs)

    return method


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


for _name in PASSED:
    if hasattr(dist.ProcessGroup, _name):  # some are of later releases of torch
        setattr(CompressedGroup, _name, _passed(_name))

_asked: list[CompressedGroup] = []  # the group that `_create` returns


def _create(*_: Any) -> CompressedGroup:
    return _asked.pop()


def compressed_group(
    group: dist.ProcessGroup | None = None, wire: str = "int8", *, min_numel: int = MIN_NUMEL
) -> CompressedGroup:
    """A process group of the same ranks whose large gradient collectives are compressed. A collective call.

    ``all_reduce`` (AVG, SUM) and ``reduce_scatter_tensor`` of floating-point tensors with ``min_numel`` elements or
    more are those of `gradwire.collectives`; all other collectives are those of ``group``. Pass it to whatever takes a
    process group and exchanges gradients on it. It cannot tell gradients from parameters: what averages parameters by
    all-reduce must keep the plain group.

    Args:
        group: the ranks; None for the default group.
        wire: "int8", "fp8", "int6", "bf16" or "fp16", which need no error memory. Equal on all ranks.
        min_numel: smallest number of elements of a compressed tensor. Equal on all ranks.

    Returns:
        The group; its ``compressed`` and ``passed`` count bytes by operation.

    Raises:
        TypeError: ``group`` is not a process group.
        ValueError: ``wire`` is none of these, or ``min_numel`` no positive whole number.

    Examples:
        >>> group = gradwire.collectives.compressed_group(wire="int8")
        >>> model = FullyShardedDataParallel(model, process_group=group)
    """
    wire = wire_name("wire", wire)
    check_choice(
        "wire", wire, WITHOUT_MEMORY, hint="Formats with error memory need names: call all_reduce with memory."
    )
    check_whole_number("min_numel", min_numel, "a whole number of elements, at least 1", 1)
    check_process_group(group, "group", f" Pass wire={group!r}." if isinstance(group, str) else "")
    group = group or default_group()
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    _asked.append(CompressedGroup(group, wire, min_numel))
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=True)
    assert isinstance(made, CompressedGroup)
    return made
