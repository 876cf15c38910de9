"""`all_reduce`, `all_reduce_coalesced` and `reduce_scatter_tensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.collectives.call_site import AVG, CallSite, check_separate
from gradwire.collectives.calls import Calls, calls_on
from gradwire.collectives.compressors import Compressor, Layout
from gradwire.collectives.memory import Entry, Memory
from gradwire.comm import connections_of
from gradwire.comm.torch_internals import default_group
from gradwire.comm.transport import wait_for
from gradwire.exchange.session import Session

CALL = "gradwire.collectives.resynchronize()"


class CompressedWork(dist.Work):
    """A collective in flight. On a GPU, `wait` lets the current stream wait; on a CPU, the caller.

    Args:
        calls: the calls on the process group, of which this is the latest.
        compressor: the compressor of the call.
        exchange: the future of the exchange.
        finish: returns the value of the collective's future, the tensors that it has written.

    Attributes:
        number: number of the call.
        is_marked: whether another rank's messages have a mark, and this rank's have not. Known once the exchange is
            done, on CPUs.
    """

    is_marked = False

    def __init__(
        self, calls: Calls, compressor: Compressor, exchange: Future[Any], finish: Callable[[], list[Tensor]]
    ) -> None:
        super().__init__()
        self._calls = calls
        self._compressor = compressor
        self._exchange = exchange
        self.number = calls.count

        def finished(done: Future[Any]) -> list[Tensor]:
            self.is_marked = calls.end(self.number)
            done.value()  # raises the error of the exchange
            return finish()

        self._future = exchange.then(finished)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is there. Raises the error of the exchange; ``timeout`` is the process group's."""
        compressor = self._compressor
        call = f"Call {self.number} of gradwire.collectives, {compressor.site},"
        with Session([compressor.group]).attempt(call, compressor.group):
            wait_for(self._exchange, connections_of(compressor.group).check_peers)
        self._future.wait()
        if compressor.in_flight is self._exchange:
            compressor.in_flight = None  # it holds the tensors
        return True

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future.done()

    def get_future(self) -> Future[Any]:
        """A future of the written tensors. Its ``wait()`` does not translate errors of other ranks, as `wait` does."""
        return self._future


def all_reduce(
    tensor: Tensor,
    op: Any = AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    wire: str = "int8",
    memory: Entry | None = None,
) -> dist.Work | None:
    """Replace ``tensor`` by its mean or sum over the ranks, sent in a wire format. A collective call.

    Sums are taken in fp32; the result has the same bits on all ranks. It is the two-shot all-reduce of
    `quantization_hook`; "bf16" is that of `bf16_compress_hook` with ``accumulate="fp32"``, "fp16" that of
    `scaled_cast_hook`, and "fp32" a plain all-reduce in the tensor's dtype.

    Args:
        tensor: dense, floating point, in any layout without overlaps. Overwritten.
        op: ReduceOp.AVG or SUM.
        group: the ranks; None for the default group.
        async_op: whether to return at once.
        wire: "fp32", "bf16", "fp16", "int8", "fp8", "int6", "int4", "int2" or "sign". Below 6 bits, pass memory.
        memory: an entry of a `Memory`, which keeps what the format loses for the next call; None: it is lost.

    Returns:
        With ``async_op``, a handle; until its ``wait()`` returns, ``tensor`` must not be used. None on ranks that are
        not in the group.

    Raises:
        TypeError: ``tensor`` is not a dense floating-point tensor, or ``memory`` is not an entry.
        ValueError: the operation or the wire is unknown, or elements of the tensor share memory.
        RuntimeError: the ranks make different calls (other shapes, strides, dtypes, wires, operations or entries, or a
            rank has skipped one), or a rank has failed. Every rank raises; on GPUs, only a difference in the first call
            with a tensor of this layout is found. Nothing is modified. After that, call `resynchronize`.

    Examples:
        >>> for parameter in model.parameters():
        ...     gradwire.collectives.all_reduce(parameter.grad, wire="int8")
    """
    return all_reduce_coalesced([tensor], op, group, async_op, wire=wire, memory=memory)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    wire: str = "int8",
    memory: Entry | None = None,
) -> dist.Work | None:
    """`all_reduce` of several tensors of one dtype and device in one message. The same arguments and errors.

    Two of the tensors must not share elements.
    """
    work = start_all_reduce(tensors, op, group, wire, memory)
    return _result(work, async_op)


def start_all_reduce(
    tensors: Sequence[Tensor],
    op: Any,
    group: dist.ProcessGroup | None,
    wire: str,
    memory: Entry | None = None,
    mark: bool = False,
) -> CompressedWork | None:
    """The handle of an `all_reduce_coalesced`, whose messages are marked; None outside of the group."""
    if (group := _own_group(group)) is None:
        return None
    with _leaving_on_error(group, "all_reduce") as calls:
        site = _site("all_reduce", op, wire, tensors, memory)
        check_separate(tensors)
        compressor = _compressor(site, group, calls, memory)
        written = [tensor.detach() for tensor in tensors]
        dense = list(written)
        for i in {*compressor.gaps, *(i for i, tensor in enumerate(written) if tensor.is_inference())}:
            dense[i] = _dense_copy(written[i], compressor.layouts[i])
        with torch.no_grad():
            future = compressor.start(dense, calls.begin(site, mark), calls.room)  # type: ignore[attr-defined]
        connections_of(group).finish()

    def finish() -> list[Tensor]:
        _copy_back(written, dense)
        return written

    return CompressedWork(calls, compressor, future, finish)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = AVG,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    wire: str = "int8",
    memory: Entry | None = None,
) -> dist.Work | None:
    """Write this rank's part of the mean or sum of ``input`` over the ranks into ``output``. A collective call.

    Each rank quantizes its ``input`` and sends every rank its part, which sums in fp32. The sum stays on its rank, so
    it is not rounded again. It is the reduce-scatter of `gradwire.attach` with ``within``.

    Args:
        output: dense, floating point, contiguous. Overwritten. May be this rank's part of ``input``.
        input: contiguous, of the dtype of ``output``, with as many elements for each rank. Not modified.
        op, group, async_op, wire, memory: as in `all_reduce`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `all_reduce`; also if the sizes do not fit.
    """
    work = start_reduce_scatter_tensor(output, input, op, group, wire, memory)
    return _result(work, async_op)


