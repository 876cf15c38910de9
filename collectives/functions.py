"""`all_reduce`, `all_reduce_coalesced` and `reduce_scatter_tensor`: adapters to the hooks' algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.collectives.memory import Entry, Memory
from gradwire.collectives.places import AveragePlace, Calls, P, Place, ScatterPlace, calls_on, stateless_place
from gradwire.comm import connections_of
from gradwire.comm.connections import ADVICE, may_follow_from_peer
from gradwire.comm.store_collectives import gather_json
from gradwire.comm.torch_internals import default_group
from gradwire.comm.transport import wait_for
from gradwire.kernels import WIRE_FORMATS

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
CALL = "gradwire.collectives.resynchronize()"


class CompressedWork(dist.Work):
    """A collective in flight. On a GPU, `wait` lets the current stream wait; on a CPU, the caller.

    Args:
        group: the ranks.
        place: the place of its tensors.
        exchange: the future of the exchange.
        finish: turns its value into the value of the collective's future: the tensors that it has written.
    """

    def __init__(
        self, group: dist.ProcessGroup, place: Place, exchange: Future[Any], finish: Callable[[Any], list[Tensor]]
    ) -> None:
        super().__init__()
        self._connections, self._place, self._exchange = connections_of(group), place, exchange
        self._future = exchange.then(lambda done: finish(done.value()))
        self._calls = calls_on(self._connections)
        self._number = self._calls.count

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is there. Raises the error of the exchange; ``timeout`` is the process group's."""
        connections = self._connections
        try:
            wait_for(self._exchange, lambda: self._calls.check(connections, self._number))
        except RuntimeError as error:
            elsewhere = connections.failure_elsewhere(wait=may_follow_from_peer(error))
            connections.fail(elsewhere or f"A collective failed on rank {dist.get_rank()}: {error}")
            if elsewhere is None or elsewhere in str(error):
                raise
            raise RuntimeError(f"{elsewhere}\n{ADVICE}") from error
        self._future.wait()
        if self._place.in_flight is self._exchange:
            self._place.in_flight = None  # it holds the tensors
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
    `quantization_hook`, and for "bf16" that of `bf16_compress_hook` with ``accumulate="fp32"``.

    Args:
        tensor: dense, floating point, in any layout without overlaps. Overwritten.
        op: ReduceOp.AVG or SUM.
        group: the ranks; None for the default group.
        async_op: whether to return at once.
        wire: "fp32", "bf16", "fp16", "int8", "fp8", "int6", "int4", "int2" or "sign". Below 6 bits, pass memory.
        memory: an entry of a `Memory`, which keeps what the format loses for the next call; None: it is lost.

    Returns:
        With ``async_op``, a handle; until its ``wait()`` returns, ``tensor`` must not be used.

    Raises:
        TypeError: ``tensor`` is not a dense floating-point tensor, or ``memory`` is not an entry.
        ValueError: the operation or the wire is unknown.
        RuntimeError: the ranks pass different shapes, dtypes, wires or operations, or a rank has failed. Every rank
            raises. Nothing is modified. After that, call `resynchronize`.

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
    """`all_reduce` of several tensors of one dtype and device in one message. The same arguments and errors."""
    group = group or default_group()
    if group.rank() < 0:
        return None
    with _leaving_on_error(group, "all_reduce"):
        calls = _begin(group, op, tensors)
        tensors = [tensor.detach() for tensor in tensors]
        place = _place(AveragePlace, tensors, wire, group, calls, memory)
        with torch.no_grad():
            future = place.start(tensors)
        connections_of(group).finish()
    size = group.size()

    def finish(result: Tensor) -> list[Tensor]:
        with torch.no_grad():
            place.finish(tensors, result)
            if op == SUM:
                torch._foreach_mul_(tensors, size)
        return tensors

    return _result(CompressedWork(group, place, future, finish), async_op)


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
        output: dense, floating point, contiguous. Overwritten.
        input: contiguous, of the dtype of ``output``, with as many elements for each rank. Not modified.
        op, group, async_op, wire, memory: as in `all_reduce`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `all_reduce`; also if the sizes do not fit.
    """
    group = group or default_group()
    if group.rank() < 0:
        return None
    with _leaving_on_error(group, "reduce_scatter_tensor"):
        calls = _begin(group, op, [output, input])
        if not (output.is_contiguous() and input.is_contiguous()) or input.numel() != group.size() * output.numel():
            raise ValueError(
                f"input has {input.numel()} elements and output {output.numel()}; expected contiguous tensors, and "
                f"{group.size()} times as many elements in input."
            )
        target, source = output.detach().view(-1), input.detach().view(-1)
        place = _place(ScatterPlace, [source], wire, group, calls, memory)
        future = place.start(source, target, 1.0 if op == SUM else 1 / group.size())
        connections_of(group).finish()
    return _result(CompressedWork(group, place, future, lambda _: [output]), async_op)


def resynchronize(group: dist.ProcessGroup | None = None, *memories: Memory) -> None:
    """Start again after an error in a collective. A collective call: every rank of ``group`` must make it.

    Discard the tensors of the failed step on every rank first. ``memories``, those that are used on the group, in the
    same order on every rank, keep their errors; what a finished call of the failed step has applied is not taken back.
    """
    group = group or default_group()
    connections = connections_of(group)
    connections.fail(f"{CALL} was called")
    calls = calls_on(connections)
    mine = [connections.generation, calls.count, [memory.steps(group) for memory in memories]]
    facts = gather_json(group, CALL, mine)
    connections.renew(1 + max(generation for generation, _, _ in facts))
    calls.restart(max(count for _, count, _ in facts))
    for memory, *steps in zip(memories, *(each for _, _, each in facts), strict=True):
        memory.restart(group, steps)


def is_mean_or_sum(op: Any) -> bool:
    """Whether an operation is AVG or SUM. A ``ReduceOp`` equals them, but they do not equal it."""
    return any(op == known for known in (AVG, SUM))


def _begin(group: dist.ProcessGroup, op: Any, tensors: Sequence[Tensor]) -> Calls:
    """Count a call, and check its arguments."""
    calls = calls_on(connections_of(group))
    calls.count += 1
    if not is_mean_or_sum(op):
        remedy = f" Pass wire={op!r}." if isinstance(op, str) and op in WIRE_FORMATS else ""
        raise ValueError(f"op is {op!r}; expected ReduceOp.AVG or ReduceOp.SUM.{remedy}")
    calls.op = "SUM" if op == SUM else "AVG"
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
    return calls


def _place(
    kind: type[P], tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls, memory: Entry | None
) -> P:
    """The place of these tensors, with or without memory."""
    if memory is None:
        return stateless_place(kind, tensors, wire, group, calls)
    if not isinstance(memory, Entry):
        raise TypeError(f"memory is a {type(memory).__name__}; expected an entry of a Memory: memory['name'].")
    return memory.place(kind, tensors, wire, group, calls)


@contextmanager
def _leaving_on_error(group: dist.ProcessGroup, call: str) -> Iterator[None]:
    """Let the other ranks raise, too, if this one cannot take part."""
    connections = connections_of(group)
    connections.check()
    try:
        yield
    except BaseException as error:
        connections.fail(f"{call} failed on rank {dist.get_rank()}: {error}")
        raise


def _result(work: CompressedWork, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None
