"""The GPU lane on a CPU, where there is no GPU; `enter` makes a process a rank of it.

`NcclRules` is gloo that raises where NCCL fails. `gpu_on_cpu` makes executors and timings take the code path of a GPU,
with streams that do nothing: on a CPU, work is done in program order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.futures import Future

from gradwire.bench import emulated, timing
from gradwire.comm import connections, stream_executor
from tests.conformance.no_stream import NoStream

BACKEND = "gradwire_nccl_rules"
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


class NcclRules(dist.ProcessGroup):
    """A process group of CPU tensors over gloo that raises, on every rank, where NCCL would fail or hang.

    - Tensors are dense and contiguous, with a dtype that NCCL sums as numbers.
    - Tensors of one call have one dtype and one device, and there is at least one.
    - The parts that an all-to-all or an all-gather exchanges are equally large, and the output has room for them.
    - All ranks call the same collectives in the same order, with the same dtypes and sizes.

    NCCL is more lenient in two cases: PyTorch passes it complex tensors as real pairs, and a sum of bools is their
    logical or. gradwire relies on neither. Messages are PyTorch's where it has one.

    Attributes:
        calls: name, dtypes and numbers of elements of every collective so far.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # The stubs give a backend no collectives.
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._coalesced: Any = None
        self._name = self._description = ""
        self.calls: list[tuple[str, tuple[torch.dtype, ...], tuple[int, ...]]] = []

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _start_coalescing(self, device: torch.device) -> None:
        pass  # `allreduce_coalesced` follows, and checks

    def _end_coalescing(self, device: torch.device) -> Any:
        work, self._coalesced = self._coalesced, None
        return work

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        if any(tensor.is_sparse for tensor in tensors):
            raise ValueError("NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.")
        self._check("allreduce", tensors)
        self._refuse_sums_of_bools(tensors, options)
        return self._gloo.allreduce(tensors, options)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        self._check("allreduce_coalesced", tensors)
        self._refuse_sums_of_bools(tensors, options)
        self._coalesced = self._gloo.allreduce_coalesced(tensors, options)
        return self._coalesced

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *options: Any) -> Any:  # type: ignore[override]
        self._check("allgather", inputs)
        return self._gloo.allgather(outputs, inputs, *options)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], *options: Any
    ) -> Any:
        """Check, then exchange parts of the first dimension: equal ones, or of these sizes."""
        for tensor, splits in ((input, input_splits), (output, output_splits)):
            if not splits and (tensor.dim() == 0 or tensor.size(0) % self.size() != 0):
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            if splits and len(splits) != self.size():
                raise ValueError("Number of tensor splits not equal to group size")
            if splits and sum(splits) != tensor.size(0):
                raise ValueError("Split sizes doesn't match total dim 0 size")
        if not input_splits and output.numel() != input.numel():
            raise ValueError("output tensor size must be equal to input tensor size")
        self._check("alltoall_base", [output, input])
        return self._gloo.alltoall_base(output, input, output_splits, input_splits, *options)

    def _allgather_base(self, output: Tensor, input: Tensor, *options: Any) -> Any:
        if output.numel() != self.size() * input.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        self._check("_allgather_base", [output, input])
        return self._gloo._allgather_base(output, input, *options)

    def broadcast(self, tensors: Sequence[Tensor], *options: Any) -> Any:  # type: ignore[override]
        self._check("broadcast", tensors)
        return self._gloo.broadcast(tensors, *options)

    def barrier(self, opts: Any = None) -> Any:
        self._agree("barrier", [])
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            raise ValueError("Tensor list must be nonempty")
        for tensor in tensors:
            if tensor.is_sparse:
                raise ValueError("Tensors must be CUDA and dense")
            if tensor.dtype != tensors[0].dtype:
                raise TypeError("Tensors must have identical type")
            if tensor.device != tensors[0].device:
                raise ValueError("Expected list of tensors on the same device")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self._agree(name, tensors)

    def _refuse_sums_of_bools(self, tensors: Sequence[Tensor], options: Any) -> None:
        if tensors[0].dtype == torch.bool and options is not None and options.reduceOp == dist.ReduceOp.SUM:
            raise TypeError("A sum of bools over NCCL is their logical or; sum integers.")

    def _agree(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raise, on every rank, unless all of them call the same collective."""
        call = (name, tuple(tensor.dtype for tensor in tensors), tuple(tensor.numel() for tensor in tensors))
        self.calls.append(call)
        text = repr((len(self.calls), call)).encode()
        digest = torch.frombuffer(bytearray(blake2b(text, digest_size=16).digest()), dtype=torch.uint8)
        all_digests = [torch.empty_like(digest) for _ in range(self.size())]
        self._gloo.allgather([all_digests], [digest]).wait()
        if len({bytes(one.tolist()) for one in all_digests}) > 1:
            raise RuntimeError(
                f"Collective {len(self.calls)} differs between ranks; on rank {self.rank()} it is {call}."
            )


@cache
def register_backend() -> str:
    """Register `NcclRules` as a backend of this process; returns its name."""
    dist.Backend.register_backend(BACKEND, NcclRules, devices=["cpu"])
    return BACKEND


@contextmanager
def _run_once(*_: object, **__: object) -> Iterator[None]:
    """Stands in for ``torch.cuda.graph``: the work runs in the capture, and a replay does nothing."""
    yield


class _NoGraph:
    """Stands in for ``torch.cuda.CUDAGraph``; see `_run_once`."""

    def replay(self) -> None:
        pass

    reset = replay


class _Device:
    """Stands in for the clock of a GPU. A spin delays its events; work takes as long as it takes the host."""

    def __init__(self) -> None:
        self.spins_until = 0.0

    def spin(self, cycles: int) -> None:
        """Let events that are recorded from now on wait, for a nanosecond per cycle."""
        self.spins_until = max(self.spins_until, time.perf_counter()) + 1e-9 * cycles

    def synchronize(self, *_: object) -> None:
        self.spins_until = 0.0

    def event(self, enable_timing: bool = False) -> _Event:
        return _Event(self)


class _Event:
    """Stands in for a CUDA event."""

    def __init__(self, device: _Device) -> None:
        self._device = device

    def record(self, stream: object = None) -> None:
        self._recorded = time.perf_counter()
        self._due = max(self._recorded, self._device.spins_until)

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return time.perf_counter() >= self._due

    def synchronize(self) -> None:
        self._device.synchronize()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds of the host between two events."""
        return 1e3 * (end._recorded - self._recorded)


def _nothing(*_: object) -> None:
    pass


def _future_without_devices(devices: object = None) -> Future[Any]:
    return Future()


class _ResultOnCpu(stream_executor.Result):
    """The future of a task on CPU tensors, which belong to no device."""

    def __init__(self, executor: stream_executor.StreamExecutor, _: object) -> None:
        super().__init__(executor, [])


@contextmanager
def gpu_on_cpu() -> Iterator[None]:
    """A context in which gradwire runs bucket algorithms on CPU tensors with its `StreamExecutor`, as on a GPU.

    It applies to process groups whose first hook runs in it. Timings are those of the CPU, after spins that take no
    time. Work in ``torch.cuda.graph`` runs once, in the capture, and its replays take no time.
    """
    device = _Device()
    with ExitStack() as patches:
        for module, name, stand_in in (
            (torch.cuda, "Stream", NoStream),
            (torch.cuda, "current_stream", NoStream),
            (torch.cuda, "stream", NoStream),
            (torch.cuda, "set_stream", _nothing),
            (torch.cuda, "device", nullcontext),
            (torch.cuda, "_exchange_device", _nothing),
            (torch.cuda, "_maybe_exchange_device", _nothing),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "graph", _run_once),
            (torch.cuda, "CUDAGraph", _NoGraph),
            (torch.cuda, "Event", device.event),
            (torch.cuda, "_sleep", device.spin),
            (torch.cuda, "synchronize", device.synchronize),
            (torch.cuda, "set_sync_debug_mode", _nothing),
            (timing, "has_events", lambda _: True),
            (emulated, "Future", _future_without_devices),
            (stream_executor, "Result", _ResultOnCpu),
            (connections, "has_streams", lambda _: True),
        ):
            patches.enter_context(mock.patch.object(module, name, stand_in))
        yield


def enter(stack: ExitStack) -> str:
    """Make this process a rank of a rehearsal, until ``stack`` ends; returns the backend of its process group."""
    os.environ["GRADWIRE_KERNELS"] = "torch"
    torch.set_num_threads(1)
    stack.enter_context(gpu_on_cpu())
    return register_backend()
