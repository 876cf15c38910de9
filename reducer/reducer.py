"""The reducer: launches each bucket's reduction as its gradients become ready, and writes the results back."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.connections import ADVICE, may_follow_from_peer
from gradwire.comm.stream_executor import Handle, Result
from gradwire.comm.torch_internals import NO_BACKWARD, EndCallback, current_backward, profiler_range, queue_callback
from gradwire.comm.transport import clear_frames, wait_for
from gradwire.exchange.bucket import tensor_in
from gradwire.exchange.decorators import is_gradwire_hook, is_replayable, is_zero_copy
from gradwire.exchange.handshake import stepped_early
from gradwire.exchange.hook_state import HookState
from gradwire.exchange.plans import Plans
from gradwire.exchange.settings import check_pairing, follow_model, in_group
from gradwire.reducer import bucketing, errors, torch_internals
from gradwire.reducer.autograd_hooks import AutogradHooks
from gradwire.reducer.bucket import BucketHook, DelayedGradients, ReducerBucket
from gradwire.reducer.drift import DriftCheck
from gradwire.reducer.exchange import Exchange
from gradwire.reducer.model_watch import ModelWatch
from gradwire.reducer.step_times import StepTimes
from gradwire.reducer.unused_parameters import UsedParameters, find_unused


class Phase(Enum):
    """The progress of a backward."""

    PREPARED = "no gradient is ready yet"
    REDUCING = "gradients are ready, and buckets are launched once they are complete"
    DONE = "all results are in the gradients, or the backward was discarded"
    AGAIN = "gradients of a further backward of a synchronized forward come in; its end reduces all buckets"


class Backward:
    """The state of one synchronized backward pass.

    A gradient is *ready* once autograd adds nothing more to it. A bucket is *complete* once all its gradients are
    ready. It is *launched* once it and all buckets before it are complete. If the backward ``may_leave_out``
    parameters, the ranks exchange which of them are ``used``.
    """

    def __init__(self, buckets: list[ReducerBucket], phase: Phase, may_leave_out: bool, used: UsedParameters) -> None:
        n_parameters = len(used.local)
        self.phase = phase
        self.may_leave_out = may_leave_out
        self.used = used
        self.is_again = phase is Phase.AGAIN  # whether it is not the first of its forward
        self.follower = EndCallback()  # queued while a further backward of its forward runs
        self.is_of_several = False  # whether it may belong to one of several forwards, with ``find_unused_parameters``
        self.divisor = 1  # of sums over ranks: the world size; in `join`, the number of ranks with inputs left
        self.ready = bytearray(n_parameters)  # 1 for each parameter whose gradient is ready
        self.ready_order: list[int] = []  # of parameters, as autograd completed their gradients; without unused ones
        self.n_pending = [len(bucket.members) for bucket in buckets]  # gradients that each bucket still waits for
        self.expected_in = -1  # position of the bucket of which a hook is not deferred, so that its end is noticed
        self.calls = [0] * n_parameters  # of each parameter's autograd hook, with a static graph
        self.delay = EndCallback()  # `_delay_all_reduce`, or `_complete` if it `is_of_several`
        self.n_launched = 0  # buckets, skipped ones included
        self.marks: list[tuple[int, ...]] | None = None  # `ModelWatch.marks` of a backward that was about to begin
        self.skipped: set[int] = set()  # positions of the buckets that are not reduced: no parameter of them is used
        # None before the launch, and if not reduced.
        self.futures: list[Future[Any] | Handle | None] = [None] * len(buckets)

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]

    def take_values(self, is_needed: bool) -> list[Any]:
        """The values of the futures that are done; None for the others and for failed ones. Drops the futures.

        On a GPU, the current stream waits for the values. Unless they are needed, it does not wait for an executor,
        which keeps the gradients (`Exchange.keep`): a collective may never end.
        """
        values = []
        while self.futures:
            future = self.futures.pop(0)
            is_passed_over = not is_needed and isinstance(future, Handle | Result)
            try:
                values.append(future.wait() if future is not None and not is_passed_over and future.done() else None)
            except Exception as error:
                clear_frames(error)
                values.append(None)
            finally:
                del future  # it holds the error, too
        return values


class Reducer:
    """Averages gradients over ranks, bucket by bucket, while the backward pass still runs.

    One backward goes through these phases, which the methods below follow in order:

    1. `prepare_for_backward`, after a forward that will be synchronized, creates a `Backward`: every bucket
       waits for all its gradients. With ``find_unused_parameters``, a walk of the graph finds those that will not come.
    2. `_on_gradients`, called by `AutogradHooks` when autograd has completed gradients, marks them ready.
    3. `_launch`, once a bucket is complete and all buckets before it are launched: the hook gets the bucket and returns
       a future at once; its work runs in the executor's stream or thread.
    4. `_finalize`, at the end of the backward or in `finalize_backward`, waits for each bucket in order and writes its
       result into the gradients.

    With a static graph, the first backward only counts the calls of each parameter's autograd hook, and all buckets are
    reduced at its end; later, a gradient is ready after as many calls. After the first synchronized backward,
    `_rebuild_buckets` sorts the parameters by the order in which their gradients became ready on rank 0.

    A further backward of a synchronized forward, such as the second of two forwards and two backwards, adds its
    gradients to the means. At its end, once all ranks have agreed that they are in it, all buckets are reduced again.
    The hook of an output of a synchronized forward notices it, as it runs without a prepared reduction.

    A step that fails is discarded: this rank leaves the exchange, see `Exchange`.

    Args:
        exchange: this rank's part in the exchange with the other ranks.
        hook: the default reduction of the buckets, until a communication hook is registered.
        options: the parameters, and the sizes of their buckets.
        watch: finds parameters that were replaced, added or unfrozen.
        drift: with ``check_every``.
        delayed: the gradients of the parameters that no bucket has.
        find_unused_parameters: whether a backward may leave parameters without a gradient. A parameter that no rank has
            a gradient for keeps its ``.grad``.
        skip_unused: whether to skip buckets without any used parameter. All ranks must agree on it.
        is_in_no_sync: tells whether gradients are to stay on this rank at present.
    """

    def __init__(
        self,
        exchange: Exchange,
        hook: BucketHook,
        options: bucketing.BucketOptions,
        watch: ModelWatch,
        drift: DriftCheck | None,
        delayed: DelayedGradients | None,
        *,
        find_unused_parameters: bool,
        skip_unused: bool,
        is_in_no_sync: Callable[[], bool],
    ) -> None:
        self.exchange = exchange
        self.hook = hook
        self.options = options
        self._default_hook = hook
        self._watch = watch
        self.drift = drift
        self._delayed = delayed
        self.parameters = options.parameters
        self.find_unused_parameters, self.skip_unused = find_unused_parameters, skip_unused
        self.static_graph = False
        self.is_finalized_by_caller = False  # whether `finalize_backward` ends a backward
        self.runs_optimizers = False  # whether it steps the optimizers of apply_optimizer_in_backward, once averaged
        self._upcast_stream: torch.Stream | None = None  # with mixed precision: PyTorch's hook casts gradients on it
        self._lock = threading.Lock()  # held while gradients are marked ready, in any of autograd's threads
        # If the latest forward was in `join`: the all-reduce that counts the ranks with inputs left, and whether to
        # divide by that number.
        self._live_ranks: tuple[dist.Work, bool] | None = None
        self.forward_is_running = False
        self.is_local = False  # whether a forward under no_sync has come after the latest preparation of a backward
        self._is_in_no_sync, self._has_warned_of_local = is_in_no_sync, False
        self._post_backward_futures: list[Future[Any]] = []  # awaited at the end of the backward
        self.static_calls: list[int] | None = None  # per autograd hook, in the first backward of a static graph
        self.unused: list[int] = []  # parameters without a gradient in the last backward, or in a static graph
        self._used = UsedParameters(len(self.parameters), exchange.device)
        # For the logging data: the last error, and the number of buckets that the last backward has reduced.
        self.error: str | None = None
        self.n_reduced = 0
        self.times = StepTimes(exchange.device)
        # The parameters that other wrappers reduce too, by index.
        self._shared_with: weakref.WeakKeyDictionary[object, list[int]] = weakref.WeakKeyDictionary()
        self._autograd_hooks = AutogradHooks(self.parameters, self._on_gradients)
        self._output_hooks = [_make_output_hook(weakref.ref(self), synchronized) for synchronized in (False, True)]
        self.has_rebuilt_buckets = False
        self._has_reduced = False  # whether this rank has taken part in a reduction
        self._graph_seems_static = True  # whether `unused` has never changed
        self.bucket_limits = options.rebuilt_limits  # sizes in bytes of the rebuilt buckets; the last one repeats
        self._set_buckets(bucketing.assign_first_buckets(options))

    def _set_buckets(self, assignment: bucketing.Assignment) -> None:
        self.buckets = bucketing.make_buckets(self.options, assignment, self._upcast_stream)
        self._bucket_of = {i: bucket.position for bucket in self.buckets for i in bucket.members}
        self._begin(Phase.DONE)

    def _begin(self, phase: Phase) -> None:
        for bucket in self.buckets:
            bucket.release()
        self._autograd_hooks.reset()
        self._backward = Backward(self.buckets, phase, self.find_unused_parameters or self.static_graph, self._used)

    # Phase 1: a forward, and the preparation of its backward.

    @torch_internals.not_compiled
    def prepare_for_forward(self) -> None:
        """Count an iteration: the forward of a synchronized backward begins."""
        connections = self.exchange.connect()
        connections.check()
        if self.forward_is_running:
            self._leave("the forward pass raised an exception")
            connections.check()
        if self._watch.is_due():
            self._check_model(range(len(self.parameters)))
        else:
            self._check_hooks([0])
        self._live_ranks = None
        self.exchange.begin_forward()
        self.times.begin_forward()

    def _check_hooks(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if parameters were changed so that autograd drops their hooks: one was cast, or has
        another gradient node, which only those among ``indices`` are asked for.
        """
        if self._upcast_stream is None and (index := self._autograd_hooks.find_lost(indices)) is not None:
            self._leave_and_raise(
                f"{self.options.names[index]} was cast to another dtype or moved to another device after the model was "
                "wrapped, or its memory was replaced, as torch.nn.utils.parametrize does. Its gradients would not be "
                "averaged. Wrap the model again, or change it before you wrap it."
            )

    def _check_model(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if the model's trainable parameters are not those that are averaged, or have no hooks.

        ``indices`` are the parameters whose hooks are checked.
        """
        if (name := self._watch.find_unknown()) is not None:
            self._leave_and_raise(
                f"{name} was replaced, added or unfrozen after the model was wrapped. Its gradients would not be "
                "averaged. Wrap the model again, or change it before you wrap it; load_state_dict without assign=True "
                "keeps parameters. A parameter that each rank is to train by itself must be named in "
                "module._ddp_params_and_buffers_to_ignore before you wrap the model."
            )
        self._check_hooks(indices)

    def _check_absent(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if parameters without a gradient were replaced, or have lost their hooks."""
        if self._watch.are_replaced(indices):
            self._check_model(indices)
        else:
            self._check_hooks(indices)

    @torch_internals.not_compiled
    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets once, in rank 0's order of ready gradients; returns whether that was done.

        A collective call. Not if backwards may leave out different parameters: ranks could not agree on when.
        """
        self._check_reducer_finalized()
        order = self._backward.ready_order
        may_rebuild = self.static_graph or not self.find_unused_parameters
        if self.has_rebuilt_buckets or not may_rebuild or not order:
            return False
        with self.leaving("the rebuild of the buckets"):
            self.bucket_limits = bucketing.rebuilt_limits(self.options, self.hook.state)
            parameters, transport = order + self.unused, self.exchange.transport
            self._set_buckets(bucketing.rebuild_buckets(self.options, self.bucket_limits, parameters, transport))
        self._backward.ready_order = order
        self.has_rebuilt_buckets = True
        return True

    @torch_internals.not_compiled
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Prepare for the backward from ``outputs``; only ``find_unused_parameters`` reads them.

        DistributedDataParallel calls it at the end of a forward. A pipeline schedule makes its forwards under no_sync,
        and calls it before the last backward of a step.
        """
        self._check_reducer_finalized()
        has_earlier = self._backward.phase is Phase.PREPARED  # a forward whose backward may come with this one's
        self._begin(Phase.PREPARED)
        self._watch.begin_backward()
        if not self.forward_is_running:
            self._backward.marks = self._watch.marks()
        self.forward_is_running = self.is_local = False
        if self.find_unused_parameters and not self.static_graph:
            self._backward.is_of_several = has_earlier
            nodes = self._autograd_hooks.nodes
            if self._upcast_stream is not None:  # with mixed precision, each forward creates new ones
                nodes = [torch_internals.gradient_node(parameter) for parameter in self.parameters]
            unused = find_unused(outputs, nodes)
            if has_earlier:
                unused = sorted({*unused} & {*self.unused})
            self._check_absent(unused)
            if self.times.iterations > 1:
                self._graph_seems_static &= unused == self.unused
            self.unused = unused

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward left buckets incomplete."""
        if self._backward.phase is Phase.AGAIN:
            self._leave("a further backward pass of a synchronized forward pass raised an exception")
            self.exchange.connections.check()
        if self._backward.phase is Phase.PREPARED and self._backward.marks not in (None, self._watch.marks()):
            self._leave_and_raise(
                "The last backward pass was prepared for the average and has changed gradients, but none of them came "
                "through autograd's hooks: they are this rank's own, and an optimizer may have applied them. Pipeline "
                "schedules that split the backward pass, such as zero-bubble ones, compute the gradients of weights "
                "with torch.autograd.grad, which no DistributedDataParallel averages. Use a schedule with whole "
                "backward passes, such as Schedule1F1B or ScheduleInterleaved1F1B, or replicate or fully_shard with "
                "gradwire.attach in place of DistributedDataParallel."
            )
        if self._backward.phase is not Phase.REDUCING:
            return
        for index in self._autograd_hooks.recorded:  # parameters of buckets that never became complete
            self._backward.ready[index] = 1
        if self._backward.missing:
            self._leave_and_raise(self._unfinished())
        if self.is_finalized_by_caller:
            self._leave_and_raise(
                "finalize_backward() was not called for the last backward pass, whose gradients are not averaged. Call "
                "it after every synchronized backward pass, or set require_manual_backward_finalization to False."
            )
        self._leave("the backward pass raised an exception after all buckets were launched")
        self.exchange.connections.check()

    @torch_internals.not_compiled
    def watch_outputs(self, output: object, is_synchronized: bool) -> None:
        """Notice the first backward of a static graph, and further ones of a synchronized forward, by their outputs."""
        self.is_local |= not is_synchronized
        if is_synchronized or (self.static_graph and self.static_calls is None):
            for tensor in torch_internals.tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._output_hooks[is_synchronized])

    def share(self, wrapper: object, parameters: Collection[int]) -> None:
        """Copy the gradients of parameters, by ids, that another living wrapper uses in the same backward, too."""
        self._shared_with[wrapper] = [i for i, each in enumerate(self.parameters) if id(each) in parameters]

    # Phase 2: gradients become ready.

    def _on_gradients(self, incoming: Tensor | None) -> None:
        """Autograd has accumulated gradients, ``incoming`` the latest of them; one may complete a bucket."""
        hooks, buckets = self._autograd_hooks, self.buckets
        with self._lock:
            tracks_usage = self._backward.may_leave_out and self.static_calls is None
            while hooks.recorded:
                taken = hooks.recorded[:]
                del hooks.recorded[: len(taken)]  # other threads may append meanwhile
                backward = self._backward
                if backward.phase is Phase.REDUCING and not tracks_usage and not self.static_graph:  # usually
                    backward.ready_order += taken
                    ready = taken
                else:
                    ready = [index for index in taken if self._becomes_ready(index, tracks_usage)]
                if not ready:
                    continue
                backward = self._backward
                self._mark_ready(ready, incoming)
                if backward.n_launched < len(buckets):
                    members = buckets[backward.n_launched].members
                    # The last one usually comes last. If it has come, the order may be the opposite.
                    is_first_guess = backward.expected_in != backward.n_launched
                    hooks.expect(reversed(members) if is_first_guess else members, backward.ready)
                    backward.expected_in = backward.n_launched
                elif self.is_finalized_by_caller:
                    self._watch.end_backward()
                else:
                    queue_callback(self._finalize)

    def _becomes_ready(self, index: int, tracks_usage: bool) -> bool:
        """Whether a gradient is ready, now that autograd has accumulated it; begins a reduction with the first one."""
        if self._backward.phase is Phase.DONE and self._backward.follower.is_queued:
            self._begin_again()
        backward = self._backward
        is_again = backward.phase is Phase.AGAIN
        if tracks_usage or is_again:
            if self.parameters[index].grad is not None:
                backward.used.local[index] = 1  # also in no_sync, whose gradients the next reduction includes
            elif backward.phase is not Phase.DONE and index not in self._autograd_hooks.undefined:
                self._leave_and_raise(stepped_early(f"The gradient of {self.options.names[index]} was removed"))
        if is_again:
            return False
        if backward.phase is Phase.DONE:
            if not (self.is_local or self._has_warned_of_local):
                self._warn_of_local_gradient(index)
            return False
        if self.static_graph and not self._is_last_call(index):
            return False
        if backward.phase is Phase.PREPARED:
            self._begin_reduction(index)
        backward.ready_order.append(index)
        return True

    def _warn_of_local_gradient(self, index: int) -> None:
        """Warn once of a gradient that no backward of this wrapper averages, unless it is to stay on this rank."""
        is_shared = any(index in indices for indices in self._shared_with.values())  # another wrapper averages it
        has_failed = self.exchange.connections.failure is not None  # the rest of a backward that has raised
        if is_shared or has_failed or self._is_in_no_sync():
            return
        self._has_warned_of_local = True
        warnings.warn(
            f"A backward pass has added this rank's own gradients to {self.options.names[index]}, and perhaps to other "
            "parameters: its forward pass did not go through the DistributedDataParallel, as in model.module(x). They "
            "are averaged only if a later backward pass of the wrapper adds to them. Call the wrapper, model(x). If "
            "gradients are to stay on their rank, compute them under model.no_sync(), without this warning.",
            stacklevel=2,
        )

    def _is_last_call(self, index: int) -> bool:
        """With a static graph, count a call of a parameter's autograd hook; returns whether it is the last."""
        calls = self._backward.calls
        calls[index] += 1
        if self.static_calls is None:
            # Unless the hook of an output has: an output may be no tensor that `tensors_in` finds.
            self._backward.delay.queue(self._delay_all_reduce)
            self.times.record("backward_compute_time_start")
            return False
        expected = self.static_calls[index]
        if calls[index] > expected:
            message = errors.GRAPH_CHANGED.format(name=self.options.names[index], index=index, calls=expected)
            self._leave(f"{message}\n{self._unfinished()}")  # in PyTorch the next forward raises it
            raise RuntimeError(f"{message}\n{ADVICE}")
        return calls[index] == expected

    def _begin_again(self) -> None:
        if self._upcast_stream is not None or self._live_ranks is not None:
            feature = "join()" if self._upcast_stream is None else "mixed_precision"
            self._leave_and_raise(
                "A second backward pass of one synchronized forward pass, or a backward pass of an earlier forward "
                f"pass than the latest, cannot be averaged with {feature}. Call backward() once after each forward "
                "pass: add up the losses, or use no_sync() for the forward passes whose gradients another one will "
                "average."
            )
        earlier, used = self._backward, UsedParameters(len(self.parameters), self.exchange.device)
        self._backward = Backward(self.buckets, Phase.AGAIN, may_leave_out=True, used=used)
        self._watch.begin_backward()
        self._backward.follower = earlier.follower
        self._backward.ready_order = earlier.ready_order  # for the rebuild of the buckets

    def _end_of_further_backward(self) -> None:
        if self._backward.phase is Phase.AGAIN:  # not if only gradients of inputs were computed
            self._reduce_all()

    def _reduce_all(self) -> None:
        self._start_exchange()
        with self._lock:
            self._mark_ready(range(len(self.parameters)))
        if self.is_finalized_by_caller:
            self._watch.end_backward()
        else:
            self._finalize()

    def _begin_reduction(self, first: int) -> None:
        """Begin the reduction at the first ready gradient; count unused parameters as ready."""
        self._start_exchange()
        self.times.record("backward_compute_time_start")
        not_deferred = [first, *self.unused]
        if self.static_calls is not None:  # and gradients that come in several calls from now on
            calls = zip(self.static_calls, self._backward.calls, strict=True)
            not_deferred += [index for index, (expected, done) in enumerate(calls) if expected - done > 1]
        self._autograd_hooks.defer_others(not_deferred)
        queue_callback(self._check_complete)
        if self.unused:
            self._mark_ready(self.unused)

    def _complete(self) -> None:
        """At the end of a backward of one of several forwards: parameters that only the others use are unused in it."""
        self._on_gradients(None)
        backward = self._backward
        if backward.phase is Phase.REDUCING and (absent := backward.missing):
            self._check_absent(absent)
            with self._lock:
                self._mark_ready(absent)
            if not self.is_finalized_by_caller:
                self._finalize()

    def _check_complete(self) -> None:
        """At the end of a backward: if parameters have no gradient, check that no other parameter has it.

        A further backward may bring their gradients; else the next forward raises.
        """
        backward = self._backward
        if backward.phase is Phase.REDUCING and backward.n_launched < len(self.buckets):
            came = set(self._autograd_hooks.recorded)
            self._check_absent([index for index in backward.missing if index not in came])

    def _start_exchange(self) -> None:
        exchange, backward = self.exchange, self._backward
        try:
            exchange.begin_backward(self.hook.has_groups)
            if backward.is_again:
                exchange.agree_to_reduce_again()
            backward.divisor = n_live = exchange.process_group.size()
            if self._live_ranks is not None:
                counting, divides_by_count = self._live_ranks
                if divides_by_count or self.drift is not None:
                    counting.wait()
                    n_live = int(counting.result()[0].item())
                if divides_by_count:
                    backward.divisor = n_live
            if self.drift is not None and n_live == exchange.process_group.size():
                self.drift.begin(self.hook.state, exchange)
        except BaseException as error:
            self._leave_after(error, "the backward pass")
            raise
        backward.phase = Phase.REDUCING
        if self.skip_unused:  # but a rank that has joined cannot know what is unused
            unused = set() if backward.is_again or self._live_ranks is not None else set(self.unused)
            backward.skipped = {bucket.position for bucket in self.buckets if unused.issuperset(bucket.members)}
            reduced = [bucket for bucket in self.buckets if bucket.position not in backward.skipped]
            for bucket in reduced:
                bucket.is_first, bucket.is_final = bucket is reduced[0], bucket is reduced[-1]

    def _mark_ready(self, indices: Iterable[int], incoming: Tensor | None = None) -> None:
        """Mark gradients ready, and launch the buckets that are complete now. ``incoming``: see `AutogradHooks`."""
        backward, buckets, n_pending = self._backward, self.buckets, self._backward.n_pending
        for index in indices:
            if backward.ready[index]:
                name = errors.pytorch_name(self.options.names[index])
                self._leave_and_raise(errors.MARKED_TWICE.format(index=index, name=name))
            backward.ready[index] = 1
            n_pending[self._bucket_of[index]] -= 1
        while backward.n_launched < len(buckets) and n_pending[backward.n_launched] == 0:
            bucket = buckets[backward.n_launched]
            if bucket is buckets[-1]:
                self.times.record("backward_compute_time_end")
            if bucket.position not in backward.skipped:
                self._launch(bucket, incoming)
            backward.n_launched += 1
            if backward.may_leave_out and backward.n_launched == len(buckets):
                with self.leaving("the exchange of used parameters"):
                    backward.used.exchange(self.exchange.transport, self.exchange.n_passes)

    def _unfinished(self) -> str:
        rank = dist.get_rank(self.exchange.process_group)
        names, missing = self.options.names, self._backward.missing
        return errors.unfinished(rank, names, missing, self.static_graph, self.find_unused_parameters)

    # Phase 3: buckets are launched.

    def _launch(self, bucket: ReducerBucket, incoming: Tensor | None) -> None:
        if self.times.is_timed:  # most steps are not
            self.times.record("backward_comm_time_start")
        backward, index = self._backward, self._backward.n_launched
        try:
            has_graph = torch.is_grad_enabled()
            if has_graph:
                warnings.warn(errors.CREATE_GRAPH, stacklevel=2)
            with profiler_range(bucket.launch_range), torch.no_grad() if has_graph else nullcontext():
                is_used = backward.used.local
                unused = [k for k, i in enumerate(bucket.members) if not is_used[i]] if backward.may_leave_out else ()
                positions: Sequence[int] = ()
                if self._shared_with:
                    shared = set(chain.from_iterable(self._shared_with.values()))
                    positions = [k for k, i in enumerate(bucket.members) if i in shared]
                none = self._autograd_hooks.undefined
                undefined = [k for k, i in enumerate(bucket.members) if i in none] if none else ()
                exchange, divisor = self.exchange, backward.divisor
                future = bucket.launch(self.hook, exchange, divisor, unused, positions, incoming, undefined)
            if type(future) is not Handle and not isinstance(future, torch_internals.AnyFuture):
                raise RuntimeError(errors.NO_FUTURE.format(kind=type(future)))
            backward.futures[index] = future
        except BaseException as error:
            self._leave_after(error, f"the communication hook of bucket {index}")
            raise

    # Phase 4: results become gradients.

    def _finalize(self) -> None:
        """Wait for the results, in the order of the buckets, and write them into the gradients.

        The gradients of delayed parameters are averaged while the buckets are in flight.
        """
        backward, connections = self._backward, self.exchange.connections
        if (name := self._watch.find_stepped()) is not None:
            self._leave_and_raise(stepped_early(f"{name} was changed"))
        if self._delayed is not None:
            with self.leaving("the all-reduce of the delayed parameters"), torch.no_grad():
                self._all_reduce(self._delayed.collect().div_(backward.divisor))
        backward.phase = Phase.DONE
        # Hooks divide by the world size, but joined ranks sent zeros: rescale.
        scale = self.exchange.process_group.size() / backward.divisor if self.hook.is_registered else 1
        self.n_reduced = len(backward.futures) - backward.futures.count(None)
        try:
            with profiler_range("gradwire::wait for buckets"), torch.no_grad():
                self._finish_buckets(scale)
        except BaseException as error:
            self._leave_after(error, "the end of the backward pass")
            raise
        connections.end_exchange(self.exchange)
        if self.hook.has_groups:
            self.exchange.note_groups()
        for bucket in self.buckets:
            bucket.release()
        backward.futures.clear()
        self.times.record("backward_comm_time_end")
        # With a static graph, the first backward has found them.
        if backward.may_leave_out and (backward.is_again or not self.static_graph):
            backward.used.clear()
        backward.used = self._used
        if self._delayed is not None and self.runs_optimizers:
            torch_internals.step_optimizers(self._delayed.parameters)
        if self._upcast_stream is not None and self.skip_unused:  # PyTorch's hook does not see a skipped bucket
            torch_internals.restore_parameters(self.parameters)
        self._count_reduction()

    def _finish_buckets(self, scale: float) -> None:
        backward, connections = self._backward, self.exchange.connections
        connections.finish()
        if self.drift is not None:  # before optimizers in the backward step
            self.drift.finish(self.exchange.process_group, connections.check_peers)
        if backward.may_leave_out and not self.exchange.has_streams:  # on a GPU, the host would wait
            backward.used.check_passes()
        for index, bucket in enumerate(self.buckets):
            if backward.futures[index] is not None:
                self._finish(index, bucket, scale)
        if self._post_backward_futures:
            self.wait_for_post_backward_futures()

    def _finish(self, index: int, bucket: ReducerBucket, scale: float) -> None:
        backward, futures = self._backward, self._backward.futures
        future: Any = futures[index]
        value: Any = future.wait() if type(future) is Handle else wait_for(future, self.exchange.check_in_step)
        result = value if isinstance(value, Tensor) else value[0]  # `tensor_in`
        used = {k: backward.used.used_anywhere(bucket.members[k]) for k in bucket.stand_ins} if bucket.stand_ins else {}
        bucket.finish(result, scale, used, self.hook.take_back)
        if self.runs_optimizers:
            futures[index] = None  # applied: must not return to the error memory if a later bucket fails
            torch_internals.step_optimizers(bucket.parameters())

    def _count_reduction(self) -> None:
        """Ranks rebuild their buckets together, after the first reduction, or the second one of a static graph.

        A rank without an order of ready gradients, because it has joined or counts late, takes the model's.
        """
        backward = self._backward
        if not backward.ready_order and (self._has_reduced or not self.static_graph):
            backward.ready_order = [i for i in range(len(self.parameters)) if i not in self.unused]
        self._has_reduced = True

    # The end of a backward that the caller finalizes.

    def set_finalized_by_caller(self, required: bool) -> None:
        """Choose whether `finalize_backward` ends a backward; see `DistributedDataParallel.finalize_backward`."""
        if self._backward.phase is Phase.REDUCING:
            self._refuse_to_finalize("require_manual_backward_finalization changes within a backward pass")
        self.is_finalized_by_caller = required

    def finalize_backward(self) -> None:
        """End a backward that has returned; see `DistributedDataParallel.finalize_backward`."""
        if not self.is_finalized_by_caller:
            self._refuse_to_finalize("require_manual_backward_finalization is False")
        if current_backward() != NO_BACKWARD:
            self._refuse_to_finalize("a backward pass runs, which may still read gradients")
        if self._backward.phase is not Phase.REDUCING or self._backward.n_launched < len(self.buckets):
            self._refuse_to_finalize("no complete reduction is in flight")
        self._finalize()

    def _refuse_to_finalize(self, why: str) -> NoReturn:
        self._raise(
            f"finalize_backward() cannot run: {why}. Set require_manual_backward_finalization to True, and call "
            "finalize_backward() once after every synchronized backward pass."
        )

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
        is_consequence = may_follow_from_peer(error)
        has_timed_out = is_consequence and any(words in message.lower() for words in ("timeout", "timed out"))
        late = self.exchange.late_ranks() if has_timed_out else None
        told = message if late is None else f"{late} {message}"
        elsewhere = self._leave(told, is_of_peer=is_consequence and "gloo" in message)
        cause = late or elsewhere
        error.with_traceback(raised_in)  # without the frames that ask a failed future for its value
        is_included = cause is None or str(error) in cause or cause in str(error)
        if is_consequence and not is_included:
            raise RuntimeError(f"{cause}\n{ADVICE}\nOn this rank: {message}") from error

    def _leave(self, cause: str, is_of_peer: bool = False) -> str | None:
        """Leave the exchange and discard this step. Returns the error of another rank that left before this one."""
        self.error = cause
        elsewhere = self.exchange.leave(self.times.iterations, cause, is_of_peer)
        self.exchange.keep([tensor for bucket in self.buckets for tensor in bucket.in_flight()])
        take_back = self.hook.take_back
        # A frame of the error's traceback may hold the futures, and a future holds its error: drop them.
        values = self._backward.take_values(is_needed=take_back is not None)
        for bucket, result in zip(self.buckets, values, strict=False):  # none between steps
            if result is not None and take_back is not None:
                with suppress(Exception), torch.no_grad():  # never applied: back to the hook's error memory
                    bucket.discard(tensor_in(result), take_back)
        self._post_backward_futures = []
        self.forward_is_running = False
        self._begin(Phase.DONE)
        return elsewhere

    def _leave_and_raise(self, message: str) -> NoReturn:
        self._leave(message)
        self._raise(f"{message}\n{ADVICE}")

    def _raise(self, message: str) -> NoReturn:
        self.error = message
        raise RuntimeError(message)

    # The communication hook.

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Future[Tensor]]) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket from now on. Raises RuntimeError if a hook does already."""
        if self.hook.is_registered:
            raise RuntimeError(errors.HOOK_REGISTERED_TWICE)
        check_pairing(state, hook)
        state = in_group(state, hook, self.exchange.process_group)
        take_back = state.memory.take_back if isinstance(state, HookState) else None
        self._set_hook(
            BucketHook(
                hook,
                state,
                is_zero_copy=is_zero_copy(hook),
                is_registered=True,
                has_groups=not is_gradwire_hook(hook),
                can_replay=is_replayable(hook),
                take_back=take_back,
            )
        )
        if self.hook.has_groups and isinstance(state, HookState):
            self.exchange.note_use(state, state.process_group or self.exchange.process_group)

    def drop_comm_hook(self) -> None:
        """Return to the default reduction, between two steps."""
        self._set_hook(self._default_hook)

    def _set_hook(self, hook: BucketHook) -> None:
        self.hook = hook
        for bucket in self.buckets:
            bucket.plans = None if bucket.plans is None else Plans()  # those of the hook before
        self.exchange.has_hook = hook.is_registered

    # Static graphs.

    def _set_static_graph(self) -> None:
        """Declare that every backward uses the same parameters as the first one, equally often."""
        if self.times.iterations > 0:
            self._raise(errors.STATIC_GRAPH_TOO_LATE.format(iterations=self.times.iterations))
        self.static_graph = self._backward.may_leave_out = True

    def _delay_all_reduce(self) -> None:
        """Reduce all buckets at the end of the first backward of a static graph, and keep the calls of its hooks."""
        if self._backward.phase is Phase.DONE:  # no_sync counts nothing
            return
        if not any(self._backward.calls):  # a backward to the inputs alone; the next one of this forward may reach more
            return
        self.static_calls = self._backward.calls
        self.unused = [index for index, calls in enumerate(self.static_calls) if calls == 0]
        self._check_absent(self.unused)
        self._reduce_all()

    # Mixed precision.

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Expect gradients in the dtype of the parameters' copies, whose communication hook is registered already."""
        self._upcast_stream = self.hook.state.upcast_stream
        self._autograd_hooks.remove()  # PyTorch's class sets hooks on the copies
        self._set_buckets([bucket.members for bucket in self.buckets])

    def _autograd_hook(self, index: int) -> None:
        """With mixed precision: the gradient of a parameter's copy has come in."""
        self._autograd_hooks.record(index)

    # `join`: a rank without inputs joins the collectives of the others.

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Divide by the rank count that ``work`` sums, or by the world size if that is static."""
        self._live_ranks = work, not use_static_world_size

    @torch.no_grad()
    def reduce_zeros(self) -> None:
        """Take part in a backward of the ranks with inputs left: the same collectives in the same order."""
        exchange = self.exchange
        exchange.begin_forward()
        with self.leaving("a backward pass of the ranks with inputs left"):
            exchange.begin_backward(self.hook.has_groups)
            buckets: list[ReducerBucket] = [bucket.with_zeros(self.hook.is_zero_copy) for bucket in self.buckets]
            exchange.keep([tensor for bucket in buckets for tensor in bucket.in_flight()])  # also after an error
            futures: list[Any] = [
                bucket.launch(self.hook, exchange, exchange.process_group.size()) for bucket in buckets
            ]
            may_leave_out = self.find_unused_parameters or self.static_graph
            counts = self._used.exchange_none(exchange.transport) if may_leave_out else ()
            unused = {name for name, count in zip(self.options.names, counts, strict=False) if count == 0}
            if self._delayed is not None:
                self._all_reduce(torch.zeros_like(self._delayed.buffer))
            exchange.connections.finish()
            take_back = self.hook.take_back
            for bucket, future in zip(buckets, futures, strict=True):
                value: Any = wait_for(future, exchange.check_in_step)
                if unused and take_back is not None:
                    # Nothing of unused parameters is applied on any rank.
                    bucket.discard(
                        tensor_in(value), lambda name, sent: take_back(name, sent) if name in unused else None
                    )
        exchange.connections.end_exchange(exchange)
        exchange.note_groups()
        if not self.static_graph:
            self._used.clear()
        self._count_reduction()

    def _all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place, and wait for it."""
        transport = self.exchange.transport
        transport.launch(transport.all_reduce(tensor))(self.exchange.check_in_step)

    # Further methods of PyTorch's reducer.

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far has left out the same parameters."""
        return self._graph_seems_static

    def _get_local_used_map(self) -> Tensor:
        """The number of ranks that had a gradient for each parameter in the last backward: int32."""
        return self._used.counts

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        """Wait for these futures, too, at the end of the backward, or of a forward without one."""
        self._post_backward_futures += futures

    def wait_for_post_backward_futures(self) -> None:
        """Wait for the futures of `_install_post_backward_futures`."""
        futures, self._post_backward_futures = self._post_backward_futures, []
        for future in futures:
            wait_for(future, self.exchange.connections.check_peers)

    def _run_allreduce_hook(self, bucket: ReducerBucket) -> Future[Tensor]:
        return self.exchange.transport.start_all_reduce(bucket.buffer())

    def _remove_autograd_hooks(self) -> None:
        self._autograd_hooks.remove()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first iterations, time one in ``sample_rate``."""
        self.times.sample_rate = sample_rate

    # Training on a changing set of ranks, and after errors.

    def _reset_state(self) -> None:
        """Rebuild the buckets after the next backward, and count a static graph's calls again."""
        self.static_calls = None
        self.unused = []
        self._used = UsedParameters(len(self.parameters), self.exchange.device)
        if self.drift is not None:
            self.drift.restart()
        self._live_ranks, self._post_backward_futures = None, []
        self._begin(Phase.DONE)
        self.has_rebuilt_buckets = self._has_reduced = False

    def leave_for_resynchronize(self, cause: str) -> None:
        """Leave the exchange unless this rank has left it. Nothing of this rank is in flight afterwards."""
        if self.exchange.connect().failure is None:
            self._leave(cause)
        if self._upcast_stream is not None:  # the failed backward has left copies in place of the parameters
            state = self.hook.state
            torch_internals.restore_parameters(state.ddp_weakref().module.parameters())
            state.wait_for_stream_enqueued = False

    def restart(self) -> None:
        """Return to the state after construction, with the first buckets, equal on all ranks."""
        self._reset_state()
        self.exchange.restart()
        self._set_buckets(bucketing.assign_first_buckets(self.options))

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, as does a hook's state that had the process group."""
        state: Any = self.hook.state if self.hook.is_registered else None
        if state is self.exchange.process_group:
            self.hook = self.hook._replace(state=process_group)
        elif getattr(state, "process_group", None) is self.exchange.process_group:
            if isinstance(state, HookState):
                follow_model(state, process_group)
            else:
                state.process_group = process_group
        self.exchange.update_process_group(process_group)


def _make_output_hook(reference: weakref.ref[Reducer], is_synchronized: bool) -> Callable[[Tensor], None]:
    """A hook of a forward's outputs; see `Reducer.watch_outputs`.

    It must not keep the reducer alive: nothing collects cycles through C++.
    """

    def hook(_: Tensor) -> None:
        reducer = reference()
        if reducer is None:
            return
        backward = reducer._backward
        if reducer.static_graph and reducer.static_calls is None:
            backward.delay.queue(reducer._delay_all_reduce)
        elif is_synchronized and backward.phase in (Phase.DONE, Phase.AGAIN):
            if backward.phase is Phase.AGAIN and not backward.follower.is_queued:
                reducer._check_reducer_finalized()  # raises: an earlier further backward has
            backward.follower.queue(reducer._end_of_further_backward)
        elif is_synchronized and backward.is_of_several:
            backward.delay.queue(reducer._complete)

    return hook
