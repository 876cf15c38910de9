"""`DDPReducer`: the reducer with the methods that PyTorch's DistributedDataParallel calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.hooks._bucket import is_gradwire_hook, is_zero_copy
from gradwire.hooks._registration import check_pairing, in_group
from gradwire.hooks.hook_state import HookState
from gradwire.reducer import errors
from gradwire.reducer.backward import ForwardResults, Phase
from gradwire.reducer.bucketing import Bucket, assign_first_buckets
from gradwire.reducer.reducer import CommHook, Reducer
from gradwire.reducer.unused_parameters import UsedParameters

__all__ = ["DDPReducer"]


class DDPReducer(Reducer):
    """A reducer with static graphs, mixed precision, `join` and changing sets of ranks.

    The method names are PyTorch's, because PyTorch's DistributedDataParallel calls them.
    """

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket from now on.

        Raises:
            RuntimeError: a hook is registered already.
            TypeError: ``hook`` is PyTorch's, ``state`` gradwire's.
            ValueError: ``hook`` is gradwire's, and ``state`` has or is a process group of other ranks.
        """
        if self._hook is not None:
            raise RuntimeError(errors.HOOK_REGISTERED_TWICE)
        check_pairing(state, hook)
        self._hook, self.hook_state = hook, in_group(state, hook, self.process_group)
        self._hook_is_zero_copy, self._hook_has_groups = is_zero_copy(hook), not is_gradwire_hook(hook)

    @property
    def ready_order(self) -> list[int]:
        """The parameters in the order in which the last backward made their gradients ready."""
        return self._backward.ready_order

    # Static graphs.

    @property
    def has_counted_calls(self) -> bool:
        """Whether the first backward of a static graph has counted the calls of each autograd hook."""
        return self._static_calls is not None

    def _set_static_graph(self) -> None:
        """Declare the graph static.

        Every backward must use the same parameters as the first one, equally often.

        Raises:
            RuntimeError: there was a synchronised forward already.
        """
        if self.times.iterations > 0:
            self._raise(errors.static_graph_too_late(self.times.iterations))
        self.static_graph = True

    def _delay_all_reduce(self) -> None:
        """Reduce all buckets: the first backward of a static graph has ended, and its hooks' calls are counted."""
        if self._backward.phase is Phase.DONE:  # in no_sync, which counts nothing
            return
        self._static_calls = self._backward.calls
        self._unused = [index for index, calls in enumerate(self._static_calls) if calls == 0]
        self._check_nodes(self._unused)
        self._start_exchange()
        self._find_last_launched()
        with self._lock:
            for index in range(len(self.parameters)):
                self._mark_ready(index)
        if not self.is_finalized_by_caller:
            self._finalize()

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
        self._forward_results.futures += futures

    def _remove_autograd_hooks(self) -> None:
        self._autograd_hooks.remove()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first iterations, time one in ``sample_rate``."""
        self.times.sample_rate = sample_rate

    # Mixed precision.

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Expect gradients in the dtype of the parameters' copies, whose communication hook is registered already."""
        self._upcast_stream = self.hook_state.upcast_stream
        self._autograd_hooks.remove()  # PyTorch's class sets hooks on the copies
        self._set_buckets([bucket.members for bucket in self.buckets])

    def on_copy_gradient(self, index: int) -> None:
        """Autograd has accumulated the gradient of a parameter's copy."""
        self._autograd_hooks.record(index)

    # `join`: a rank without inputs takes part in the collectives of the others.

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Divide by the rank count that ``work`` sums, or by the world size if that is static."""
        self._forward_results.live_ranks = None if use_static_world_size else work

    def _get_zeros_like_grad_buckets(self) -> list[Bucket]:
        buckets: list[Bucket] = [bucket.of_zeros(self._is_zero_copy(bucket)) for bucket in self.buckets]
        for bucket in buckets:
            bucket.process_group, bucket.hook_has_groups = self.process_group, self._hook_has_groups
            bucket.divisor = self.process_group.size()
        return buckets

    def _run_allreduce_hook(self, bucket: Bucket) -> Future[Tensor]:
        return self.transport.start_all_reduce(bucket.buffer())

    def match_used_map(self) -> None:
        """Take part in the exchange of used parameters, on a rank that used none."""
        self._used.exchange(self.transport)
        self._used.clear()

    def _push_all_rebuilt_params(self) -> None:
        """Take part in the rebuild of the buckets, in rank 0's order."""
        if not self._backward.ready_order:
            self._backward.ready_order = list(range(len(self.parameters)))

    # Training on a changing set of ranks, and after errors.

    def _reset_state(self) -> None:
        """Rebuild the buckets after the next backward, and count a static graph's calls again."""
        self._static_calls = None
        self._unused = []
        self._used = UsedParameters(len(self.parameters), self.device)
        self._forward_results = ForwardResults()
        self._begin(Phase.DONE)
        self.has_rebuilt_buckets = False

    def restart(self) -> None:
        """Return to the state after construction, with the first buckets, equal on all ranks."""
        self._reset_state()
        self._n_forwards = self._n_backwards = 0
        self._set_buckets(assign_first_buckets(self.options))

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, as does a hook's state that had the process group."""
        if self.hook_state is self.process_group:
            self.hook_state = process_group
        elif getattr(self.hook_state, "process_group", None) is self.process_group:
            self.hook_state.process_group = process_group
            if isinstance(self.hook_state, HookState):
                self.hook_state.follows_model = True
        self.process_group = process_group
        self._number = self.connections.new_user()
