"""gradwire's DistributedDataParallel: PyTorch's class with gradwire's reducer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.compress._validation import check_whole_number
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.adapted_ddp import AdaptedDDP
from gradwire.reducer.mixed_precision import check_config
from gradwire.reducer.model_sync import resynchronize
from gradwire.reducer.parameters import check_no_wrapper_inside

# PyTorch's arguments and their defaults.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters.items()
    if name not in ("self", "module", "batched_grad_copy")
}
# Names in `__init__` that work with every version of PyTorch.
_OWN = {
    "self",
    "__class__",
    "module",
    "batched_grad_copy",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
    "check_every",
}


class DistributedDataParallel(AdaptedDDP):
    """Data-parallel training: averages gradients over ranks during the backward pass.

    A drop-in subclass of ``torch.nn.parallel.DistributedDataParallel``, with the same arguments. Without a
    communication hook, gradients are bitwise equal to PyTorch's. Buckets are lists of gradients, so gradwire's hooks
    are zero-copy: they read and write gradients in place, without a flat copy. Without a hook, and with
    `allreduce_hook`, gradients are flattened on CPUs, as in PyTorch, but not on GPUs.

    Args:
        module: the model, with the same structure on all ranks. Rank 0's parameters and buffers are broadcast unless
            ``init_sync=False``.
        device_ids: None, or a list of one GPU.
        output_device: device of a single-GPU module's output.
        dim: the dimension along which `scatter` and `gather` split.
        broadcast_buffers: deprecated; see ``forward_sync_buffers``.
        init_sync: whether to compare the models of all ranks at construction and broadcast rank 0's parameters and
            buffers.
        process_group: the ranks to average over; None for the default group.
        bucket_cap_mb: bucket size in MiB. The default is the ``preferred_bucket_cap_mb`` of the hook's state (100 for
            `powerSGD_hook`), if it has one, and otherwise 25, with 1 for the first bucket. To take effect, the hook
            must be registered before the second forward, when buckets are rebuilt. With ``find_unused_parameters``,
            buckets are not rebuilt, so pass the size.
        find_unused_parameters: whether a backward pass may leave parameters without a gradient, on some ranks or all.
            Costs a traversal of the graph in every forward and a small all-reduce in every backward. Buckets keep the
            order of the model's parameters.
        check_reduction: ignored, as in PyTorch.
        gradient_as_bucket_view: whether every ``.grad`` becomes a view of a flat buffer.
        static_graph: promises that every backward pass uses the same parameters as the first, the same number of times.
            Supports unused parameters without the costs of ``find_unused_parameters``, and activation checkpointing of
            shared parameters.
        delay_all_reduce_named_params: (name, parameter) pairs to leave out of the buckets; their gradients are reduced
            together in one flat fp32 buffer at the end of the backward.
        param_to_hook_all_reduce: required with ``delay_all_reduce_named_params``, as in PyTorch; no effect.
        mixed_precision: PyTorch's ``_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)``: compute with copies of
            the parameters in one dtype, sum their gradients in another, and keep parameters and gradients in their own
            for the optimizer. Needs an accelerator. Excludes communication hooks, `join`, delayed parameters and
            copies of the wrapped model; ``gradient_as_bucket_view`` has no effect.
        device_mesh: a 1-D mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: whether to skip the reduction of buckets without a used parameter, with
            ``find_unused_parameters``. All ranks must use the same parameters.
        bucket_cap_mb_list: the size of each bucket in MiB; the last one repeats.
        batched_grad_copy: no effect; the gradients of a bucket are always copied together.
        forward_sync_buffers: whether rank 0's buffers are broadcast before every synchronized forward.
        lazy_bucket_allocation: whether flat buffers are freed after every backward. gradwire's hooks use none,
            except `batched_powerSGD_hook`, and `allreduce_hook` on CPUs. No effect with ``gradient_as_bucket_view``.
        check_every: compare the ranks in one of this many synchronized backwards: parameters, buffers that were
            broadcast, and the parts of the hook's state that all ranks have equal. If a checksum differs, the backward
            raises RuntimeError on every rank, with the names. None never compares. See "Drift" in the docs. Not in
            PyTorch.

    Raises:
        NotImplementedError: an argument or setting is not supported.
        ValueError: the module is or contains a wrapper of the same parameters with a communication hook; or
            ``check_every`` is not a whole number of steps; or as in PyTorch's class.
        RuntimeError: as in PyTorch's class.

    Examples:
        >>> model = gradwire.DistributedDataParallel(model)
        >>> model.register_comm_hook(QuantizationState(wire="int4"), quantization_hook)
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        check_every: int | None = None,
    ) -> None:
        given = dict(locals())
        if unknown := [name for name, value in given.items() if name not in _OWN | _DEFAULTS.keys() and value]:
            raise TypeError(
                f"{', '.join(unknown)}: PyTorch {torch.__version__} has no such argument; leave it out, or install a "
                "later version."
            )
        # Arguments left at their default are not passed on: older versions of PyTorch do not know all of them, and have
        # other defaults where these are None.
        arguments = {
            name: value
            for name, value in given.items()
            if value is not None and value is not _DEFAULTS.get(name, value)
        }
        check_no_wrapper_inside(module)
        if mixed_precision is not None:
            check_config(mixed_precision)
        if delay_all_reduce_named_params:
            errors.check_delayed(module, [p for _, p in delay_all_reduce_named_params], mixed_precision)
        if torch_internals.uses_python_reducer():
            raise NotImplementedError(
                "gradwire.DistributedDataParallel does not support torch._dynamo.config.optimize_ddp='python_reducer', "
                "which replaces the reducer. Leave it at True, its default, or use PyTorch's DistributedDataParallel."
            )
        errors.check_ranks(process_group, device_mesh)
        errors.check_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        if check_every is not None:
            check_whole_number("check_every", check_every, "a whole number of steps, at least 1, or None", 1)
        if forward_sync_buffers is not None and "forward_sync_buffers" not in _DEFAULTS:
            arguments["broadcast_buffers"] = forward_sync_buffers
        self._has_default_bucket_size = bucket_cap_mb is None and bucket_cap_mb_list is None
        self._syncs_at_init = init_sync
        arguments["init_sync"] = False  # `_ddp_init_helper` does it; PyTorch's class calls it right after
        self._options_at_init = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params and find_unused_parameters,
            "mixed_precision": str(mixed_precision),
            "check_every": check_every,
        }
        self._syncs_buffers_at_init = forward_sync_buffers is not None or broadcast_buffers in (None, True)
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.check_every = check_every
        super().__init__(module, **arguments)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether each synchronized backward ends with a call of `finalize_backward`, as in PyTorch 2.15.

        Other work can then overlap with the collectives that are in flight after the backward. Assign it between two
        steps, equally on all ranks.
        """
        return bool(vars(self).get("_require_manual_backward_finalization", False))

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.set_finalized_by_caller(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether to call `finalize_backward` after the backward and not in one of its hooks.

        If `require_manual_backward_finalization` is set, this is always so: before the end of the backward, autograd
        may still read the memory of a gradient.
        """
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Wait for the reductions of a backward that has returned, and write the results into the gradients.

        Raises:
            RuntimeError: a backward still runs, no reduction is in flight, or `require_manual_backward_finalization`
                is not set.
        """
        self.reducer.finalize_backward()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce the gradients of every bucket with ``hook(state, bucket)`` instead of the plain all-reduce.

        Args:
            state: passed to every call of the hook.
            hook: gradwire's, PyTorch's or your own. It takes the state and a bucket, and returns a
                ``torch.futures.Future`` of the reduced flat tensor. Unlike in PyTorch, hooks named
                ``bf16_compress_hook`` run on every backend.

        Raises:
            TypeError: ``hook`` is not callable; the message says so if it and ``state`` are swapped.
            ValueError: the signature or annotations of ``hook`` are not those of a hook.
            RuntimeError: a hook is already registered.
        """
        if self.mixed_precision is not None and self._comm_hooks:
            self._log_and_throw(RuntimeError, errors.HOOK_WITH_MIXED_PRECISION)
        if callable(state) and not callable(hook):
            self._log_and_throw(TypeError, errors.SWAPPED_HOOK_AND_STATE.format(hook=type(hook).__name__))
        self._check_comm_hook(hook)
        self._install_comm_hook(state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", repr(hook)))
        self._comm_hooks.append((hook, state))

    def resynchronize(self, from_rank: int | None = None) -> None:
        """Recover from an error: discard the failed step, so that training can continue on all ranks.

        A collective call: every rank must make it, including ranks that had no error of their own. It replaces
        gradwire's own connections, starts over with the buckets of the first step, and copies the part of the hook's
        state that must be equal on all ranks (factors, scales, step counts) from one rank. Error memory stays on its
        rank. See "Fault handling" in the docs.

        Args:
            from_rank: the rank of the process group whose parameters, buffers and hook state all ranks take. None
                requires equal parameters, and takes the hook's state from rank 0. Optimizer state is not compared: if
                it differs between ranks, restart from a checkpoint.

        Raises:
            RuntimeError: on every rank, if the parameters differ and ``from_rank`` is None; if some ranks have issued
                collectives on the process group itself that others have not (by NCCL, or by a hook that is not
                gradwire's), which needs a new process group or a restart; or if some ranks do not make this call
                within the process group's timeout.
            ValueError: on every rank, if ``from_rank`` is not a rank or differs between ranks.
        """
        buffers = [*self._buffers_in_use().values()]
        delayed = set(self._delay_all_reduce_params)
        parameters = self._parameters_in_use() | {n: p for n, p in self.module.named_parameters() if p in delayed}
        resynchronize(self.reducer, parameters, buffers, from_rank, self.broadcast_bucket_size)
