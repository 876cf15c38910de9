"""gradwire's DistributedDataParallel: PyTorch's class with gradwire's reducer."""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from gradwire.comm import GroupTransport
from gradwire.comm.connections import connections_of
from gradwire.comm.shared_facts import UNKNOWN
from gradwire.exchange.decorators import CommHook, name_of
from gradwire.exchange.hook_state import HookState
from gradwire.hooks import default_hooks
from gradwire.hooks.by_name import (
    NONE,
    VARIABLE,
    environment_value,
    hook_named,
    log_name_from_environment,
    name_from_environment,
)
from gradwire.reducer import arguments, errors, torch_internals
from gradwire.reducer.bucket import BucketHook, DelayedGradients, default_reduction
from gradwire.reducer.bucketing import BucketOptions
from gradwire.reducer.drift import DriftCheck
from gradwire.reducer.exchange import Exchange
from gradwire.reducer.logger import Logger
from gradwire.reducer.model_sync import (
    begin_together,
    broadcast_coalesced,
    check_memory,
    has_own_memory,
    layouts_of,
    verify_model,
)
from gradwire.reducer.model_watch import BufferWatch, ModelWatch
from gradwire.reducer.recovery import resynchronize
from gradwire.reducer.reducer import Reducer
from gradwire.reducer.wrappers import check_no_wrapper_inside, check_not_nested, link_sharing_wrappers
from gradwire.validation import check_whole_number

# PyTorch's arguments and their defaults.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters.items()
    if name not in ("self", "module", "batched_grad_copy")
}
# Names in `__init__` that work with every version of PyTorch.
_OWN = {"module", "batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation", "check_every"}


