"""The reducer: launches each bucket's reduction as its gradients become ready, and writes the results back."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.connections import ADVICE
from gradwire.comm.torch_internals import profiler_range, queue_callback
from gradwire.comm.transport import clear_frames, wait_for
from gradwire.compress import Step, cast_all_reduce
from gradwire.hooks._bucket import reduce_bucket
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.backward import AutogradHooks, Backward, Exchange, Phase, StepTimes
from gradwire.reducer.bucket import Bucket, DenseBucket, TakeBack
from gradwire.reducer.bucketing import Assignment, BucketOptions, assign_first_buckets, make_buckets
from gradwire.reducer.drift import DriftCheck
from gradwire.reducer.parameters import UsedParameters


class BucketHook(NamedTuple):
    """Reduces a bucket: a registered communication hook with its state, or `default_reduction` with the exchange."""

    function: Callable[[Any, Any], Future[Tensor]]
    state: Any
    is_zero_copy: bool
    is_registered: bool = False
    has_groups: bool = False  # whether it may have process groups of its own
    take_back: TakeBack | None = None  # adds a sent but unapplied gradient to the error memory


class Reducer:
    """Averages gradients over ranks, bucket by bucket, while the backward pass still runs.

    One backward goes through these phases, which the methods below follow in order:

    1. `DDPReducer.prepare_for_backward`, after a forward that will be synchronized, creates a `Backward`: every bucket
       waits for all its gradients. With ``find_unused_parameters``, a walk of the graph finds those that will not come.
    2. `_on_gradients`, called by `AutogradHooks` when autograd has completed gradients, marks them ready.
    3. `_launch`, once a bucket is complete and all buckets before it are launched: the hook gets the bucket and returns
       a future at once; its work runs in the executor's stream or thread.
    4. `_finalize`, at the end of the backward or in `finalize_backward`, waits for each bucket in order and writes its
       result into the gradients.

    With a static graph, the first backward only counts the calls of each parameter's autograd hook, and all buckets are
    reduced at its end; later, a gradient is ready after as many calls. After the first synchronized backward,
    `DDPReducer._rebuild_buckets` sorts the parameters by the order in which their gradients became ready on rank 0.

    A further backward of a synchronized forward, such as the second of two forwards and two backwards, adds its
    gradients to the means. At its end, once all ranks have agreed that they are in it, all buckets are reduced again.
    `_on_output` notices it: the hook of an output of a synchronized forward runs, and no reduction is prepared.

    A step that fails is discarded: this rank leaves the exchange, see `Exchange`.

    Args:
        exchange: the exchange with the ranks to average over.
        hook: reduces the buckets; may be replaced between two steps.
        options: the parameters and the sizes of buckets.
        find_unused_parameters: whether a backward may leave parameters without a gradient. A parameter that no rank has
            a gradient for keeps its ``.grad``.
        skip_unused: whether to skip buckets without any used parameter. All ranks must agree on it.
    """

    def __init__(
        self,
        exchange: Exchange,
        hook: BucketHook,
        options: BucketOptions,
        *,
        find_unused_parameters: bool = False,
        skip_unused: bool = False,
    ) -> None:
        self.exchange, self.hook, self.options = exchange, hook, options
        self.parameters = options.parameters
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused = skip_unused
        self.static_graph = False
        self._may_leave_out = find_unused_parameters  # whether the first backward of a forward may do so
        self.drift: DriftCheck | None = None  # with ``check_every``
        self.is_finalized_by_caller = False  # whether `finalize_backward` ends a backward
        self._runs_optimizers = False  # whether it steps the optimizers of apply_optimizer_in_backward
        self._upcast_stream: torch.Stream | None = None  # with mixed precision: PyTorch's hook casts gradients on it
        self._lock = threading.Lock()  # held while gradients are marked ready, in any of autograd's threads
        self._is_in_join = False  # whether the latest forward was in `join`
        self.forward_is_running = False
        self._forget_forward()
        self._divisor = 1  # divisor of sums: the world size; in `join`, the number of ranks with inputs left
        self.static_calls: list[int] | None = None  # per autograd hook, in the first backward of a static graph
        self._unused: list[int] = []  # parameters without a gradient in the last backward, or in a static graph
        self._used = UsedParameters(len(self.parameters), exchange.device)
        self._used_before = self._used  # during a further backward: what `_used` was before
        self._incoming: Tensor | None = None  # the gradient whose autograd hook runs
        self.error: str | None = None  # the last one, for the logging data
        self.times = StepTimes(exchange.device)
        # The parameters that other wrappers reduce too, by index.
        self._shared_with: weakref.WeakKeyDictionary[object, list[int]] = weakref.WeakKeyDictionary()
        self._autograd_hooks = AutogradHooks(self.parameters, self._on_gradients)
        self._output_hook = _make_output_hook(weakref.WeakMethod(self._on_output))
        self._set_buckets(assign_first_buckets(options))

    def _set_buckets(self, assignment: Assignment) -> None:
        self.buckets = make_buckets(self.options, assignment, self._upcast_stream)
        self._bucket_of = {i: bucket.position for bucket in self.buckets for i in bucket.members}
        self._begin(Phase.DONE)

    def _begin(self, phase: Phase) -> None:
        """Discard the state of the last backward."""
        for bucket in self.buckets:
            bucket.release()
        self._autograd_hooks.reset()
        self._is_through_outputs = False  # whether a further backward of a synchronized forward runs
        self._backward = Backward(self.buckets, len(self.parameters), phase, self._may_leave_out)

    def _forget_forward(self) -> None:
        """Drop what forwards have set for the next reduction."""
        self._live_ranks: dist.Work | None = None  # in `join`, the all-reduce that counts the ranks with inputs left
        self._divides_by_live_ranks = False
        self._post_backward_futures: list[Future[Any]] = []  # awaited at the end of the backward

    # Errors: this rank leaves the exchange.

    @contextmanager
    def leaving(self, during: str) -> Iterator[None]:
        """Leave the exchange if the body raises; see `_leave_after`."""
        try:
            yield
        except BaseException as error:
            self._leave_after(error, during)
            raise

    def _leave_after(self, error: BaseException, during: str) -> None:
        """Leave the exchange after an error, which the caller raises again; raise the cause if another rank left."""
        clear_frames(error)
        raised_in = error.__traceback__
        message = f"{type(error).__name__} in {during}: {error}"
        is_consequence = type(error) in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
        has_timed_out = is_consequence and any(words in message.lower() for words in ("timeout", "timed out"))
        late = self.exchange.late_ranks() if has_timed_out else None
        told = message if late is None else f"{late} {message}"
        elsewhere = self._fail(told, is_of_peer=is_consequence and "gloo" in message)
        cause = late or elsewhere
        error.with_traceback(raised_in)  # without the frames that ask a failed future for its value
        is_included = cause is None or str(error) in cause or cause in str(error)
        if is_consequence and not is_included:
            raise RuntimeError(f"{cause}\n{ADVICE}\nOn this rank: {message}") from error

    def _fail(self, cause: str, is_of_peer: bool = False) -> str | None:
        """Leave the exchange and discard this step. Returns the error of another rank that left before this one."""
        self.error = cause
        elsewhere = self.exchange.fail(self, self.times.iterations, cause, is_of_peer)
        if (take_back := self.hook.take_back) is not None:
            for bucket, result in zip(self.buckets, self._backward.take_values(), strict=False):  # none between steps
                if result is not None and isinstance(bucket, DenseBucket):
                    with suppress(Exception), torch.no_grad():  # never applied: back to the hook's error memory
                        bucket.give_back(result if isinstance(result, Tensor) else result[0], take_back)
        self._backward.futures.clear()  # a frame of the error's traceback may hold them, and a future holds its error
        self._forget_forward()
        self.forward_is_running = False
        self._begin(Phase.DONE)
        return elsewhere

    def _fail_and_raise(self, message: str) -> NoReturn:
        self._fail(message)
        self._raise(f"{message}\n{ADVICE}")

    def _raise(self, message: str) -> NoReturn:
        self.error = message
        raise RuntimeError(message)

    # Phase 2: gradients become ready.

    def _on_gradients(self, incoming: Tensor | None) -> None:
        """Autograd has accumulated gradients, ``incoming`` the latest of them; one may complete a bucket."""
        hooks, buckets = self._autograd_hooks, self.buckets
        tracks_usage = self._may_leave_out and self.static_calls is None
        with self._lock:
            self._incoming = incoming
            while hooks.recorded:
                taken = hooks.recorded[:]
                del hooks.recorded[: len(taken)]  # other threads may append meanwhile
                for index in taken:
                    if self._backward.phase is Phase.DONE and self._is_through_outputs:
                        self._begin_again()
                    backward = self._backward
                    is_again = backward.phase is Phase.AGAIN
                    if (tracks_usage or is_again) and self.parameters[index].grad is not None:
                        self._used.local[index] = 1  # also in no_sync, whose gradients the next reduction includes
                    if is_again:
                        continue
                    if backward.phase is Phase.DONE or (self.static_graph and not self._is_last_call(index)):
                        continue
                    if backward.phase is Phase.PREPARED:
                        self._begin_reduction(index)
                    backward.ready_order.append(index)
                    self._mark_ready(index)
                    if backward.expected_last[index]:
                        other = hooks.expect_one(buckets[self._bucket_of[index]].members, backward.ready)
                        if other is not None:
                            backward.expected_last[other] = 1
                    if backward.n_launched == len(buckets) and not self.is_finalized_by_caller:
                        queue_callback(self._finalize)
            self._incoming = None

    def _is_last_call(self, index: int) -> bool:
        """With a static graph, count a call of a parameter's autograd hook; returns whether it is the last."""
        calls = self._backward.calls
        calls[index] += 1
        if self.static_calls is None:
            self.times.record("backward_compute_time_start")
            return False
        expected = self.static_calls[index]
        if calls[index] > expected:
            message = errors.GRAPH_CHANGED.format(name=self.options.names[index], index=index, calls=expected)
            self._fail(f"{message}\n{self._unfinished()}")  # in PyTorch the next forward raises it
            raise RuntimeError(f"{message}\n{ADVICE}")
        return calls[index] == expected

    def _on_output(self) -> None:
        """A backward runs through an output of a synchronized forward."""
        if self._backward.phase is Phase.DONE and not self._is_through_outputs:
            self._is_through_outputs = True
            queue_callback(self._end_of_further_backward)

    def _begin_again(self) -> None:
        """The first gradient of a further backward has come in."""
        feature = "mixed_precision" if self._upcast_stream is not None else "join()" if self._is_in_join else None
        if feature is not None:
            self._fail_and_raise(errors.CANNOT_REDUCE_AGAIN.format(feature=feature))
        order = self._backward.ready_order
        self._backward = Backward(self.buckets, len(self.parameters), Phase.AGAIN, may_leave_out=True)
        self._backward.ready_order = order  # for the rebuild of the buckets
        self._used_before, self._used = self._used, UsedParameters(len(self.parameters), self.exchange.device)

    def _end_of_further_backward(self) -> None:
        self._is_through_outputs = False
        if self._backward.phase is Phase.AGAIN:  # not if only gradients of inputs were computed
            self._reduce_all()

    def _reduce_all(self) -> None:
        """Reduce all buckets at the end of a backward."""
        self._start_exchange()
        with self._lock:
            for index in range(len(self.parameters)):
                self._mark_ready(index)
        if not self.is_finalized_by_caller:
            self._finalize()

    def _begin_reduction(self, first: int) -> None:
        """Begin the reduction at the first ready gradient; count unused parameters as ready."""
        self._start_exchange()
        self.times.record("backward_compute_time_start")
        self._autograd_hooks.defer(self._backward.deferrable(self.buckets, first, self._unused, self.static_calls))
        for index in self._unused:
            self._mark_ready(index)

    def _start_exchange(self) -> None:
        try:
            self.exchange.begin_backward(self, self.hook.has_groups)
            if self._backward.is_again:
                self.exchange.agree_to_reduce_again()
            self._divisor = n_live = self.exchange.process_group.size()
            if self._live_ranks is not None and (self._divides_by_live_ranks or self.drift is not None):
                self._live_ranks.wait()
                n_live = int(self._live_ranks.result()[0].item())
                if self._divides_by_live_ranks:
                    self._divisor = n_live
            if self.drift is not None and n_live == self.exchange.process_group.size():
                exchange = self.exchange
                self.drift.begin(self.hook.state, exchange.n_passes, exchange.transport, exchange.device)
        except BaseException as error:
            self._leave_after(error, "the backward pass")
            raise
        self._backward.phase = Phase.REDUCING
        if self._skips:
            launched = [bucket for bucket in self.buckets if not self._is_skipped(bucket)]
            for bucket in self.buckets:
                bucket.is_final = bucket in launched[-1:]

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self._skips and not self._backward.is_again and set(bucket.members) <= set(self._unused)

    @property
    def _skips(self) -> bool:
        return self.skip_unused and self._live_ranks is None  # a rank that has joined cannot know what is unused

    def _mark_ready(self, index: int) -> None:
        """Mark a gradient ready, and launch the buckets that are complete now."""
        backward, buckets = self._backward, self.buckets
        if backward.ready[index]:
            name = errors.as_pytorch_names(self.options.names[index])
            self._fail_and_raise(errors.MARKED_TWICE.format(index=index, name=name))
        backward.ready[index] = 1
        n_pending = backward.n_pending
        n_pending[self._bucket_of[index]] -= 1
        while backward.n_launched < len(buckets) and n_pending[backward.n_launched] == 0:
            bucket = buckets[backward.n_launched]
            if bucket is buckets[-1]:
                self.times.record("backward_compute_time_end")
            if not self._is_skipped(bucket):
                self._launch(bucket)
            backward.n_launched += 1
            if backward.may_leave_out and backward.n_launched == len(buckets):
                self._used.exchange(self.exchange.transport, self.exchange.n_passes)

    def _unfinished(self) -> str:
        return errors.unfinished(
            dist.get_rank(self.exchange.process_group),
            self.options.names,
            self._backward.missing,
            static_graph=self.static_graph,
            find_unused=self.find_unused_parameters,
        )

    # Phase 3: buckets are launched.

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduction of a complete bucket."""
        self.times.record("backward_comm_time_start")
        index = self._backward.n_launched
        try:
            if torch.is_grad_enabled():
                warnings.warn(errors.CREATE_GRAPH, stacklevel=2)
            with profiler_range(f"gradwire::launch bucket {index}"), torch.no_grad():
                bucket.divisor, bucket.n_passes = self._divisor, self.exchange.n_passes
                is_used = self._used.local
                may_leave_out = self._backward.may_leave_out
                unused = [k for k, i in enumerate(bucket.members) if not is_used[i]] if may_leave_out else []
                shared = set(chain.from_iterable(self._shared_with.values())) if self._shared_with else ()
                positions = [k for k, i in enumerate(bucket.members) if i in shared] if shared else []
                bucket.collect(self.hook.is_zero_copy, unused, positions, self._incoming)
                future = self._run_comm_hook(bucket)
            if not isinstance(future, torch_internals.AnyFuture):
                raise RuntimeError(errors.NO_FUTURE.format(kind=type(future)))
            self._backward.futures[index] = future
        except BaseException as error:
            self._leave_after(error, f"the communication hook of bucket {index}")
            raise

    def _run_comm_hook(self, bucket: Bucket) -> Future[Tensor]:
        exchange, hook = self.exchange, self.hook
        bucket.process_group, bucket.model_number = exchange.process_group, exchange.number
        bucket.note_use = exchange.note_use if hook.has_groups else None
        return hook.function(hook.state, bucket)

    # Phase 4: results become gradients.

    def _finalize(self) -> None:
        """Wait for the results, in the order of the buckets, and write them into the gradients."""
        backward, connections = self._backward, self.exchange.connections
        backward.phase = Phase.DONE
        # Hooks divide by the world size, but joined ranks sent zeros: rescale.
        scale = self.exchange.process_group.size() / self._divisor if self.hook.is_registered else 1
        self.times.n_reduced = len(backward.futures) - backward.futures.count(None)
        try:
            with profiler_range("gradwire::wait for buckets"), torch.no_grad():
                connections.finish()
                if self.drift is not None:  # before optimizers in the backward step
                    self.drift.finish(self.exchange.process_group, connections.check_peers)
                if backward.may_leave_out and not self.exchange.has_streams:  # on a GPU, the host would wait
                    self._used.check_passes()
                for index, bucket in enumerate(self.buckets):
                    if backward.futures[index] is not None:
                        self._finish(index, bucket, scale)
                for future in self._post_backward_futures:
                    future.wait()
        except BaseException as error:
            self._leave_after(error, "the end of the backward pass")
            raise
        connections.end_exchange(self)
        self.exchange.note_groups()
        for bucket in self.buckets:
            bucket.release()
        backward.futures.clear()
        self.times.record("backward_comm_time_end")
        if self._live_ranks is not None or self._post_backward_futures:
            self._forget_forward()
        if backward.is_again:
            self._used.clear()
            self._used = self._used_before
        elif backward.may_leave_out and not self.static_graph:  # with a static graph, found in its first backward
            self._used.clear()

    def _finish(self, index: int, bucket: Bucket, scale: float) -> None:
        """Wait for a bucket's result, and write it into its gradients."""
        futures = self._backward.futures
        value = wait_for(cast("Future[Any]", futures[index]), self.exchange.check_in_step)
        result = value if isinstance(value, Tensor) else value[0]  # the future of a collective has a list
        used = {k: self._used.used_anywhere(bucket.members[k]) for k in bucket.stand_ins} if bucket.stand_ins else {}
        bucket.finish(result, scale, used, self.hook.take_back)
        if self._runs_optimizers:
            futures[index] = None  # applied: must not return to the error memory if a later bucket fails
            run_optimizers(bucket.parameters())


