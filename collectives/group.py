"""`compressed_group`: a process group that compresses large all-reduces and reduce-scatters, and passes on the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.call_site import AVG, SUM, is_mean_or_sum
from gradwire.collectives.functions import all_reduce, reduce_scatter_tensor
from gradwire.comm.torch_internals import default_group, share_backends, stand_for
from gradwire.compress.policy import wire_name
from gradwire.exchange.decorators import check_process_group
from gradwire.validation import check_choice, check_whole_number

BACKEND = "gradwire"
WITHOUT_MEMORY = ("int8", "fp8", "int6", "bf16", "fp16")  # formats that need no error memory
MIN_NUMEL = 65_536
# The methods of a process group that are passed on as they are.
PASSED = (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send", "set_timeout"),
)


Compress = Callable[..., dist.Work | None]


class CompressedGroup(dist.ProcessGroup):
    """A process group of the ranks of another one, which compresses reductions and passes on all else.

    It has the backends of the other group, but not their life: to destroy it leaves the other group as it is.

    Args:
        group: the plain process group.
        compress: starts a collective, as ``compress("all_reduce", op, tensor)`` or
            ``compress("reduce_scatter_tensor", op, output, input)``. It returns the handle, or None to pass it on.

    Attributes:
        compressed, passed: bytes of tensors that were compressed, and of those that were passed on, by operation.
    """

    def __init__(self, group: dist.ProcessGroup, compress: Compress) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self.compress = group, compress
        self.compressed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self._name = self._description = ""
        share_backends(group, self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {nbytes:,} B" for name, nbytes in self.compressed.items()) or "nothing yet"
        return f"CompressedGroup(compressed: {counts})"

    # What PyTorch asks a process group in C++. Without these methods, names would be set on the shared backends.

    def getBackendName(self) -> str:
        """Name of the backend, for PyTorch's messages."""
        return BACKEND

    def getGroupName(self) -> str:
        """The name under which functional collectives and device meshes find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name: PyTorch does, once."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The description, for PyTorch's logs."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description."""
        self._description = description

    def shutdown(self) -> None:
        """Do nothing: the backends are those of the plain group."""

    def abort(self) -> None:
        """Do nothing: the backends are those of the plain group."""

    # Collectives.

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """The all-reduce of one tensor, compressed if ``compress`` does not pass it on."""
        (tensor,) = tensors
        return self._compressed("all_reduce", options, tensor) or self.group.allreduce(tensors, *_given(options))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any = None) -> dist.Work:
        work = self._compressed("reduce_scatter_tensor", options, output, input)
        return work or self.group._reduce_scatter_base(output, input, *_given(options))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  # its name since torch 2.13

    def _compressed(self, name: str, options: Any, *tensors: Tensor) -> dist.Work | None:
        work = self.compress(name, SUM if options is None else options.reduceOp, *tensors)
        (self.passed if work is None else self.compressed)[name] += _nbytes(tensors[-1])
        return work


def _given(options: Any) -> list[Any]:
    return [] if options is None else [options]


def _passed(name: str) -> Any:
    def method(self: CompressedGroup, *args: Any, **kwargs: Any) -> Any:
        self.passed[name.strip("_")] += _nbytes(args)
        return getattr(self.group, name)(*args, **kwargs)

    return method


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return _nbytes([value._indices(), value._values()]) if value.is_sparse else value.nbytes
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
        min_numel: smallest number of elements of a compressed tensor; that of ``reduce_scatter_tensor`` is its input.
            Equal on all ranks.

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
    functions: dict[str, Compress] = {"all_reduce": all_reduce, "reduce_scatter_tensor": reduce_scatter_tensor}

    def compress(name: str, op: Any, *tensors: Tensor) -> dist.Work | None:
        if not is_compressible(op, tensors, min_numel):
            return None
        return functions[name](*tensors, AVG if op == AVG else SUM, group, True, wire=wire)

    _asked.append(CompressedGroup(group, compress))
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=True)
    assert isinstance(made, CompressedGroup)
    stand_for(group, made)
    return made


def is_compressible(op: Any, tensors: Sequence[Tensor], min_numel: int) -> bool:
    """Whether a collective's operation and tensors, of which the last one is sent, may be compressed."""
    return (
        is_mean_or_sum(op)
        and tensors[-1].numel() >= min_numel
        and all(each.layout == torch.strided and each.is_floating_point() for each in tensors)
        and (len(tensors) == 1 or all(each.is_contiguous() for each in tensors))
        and all(0 not in each.stride() for each in tensors)
    )
