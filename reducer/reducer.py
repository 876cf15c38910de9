"""The reducer: watches a backward pass, launches each bucket's hook as its gradients become ready, and finishes it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.futures import Future

from gradwire.comm import GroupTransport, Transport, Workspace
from gradwire.comm.connections import ADVICE, Connections, connections_of
from gradwire.comm.executor import let_go_of_locals
from gradwire.compress import Gradients, cast_all_reduce
from gradwire.hooks._parameter_names import NamedState
from gradwire.hooks._reduce_bucket import is_zero_copy, reduce_bucket
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.arrivals import Arrivals
from gradwire.reducer.bucket import GradBucket, TakeBack
from gradwire.reducer.mixed_precision import LowPrecisionBucket
from gradwire.reducer.sparse_bucket import SparseBucket
from gradwire.reducer.statistics import Statistics
from gradwire.reducer.usage import UsedMap, unreachable

CommHook = Callable[[Any, Any], Future[Tensor]]
Bucket = GradBucket | SparseBucket


class Reducer:
    """Averages gradients over ranks, bucket by bucket, while the backward pass still runs.

    One backward goes through these phases, which the methods below follow in order:

    1. `prepare_for_backward`, after a forward that will be synchronised: all buckets wait for all their gradients.
       With ``find_unused_parameters``, a walk of the graph tells which gradients there is no waiting for.
    2. `_autograd_hook`, called when gradients are complete (`Arrivals` tells): their buckets wait for one less.
    3. `_launch`, once a bucket is complete and all buckets before it were launched: so every rank launches the same
       buckets in the same order. The hook gets the bucket and returns a future at once; the work goes on in the
       executor's stream or thread.
    4. `_finalize`, queued by the last launch and called by autograd at the end of the backward: waits for each
       bucket in order and puts its result into the gradients.

    With a static graph, the first backward only counts how often each parameter's hook is called, and
    `_delay_all_reduce` reduces everything at its end; from then on, a gradient is complete after as many calls.

    After an error the rank *leaves* the exchange (`leaving`, `_fail`), whether its forward, its backward, a hook or
    `_finalize` raised: its connections are closed with a notice to its peers, which raise and leave too, and this step
    is discarded. `prepare_for_forward` raises from then on, until `resynchronize` has brought all ranks together and
    `restart` begins as after construction. A backward that raised tells nobody; it is found unfinished by the next
    forward. One that raised before the first gradient was ready has exchanged nothing, and the next batch takes its
    place. See `gradwire.comm.connections` and docs/fault-handling.md.

    Between the first and the second synchronised backward, `_rebuild_buckets` sorts the parameters by the order in
    which their gradients became ready on rank 0. Gradients belong to the parameters, flat buffers to the buckets, the
    wire to the executor of the process group.

    Args:
        parameters: what to reduce; those that require a gradient, each once.
        names: their names, as in ``module.named_parameters()``.
        sparse: whether each one's gradient is sparse.
        process_group: the ranks to average over.
        limits: sizes in bytes of the first buckets, from the last parameter to the first; the last one repeats.
        rebuilt_limits: sizes in bytes of the rebuilt buckets.
        gradient_as_bucket_view: whether every ``.grad`` becomes a view of a flat buffer.
        find_unused_parameters: whether a backward may leave parameters without a gradient. A parameter that no rank
            has a gradient for keeps the ``.grad`` that it has.
        skip_unused: whether a bucket of which this rank uses no parameter is not reduced. Ranks must agree on that.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        process_group: dist.ProcessGroup,
        limits: Sequence[int],
        rebuilt_limits: Sequence[int],
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        skip_unused: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.device = self.parameters[0].device
        self.names = list(names)
        self.sparse = list(sparse)
        self.process_group = process_group
        self.rebuilt_limits = list(rebuilt_limits)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused = skip_unused
        self.static_graph = False
        self._may_leave_out = find_unused_parameters  # of a backward, some parameters
        self._tracks_usage = find_unused_parameters
        self.error: str | None = None  # the last one of a backward
        self.has_rebuilt_buckets = False
        self.statistics = Statistics(self.device)
        self._hook: CommHook | None = None
        self.hook_state: Any = None
        self._hook_zero_copy = False
        self._take_back: TakeBack | None = None
        self._runs_optimizers = False
        self._upcast_stream: torch.Stream | None = None  # with mixed precision
        self._lock = threading.Lock()
        self._expects_hooks = False
        self._requires_finalize = False
        self._forward_under_way = False
        self._live_ranks: dist.Work | None = None
        self._divisor: int | None = None
        self._post_backward_futures: list[Future[Any]] = []
        self._calls = [0] * len(self.parameters)  # of each hook in the first backward of a static graph
        self.has_counted_calls = False
        self._calls_left: list[int] = []
        self._unused: list[int] = []
        self._graph_seems_static = True
        self._used = UsedMap(len(self.parameters), self.device)
        self.ready_order: list[int] = []  # of the parameters, in the last synchronised backward
        self._ready = bytearray(len(self.parameters))
        self._next = 0
        self.buckets: list[Bucket] = []
        self._limits = list(limits)
        self._assign_first_buckets()
        self._arrivals = Arrivals(self.parameters, self._autograd_hook)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket from now on.

        Raises:
            RuntimeError: a hook is registered already.
        """
        if self._hook is not None:
            raise RuntimeError(errors.HOOK_REGISTERED_TWICE)
        self._hook, self.hook_state = hook, state
        self._hook_zero_copy = is_zero_copy(hook)
        self._take_back = state.take_back if isinstance(state, NamedState) else None

    def _assign_first_buckets(self) -> None:
        """As in PyTorch: in model order for the first backward, which tells the order of readiness."""
        self._build_buckets(torch_internals.assign_buckets(self.parameters, self._limits, self.sparse)[::-1])

    def _build_buckets(self, assignment: Sequence[Sequence[int]]) -> None:
        last = len(assignment) - 1
        self.buckets = [self._new_bucket(index, index == last, members) for index, members in enumerate(assignment)]
        self._bucket_of: list[Bucket] = [self.buckets[0]] * len(self.parameters)
        self.members = [list(members) for members in assignment]
        for bucket, members in zip(self.buckets, assignment, strict=True):
            for i in members:
                self._bucket_of[i] = bucket

    def _new_bucket(self, index: int, is_last: bool, members: Sequence[int]) -> Bucket:
        if self.sparse[members[0]]:
            return SparseBucket(index, is_last, self.parameters[members[0]], self.names[members[0]])
        parameters, names = [self.parameters[i] for i in members], [self.names[i] for i in members]
        if self._upcast_stream is not None:
            return LowPrecisionBucket(index, is_last, parameters, names, self._upcast_stream)
        bucket = GradBucket(index, is_last, parameters, names, self.gradient_as_bucket_view)
        if self.gradient_as_bucket_view:
            bucket.adopt_gradients()
        return bucket

    @property
    def connections(self) -> Connections:
        """What gradwire owns on the process group.

        Raises:
            RuntimeError: the process group was destroyed.
        """
        return connections_of(self.process_group)

    @property
    def transport(self) -> GroupTransport:
        """The collectives of the reducer itself, and on CPUs of the plain all-reduce."""
        return self.connections.transport("backward", self.device)

    def prepare_for_forward(self) -> None:
        """Count an iteration, as the forward of a synchronised backward begins.

        Raises:
            RuntimeError: the previous step failed, or the process group was destroyed.
        """
        self.connections.check()
        if self._forward_under_way:
            self._fail("the forward pass raised an exception")
            self.connections.check()
        self.statistics.begin_forward()

    def begin_forward(self) -> None:
        """The module's forward pass begins, of a synchronised backward; `prepare_for_backward` tells its end."""
        self._forward_under_way = True

    def _rebuild_buckets(self) -> bool:
        """Assign parameters to buckets anew, in the order of readiness of rank 0's first synchronised backward.

        Happens once, and never where a backward may leave out parameters, because ranks would not agree on when; a
        collective call then. Returns whether it happened now.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._ensure_prior_reduction_finished()
        if self.has_rebuilt_buckets or not (self.static_graph or not self.find_unused_parameters):
            return False
        if not self.ready_order:
            return False
        order = self.ready_order + self._unused
        tensors = [self.parameters[i] for i in order]
        buckets = torch_internals.assign_buckets(tensors, self.rebuilt_limits, self.sparse, order)
        with self.leaving("the rebuild of the buckets"):
            self._build_buckets(self._agree(buckets))
        self.has_rebuilt_buckets = True
        return True

    def _agree(self, buckets: list[list[int]]) -> list[list[int]]:
        """Rank 0's buckets, broadcast as one tensor: the parameters in order, and the bucket of each."""
        order = [i for bucket in buckets for i in bucket]
        number = [b for b, bucket in enumerate(buckets) for _ in bucket]
        message = torch.tensor([order, number], device=self.device)
        transport = self.transport
        transport.wait(transport.broadcast(message, 0))
        agreed: list[list[int]] = [[] for _ in range(int(message[1, -1]) + 1)]
        for i, b in zip(*message.tolist(), strict=True):
            agreed[b].append(i)
        return agreed

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect in the coming backward the gradient of every parameter that ``outputs`` depend on.

        Args:
            outputs: of the forward. Looked at only with ``find_unused_parameters``, and not with a static graph.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._ensure_prior_reduction_finished()
        self._reset()
        self._forward_under_way = False
        self._expects_hooks = True
        if self.static_graph:
            self._calls_left = list(self._calls)
        elif self.find_unused_parameters:
            unused = unreachable(outputs, self._gradient_nodes())
            if self.statistics.iterations > 1:
                self._graph_seems_static &= unused == self._unused
            self._unused = unused
        self.statistics.unused_bytes = sum(self.parameters[i].nbytes for i in self._unused)

    def _gradient_nodes(self) -> list[Node]:
        """The autograd nodes that take the gradients; with mixed precision, each forward has others."""
        if self._upcast_stream is not None:
            return [torch_internals.gradient_node(parameter) for parameter in self.parameters]
        return self._arrivals.nodes

    def _quiet(self) -> bytearray:
        """Whether the arrival of each gradient need only be noted: not of the one that a bucket gets last.

        Nor of one that adds up from several calls, or never comes; and of none as long as calls are counted.
        """
        if self.static_graph and not self.has_counted_calls:
            return bytearray(len(self.parameters))
        quiet = bytearray(b"\1") * len(self.parameters)
        for index in self._unused:
            quiet[index] = 0
        for index, calls in enumerate(self._calls_left):
            if calls > 1:
                quiet[index] = 0
        for bucket, members in zip(self.buckets, self.members, strict=True):
            bucket.awaited = next((i for i in reversed(members) if quiet[i]), None)
            if bucket.awaited is not None:
                quiet[bucket.awaited] = 0
        return quiet

    def _autograd_hook(self) -> None:
        """Autograd has accumulated gradients of parameters, among them one that is not quiet."""
        with self._lock:
            for index in self._arrivals.new():
                if self._tracks_usage and self.parameters[index].grad is not None:
                    self._used.local[index] = 1  # also in no_sync: what has accumulated there is reduced next time
                if self._expects_hooks:
                    self._accept(index)

    def _accept(self, index: int) -> None:
        """A gradient has come, perhaps one of several that add up."""
        if self.static_graph and self._must_wait_for_more(index):
            return
        if not self._requires_finalize:
            self._begin_reduction(index)
        self.ready_order.append(index)
        self._mark_ready(index)
        bucket = self._bucket_of[index]
        if bucket.pending > 0 and bucket.awaited == index:
            missing = (i for i in self.members[bucket.index()] if not self._ready[i])
            bucket.awaited = self._arrivals.wake_one(missing)
        if self._next == len(self.buckets):
            torch_internals.queue_callback(self._finalize)

    def _must_wait_for_more(self, index: int) -> bool:
        """With a static graph, whether more will be added to a gradient."""
        if not self.has_counted_calls:
            self.statistics.mark("backward_compute_time_start")
            self._calls[index] += 1
            return True
        if self._calls_left[index] == 0:
            self._raise_graph_changed(index)
        self._calls_left[index] -= 1
        return self._calls_left[index] > 0

    def _begin_reduction(self, first: int) -> None:
        """The first gradient is ready; so are those that there will not be."""
        self._requires_finalize = True
        self.statistics.mark("backward_compute_time_start")
        quiet = self._quiet()
        quiet[first] = 0
        self._arrivals.quieten(quiet)
        for unused in self._unused:
            self._mark_ready(unused)

    def _delay_all_reduce(self) -> None:
        """The first backward of a static graph has come to its end: now it is known what it uses. Reduce all of it."""
        if not self._expects_hooks:  # in no_sync; nothing was counted
            return
        self.has_counted_calls = True
        self._tracks_usage = False  # it stays as it is now
        self._requires_finalize = True
        self._unused = [index for index, calls in enumerate(self._calls) if calls == 0]
        with self._lock:
            for index in range(len(self.parameters)):
                self._mark_ready(index)
        self._finalize()

    def _mark_ready(self, index: int) -> None:
        """The bucket of a parameter waits for one gradient less."""
        if self._ready[index]:
            self._raise_marked_twice(index)
        self._ready[index] = 1
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        """Launch what is complete, in the order of the buckets."""
        last = len(self.buckets) - 1
        while self._next <= last and self.buckets[self._next].pending == 0:
            if self._next == last:
                self.statistics.mark("backward_compute_time_end")
            self._launch(self._next)
            self._next += 1
            if self._next > last and self._may_leave_out:
                self._used.exchange(self.transport)

    def _launch(self, index: int) -> None:
        """Hand a bucket whose gradients are all ready to the hook."""
        bucket, members = self.buckets[index], self.members[index]
        if self.skip_unused and set(members) <= set(self._unused):
            return
        self.statistics.mark("backward_comm_time_start")
        with self.leaving(f"the communication hook of bucket {index}"):
            if torch.is_grad_enabled():
                warnings.warn(errors.CREATE_GRAPH, stacklevel=2)
            with torch.no_grad():
                bucket.divisor = self._divide_factor()
                unused = [k for k, i in enumerate(members) if not self._used.local[i]] if self._may_leave_out else []
                bucket.collect(self._reduces_zero_copy(bucket), unused)
                future = self._run_comm_hook(bucket)
            if not torch_internals.is_future(future):
                self._raise(errors.no_future(future))
            bucket.future = future

    def _reduces_zero_copy(self, bucket: Bucket) -> bool:
        """Whether the result is written into the gradients; else it is that of the future."""
        if isinstance(bucket, SparseBucket):
            return False
        return self._hook_zero_copy if self._hook is not None else bucket.device.type != "cpu"

    def _divide_factor(self) -> int:
        """What sums over the ranks are divided by: their number, or in `join` the number of those with inputs left."""
        if self._divisor is None:
            self._divisor = self.process_group.size()
            if self._live_ranks is not None:
                self._live_ranks.wait()
                self._divisor = int(self._live_ranks.result()[0].item())
        return self._divisor

    def _finalize(self) -> None:
        """Wait for the results, in the order of the buckets, and put them into the gradients."""
        self._expects_hooks = False
        self._requires_finalize = False
        # A hook averages over all ranks, of which those that have joined added zeros.
        scale = self.process_group.size() / self._divide_factor() if self._hook is not None else 1
        self.statistics.n_reduced = sum(bucket.future is not None for bucket in self.buckets)
        with self.leaving("the end of the backward pass"), torch.no_grad():
            for bucket, members in zip(self.buckets, self.members, strict=True):
                if bucket.future is None:
                    bucket.release()
                    continue
                value = self.connections.wait(bucket.future)
                flat = value if isinstance(value, Tensor) else value[0]
                zero_copy = self._reduces_zero_copy(bucket)
                used = {k: self._used.used_anywhere(members[k]) for k in bucket.stand_ins}
                bucket.finish(None if zero_copy else flat, scale, used, self._take_back)
                if self._runs_optimizers:
                    _run_optimizers(bucket.parameters())
            for future in self._post_backward_futures:
                future.wait()
        self.statistics.mark("backward_comm_time_end")
        self._forget_step()

    def _forget_step(self) -> None:
        """Let go of what concerns one backward only."""
        if not self.static_graph:  # whose first backward told it once and for all
            self._used.clear()
        self._divisor = self._live_ranks = None
        self._post_backward_futures = []

    @contextmanager
    def leaving(self, during: str) -> Iterator[None]:
        """Leave the exchange if what is done here fails; see the class docstring.

        Raises:
            RuntimeError: it failed because another rank left; tells what failed there.
        """
        try:
            yield
        except BaseException as error:
            let_go_of_locals(error)
            message = f"{type(error).__name__} in {during}: {error}"
            elsewhere = self._fail(message)
            is_consequence = type(error) in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
            if elsewhere is not None and is_consequence and str(error) not in elsewhere:
                raise RuntimeError(f"{elsewhere}\n{ADVICE}\nOn this rank: {message}") from error
            raise

    def _fail(self, cause: str) -> str | None:
        """Leave the exchange and discard this step. Returns what failed on another rank that left before this one."""
        self.error = cause
        connections = self.connections
        elsewhere = connections.failure_elsewhere()
        rank = dist.get_rank(self.process_group)
        connections.fail(elsewhere or f"Step {self.statistics.iterations} failed on rank {rank}: {cause}")
        self._keep_what_was_sent()
        self._used.abandon(keep_local=self.static_graph)
        self._divisor = self._live_ranks = None
        self._post_backward_futures = []
        self._forward_under_way = False
        self._reset()
        return elsewhere

    def _keep_what_was_sent(self) -> None:
        """Give the results of this step, which nobody will apply, back to the hook's memory of earlier steps."""
        if self._take_back is None:
            return
        for bucket in self.buckets:
            if bucket.future is not None and bucket.future.done() and isinstance(bucket, GradBucket):
                with suppress(Exception), torch.no_grad():
                    bucket.future.value()
                    bucket.give_back(self._take_back)

    def _reset(self) -> None:
        self._expects_hooks = False
        self._requires_finalize = False
        if not self.has_counted_calls:
            self._calls = [0] * len(self.parameters)
        self._next = 0
        self.ready_order = []
        self._ready = bytearray(len(self.parameters))
        self._arrivals.begin()
        for bucket in self.buckets:
            bucket.release()

    def _ensure_prior_reduction_finished(self) -> None:
        if not self._requires_finalize:
            return
        for index in self._arrivals.new():  # noted since, in buckets that never became complete
            self._ready[index] = 1
        missing = [i for i, ready in enumerate(self._ready) if not ready]
        if not missing:
            self._fail("the backward pass raised an exception after all buckets were launched")
            self.connections.check()
            return
        self._fail_and_raise(
            errors.unfinished(
                dist.get_rank(self.process_group),
                self.names,
                missing,
                static_graph=self.static_graph,
                find_unused=self.find_unused_parameters,
            )
        )

    def _raise(self, message: str) -> NoReturn:
        self.error = message
        raise RuntimeError(message)

    def _fail_and_raise(self, message: str) -> NoReturn:
        self._fail(message)
        self._raise(f"{message}\n{ADVICE}")

    def _raise_marked_twice(self, index: int) -> None:
        self._fail_and_raise(errors.marked_twice(self.names[index], index))

    def _raise_graph_changed(self, index: int) -> None:
        self._fail_and_raise(errors.graph_changed(self.names[index], index, self._calls[index]))

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward left buckets incomplete."""
        self._ensure_prior_reduction_finished()

    def _remove_autograd_hooks(self) -> None:
        """Stop watching the parameters."""
        self._arrivals.remove()

    def _set_static_graph(self) -> None:
        """Rely on every backward to use what the first one uses, as often.

        Raises:
            RuntimeError: there was a synchronised forward already.
        """
        if self.statistics.iterations > 0:
            self._raise(errors.static_graph_too_late(self.statistics.iterations))
        self.static_graph = self._may_leave_out = self._tracks_usage = True

    def _ddp_graph_static(self) -> bool:
        """Whether no backward so far left out other parameters than the one before it."""
        return self._graph_seems_static

    def _get_local_used_map(self) -> Tensor:
        """How many ranks had a gradient for each parameter in the last backward: int32."""
        return self._used.last

    def _set_optimizer_in_backward(self) -> None:
        """Step the optimizers attached to a parameter as soon as its gradient is reduced, and clear that."""
        self._runs_optimizers = True

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        """Wait for these too at the end of the backward."""
        self._post_backward_futures += futures

    # What follows serves mixed precision.

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Expect gradients in the dtype of the parameters' copies; their hook has been registered."""
        self._upcast_stream = self.hook_state.upcast_stream
        self._arrivals.remove()  # PyTorch's class watches the copies
        self._build_buckets(self.members)

    def gradient_arrived(self, index: int) -> None:
        """Autograd has accumulated the gradient of a parameter's copy."""
        self._arrivals.arrive(index)

    # What follows lets a rank that has run out of inputs take part in the others' collectives; see DDP's `join`.

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Divide by the number of ranks that ``work`` sums up, unless by that of all ranks."""
        self._live_ranks = None if use_static_world_size else work

    def _get_zeros_like_grad_buckets(self) -> list[Bucket]:
        buckets: list[Bucket] = [bucket.of_zeros(self._reduces_zero_copy(bucket)) for bucket in self.buckets]
        for bucket in buckets:
            bucket.divisor = self.process_group.size()
        return buckets

    def _run_comm_hook(self, bucket: Bucket) -> Future[Tensor]:
        if self._hook is not None:
            return self._hook(self.hook_state, bucket)
        if isinstance(bucket, GradBucket) and bucket.device.type == "cpu":
            # Without an executor: gloo sums in threads of its own, of several buckets at once.
            return self.transport.start_all_reduce(bucket.scale_into_buffer())
        return _plain_all_reduce(self.process_group, bucket)

    def _run_allreduce_hook(self, bucket: Bucket) -> Future[Tensor]:
        return self.transport.start_all_reduce(bucket.buffer())

    def match_used_map(self) -> None:
        """Take part in the exchange of a backward that this rank has no inputs for."""
        self._used.exchange(self.transport)
        self._used.clear()

    def _push_all_rebuilt_params(self) -> None:
        """Let the coming rebuild go by the order of the parameters; it goes by rank 0's anyway."""
        if not self.ready_order:
            self.ready_order = list(range(len(self.parameters)))

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first ten, time one iteration in ``sample_rate``."""
        self.statistics.sample_rate = sample_rate

    # What follows serves training on a changing set of ranks.

    def _reset_state(self) -> None:
        """Forget what backwards have told: rebuild the buckets after the next, count a static graph's calls again."""
        self.has_counted_calls = False
        self._tracks_usage = self._may_leave_out
        self._unused = []
        self._used = UsedMap(len(self.parameters), self.device)
        self._divisor = self._live_ranks = None
        self._post_backward_futures = []
        self._reset()
        self.has_rebuilt_buckets = False

    def leave(self, cause: str) -> None:
        """Leave the exchange, if that has not happened yet. Nothing of this rank is in flight afterwards."""
        if self.connections.failure is None:
            self._fail(cause)

    def restart(self) -> None:
        """Begin as after construction, with the first buckets, which are the same on all ranks."""
        self._reset_state()
        self._assign_first_buckets()

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on. The process group of a hook's state is its owner's to update."""
        self.process_group = process_group


def _plain_all_reduce(process_group: dist.ProcessGroup, bucket: Bucket) -> Future[Tensor]:
    """What PyTorch's DDP does without a hook, to the bit, where `GradBucket.scale_into_buffer` is not enough."""

    async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        assert isinstance(bucket, GradBucket)
        if bucket.as_view:
            await transport.all_reduce(bucket.scale_into_buffer())
        else:
            await cast_all_reduce(source, target, source.table.dtype, transport, workspace, bucket.divisor)

    return reduce_bucket(process_group, cast("Any", bucket), algorithm, bucket.divisor)


def _run_optimizers(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