def _arguments_for_pytorch(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not left at their default.

    Older versions of PyTorch do not know all of them, and have other defaults where these are None.

    Raises TypeError for an argument that this version of PyTorch does not know.
    """
    if unknown := [name for name, value in given.items() if name not in _OWN | _DEFAULTS.keys() and value]:
        raise TypeError(
            f"{', '.join(unknown)}: PyTorch {torch.__version__} has no such argument; leave it out, or install a "
            "later version."
        )
    is_default = {name: value is None or value is _DEFAULTS.get(name, value) for name, value in given.items()}
    return {name: value for name, value in given.items() if not is_default[name]}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Data-parallel training: averages gradients over ranks during the backward pass.

    A drop-in subclass of ``torch.nn.parallel.DistributedDataParallel``, with the same arguments. Without a
    communication hook, gradients are bitwise equal to PyTorch's. Buckets are lists of gradients, so gradwire's hooks
    are zero-copy: they read and write gradients in place, without a flat copy. Without a hook, and with
    `allreduce_hook`, gradients are flattened on CPUs, as in PyTorch, but not on GPUs.

    If the environment variable ``GRADWIRE_HOOK`` names a hook, such as ``int4``, it is attached at construction; a hook
    that the script registers replaces it, with a warning. See docs/hooks.md.

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
            Supports unused parameters without the traversal of ``find_unused_parameters``, and activation checkpointing
            of shared parameters. The small all-reduce remains: it finds ranks that are out of step.
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
            ``check_every`` is not a whole number of steps; ``GRADWIRE_HOOK`` names no hook; or as in PyTorch's class.
        RuntimeError: as in PyTorch's class.

    Examples:
        >>> model = gradwire.DistributedDataParallel(model)
        >>> model.register_comm_hook(QuantizationState(wire="int4"), quantization_hook)
    """

    reducer: Reducer  # type: ignore[assignment]
    _delay_grad_buffer: Tensor
    logger: Logger
    _log_and_throw: Callable[[type[Exception], str], NoReturn]
    _hook_from_environment: str | None = None  # the name of the registered hook if ``GRADWIRE_HOOK`` has set it

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
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        passed_on = _arguments_for_pytorch(given)
        check_no_wrapper_inside(module)
        if mixed_precision is not None:
            arguments.check_mixed_precision(mixed_precision)
        if delay_all_reduce_named_params:
            arguments.check_delayed(module, {p for _, p in delay_all_reduce_named_params}, mixed_precision)
        arguments.check_reducer_is_used()
        arguments.check_ranks(process_group, device_mesh)
        arguments.check_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        if check_every is not None:
            check_whole_number("check_every", check_every, "a whole number of steps, at least 1, or None", 1)
        if forward_sync_buffers is not None and "forward_sync_buffers" not in _DEFAULTS:
            passed_on["broadcast_buffers"] = forward_sync_buffers
        self._has_default_bucket_size = bucket_cap_mb is None and bucket_cap_mb_list is None
        self._syncs_at_init = init_sync
        passed_on["init_sync"] = False  # `_ddp_init_helper` does it; PyTorch's class calls it right after
        self._options_at_init: dict[str, Any] = {  # must be equal on all ranks
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params and find_unused_parameters,
            "mixed_precision": str(mixed_precision),
            "check_every": check_every,
            VARIABLE: environment_value() or "not set",
        }
        self._syncs_buffers_at_init = forward_sync_buffers is not None or broadcast_buffers in (None, True)
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.check_every = check_every
        super().__init__(module, **passed_on)
        self._take_hook_from_environment()

    def _take_hook_from_environment(self) -> None:
        """Register the hook that ``GRADWIRE_HOOK`` names, until the script registers one of its own."""
        name = name_from_environment()
        if name is None or name == NONE:
            return
        if self._comm_hooks:
            self._warn_of_unused_hook(name, "mixed_precision has a hook of its own")
            return
        named = hook_named(name)
        self.register_comm_hook(named.state(), named.hook)
        self._hook_from_environment = name
        log_name_from_environment(name)

    def _drop_hook_from_environment(self, reason: str) -> None:
        """Return to the plain reduction if ``GRADWIRE_HOOK`` has named the hook: the script decides."""
        if self._hook_from_environment is not None:
            self._warn_of_unused_hook(self._hook_from_environment, reason)
            self._hook_from_environment = None
            self._comm_hooks.clear()
            self.reducer.drop_comm_hook()
            del self.logger.facts["comm_hook"]

    def _warn_of_unused_hook(self, name: str, reason: str) -> None:
        model = type(self.module).__name__
        warnings.warn(f"{VARIABLE}={name} is not used for this {model}: {reason}.", stacklevel=4)

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

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce the gradients of every bucket with ``hook(state, bucket)`` instead of the plain all-reduce.

        Replaces the hook of the environment variable ``GRADWIRE_HOOK``, with a warning.

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
            self._log_and_throw(
                RuntimeError,
                f"{errors.HOOK_REGISTERED_TWICE} mixed_precision has a hook of its own, which sums gradients in its "
                "reduce_dtype. Leave out one of the two; with a hook that compresses, use torch.autocast for the "
                "computation.",
            )
        try:
            arguments.check_comm_hook(state, hook)
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))
        self._drop_hook_from_environment(f"the script registers {name_of(hook)}")
        self._install_comm_hook(state, hook)
        self.logger.facts["comm_hook"] = getattr(hook, "__qualname__", repr(hook))
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
            RuntimeError: on every rank, if the parameters differ and ``from_rank`` is None; if with ``from_rank`` the
                names, shapes or dtypes of parameters or buffers differ; if some ranks have issued
                collectives on the process group itself that others have not (by NCCL, or by a hook that is not
                gradwire's), which needs a new process group or a restart; or if some ranks do not make this call
                within the process group's timeout.
            ValueError: on every rank, if ``from_rank`` is not a rank or differs between ranks.
        """
        parameters = _replicated(self.module, self.parameters_to_ignore, set(self._delay_all_reduce_params))
        resynchronize(self.reducer, parameters, self._buffers_in_use(), from_rank, self.broadcast_bucket_size)
        # The latest forward may have ended on some ranks only: all synchronize buffers in the next one.
        self.require_forward_param_sync = True

    # The private methods of PyTorch's class that behave differently with gradwire's reducer.

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Create gradwire's reducer and logger instead of PyTorch's; called by the constructor and by unpickling."""
        has_compared, self._syncs_at_init = self._syncs_at_init, False
        if has_compared:
            self._verify_construction(parameters)
            buffers = self._buffers_in_use() if self._syncs_buffers_at_init else {}
            check_memory(self._parameters_in_use() | buffers)
            states = [tensor.detach() for tensor in (*self._parameters_in_use().values(), *buffers.values())]
            with torch.no_grad():
                broadcast_coalesced(states, GroupTransport(self.process_group), self.broadcast_bucket_size)
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]  # PyTorch's class passes it to `_autograd_hook`
        self.reducer = self._make_reducer(parameters, expect_sparse_gradient, static_graph, has_compared)
        self._buffer_watch = BufferWatch()
        has_sync_bn = any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())
        self.logger = Logger(
            self.reducer,
            module_name=type(self.module).__name__,
            device_ids=", ".join(map(str, self.device_ids or ())),
            output_device=-1 if self.output_device is None else self.output_device,
            broadcast_buffers=int(self.broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
        )
        if static_graph:
            self.logger._set_static_graph()
        if has_sync_bn and self.device_type == "cpu":
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _register_delay_all_reduce_hook(
        self, bucket_cap_mb: float, param_to_hook_all_reduce: Tensor, device_ids: list[int | torch.device] | None
    ) -> None:
        """Compare the models before PyTorch's class broadcasts the delayed parameters. Frozen ones are not delayed."""
        names = {p: name for name, p in self.module.named_parameters()}
        frozen = {p for p in self._delay_all_reduce_params if not p.requires_grad}
        self.parameters_to_ignore -= {names[p] for p in frozen}
        self._delay_all_reduce_params = [p for p in self._delay_all_reduce_params if p not in frozen]
        parameters, _ = self._build_params_for_reducer()
        if self._syncs_at_init:
            self._verify_construction(parameters, param_to_hook_all_reduce)
        # PyTorch's class takes this size for one in bytes, and no ``device_ids`` for the CPU.
        nbytes, devices = int(bucket_cap_mb * 2**20), device_ids or [parameters[0].device]
        super()._register_delay_all_reduce_hook(nbytes, param_to_hook_all_reduce, devices)  # type: ignore[no-untyped-call]
        buffer = self._delay_grad_buffer
        for p in self._delay_all_reduce_params:
            if (p.dtype, p.device) != (buffer.dtype, buffer.device):
                self._log_and_throw(
                    ValueError,
                    f"delay_all_reduce_named_params names {names[p]}, which is {p.dtype} on {p.device}. The gradients "
                    f"of delayed parameters are summed in one buffer, {buffer.dtype} on {buffer.device}, which needs "
                    "parameters of its dtype on its device. Leave this parameter out, or pass device_ids to sum on its "
                    "GPU.",
                )

    def _delayed_all_reduce_hook(self, grad: Tensor) -> None:
        """Do nothing: the reducer averages the delayed gradients at the end of the backward, once all are ready."""

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """Leave out ignored parameters of the module itself, too, whose names in PyTorch's class begin with a dot."""
        self.parameters_to_ignore |= {f".{name}" for name in self.parameters_to_ignore if "." not in name}
        parameters: tuple[list[Tensor], list[bool]] = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters

    def _parameters_in_use(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}

    def _buffers_in_use(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    # Buffers: compared with the other ranks' once they change, then synchronized. PyTorch's class compares nothing, and
    # does not see the first buffer of a model that had none.

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether to synchronize the buffers before this forward; RuntimeError unless all ranks have the same ones."""
        return not self._has_post_forward_buffer_hook() and self._compare_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether to synchronize the buffers after this forward; RuntimeError unless all ranks have the same ones."""
        return self._has_post_forward_buffer_hook() and self._compare_buffers()

    def _has_post_forward_buffer_hook(self) -> bool:
        hook = getattr(self, "buffer_hook", None)
        return hook is not None and hook.buffer_comm_hook_location is torch_internals.POST_FORWARD

    @torch_internals.not_compiled
    def _compare_buffers(self) -> bool:
        """Whether this forward synchronizes buffers; RuntimeError, on every rank, unless all have the same ones."""
        if not (self.require_forward_param_sync and self.broadcast_buffers):
            return False
        if self.modules_buffers or self._buffer_watch.is_due():
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        with self.reducer.leaving("the comparison of buffers"):
            self.reducer.exchange.compare_buffers(self.named_module_buffers)
        return bool(self.modules_buffers)

    def _sync_buffers(self) -> None:
        """Synchronize the buffers that `_compare_buffers` has found."""
        with torch.no_grad(), torch_internals.keeping_versions(tuple(self.modules_buffers)):
            joins = self._join_config.enable
            source = self._find_common_rank(self._distributed_rank, True) if joins else 0
            self._sync_module_buffers(source)  # type: ignore[no-untyped-call]

    def _find_common_rank(self, rank: int, is_candidate: bool) -> int:
        """In `join`: the largest of the candidates' ranks. A collective call."""
        return self._start_maximum(rank if is_candidate else -1)()

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """In `join`: tell joined ranks whether this backward averages gradients; on those, return it."""
        wait = self._start_maximum(not is_joined_rank and self.require_backward_grad_sync)
        return bool(wait()) if is_joined_rank else None

    def _start_maximum(self, value: int) -> Callable[[], int]:
        """Start a maximum over the ranks; returns the function that waits for it, unless another rank leaves."""
        exchange, leaving = self.reducer.exchange, partial(self.reducer.leaving, "a forward pass in join()")
        with leaving():
            found = torch.tensor([int(value)], device=self.device)
            transport = exchange.connect().transport("forward", exchange.device)
            wait = transport.launch(transport.all_reduce_max(found))

        def result() -> int:
            with leaving():
                wait(exchange.announce_forward)
            return int(found)

        return result

    def __getstate__(self) -> dict[str, Any]:
        if self.mixed_precision is not None:
            raise NotImplementedError(
                "A DistributedDataParallel with mixed_precision can be neither copied nor pickled. Copy the module, "
                "and wrap the copy."
            )
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self.module.parameters()):
            raise NotImplementedError(
                "A DistributedDataParallel with optimizers in backward can be neither copied nor pickled: the copy of "
                "a parameter has no optimizer. Copy the module, call _apply_optimizer_in_backward for the copy, and "
                "wrap it."
            )
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # PyTorch's class drops the hook when unpickling; a copy must keep it to train as the original does.
        for hook, hook_state in self._comm_hooks:
            self._install_comm_hook(hook_state, hook)
        self.reducer.set_finalized_by_caller(self.require_manual_backward_finalization)

    def _install_comm_hook(self, state: object, hook: CommHook) -> None:
        if isinstance(state, HookState):
            state.bind(self.module)
        self.reducer.register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: torch_internals.BuiltinCommHookType) -> None:
        hooks = {
            torch_internals.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            torch_internals.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if self._comm_hooks and self._hook_from_environment is None:
            text = "register_builtin_comm_hook or register_comm_hook can only be called once."
            self._log_and_throw(RuntimeError, text)
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger.facts["comm_hook"] = str(comm_hook_type)

    @torch_internals.not_compiled
    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers before a forward, on a transport used for nothing else."""
        with self.reducer.leaving("the broadcast of buffers"):
            exchange = self.reducer.exchange
            connections = exchange.connect()
            connections.begin_exchange(self, threading.get_ident())
            transport = connections.transport("forward", exchange.device)
            broadcast_coalesced(tensors, transport, buffer_size, authoritative_rank, exchange.announce_forward)
            connections.end_exchange(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.logger._get_ddp_logging_data()

    def _setup_in_backward_optimizers(self) -> None:
        """Let the reducer step the optimizers in backward: their own hooks run before the reduction."""
        parameters = [*self._module_parameters, *self._delay_all_reduce_params]
        if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
            return
        handles = torch_internals.optimizer_hooks()
        for parameter in parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        self.reducer.runs_optimizers = True

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        check_not_nested(self)
        link_sharing_wrappers(self)
        with self._apart() if self._evaluates_in_join() else nullcontext():
            result = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        drift = self.reducer.drift
        has_buffer_hook = hasattr(self, "buffer_hook")
        if drift is not None and torch.is_grad_enabled() and not has_buffer_hook and self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            drift.after_broadcast(self._buffers_in_use())
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.forward_is_running = True
        return result

    def _evaluates_in_join(self) -> bool:
        return self._join_config.enable and not torch.is_grad_enabled()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Exchange nothing meanwhile: a rank that has joined takes no part in an evaluation."""
        before = self._join_config, self.require_forward_param_sync
        self._join_config, self.require_forward_param_sync = self._join_config._replace(enable=False), False
        try:
            yield
        finally:
            self._join_config, self.require_forward_param_sync = before

    def _post_forward(self, output: Any) -> Any:
        if self.mixed_precision is not None and not torch.is_grad_enabled():
            torch_internals.restore_parameters(self.module.parameters())
        if self.static_graph:  # the reducer notices its first backward; PyTorch's class would once per model
            self._static_graph_delay_allreduce_enqueued = True
        with self._apart() if self._evaluates_in_join() else nullcontext():
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        is_synchronized = bool(self.require_backward_grad_sync)
        if torch.is_grad_enabled():
            self.reducer.watch_outputs(output, is_synchronized)
        if not (torch.is_grad_enabled() and is_synchronized):
            self.reducer.wait_for_post_backward_futures()
        return output

    def _bucket_limits(self, static_graph: bool) -> tuple[list[int], list[int]]:
        """Sizes in bytes of the buckets of the first backward, and of the rebuilt ones; the last one repeats."""
        caps = list(getattr(self, "bucket_bytes_cap_list", []))
        first = torch_internals.DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        rebuilt = caps or [first, self.bucket_bytes_cap]
        # As in PyTorch: one bucket for a first backward that is followed by a rebuild.
        is_rebuilt = static_graph or not self.find_unused_parameters
        return caps or ([sys.maxsize] if is_rebuilt else rebuilt), rebuilt

    def _make_reducer(
        self, parameters: list[Tensor], sparse: list[bool], static_graph: bool, has_compared: bool
    ) -> Reducer:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        first_limits, rebuilt_limits = self._bucket_limits(static_graph)
        options = BucketOptions(
            parameters=parameters,
            names=[names[parameter] for parameter in parameters],
            sparse=sparse,
            first_limits=first_limits,
            rebuilt_limits=rebuilt_limits,
            hook_may_choose=self._has_default_bucket_size,
            gradient_as_bucket_view=self.gradient_as_bucket_view and self.mixed_precision is None,
            frees_buffers=self.lazy_bucket_allocation,
        )
        buffers = layouts_of(self.named_module_buffers) if has_compared and self.broadcast_buffers else UNKNOWN
        exchange = Exchange(self.process_group, parameters[0].device, buffers)
        delayed = self._delay_all_reduce_params
        replicated = partial(_replicated, self.module, self.parameters_to_ignore, set(delayed))
        return Reducer(
            exchange,
            BucketHook(default_reduction, exchange, is_zero_copy=exchange.has_streams),
            options,
            ModelWatch(self.module, parameters, delayed, self.parameters_to_ignore),
            None if self.check_every is None else DriftCheck(self.check_every, replicated),
            DelayedGradients(delayed, self._delay_grad_buffer) if delayed else None,
            find_unused_parameters=self.find_unused_parameters,
            skip_unused=self.skip_all_reduce_unused_params,
            is_in_no_sync=partial(_is_in_no_sync, weakref.ref(self)),
        )

    def _verify_construction(self, parameters: list[Tensor], param_to_hook_all_reduce: Tensor | None = None) -> None:
        """Raise unless all ranks have the same model and options, as far as their collectives depend on them.

        They do not depend on ``gradient_as_bucket_view``, nor on the sizes of rebuilt buckets, which rank 0 broadcasts.
        """
        begin_together(connections_of(self.process_group))
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        buffers = self._buffers_in_use() if self._syncs_buffers_at_init or self.broadcast_buffers else {}
        limits, _ = self._bucket_limits(self._options_at_init["static_graph"])
        frozen = {name: p for name, p in self._parameters_in_use().items() if not p.requires_grad}
        options = {
            **self._options_at_init,
            "bucket_cap_mb, first buckets (bytes)": limits,
            "forward_sync_buffers": bool(buffers) and self.broadcast_buffers,
            "buffers broadcast at construction": bool(buffers) and self._syncs_buffers_at_init,
            "delay_all_reduce_named_params": [(names.get(p), tuple(p.shape)) for p in self._delay_all_reduce_params],
            "param_to_hook_all_reduce": names.get(param_to_hook_all_reduce),
            "parameters without memory of their own": [
                name for name, p in self._parameters_in_use().items() if not has_own_memory(p)
            ],
        }
        states = {f"frozen parameter {name}": p for name, p in frozen.items()}
        states |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
        verify_model({names[p]: p for p in parameters}, states, options, self.process_group, self.device)

    # Mixed precision. PyTorch's class does most of it: before a forward it points each parameter at a low-precision
    # copy, and its hook sums a bucket in ``reduce_dtype`` and points the parameters back at their own values.

    def _module_wait_for_copy_hook(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Before a module computes with copies of its parameters: wait for them, and set hooks on their gradients."""
        if torch.is_grad_enabled():
            if self._submodule_to_event[module]:
                torch_internals.remove_copy_hooks(module.parameters(recurse=False))
            super()._module_wait_for_copy_hook(module, *args, **kwargs)
            return
        for event in self._submodule_to_event.pop(module, ()):
            event.wait(stream=torch.accelerator.current_stream())

    def join_hook(self, **kwargs: Any) -> Any:
        """The hook for `torch.distributed.algorithms.Join`; raises with mixed precision."""
        if self.mixed_precision is not None:
            raise NotImplementedError(
                "join() does not support mixed_precision. Use torch.autocast in its place, or give all ranks as many "
                "inputs."
            )
        self.logger.facts["join_uneven_inputs"] = 1
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return JoinedRank(self)


class JoinedRank(JoinHook):
    """A rank without inputs left in `join`, which takes part in the collectives of the others."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Take part in a forward of the others and, unless they are in ``no_sync``, in its backward."""
        ddp = self._ddp
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        is_synchronized = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, False))
        ddp.reducer.wait_for_post_backward_futures()
        ddp.require_forward_param_sync = is_synchronized
        if is_synchronized:
            ddp.reducer.reduce_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that was among the last with inputs."""
        ddp = self._ddp
        if ddp.broadcast_buffers:
            with ddp.reducer.leaving("the end of join()"):
                ddp.reducer.exchange.compare_buffers(ddp._buffers_in_use())
        ddp._sync_final_model(is_last_joiner)
        if delayed := [p.detach() for p in ddp._delay_all_reduce_params]:  # which PyTorch's class ignores
            transport = ddp.reducer.exchange.transport
            broadcast_coalesced(delayed, transport, ddp.broadcast_bucket_size, ddp._authoritative_rank)


def _is_in_no_sync(ddp: weakref.ref[DistributedDataParallel]) -> bool:
    wrapper = ddp()
    return wrapper is None or not wrapper.require_backward_grad_sync


def _replicated(module: nn.Module, ignored: Collection[str], delayed: Collection[Tensor]) -> dict[str, Tensor]:
    """The parameters that all ranks have equal, frozen ones included; with mixed precision, not their copies.

    Without those that no message can carry.
    """
    return {
        name: getattr(parameter, "_fp_param", parameter)
        for name, parameter in module.named_parameters()
        if (name not in ignored or parameter in delayed) and has_own_memory(parameter)
    }