def _make_output_hook(notify: weakref.WeakMethod[Callable[[], None]]) -> Callable[[Tensor], None]:
    """A hook of a forward's outputs, which must not keep the reducer alive: nothing collects cycles through C++."""

    def hook(_: Tensor) -> None:
        if (method := notify()) is not None:
            method()

    return hook


def default_reduction(exchange: Exchange, bucket: Bucket) -> Future[Tensor]:
    """Start to average a bucket's gradients, bitwise equal to PyTorch's DDP. The future has the result.

    gloo's threads sum dense gradients on a CPU, several buckets at once; all others are reduced in the executor.
    """
    if isinstance(bucket, DenseBucket) and not exchange.has_streams:
        return exchange.transport.start_all_reduce(bucket.scale_into_buffer())

    async def algorithm(step: Step) -> None:
        assert isinstance(bucket, DenseBucket)
        if bucket.as_view:
            await step.transport.all_reduce(bucket.scale_into_buffer())
        else:
            await cast_all_reduce(step, divisor=bucket.divisor)

    return reduce_bucket(exchange.connections, bucket, algorithm, "all-reduce", divisor=bucket.divisor)


def run_optimizers(parameters: Sequence[Tensor]) -> None:
    """Step the optimizers of ``apply_optimizer_in_backward``, and clear the gradients."""
    for parameter in parameters:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