def start_reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any,
    group: dist.ProcessGroup | None,
    wire: str,
    memory: Entry | None = None,
    mark: bool = False,
) -> CompressedWork | None:
    """The handle of a `reduce_scatter_tensor`, whose messages are marked; None outside of the group."""
    if (group := _own_group(group)) is None:
        return None
    with _leaving_on_error(group, "reduce_scatter_tensor") as calls:
        _site("reduce_scatter_tensor", op, wire, [output, input], None)  # raises
        if not (output.is_contiguous() and input.is_contiguous()) or input.numel() != group.size() * output.numel():
            raise ValueError(
                f"input has {input.numel()} elements and output {output.numel()}; expected contiguous tensors, and "
                f"{group.size()} times as many elements in input."
            )
        source, written = input.detach().view(-1), output.detach().view(-1)
        site = _site("reduce_scatter_tensor", op, wire, [source], memory)
        compressor = _compressor(site, group, calls, memory)
        target = _dense_copy(written, (written.shape, (1,))) if written.is_inference() else written
        future = compressor.start(source, target, calls.begin(site, mark), calls.room)  # type: ignore[attr-defined]
        connections_of(group).finish()

    def finish() -> list[Tensor]:
        _copy_back([written], [target])
        return [output]

    return CompressedWork(calls, compressor, future, finish)


def resynchronize(group: dist.ProcessGroup | None = None, *memories: Memory) -> None:
    """Start again after an error in a collective. A collective call: every rank of ``group`` must make it.

    Discard the tensors of the failed step on every rank first. ``memories``, those that are used on the group, in the
    same order on every rank, keep their errors; what a finished call of the failed step has applied is not taken back.

    Raises:
        RuntimeError: a rank has exited, or does not make the call within the timeout of the process group.
    """
    if (group := _own_group(group)) is None:
        return
    calls = calls_on(connections_of(group))
    mine = {"calls": calls.count, "steps": [memory.steps(group) for memory in memories]}
    every = Session([group]).resynchronize(CALL, mine)
    calls.restart(max(one["calls"] for one in every))
    for memory, *steps in zip(memories, *(one["steps"] for one in every), strict=True):
        memory.restart(group, steps)


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group, by default the default one; None if this rank is not in it, as `dist.new_group` says."""
    group = group or default_group()
    return group if isinstance(group, dist.ProcessGroup) and group.rank() >= 0 else None


def _site(collective: str, op: Any, wire: str, tensors: Sequence[Tensor], memory: Entry | None) -> CallSite:
    """The call site of a call, whose arguments are checked."""
    if memory is None:
        return CallSite.of(collective, op, wire, tensors)
    if not isinstance(memory, Entry):
        raise TypeError(f"memory is a {type(memory).__name__}; expected an entry of a Memory: memory['name'].")
    if len(tensors) != len(memory.names):
        raise ValueError(f"There are {len(tensors)} tensors and {len(memory.names)} names: {memory.names}.")
    return CallSite.of(collective, op, wire, tensors, memory.names, memory.options)


def _compressor(site: CallSite, group: dist.ProcessGroup, calls: Calls, memory: Entry | None) -> Compressor:
    """The compressor of a call; a new call site is compared with the other ranks first."""
    return calls.compressor(site, group) if memory is None else memory.compressor(site, group, calls)


def _dense_copy(tensor: Tensor, layout: Layout) -> Tensor:
    """A copy in a dense layout. It is no inference tensor: the executor's thread must be able to write into it."""
    with torch.inference_mode(False):
        return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _copy_back(written: Sequence[Tensor], reduced: Sequence[Tensor]) -> None:
    """Copy the results that are in other tensors. In the current stream, until whose end their memory is kept."""
    for tensor, result in zip(written, reduced, strict=True):
        if tensor is not result:
            with torch.inference_mode() if tensor.is_inference() else nullcontext(), torch.no_grad():
                tensor.copy_(result)
            if tensor.is_cuda:
                for each in (tensor, result):
                    each.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def _leaving_on_error(group: dist.ProcessGroup, call: str) -> Iterator[Calls]:
    """Count a call, and let the other ranks raise, too, if this one cannot take part."""
    connections = connections_of(group)
    connections.check()
    calls = calls_on(connections)
    calls.count += 1
    try:
        yield calls
    except BaseException as error:
        connections.fail(f"{call} failed on rank {dist.get_rank()}: {error}")
        raise


def _result(work: CompressedWork | None, async_op: bool) -> dist.Work | None:
    if async_op or work is None:
        return work
    work.wait()
    return None
