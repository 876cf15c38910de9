"""The reducer and the logger with the methods that PyTorch's DistributedDataParallel calls, under its names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.torch_internals import GLOO_THREADS, NO_BACKWARD, current_backward
from gradwire.comm.transport import wait_for
from gradwire.hooks._bucket import is_gradwire_hook, is_zero_copy
from gradwire.hooks.hook_state import HookState, check_pairing, in_group
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.backward import Phase
from gradwire.reducer.bucket import Bucket, BucketBase, DenseBucket
from gradwire.reducer.bucketing import assign_first_buckets, rebuild_buckets, rebuilt_limits
from gradwire.reducer.mixed_precision import restore_parameters
from gradwire.reducer.parameters import DelayedGradients, ModelWatch, UsedParameters, find_unused
from gradwire.reducer.reducer import BucketHook, Reducer, run_optimizers

# Environment variables that decide how ranks meet.
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_NCCL_VARIABLES = ("SOCKET_IFNAME", "BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "DEBUG", "NTHREADS", "IB_TIMEOUT")
_BACKEND_VARIABLES = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": tuple(f"NCCL_{name}" for name in _NCCL_VARIABLES),
}


_CPP_DTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}


class DDPReducer(Reducer):
    """The reducer with the preparation of a backward, static graphs, mixed precision, `join` and changing ranks.

    PyTorch's DistributedDataParallel calls its methods by their names.
    """

    watch: ModelWatch | None = None
    delayed: DelayedGradients | None = None
    has_rebuilt_buckets = False
    _has_reduced = False  # whether this rank has taken part in a reduction
    _graph_seems_static = True  # whether `_unused` has never changed
    bucket_limits: Sequence[int] = ()  # sizes in bytes of the rebuilt buckets; the last one repeats

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Future[Tensor]]) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket from now on. A hook cannot be replaced."""
        if self.hook.is_registered:
            raise RuntimeError(errors.HOOK_REGISTERED_TWICE)
        check_pairing(state, hook)
        state = in_group(state, hook, self.exchange.process_group)
        take_back = state.memory.take_back if isinstance(state, HookState) else None
        self.hook = BucketHook(hook, state, is_zero_copy(hook), True, not is_gradwire_hook(hook), take_back)
        self.exchange.has_hook = True
        if self.hook.has_groups and isinstance(state, HookState):
            self.exchange.note_use(state, state.process_group or self.exchange.process_group)

    # A forward, and the preparation of its backward.

    @torch_internals.not_compiled
    def prepare_for_forward(self) -> None:
        """Count an iteration: the forward of a synchronized backward begins."""
        connections = self.exchange.connect()
        connections.check()
        if self.forward_is_running:
            self._fail("the forward pass raised an exception")
            connections.check()
        self._check_not_cast([0])
        if self.watch is not None and (name := self.watch.find_unknown()) is not None:
            self._fail_and_raise(errors.PARAMETER_UNKNOWN.format(name=name))
        self._is_in_join = False
        self.exchange.begin_forward()
        self.times.begin_forward()

    def _check_not_cast(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if parameters were cast or moved after the model was wrapped: autograd drops their hooks.

        A cast that was undone shows in the autograd node. To save time, only the nodes of ``indices`` are compared.
        """
        if self._upcast_stream is not None:
            return
        index: int | None
        dtypes = [parameter.dtype for parameter in self.parameters]
        if dtypes != self._dtypes:
            index = next(i for i, (now, before) in enumerate(zip(dtypes, self._dtypes, strict=True)) if now != before)
        else:
            index = self._autograd_hooks.find_lost(indices)
        if index is not None:
            self._fail_and_raise(errors.PARAMETER_CAST.format(name=self.options.names[index]))

    @torch_internals.not_compiled
    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets once, in rank 0's order of ready gradients; returns whether that was done. A collective
        call.

        Never if backwards may leave out different parameters: ranks could not agree on when.
        """
        self._check_reducer_finalized()
        order = self._backward.ready_order
        may_rebuild = self.static_graph or not self.find_unused_parameters
        if self.has_rebuilt_buckets or not may_rebuild or not order:
            return False
        with self.leaving("the rebuild of the buckets"):
            limits = self.bucket_limits = rebuilt_limits(self.options, self.hook.state)
            self._set_buckets(rebuild_buckets(self.options, limits, order + self._unused, self.exchange.transport))
        self._backward.ready_order = order
        self.has_rebuilt_buckets = True
        return True

    @torch_internals.not_compiled
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Prepare for the backward from ``outputs``; only ``find_unused_parameters`` reads them."""
        self._check_reducer_finalized()
        self._begin(Phase.PREPARED)
        self.forward_is_running = False
        if self.find_unused_parameters and not self.static_graph:
            nodes = self._autograd_hooks.nodes
            if self._upcast_stream is not None:  # with mixed precision, each forward creates new ones
                nodes = [torch_internals.gradient_node(parameter) for parameter in self.parameters]
            unused = find_unused(outputs, nodes)
            self._check_not_cast(unused)
            if self.times.iterations > 1:
                self._graph_seems_static &= unused == self._unused
            self._unused = unused
        self.times.unused_bytes = sum(self.parameters[i].nbytes for i in self._unused)

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward left buckets incomplete."""
        if self._backward.phase is Phase.AGAIN:
            self._fail("a further backward pass of a synchronized forward pass raised an exception")
            self.exchange.connections.check()
        if self._backward.phase is not Phase.REDUCING:
            return
        for index in self._autograd_hooks.recorded:  # parameters of buckets that never became complete
            self._backward.ready[index] = 1
        if self._backward.missing:
            self._fail_and_raise(self._unfinished())
        if self.is_finalized_by_caller:
            self._fail_and_raise(errors.NOT_FINALIZED)
        self._fail("the backward pass raised an exception after all buckets were launched")
        self.exchange.connections.check()

    @torch_internals.not_compiled
    def watch_outputs(self, output: object) -> None:
        """Call `_on_output` in every backward through the tensors in the output of a synchronized forward."""
        for tensor in torch_internals.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._output_hook)

    def share(self, wrapper: object, parameters: Collection[int]) -> None:
        """Copy the gradients of parameters, by ids, that another living wrapper uses in the same backward, too."""
        self._shared_with[wrapper] = [i for i, each in enumerate(self.parameters) if id(each) in parameters]

    # The end of a backward that the caller finalizes.

    def set_finalized_by_caller(self, required: bool) -> None:
        """Choose whether `finalize_backward` ends a backward; see `DistributedDataParallel.finalize_backward`."""
        if self._backward.phase is Phase.REDUCING:
            why = "require_manual_backward_finalization changes within a backward pass"
            self._raise(errors.CANNOT_FINALIZE.format(why=why))
        self.is_finalized_by_caller = required

    def finalize_backward(self) -> None:
        """End a backward that has returned; see `DistributedDataParallel.finalize_backward`."""
        why = None
        if not self.is_finalized_by_caller:
            why = "require_manual_backward_finalization is False"
        elif current_backward() != NO_BACKWARD:
            why = "a backward pass runs, which may still read gradients"
        elif self._backward.phase is not Phase.REDUCING or self._backward.n_launched < len(self.buckets):
            why = "no complete reduction is in flight"
        if why is not None:
            self._raise(errors.CANNOT_FINALIZE.format(why=why))
        self._finalize()

    # Delayed parameters.

    def _finalize(self) -> None:
        """Average the gradients of delayed parameters while the buckets are in flight; see `Reducer._finalize`."""
        if self.delayed is not None:
            with self.leaving("the all-reduce of the delayed parameters"), torch.no_grad():
                self._all_reduce(self.delayed.collect().div_(self._divisor))
        super()._finalize()
        if self.delayed is not None and self._runs_optimizers:
            run_optimizers(self.delayed.parameters)
        if self._upcast_stream is not None and self.skip_unused:  # PyTorch's hook does not see a skipped bucket
            restore_parameters(self.parameters)
        self._count_reduction()

    def _count_reduction(self) -> None:
        """Ranks rebuild their buckets together, after a reduction from which all but those that have joined, or that
        count the calls of a static graph late, have an order. In a static graph it is the second one.
        """
        backward = self._backward
        if not backward.ready_order and (self._has_reduced or not self.static_graph):
            backward.ready_order = [i for i in range(len(self.parameters)) if i not in self._unused]
        self._has_reduced = True

    # Static graphs.

    def _set_static_graph(self) -> None:
        """Declare that every backward uses the same parameters as the first one, equally often."""
        if self.times.iterations > 0:
            self._raise(errors.STATIC_GRAPH_TOO_LATE.format(iterations=self.times.iterations))
        self.static_graph = self._may_leave_out = True

    def _delay_all_reduce(self) -> None:
        """Reduce all buckets at the end of the first backward of a static graph, and keep the counts of its hooks'
        calls.
        """
        if self._backward.phase is Phase.DONE:  # no_sync counts nothing
            return
        self.static_calls = self._backward.calls
        self._unused = [index for index, calls in enumerate(self.static_calls) if calls == 0]
        self._check_not_cast(self._unused)
        self._reduce_all()

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far has left out the same parameters."""
        return self._graph_seems_static

    def _get_local_used_map(self) -> Tensor:
        """The number of ranks that had a gradient for each parameter in the last backward: int32."""
        return self._used.counts

    def _set_optimizer_in_backward(self) -> None:
        """Step a parameter's attached optimizers as soon as its gradient is reduced, and clear the gradient."""
        self._runs_optimizers = True

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        """Wait for these futures, too, at the end of the backward."""
        self._post_backward_futures += futures

    def wait_for_post_backward_futures(self) -> None:
        """Wait for them now: no end of a backward will."""
        futures, self._post_backward_futures = self._post_backward_futures, []
        for future in futures:
            future.wait()

    def _remove_autograd_hooks(self) -> None:
        self._autograd_hooks.remove()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first iterations, time one in ``sample_rate``."""
        self.times.sample_rate = sample_rate

    # Mixed precision.

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Expect gradients in the dtype of the parameters' copies, whose communication hook is registered already."""
        self._upcast_stream = self.hook.state.upcast_stream
        self._autograd_hooks.remove()  # PyTorch's class sets hooks on the copies
        self._set_buckets([bucket.members for bucket in self.buckets])

    # `join`: a rank without inputs joins the collectives of the others.

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Divide by the rank count that ``work`` sums, or by the world size if that is static."""
        self._live_ranks, self._divides_by_live_ranks = work, not use_static_world_size
        self._is_in_join = True

    @torch.no_grad()
    def reduce_zeros(self) -> None:
        """Take part in a backward of the ranks with inputs left: the same collectives in the same order."""
        exchange = self.exchange
        exchange.begin_forward()
        with self.leaving("a backward pass of the ranks with inputs left"):
            exchange.begin_backward(self, self.hook.has_groups)
            buckets: list[Bucket] = [bucket.with_zeros(self.hook.is_zero_copy) for bucket in self.buckets]
            futures = []
            for bucket in buckets:
                bucket.divisor = exchange.process_group.size()
                futures.append(self._run_comm_hook(bucket))
            counts = self._used.exchange_none(exchange.transport) if self._may_leave_out else ()
            unused = {name for name, count in zip(self.options.names, counts, strict=False) if count == 0}
            if self.delayed is not None:
                self._all_reduce(torch.zeros_like(self.delayed.buffer))
            exchange.connections.finish()
            for bucket, future in zip(buckets, futures, strict=True):
                value: Any = wait_for(future, exchange.check_in_step)
                if unused.intersection(bucket.parameter_names()):  # nothing of them is applied on any rank
                    self._take_back(bucket, value if isinstance(value, Tensor) else value[0], unused)
        exchange.connections.end_exchange(self)
        exchange.note_groups()
        if not self.static_graph:
            self._used.clear()
        self._count_reduction()

    def _take_back(self, bucket: Bucket, result: Tensor, names: Collection[str]) -> None:
        """Return what was sent of these parameters to the hook's error memory."""
        take_back = self.hook.take_back
        if take_back is not None and isinstance(bucket, DenseBucket):
            bucket.give_back(result, lambda name, sent: take_back(name, sent) if name in names else None)

    def _all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place, and wait for it."""
        transport = self.exchange.transport
        (work,) = transport.start(transport.all_reduce(tensor))
        transport.wait(work, self.exchange.check_in_step)

    def _run_allreduce_hook(self, bucket: Bucket) -> Future[Tensor]:
        return self.exchange.transport.start_all_reduce(bucket.buffer())

    # Training on a changing set of ranks, and after errors.

    def _reset_state(self) -> None:
        """Rebuild the buckets after the next backward, and count a static graph's calls again."""
        self.static_calls = None
        self._unused = []
        self._used = UsedParameters(len(self.parameters), self.exchange.device)
        if self.drift is not None:
            self.drift.restart()
        self._forget_forward()
        self._begin(Phase.DONE)
        self.has_rebuilt_buckets = self._has_reduced = False

    def leave(self, cause: str) -> None:
        """Leave the exchange unless this rank has left it. Nothing of this rank is in flight afterwards."""
        if self.exchange.connect().failure is None:
            self._fail(cause)
        if self._upcast_stream is not None:  # the failed backward has left copies in place of the parameters
            state = self.hook.state
            restore_parameters(state.ddp_weakref().module.parameters())
            state.wait_for_stream_enqueued = False

    def restart(self) -> None:
        """Return to the state after construction, with the first buckets, equal on all ranks."""
        self._reset_state()
        self.exchange.restart()
        self._set_buckets(assign_first_buckets(self.options))

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, as does a hook's state that had the process group."""
        state: Any = self.hook.state if self.hook.is_registered else None
        if state is self.exchange.process_group:
            self.hook = self.hook._replace(state=process_group)
        elif getattr(state, "process_group", None) is self.exchange.process_group:
            state.process_group = process_group
            if isinstance(state, HookState):
                state._follows_model = True
        self.exchange.update_process_group(process_group)


