"""gradwire's DistributedDataParallel: PyTorch's class with gradwire's reducer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm import GroupTransport
from gradwire.comm.connections import connections_of
from gradwire.hooks import default_hooks
from gradwire.hooks.hook_state import HookState
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.backward import Exchange
from gradwire.reducer.bucketing import BucketOptions
from gradwire.reducer.ddp_interface import AdaptedDDP, DDPReducer, Logger
from gradwire.reducer.mixed_precision import check_config
from gradwire.reducer.model_sync import begin_together, broadcast_coalesced, resynchronize, verify_model
from gradwire.reducer.parameters import (
    ModelWatch,
    refuse_wrappers_inside,
)

__all__ = ["DistributedDataParallel"]

TorchDDP = nn.parallel.DistributedDataParallel


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
            together in one flat fp32 buffer.
        param_to_hook_all_reduce: the parameter whose gradient starts the all-reduce of the delayed parameters.
        mixed_precision: PyTorch's ``_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)``: compute with copies of
            the parameters in one dtype, sum their gradients in another, and keep parameters and gradients in their own
            for the optimizer. Needs an accelerator. Excludes communication hooks, `join` and copies of the wrapped
            model; ``gradient_as_bucket_view`` has no effect.
        device_mesh: a 1-D mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: whether to skip the reduction of buckets without a used parameter, with
            ``find_unused_parameters``. All ranks must use the same parameters.
        bucket_cap_mb_list: the size of each bucket in MiB; the last one repeats.
        batched_grad_copy: no effect; the gradients of a bucket are always copied together.
        forward_sync_buffers: whether rank 0's buffers are broadcast before every synchronized forward.
        lazy_bucket_allocation: whether flat buffers are freed after every backward. gradwire's hooks use none,
            except for `allreduce_hook` on CPUs. No effect with ``gradient_as_bucket_view``.

    Raises:
        NotImplementedError: an argument or setting is not supported.
        ValueError: the module is or contains a wrapper of the same parameters with a communication hook; or as in
            PyTorch's class.
        RuntimeError: PyTorch's class raises, too.
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
    ) -> None:
        refuse_wrappers_inside(module)
        if mixed_precision is not None:
            check_config(mixed_precision)
        if torch_internals.uses_python_reducer():
            raise NotImplementedError(
                "gradwire.DistributedDataParallel does not support torch._dynamo.config.optimize_ddp='python_reducer', "
                "which replaces the reducer. Leave it at True, its default, or use PyTorch's DistributedDataParallel."
            )
        options = {
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "device_mesh": device_mesh,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "forward_sync_buffers": forward_sync_buffers,
        }
        if forward_sync_buffers is not None and not torch_internals.HAS_FORWARD_SYNC_BUFFERS:
            options |= {"broadcast_buffers": forward_sync_buffers, "forward_sync_buffers": None}
        errors.check_ranks(process_group, device_mesh)
        errors.check_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self._has_default_bucket_size = bucket_cap_mb is None and bucket_cap_mb_list is None
        self._syncs_at_init = init_sync
        self._options_at_init: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params and find_unused_parameters,
            "mixed_precision": str(mixed_precision),
        }
        self._syncs_buffers_at_init = forward_sync_buffers is not None or broadcast_buffers in (None, True)
        self.lazy_bucket_allocation = lazy_bucket_allocation
        if lazy_bucket_allocation and torch_internals.HAS_LAZY_BUCKET_ALLOCATION:
            options["lazy_bucket_allocation"] = True  # sets the attribute anew
        # Arguments left at their default are not passed on: older versions of PyTorch do not know all of them.
        super().__init__(
            module,
            device_ids,
            output_device,
            dim,
            init_sync=False,  # `_ddp_init_helper` synchronizes the models; PyTorch's class calls it right after
            process_group=process_group,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            **{name: value for name, value in options.items() if value is not None},
        )

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Create gradwire's reducer and logger instead of PyTorch's; called by the constructor and by unpickling."""
        if self._syncs_at_init:
            self._syncs_at_init = False
            _verify_model(self, parameters)
            with torch.no_grad():
                broadcast_coalesced(
                    self._module_states(), GroupTransport(self.process_group), self.broadcast_bucket_size
                )
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]  # as PyTorch's, for `_fire_reducer_autograd_hook`
        self.reducer = _make_reducer(self, parameters, expect_sparse_gradient, static_graph)
        self.logger = Logger(self.reducer)
        has_sync_bn = any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            [] if self.device_ids is None else self.device_ids,
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            has_sync_bn,
            static_graph,
        )
        if has_sync_bn and self.device_type == "cpu":
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _register_delay_all_reduce_hook(
        self, bucket_cap_mb: int, param_to_hook_all_reduce: Tensor, device_ids: list[int | torch.device] | None
    ) -> None:
        """Compare the models before PyTorch's class broadcasts the delayed parameters."""
        if self._syncs_at_init:
            parameters, _ = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
            _verify_model(self, parameters, param_to_hook_all_reduce)
        super()._register_delay_all_reduce_hook(bucket_cap_mb, param_to_hook_all_reduce, device_ids)  # type: ignore[no-untyped-call]

    def _parameters_in_use(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}

    def _buffers_in_use(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    def _module_states(self) -> list[Tensor]:
        """The parameters, including frozen ones, and buffers that rank 0 broadcasts at construction."""
        buffers = self._buffers_in_use() if self._syncs_buffers_at_init else {}
        return [tensor.detach() for tensor in (*self._parameters_in_use().values(), *buffers.values())]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # PyTorch's class drops the hook when unpickling; a copy must keep it to train as the original does.
        for hook, hook_state in self._comm_hooks:
            self._install_comm_hook(hook_state, hook)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether each synchronized backward ends with a call of `finalize_backward`, as in PyTorch 2.15.

        Other work can then overlap with the collectives that are in flight after the backward. Assign it between two
        steps, equally on all ranks.
        """
        return bool(vars(self).get("_require_manual_backward_finalization", False))

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if self._delay_all_reduce_all_params:
            if required:
                raise RuntimeError(errors.FINALIZATION_WITHOUT_REDUCER)
            return
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
        if self._delay_all_reduce_all_params:
            raise RuntimeError(errors.FINALIZATION_WITHOUT_REDUCER)
        self.reducer.finalize_backward()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce the gradients of every bucket with ``hook(state, bucket)`` instead of the plain all-reduce.

        Args:
            state: passed to every call of the hook.
            hook: gradwire's, PyTorch's or your own. It takes the state and a bucket, and returns a
                ``torch.futures.Future`` of the reduced flat tensor. Unlike in PyTorch, hooks named
                ``bf16_compress_hook`` run on every backend.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: the signature or annotations of ``hook`` are not those of a hook.
            RuntimeError: a hook is already registered.
        """
        if self.mixed_precision is not None and self._comm_hooks:
            self._log_and_throw(RuntimeError, errors.HOOK_WITH_MIXED_PRECISION)
        self._check_comm_hook(hook)
        self._install_comm_hook(state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", repr(hook)))
        self._comm_hooks.append((hook, state))

    def _install_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if isinstance(state, HookState):
            state.bind(self.module)
        self.reducer.register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: torch_internals.BuiltinCommHookType) -> None:
        hooks = {
            torch_internals.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            torch_internals.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if self._comm_hooks:
            self._log_and_throw(RuntimeError, errors.BUILTIN_HOOK_REGISTERED_TWICE)
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers before a forward, on a transport used for nothing else."""
        with self.reducer.leaving("the broadcast of buffers"):
            exchange, connections = self.reducer.exchange, self.reducer.connections
            connections.enter(self, threading.get_ident())
            transport = connections.transport("forward", exchange.device)
            broadcast_coalesced(tensors, transport, buffer_size, authoritative_rank, exchange.announce_forward)
            connections.leave(self)

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
        resynchronize(self.reducer, self._parameters_in_use(), buffers, from_rank, self.broadcast_bucket_size)


def _bucket_limits(ddp: DistributedDataParallel, static_graph: bool) -> tuple[list[int], list[int]]:
    """Sizes in bytes of the buckets of the first backward, and of the rebuilt ones; the last one repeats."""
    caps = list(getattr(ddp, "bucket_bytes_cap_list", []))
    first = torch_internals.DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    rebuilt = caps or [first, ddp.bucket_bytes_cap]
    # As in PyTorch: one bucket for a first backward that is followed by a rebuild.
    is_rebuilt = static_graph or not ddp.find_unused_parameters
    return caps or ([sys.maxsize] if is_rebuilt else rebuilt), rebuilt


def _make_reducer(
    ddp: DistributedDataParallel, parameters: list[Tensor], sparse: list[bool], static_graph: bool
) -> DDPReducer:
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    first_limits, rebuilt_limits = _bucket_limits(ddp, static_graph)
    options = BucketOptions(
        parameters=parameters,
        names=[names[parameter] for parameter in parameters],
        sparse=sparse,
        first_limits=first_limits,
        rebuilt_limits=rebuilt_limits,
        hook_may_choose=ddp._has_default_bucket_size,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view and ddp.mixed_precision is None,
        frees_buffers=ddp.lazy_bucket_allocation,
    )
    exchange = Exchange(ddp.process_group, parameters[0].device)
    reducer = DDPReducer(exchange, options, ddp.find_unused_parameters, ddp.skip_all_reduce_unused_params)
    reducer.watch = ModelWatch(ddp.module, parameters, ddp.parameters_to_ignore)
    reducer.is_finalized_by_caller = vars(ddp).get("_require_manual_backward_finalization", False)
    return reducer


def _verify_model(
    ddp: DistributedDataParallel, parameters: list[Tensor], param_to_hook_all_reduce: Tensor | None = None
) -> None:
    """Raise unless all ranks have the same model and options, as far as their collectives depend on them.

    They do not depend on ``gradient_as_bucket_view``, nor on the sizes of rebuilt buckets, which rank 0 broadcasts.
    """
    begin_together(connections_of(ddp.process_group))
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    buffers = ddp._buffers_in_use() if ddp._syncs_buffers_at_init or ddp.broadcast_buffers else {}
    limits, _ = _bucket_limits(ddp, ddp._options_at_init["static_graph"])
    frozen = {name: p for name, p in ddp._parameters_in_use().items() if not p.requires_grad}
    options = {
        **ddp._options_at_init,
        "bucket_cap_mb, first buckets (bytes)": limits,
        "forward_sync_buffers": bool(buffers) and ddp.broadcast_buffers,
        "buffers broadcast at construction": bool(buffers) and ddp._syncs_buffers_at_init,
        "delay_all_reduce_named_params": [(names.get(p), tuple(p.shape)) for p in ddp._delay_all_reduce_params],
        "param_to_hook_all_reduce": names.get(param_to_hook_all_reduce),
    }
    states = {f"frozen parameter {name}": p for name, p in frozen.items()}
    states |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    verify_model({names[p]: p for p in parameters}, states, options, ddp.process_group, ddp.device)
