"""The reducer: launches each bucket's reduction as its gradients become ready, and writes the results back."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.futures import Future

from gradwire.comm.connections import ADVICE
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward, profiler_range, queue_callback
from gradwire.comm.transport import take_values, wait_for
from gradwire.hooks.hook_state import HookState
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.autograd_hooks import AutogradHooks
from gradwire.reducer.backward import Backward, ForwardResults, Phase
from gradwire.reducer.bucket import DenseBucket, TakeBack
from gradwire.reducer.bucketing import (
    Assignment,
    Bucket,
    BucketOptions,
    assign_first_buckets,
    make_buckets,
    rebuild_buckets,
    rebuilt_limits,
)
from gradwire.reducer.default_reduction import default_reduction
from gradwire.reducer.exchange import Exchange
from gradwire.reducer.model_watch import ModelWatch
from gradwire.reducer.sparse_bucket import SparseBucket
from gradwire.reducer.unused_parameters import UsedParameters, find_unused

__all__ = ["Reducer"]

CommHook = Callable[[Any, Any], Future[Tensor]]


class Reducer(Exchange):
    """Averages gradients over ranks, bucket by bucket, while the backward pass still runs.

    One backward goes through these phases, which the methods below follow in order:

    1. `prepare_for_backward`, after a forward that will be synchronised, creates a `Backward`:
       every bucket waits for all its gradients. With ``find_unused_parameters``, a walk of the
       graph finds the gradients that will not come.
    2. `_on_gradients`, called by `AutogradHooks` when autograd has completed gradients, marks them ready.
    3. `_launch`, once a bucket is complete and all buckets before it are launched: so every rank launches the same
       buckets in the same order. The hook gets the bucket and returns a future at once; its work runs in the executor's
       stream or thread.
    4. `_finalize`, queued by the last launch and called by autograd at the end of the backward, or called by
       `finalize_backward`: waits for each bucket in order and writes its result into the gradients.

    With a static graph, the first backward only counts how often each parameter's autograd hook is
    called, and all buckets are reduced at its end; later, a gradient is ready after as many calls.

    A step that fails is discarded; `Exchange` explains how the ranks learn of it and go on.

    Between the first and the second synchronised backward, `_rebuild_buckets` sorts the parameters by the order in
    which their gradients became ready on rank 0, into buckets of the size that `rebuilt_limits` gives. Gradients belong
    to the parameters, flat buffers to the buckets, wire buffers to the executor of the process group.

    Args:
        options: the parameters and the sizes of buckets.
        process_group: the ranks to average over.
        find_unused_parameters: whether a backward may leave parameters without a gradient. A parameter that no rank
            has a gradient for keeps its ``.grad``.
        skip_unused: whether to skip buckets without any used parameter. All ranks must agree on it.
    """

    def __init__(
        self,
        options: BucketOptions,
        process_group: dist.ProcessGroup,
        find_unused_parameters: bool = False,
        skip_unused: bool = False,
    ) -> None:
        super().__init__(process_group, options.parameters[0].device)
        self.options = options
        self.parameters = options.parameters
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused = skip_unused
        self.static_graph = False
        self.has_rebuilt_buckets = False
        self.bucket_limits = options.rebuilt_limits  # sizes in bytes of the rebuilt buckets; the last one repeats
        self.hook_state: Any = None
        self._hook: CommHook | None = None
        self._hook_is_zero_copy = self._hook_has_groups = False
        self.is_finalized_by_caller = False  # whether `finalize_backward` ends a backward
        self._runs_optimizers = False  # whether it steps the optimizers of apply_optimizer_in_backward
        self._upcast_stream: torch.Stream | None = None  # with mixed precision: PyTorch's hook casts gradients on it
        self._lock = threading.Lock()  # held while gradients are marked ready, in any of autograd's threads
        self._forward_is_running = False
        self._forward_results = ForwardResults()
        self._static_calls: list[int] | None = None  # per autograd hook, in the first backward of a static graph
        self._unused: list[int] = []  # parameters without a gradient in the last backward, or in a static graph
        self._graph_seems_static = True  # whether `_unused` has never changed
        self._used = UsedParameters(len(self.parameters), self.device)
        self.watch: ModelWatch | None = None  # of the model that has the parameters
        self._incoming: Tensor | None = None  # the gradient whose autograd hook runs
        self._number = self.connections.new_user()
        self._thread = 0  # that called the latest forward
        self._n_forwards = self._n_backwards = 0  # that were synchronised, since the ranks last agreed
        # The parameters that other wrappers reduce too, by index.
        self._shared_with: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()
        self._backward: Backward
        self._autograd_hooks = AutogradHooks(self.parameters, self._on_gradients)
        self._set_buckets(assign_first_buckets(options))

    def _set_buckets(self, assignment: Assignment) -> None:
        self.buckets = make_buckets(self.options, assignment, self._upcast_stream)
        self._bucket_of = [0] * len(self.parameters)
        for bucket in self.buckets:
            for i in bucket.members:
                self._bucket_of[i] = bucket.index()
        self._begin(Phase.DONE)

    def _begin(self, phase: Phase) -> None:
        """Discard the state of the last backward."""
        for bucket in self.buckets:
            bucket.release()
        self._autograd_hooks.reset()
        self._backward = Backward(self.buckets, self._bucket_of, phase)

    # Phase 1: a forward, and the preparation of its backward.

    @torch_internals.not_compiled
    def prepare_for_forward(self) -> None:
        """Count an iteration: the forward of a synchronised backward begins.

        Raises:
            RuntimeError: the previous step failed, the process group was destroyed, or a parameter was cast, replaced,
                added or unfrozen.
        """
        self.connections.check()
        if self._forward_is_running:
            self._fail("the forward pass raised an exception")
            self.connections.check()
        self._check_not_cast()
        if self.watch is not None and (name := self.watch.find_unknown()) is not None:
            self._fail_and_raise(errors.parameter_unknown(name))
        self._thread = threading.get_ident()
        self._n_forwards += 1
        self.times.begin_forward()

    def _check_not_cast(self) -> None:
        """Raise RuntimeError if parameters were cast or moved after the model was wrapped: autograd drops their hooks.

        A cast that was undone shows in the autograd node. To save time, only the first parameter's is compared here,
        and that of parameters that seem unused. Others are missing at the end of the backward.
        """
        if self._upcast_stream is not None:
            return
        if [parameter.dtype for parameter in self.parameters] != self._dtypes:
            changed = zip(self.options.names, self.parameters, self._dtypes, strict=True)
            name = next(name for name, parameter, before in changed if parameter.dtype != before)
            self._fail_and_raise(errors.parameter_cast(name))
        self._check_nodes([0])

    def _check_nodes(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if a parameter has another autograd node than the one with the reducer's hook."""
        for i in indices if self._upcast_stream is None else ():
            parameter, node = self.parameters[i], self._autograd_hooks.nodes[i]
            if parameter.requires_grad and torch_internals.gradient_node(parameter) is not node:
                self._fail_and_raise(errors.parameter_cast(self.options.names[i]))

    def begin_forward(self) -> None:
        """The module's own forward of a synchronised backward begins; it ends with `prepare_for_backward`."""
        self._forward_is_running = True

    @torch_internals.not_compiled
    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets in rank 0's order of ready gradients; returns whether that was done.

        A collective call, made once, after the first synchronised backward. Buckets are never
        rebuilt if backwards may leave out different parameters: ranks could not agree on when.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._check_reducer_finalized()
        order = self._backward.ready_order
        may_rebuild = self.static_graph or not self.find_unused_parameters
        if self.has_rebuilt_buckets or not may_rebuild or not order:
            return False
        with self.leaving("the rebuild of the buckets"):
            self.bucket_limits = rebuilt_limits(self.options, self.hook_state)
            assignment = rebuild_buckets(self.options, self.bucket_limits, order + self._unused, self.transport)
            self._set_buckets(assignment)
        self._backward.ready_order = order
        self.has_rebuilt_buckets = True
        return True

    @torch_internals.not_compiled
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Prepare for the backward from ``outputs``; only ``find_unused_parameters`` reads them.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._check_reducer_finalized()
        self._begin(Phase.PREPARED)
        self._forward_is_running = False
        if self.find_unused_parameters and not self.static_graph:
            unused = find_unused(outputs, self._gradient_nodes())
            self._check_nodes(unused)
            if self.times.iterations > 1:
                self._graph_seems_static &= unused == self._unused
            self._unused = unused
        self.times.unused_bytes = sum(self.parameters[i].nbytes for i in self._unused)

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward left buckets incomplete."""
        if self._backward.phase is not Phase.REDUCING:
            return
        for index in self._autograd_hooks.recorded():  # in buckets that never became complete
            self._backward.ready[index] = 1
        if self._backward.missing:
            self._fail_and_raise(self._unfinished())
        if self.is_finalized_by_caller:
            self._fail_and_raise(errors.NOT_FINALIZED)
        self._fail("the backward pass raised an exception after all buckets were launched")
        self.connections.check()

    def _unfinished(self) -> str:
        return errors.unfinished(
            dist.get_rank(self.process_group),
            self.options.names,
            self._backward.missing,
            static_graph=self.static_graph,
            find_unused=self.find_unused_parameters,
        )

    def _gradient_nodes(self) -> list[Node]:
        """The autograd nodes that accumulate the gradients; with mixed precision, each forward has others."""
        if self._upcast_stream is not None:
            return [torch_internals.gradient_node(parameter) for parameter in self.parameters]
        return self._autograd_hooks.nodes

    @property
    def _may_leave_out(self) -> bool:
        """Whether a backward may leave parameters without a gradient."""
        return self.find_unused_parameters or self.static_graph

    # Phase 2: gradients become ready.

    def _on_gradients(self, incoming: Tensor | None) -> None:
        """Autograd has accumulated gradients; at least one of them may complete a bucket.

        Args:
            incoming: the gradient whose autograd hook calls.
        """
        with self._lock:
            self._incoming = incoming
            tracks_usage = self._may_leave_out and self._static_calls is None
            for index in self._autograd_hooks.recorded():
                if tracks_usage and self.parameters[index].grad is not None:
                    self._used.local[index] = 1  # also in no_sync, whose gradients the next reduction includes
                if self._backward.phase is not Phase.DONE:
                    self._accept(index)
            self._incoming = None

    def _accept(self, index: int) -> None:
        """Autograd has accumulated a gradient, or one of several that are added up."""
        backward = self._backward
        if self.static_graph and not self._is_last_call(index):
            return
        if backward.phase is Phase.PREPARED:
            self._begin_reduction(index)
        backward.ready_order.append(index)
        self._mark_ready(index)
        if backward.is_expected_last(index):
            backward.expect_last(index, self._autograd_hooks.expect_one(backward.missing_beside(index)))
        if backward.is_launched and not self.is_finalized_by_caller:
            queue_callback(self._finalize)

    def _is_last_call(self, index: int) -> bool:
        """With a static graph, count a call of a parameter's autograd hook; returns whether it is the last."""
        calls = self._backward.calls
        calls[index] += 1
        if self._static_calls is None:
            self.times.record("backward_compute_time_start")
            return False
        if calls[index] > self._static_calls[index]:
            self._raise_graph_changed(index, self._static_calls[index])
        return calls[index] == self._static_calls[index]

    def _raise_graph_changed(self, index: int, calls: int) -> NoReturn:
        message = errors.graph_changed(self.options.names[index], index, calls)
        self._fail(f"{message}\n{self._unfinished()}")  # in PyTorch the next forward raises it
        raise RuntimeError(f"{message}\n{ADVICE}")

    def _begin_reduction(self, first: int) -> None:
        """Begin the reduction at the first ready gradient; count unused parameters as ready."""
        self._start_exchange()
        self.times.record("backward_compute_time_start")
        self._autograd_hooks.defer(self._backward.deferrable(first, self._unused, self._static_calls))
        self._find_last_launched()
        for index in self._unused:
            self._mark_ready(index)

    def _start_exchange(self) -> None:
        with self.leaving("the backward pass"):
            self.connections.enter(self, self._thread)
        self._backward.phase = Phase.REDUCING
        self._n_backwards += 1

    def _find_last_launched(self) -> None:
        """Tell every bucket whether it is the last that will not be skipped."""
        last = max((bucket.index() for bucket in self.buckets if not self._is_skipped(bucket)), default=-1)
        for bucket in self.buckets:
            bucket.is_last_launched = bucket.index() == last

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self.skip_unused and set(bucket.members) <= set(self._unused)

    def _mark_ready(self, index: int) -> None:
        """Mark a gradient ready, and launch the buckets that are complete now."""
        backward = self._backward
        if backward.ready[index]:
            self._fail_and_raise(errors.marked_twice(self.options.names[index], index))
        backward.mark_ready(index)
        while (bucket := backward.next_complete()) is not None:
            if bucket is self.buckets[-1]:
                self.times.record("backward_compute_time_end")
            self._launch(bucket)
            backward.n_launched += 1
            if backward.is_launched and self._may_leave_out:
                self._used.exchange(self.transport)

    # Phase 3: buckets are launched.

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduction of a complete bucket."""
        if self._is_skipped(bucket):
            return
        self.times.record("backward_comm_time_start")
        index = bucket.index()
        ranges = profiler_range(f"gradwire::launch bucket {index}")
        with ranges, self.leaving(f"the communication hook of bucket {index}"):
            if torch.is_grad_enabled():
                warnings.warn(errors.CREATE_GRAPH, stacklevel=2)
            with torch.no_grad():
                bucket.process_group, bucket.hook_has_groups = self.process_group, self._hook_has_groups
                bucket.divisor = self._forward_results.divisor(self.process_group.size())
                is_used = self._used.local
                unused = [k for k, i in enumerate(bucket.members) if not is_used[i]] if self._may_leave_out else []
                bucket.collect(self._is_zero_copy(bucket), unused, self._shared(bucket), self._incoming)
                future = self._run_comm_hook(bucket)
            if not torch_internals.is_future(future):
                self._raise(errors.no_future(future))
            self._backward.futures[index] = future

    def share(self, wrapper: object, parameters: Collection[int]) -> None:
        """Copy the gradients of parameters that another wrapper reads and writes in the same backward, too.

        Args:
            wrapper: the other one, as long as it lives.
            parameters: their ids.
        """
        self._shared_with[wrapper] = [i for i, each in enumerate(self.parameters) if id(each) in parameters]

    def _shared(self, bucket: Bucket) -> list[int]:
        """The positions in a bucket of the parameters that are shared with other wrappers."""
        if not self._shared_with:
            return []
        shared = set(chain.from_iterable(self._shared_with.values()))
        return [k for k, i in enumerate(bucket.members) if i in shared]

    def _run_comm_hook(self, bucket: Bucket) -> Future[Tensor]:
        if self._hook is not None:
            return self._hook(self.hook_state, bucket)
        return default_reduction(bucket, self)

    def _is_zero_copy(self, bucket: Bucket) -> bool:
        """Whether the reduction may read and write the gradients where they are."""
        if isinstance(bucket, SparseBucket):
            return False
        return self._hook_is_zero_copy if self._hook is not None else self.connections.has_streams(bucket.device)

    # Phase 4: results become gradients.

    def set_finalized_by_caller(self, required: bool) -> None:
        """Choose whether `finalize_backward` ends a backward; see `DistributedDataParallel.finalize_backward`.

        Raises:
            RuntimeError: a backward is not finalized yet.
        """
        if self._backward.phase is Phase.REDUCING:
            self._raise(errors.cannot_finalize("require_manual_backward_finalization changes within a backward pass"))
        self.is_finalized_by_caller = required

    def finalize_backward(self) -> None:
        """End a backward that has returned; see `DistributedDataParallel.finalize_backward`."""
        if not self.is_finalized_by_caller:
            self._raise(errors.cannot_finalize("require_manual_backward_finalization is False"))
        if current_backward() != NO_BACKWARD:
            self._raise(errors.cannot_finalize("a backward pass runs, which may still read gradients"))
        if self._backward.phase is not Phase.REDUCING or not self._backward.is_launched:
            self._raise(errors.cannot_finalize("no complete reduction is in flight"))
        self._finalize()

    def _finalize(self) -> None:
        """Wait for the results, in the order of the buckets, and write them into the gradients."""
        backward = self._backward
        backward.phase = Phase.DONE
        # A hook averages over all ranks, of which those that have joined added zeros.
        size = self.process_group.size()
        scale = size / self._forward_results.divisor(size) if self._hook is not None else 1
        self.times.n_reduced = sum(future is not None for future in backward.futures)
        waiting = profiler_range("gradwire::wait for buckets")
        with waiting, self.leaving("the end of the backward pass"), torch.no_grad():
            self.connections.finish()
            for bucket in self.buckets:
                self._finish(bucket, scale)
            for future in self._forward_results.futures:
                future.wait()
        self.connections.leave(self)
        for bucket in self.buckets:
            bucket.release()
        backward.futures.clear()
        self.times.record("backward_comm_time_end")
        self._forward_results = ForwardResults()
        if not self.static_graph:  # whose first backward has found the used parameters
            self._used.clear()

    def _finish(self, bucket: Bucket, scale: float) -> None:
        """Wait for a bucket's result, and write it into its gradients."""
        futures, index = self._backward.futures, bucket.index()
        future = futures[index]
        if future is None:
            return
        result = _tensor(wait_for(future, self._check_in_step))
        used = {k: self._used.used_anywhere(bucket.members[k]) for k in bucket.stand_ins}
        take_back = self.hook_state.take_back if isinstance(self.hook_state, HookState) else None
        bucket.finish(result, scale, used, take_back)
        if self._runs_optimizers:
            futures[index] = None  # applied: not to be returned if a later bucket fails
            _run_optimizers(bucket.parameters())

    # Buffers are broadcast in a forward, gradients reduced in a backward. If the loss of a rank raises and its loop
    # goes on, it waits in its next forward for peers that wait in their backwards for it.

    def announce_forward(self) -> None:
        """While a forward waits for other ranks: tell them where this one is; raise RuntimeError if one has left."""
        here = [dist.get_rank(self.process_group), self._n_forwards, self._n_backwards]
        self.connections.announce(f"forward/{self._number}", json.dumps(here))
        self.connections.check_peers()

    def _check_in_step(self) -> None:
        """While a backward waits for other ranks: raise RuntimeError if one has left, or has skipped this backward."""
        self.connections.check_peers()
        text = self.connections.announced(f"forward/{self._number}")
        if text is not None:
            rank, forwards, backwards = json.loads(text)
            if forwards > self._n_forwards and backwards < self._n_backwards:
                raise RuntimeError(errors.backward_skipped(rank))

    def _discard_step(self) -> None:
        if isinstance(self.hook_state, HookState):
            _return_results(self.buckets, take_values(self._backward.futures), self.hook_state.take_back)
        self._backward.futures.clear()  # a frame of the error's traceback may hold them, and a future holds its error
        self._used.abandon(keep_local=self.static_graph)
        self._forward_results = ForwardResults()
        self._forward_is_running = False
        self._begin(Phase.DONE)


def _tensor(value: Any) -> Tensor:
    """The tensor in the value of a future. A hook's value is the tensor; a collective's is a list of one tensor."""
    return value if isinstance(value, Tensor) else value[0]


def _run_optimizers(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None


def _return_results(buckets: Sequence[Bucket], results: Sequence[Any], take_back: TakeBack) -> None:
    """Add results that nobody will apply to the hook's error memory."""
    for bucket, result in zip(buckets, results, strict=False):  # no results between two steps
        if result is not None and isinstance(bucket, DenseBucket):
            with suppress(Exception), torch.no_grad():
                bucket.give_back(_tensor(result), take_back)