class Logger:
    """The logger that PyTorch's DDP calls: keeps the facts that ``_get_ddp_logging_data`` returns."""

    def __init__(self, reducer: DDPReducer) -> None:
        self._reducer = reducer
        self._data: dict[str, Any] = {}

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Keep facts of the construction, under PyTorch's keys."""
        reducer = self._reducer
        backend = dist.get_backend(reducer.exchange.process_group)
        variables = _VARIABLES + _BACKEND_VARIABLES.get(backend, ())
        self._data |= {name.lower(): os.environ.get(name, "N/A") for name in variables}
        if backend == "gloo":
            self._data["gloo_num_threads"] = GLOO_THREADS
        self._data |= {
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "find_unused_parameters": int(reducer.find_unused_parameters),
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
            "dtypes": ", ".join(sorted({_CPP_DTYPES.get(p.dtype, str(p.dtype)) for p in reducer.parameters})),
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "backend_name": backend,
            "world_size": reducer.exchange.process_group.size(),
            "rank": reducer.exchange.process_group.rank(),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "bucket_sizes": _sizes(reducer.buckets),
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: PyTorch's class calls it at the start of every synchronized forward."""

    def set_error_and_log(self, error: str) -> None:
        """Keep an error."""
        self._data |= {"has_error": 1, "error": error}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        reducer = self._reducer
        data = self._data | {
            "iteration": reducer.times.reported,
            "bucket_cap_bytes": (reducer.bucket_limits or reducer.options.rebuilt_limits)[-1],
        }
        if reducer.error is not None:
            data |= {"has_error": 1, "error": reducer.error}
        if reducer.times.iterations:
            data |= reducer.times.summary() | {
                "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer._backward.ready_order)),
            }
        if reducer.has_rebuilt_buckets:
            members = ", ".join(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
            data |= {"rebuilt_bucket_sizes": _sizes(reducer.buckets), "rebuilt_per_bucket_param_indices": members}
        return data


def _sizes(buckets: Sequence[BucketBase]) -> str:
    return ", ".join(str(sum(parameter.nbytes for parameter in bucket.parameters())) for bucket in buckets)
