"""The reducer: watches a backward pass, launches each bucket's hook as its gradients become ready, and finishes it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from gradwire.compress import Gradients, Transport, Workspace, cast_all_reduce
from gradwire.hooks.executor import drain_executors
from gradwire.hooks.reduce import is_in_place, reduce_bucket
from gradwire.reducer import torch_internals
from gradwire.reducer.bucket import GradBucket

CommHook = Callable[[Any, Any], Future[Tensor]]


class Reducer:
    """Averages gradients over ranks, bucket by bucket, while the backward pass still runs.

    One backward goes through these phases, which the methods below follow in order:

    1. `prepare_for_backward`, after a forward that will be synchronised: all buckets wait for all their gradients.
    2. `_mark_ready`, called by autograd when a parameter's gradient is complete.
    3. `_launch`, once a bucket is complete and all buckets before it were launched: so every rank launches the same
       buckets in the same order. The hook gets the bucket and returns a future at once; the work goes on in the
       executor's stream or thread.
    4. `_finalize`, queued by the last launch and called by autograd at the end of the backward: waits for each
       bucket in order and puts its result into the gradients.

    Between the first and the second synchronised backward, `_rebuild_buckets` sorts the parameters by the order in
    which their gradients became ready on rank 0. Gradients belong to the parameters, flat buffers to the buckets, the
    wire to the executor of the process group.

    Args:
        parameters: what to reduce; those that require a gradient, each once.
        names: their names, as in ``module.named_parameters()``.
        process_group: the ranks to average over.
        buckets: the first assignment: lists of indices into ``parameters``, in the order of communication.
        rebuilt_limits: sizes in bytes of the rebuilt buckets; the last one repeats.
        gradient_as_bucket_view: whether every ``.grad`` becomes a view of a flat buffer.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        process_group: dist.ProcessGroup,
        buckets: Sequence[Sequence[int]],
        rebuilt_limits: Sequence[int],
        gradient_as_bucket_view: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.process_group = process_group
        self.rebuilt_limits = list(rebuilt_limits)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.has_rebuilt_buckets = False
        self.iterations = 0
        self._hook: CommHook = _plain_all_reduce
        self._hook_state: Any = process_group
        self._hook_in_place = True
        self._has_comm_hook = False
        self._lock = threading.Lock()
        self._expects_hooks = False
        self._requires_finalize = False
        self._ready_order: list[int] = []
        self._ready = bytearray(len(self.parameters))
        self._next = 0
        self.buckets: list[GradBucket] = []
        self._build_buckets(buckets)
        self._accumulators = [torch_internals.gradient_accumulator(parameter) for parameter in self.parameters]
        # The nodes must not keep the reducer alive: a model may be wrapped anew, and the old reducer then has to go.
        self._handles = [
            accumulator.register_hook(_ready_hook(weakref.ref(self), index))
            for index, accumulator in enumerate(self._accumulators)
        ]
        weakref.finalize(self, _remove_all, self._handles)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket from now on.

        Raises:
            RuntimeError: a hook is registered already.
        """
        if self._has_comm_hook:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook, self._hook_state, self._has_comm_hook = hook, state, True
        self._hook_in_place = is_in_place(hook)

    def _build_buckets(self, assignment: Sequence[Sequence[int]]) -> None:
        last = len(assignment) - 1
        self.buckets = [
            GradBucket(
                index,
                index == last,
                [self.parameters[i] for i in indices],
                [self.names[i] for i in indices],
                self.gradient_as_bucket_view,
            )
            for index, indices in enumerate(assignment)
        ]
        if self.gradient_as_bucket_view:
            for bucket in self.buckets:
                bucket.adopt_gradients()
        bucket_of = {i: bucket for bucket, indices in zip(self.buckets, assignment, strict=True) for i in indices}
        self._bucket_of = [bucket_of[i] for i in range(len(self.parameters))]

    def prepare_for_forward(self) -> None:
        """Count an iteration, as the forward of a synchronised backward begins."""
        self.iterations += 1

    def _rebuild_buckets(self) -> bool:
        """Assign parameters to buckets anew, in the order of readiness of rank 0's first synchronised backward.

        Happens once; a collective call then. Returns whether it happened now.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._ensure_prior_reduction_finished()
        if self.has_rebuilt_buckets or not self._ready_order:
            return False
        tensors = [self.parameters[i] for i in self._ready_order]
        buckets, _ = torch_internals.assign_buckets(tensors, self.rebuilt_limits, self._ready_order)
        self._build_buckets(self._agree(buckets))
        self.has_rebuilt_buckets = True
        return True

    def _agree(self, buckets: list[list[int]]) -> list[list[int]]:
        """Rank 0's buckets, broadcast as one tensor: the parameters in order, and the bucket of each."""
        order = [i for bucket in buckets for i in bucket]
        number = [b for b, bucket in enumerate(buckets) for _ in bucket]
        message = torch.tensor([order, number], device=self.parameters[0].device)
        dist.broadcast(message, group=self.process_group, group_src=0)
        agreed: list[list[int]] = [[] for _ in range(int(message[1, -1]) + 1)]
        for i, b in zip(*message.tolist(), strict=True):
            agreed[b].append(i)
        return agreed

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect the gradient of every parameter once in the coming backward. ``outputs`` is PyTorch's; not used yet.

        Raises:
            RuntimeError: the previous backward left buckets incomplete.
        """
        self._ensure_prior_reduction_finished()
        self._reset()
        self._expects_hooks = True

    def _mark_ready(self, index: int) -> None:
        if not self._expects_hooks:
            return
        with self._lock:
            if self._ready[index]:
                self._raise_marked_twice(index)
            self._requires_finalize = True
            self._ready[index] = 1
            if not self.has_rebuilt_buckets:
                self._ready_order.append(index)
            bucket = self._bucket_of[index]
            bucket.pending -= 1
            if bucket.pending == 0:
                self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._launch(self.buckets[self._next])
            self._next += 1
        if self._next == len(self.buckets):
            torch_internals.queue_callback(self._finalize)

    def _launch(self, bucket: GradBucket) -> None:
        try:
            with torch.no_grad():
                bucket.collect(self._hook_in_place)
                future = self._hook(self._hook_state, bucket)
            if not torch_internals.is_future(future):
                raise RuntimeError(
                    "The communication hook's callback must return a torch.futures.Future object, but got "
                    f"{type(future).__name__}."
                )
            bucket.future = future
        except BaseException:
            self._abandon()
            raise

    def _finalize(self) -> None:
        self._expects_hooks = False
        self._requires_finalize = False
        try:
            with torch.no_grad():
                for bucket in self.buckets:
                    assert bucket.future is not None
                    value = bucket.future.wait()
                    flat = value if isinstance(value, Tensor) else value[0]
                    bucket.finish(None if self._hook_in_place else flat)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """After an error, wait for what is under way and forget this backward, so that the next one can start."""
        for bucket in self.buckets:
            if bucket.future is not None:
                _wait_quietly(bucket.future)
        drain_executors()  # a hook may have failed after it submitted something
        self._ready_order = []
        self._reset()

    def _reset(self) -> None:
        self._expects_hooks = False
        self._requires_finalize = False
        self._next = 0
        self._ready = bytearray(len(self.parameters))
        for bucket in self.buckets:
            bucket.release()

    def _ensure_prior_reduction_finished(self) -> None:
        if not self._requires_finalize:
            return
        missing = [f"{self.names[i]} (index {i})" for i, ready in enumerate(self._ready) if not ready]
        self._abandon()
        if not missing:  # all was launched, then the backward failed elsewhere, and its caller has seen that error
            return
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your module has parameters that were not used in producing loss: "
            f"on rank {dist.get_rank(self.process_group)}, no gradient came for {', '.join(missing)}. Since nothing "
            "was reduced for them, the buckets after theirs were not reduced either, and this step's gradients must "
            "not be used. You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel` (gradwire's does not support "
            "it yet), and by making sure all `forward` function outputs participate in calculating loss. "
            "The next forward and backward start afresh."
        )

    def _raise_marked_twice(self, index: int) -> None:
        name = self.names[index]
        self._abandon()
        raise RuntimeError(
            "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
            "1) a parameter is used outside the `forward` function of the module, and so receives a gradient twice. "
            "2) parameters are reused in several reentrant backward passes, for example by several checkpoint "
            "functions wrapping the same part of the model. 3) the same backward is run twice over one forward. "
            f"Parameter {name} at index {index} has been marked ready twice. "
            "The next forward and backward start afresh."
        )

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward left buckets incomplete."""
        self._ensure_prior_reduction_finished()

    def _remove_autograd_hooks(self) -> None:
        """Stop watching the parameters."""
        _remove_all(self._handles)


def _ready_hook(reference: weakref.ref[Reducer], index: int) -> Callable[..., None]:
    def hook(*_: object) -> None:
        reducer = reference()
        if reducer is not None:
            reducer._mark_ready(index)

    return hook


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _plain_all_reduce(process_group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """What PyTorch's DDP does without a hook, to the bit."""

    def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        if bucket.as_view:
            transport.all_reduce(bucket.scale_into_buffer(transport.world_size))
        else:
            cast_all_reduce(source, target, source.table.dtype, transport, workspace)

    return reduce_bucket(process_group, cast("Any", bucket), algorithm)


def _wait_quietly(future: Future[Tensor]) -> None:
    try:
        future.wait()
    except Exception:  # the first error is the one to report
        return
