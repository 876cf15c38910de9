"""`attach`: compress the gradients of a model, wherever it averages them, and its handle, `Attachment`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.collectives import CompressedGroup
from gradwire.comm.rank_differences import format_differences
from gradwire.comm.store_collectives import gather_json
from gradwire.compress.policy import wire_name
from gradwire.exchange.decorators import CommHook, described, name_of
from gradwire.exchange.hook_state import HookState, option_values
from gradwire.exchange.memory import StateDict
from gradwire.exchange.names import check_patterns
from gradwire.exchange.settings import HookSettings, check_pairing, in_group
from gradwire.hooks.by_name import (
    NONE,
    VARIABLE,
    environment_value,
    hook_named,
    log_name_from_environment,
    name_from_environment,
)
from gradwire.kernels import WIRE_FORMATS
from gradwire.sharded import checkpoint
from gradwire.sharded.all_reduce import ReplicaAverage, shard_layouts
from gradwire.sharded.exchange import ShardedExchange
from gradwire.sharded.recovery import resynchronize
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter, ReduceScatterOptions
from gradwire.sharded.torch_internals import ParameterGroup, parameter_groups


class Attachment:
    """The place of a hook in a model, as `attach` returns it.

    Attributes:
        state: state of the hook.
        report: one line that says which gradients are compressed, and which stay plain.
        exchange: the steps of a model of FSDP2; None for a DistributedDataParallel.
    """

    def __init__(
        self,
        state: Any,
        report: str,
        model: nn.Module | None = None,
        groups: Sequence[ParameterGroup] = (),
        exchange: ShardedExchange | None = None,
    ) -> None:
        self.state = state
        self.report = report
        self.exchange = exchange
        self._model, self._groups = model, groups  # of FSDP2 only
        found = [group.reduce_scatter for group in groups]
        self._reduce_scatters = [each for each in found if isinstance(each, QuantizedReduceScatter)]
        self._with_errors = [each for each in self._reduce_scatters if each.has_errors]

    def __repr__(self) -> str:
        return f"Attachment({self.report})"

    def detach(self) -> None:
        """Average without compression from the next backward on. Call it on every rank, between two steps.

        The state keeps its error memory, for a later `attach`. The errors of the reduce-scatter (``within``) are lost,
        unless `state_dict` has saved them.

        Raises:
            RuntimeError: the model is a DistributedDataParallel, which keeps its hook.
        """
        if not self._groups:
            raise RuntimeError(
                "A DistributedDataParallel keeps its communication hook. To average plainly, wrap the model again."
            )
        for group in self._groups:
            group.restore()

    def resynchronize(self) -> None:
        """Resume after an error in a backward. A collective call: every rank must make it.

        Discard the gradients first, with ``optimizer.zero_grad()``, and start the step again with its first
        micro-batch. The results of the failed step return to the error memory: they are applied later. See
        docs/fsdp.md.

        Raises:
            RuntimeError: the model cannot go on, and must be restarted from a checkpoint: some ranks have finished the
                failed step, collectives of FSDP2 are missing on some ranks, or optimizers run in the backward. Or the
                model is a DistributedDataParallel, which has its own ``resynchronize()``.
        """
        if self._model is None or self.exchange is None:
            raise RuntimeError("The model is a DistributedDataParallel: call its own resynchronize().")
        resynchronize(self._model, self.state, self._groups, self._reduce_scatters, self.exchange)

    @property
    def within_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's gradients in the reduce-scatters (``within``) of a step, and bytes sent for them."""
        scattered = self._reduce_scatters
        return sum(each.gradient_bytes for each in scattered), sum(each.sent_bytes for each in scattered)

    @property
    def within_error_bytes(self) -> int:
        """Bytes of the error memory of the reduce-scatter on this rank, which is allocated in the first backward."""
        return sum(each.error_bytes for each in self._with_errors)

    def state_dict(self) -> StateDict:
        """The state of the hook, for ``torch.distributed.checkpoint``. A collective call: every rank must make it.

        Memory in the shapes of the gradients is sharded like the parameters (`DTensor`), so that it can be loaded with
        other numbers of shards and replicas. The entry ``within`` has the errors of the reduce-scatter. The factors of
        `PowerSGDState` are left out: they depend on the shards, and start anew after a load, as do its statistics. See
        `HookState.state_dict`. Empty for a hook whose state cannot be saved, unless the reduce-scatter has
        memory.

        Raises:
            NotImplementedError: the state has entries that fit one number of shards only, or is no `HookState`.
        """
        saved: StateDict = self.state.state_dict() if isinstance(self.state, Stateful) else {}
        if self.exchange is None:
            return saved
        return checkpoint.save(self.state, saved, self._groups, self._with_errors)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: the state does not fit the model; see `HookState.load_state_dict`. Nothing is modified.
        """
        if self.exchange is None:
            if isinstance(self.state, Stateful):
                self.state.load_state_dict(dict(state_dict))
            return
        checkpoint.load(self.state, state_dict, self._groups, self._with_errors)
        self.exchange.compare_again()


def attach(
    model: nn.Module,
    state: Any = None,
    hook: CommHook | None = None,
    *,
    within: str | ReduceScatterOptions | None = None,
    **options: Any,
) -> Attachment:
    """Compress the gradients of ``model``, wherever the model exchanges them.

    - `DistributedDataParallel`, gradwire's or PyTorch's: ``model.register_comm_hook(state, hook)``.
    - HSDP (``fully_shard`` with a 2-D mesh) and ``replicate``: the hook averages between replicas.
    - FSDP2 and HSDP with ``within``: the reduce-scatter within a replica sends 1 to 16 bits per element, and sums in
      fp32.

    Call it on every rank, after ``fully_shard`` or ``replicate`` and before the first forward.

    Args:
        model: the wrapped model.
        state: the name of a hook, such as "int4", "powersgd-r16-int8" or "int4-no-feedback" (see docs/hooks.md), or the
            state of a hook. A `HookState` serves one model. On FSDP2 without replicas, the name of a wire format is
            ``within``. With "none", nothing is compressed. Without any argument but ``model``, the environment variable
            ``GRADWIRE_HOOK`` names the hook.
        hook: the communication hook of the state; by default the one that it is made for.
        within: the exchange within a replica: a wire format, such as "bf16", "fp16", "int8" or "int4", without error
            feedback, or `ReduceScatterOptions`; None for PyTorch's reduce-scatter.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``.

    Returns:
        A handle; its ``report`` says what is compressed.

    Raises:
        TypeError: ``model`` is none of these; ``state``, ``within`` and ``GRADWIRE_HOOK`` are all missing; ``hook`` is
            missing for a state that several hooks share; or there are ``options`` or a ``hook`` that ``state`` does not
            take.
        NotImplementedError: a hook on FSDP2 without replicas, or a release of PyTorch that gradwire does not know.
        ValueError: there is no hook of that name; ``within`` is not a wire format, has no effect on this model, or has
            a name pattern that matches no parameter; the model has replicas of different ranks; or the state belongs
            to another model.
        RuntimeError: ``GRADWIRE_HOOK`` names the hook, and differs between ranks.

    Examples:
        >>> gradwire.attach(DistributedDataParallel(model), "int4")
        >>> fully_shard(model, mesh=init_device_mesh("cuda", (n_nodes, 8), mesh_dim_names=("replicate", "shard")))
        >>> gradwire.attach(model, "int4", within="bf16")
    """
    if state is None and hook is None and within is None and not options:
        if isinstance(model, TorchDDP) and getattr(model, "_hook_from_environment", None) is not None:
            hook, state = model._comm_hooks[0]  # gradwire's class has taken it already
            return _ddp_attachment(model, state, hook, f"{model._hook_from_environment}: ")
        state = _name_from_environment(model)
    if state == NONE:
        if (drop := getattr(model, "_drop_hook_from_environment", None)) is not None:  # gradwire's class
            drop(f"the script attaches {NONE!r}")
        return Attachment(None, "nothing is compressed")
    _check_model(model)
    name = f"{state}: " if isinstance(state, str) else ""
    if isinstance(state, str):
        state, hook, within = _named(model, state, hook, within, options)
    elif options:
        option = next(iter(options))
        raise TypeError(
            f"attach got {option}=..., an option of a state. Pass it to the state, or name the hook, as in "
            f"attach(model, 'int4', {option}=...)."
        )
    scatter = _reduce_scatter_options(within)
    if state is not None or hook is not None or within is None:
        hook = hook or _hook_of(state)
        check_pairing(state, hook)
    if isinstance(model, TorchDDP):
        if within is not None:
            raise ValueError("within has no effect on a DistributedDataParallel, which has no shards. Leave it out.")
        _check_has_no_hook(model)
        model.register_comm_hook(state, cast("CommHook", hook))
        return _ddp_attachment(model, state, cast("CommHook", hook), name)
    return _sharded_attachment(model, state, hook, scatter, name)


def _check_has_no_hook(model: TorchDDP) -> None:
    if model._comm_hooks and getattr(model, "_hook_from_environment", None) is None and not model.mixed_precision:
        raise RuntimeError(
            f"This {type(model).__name__} has a hook, {name_of(model._comm_hooks[0][0])}: hooks can only be attached "
            "once. To change the hook, wrap the model again."
        )


def _ddp_attachment(model: TorchDDP, state: Any, hook: CommHook, name: str) -> Attachment:
    return Attachment(state, f"{name}{name_of(hook)} compresses the all-reduce of {type(model).__name__}")


def _sharded_attachment(
    model: nn.Module, state: Any, hook: CommHook | None, scatter: ReduceScatterOptions | None, name: str
) -> Attachment:
    """Attach to FSDP2's groups of parameters: ``hook`` averages between replicas, None leaves that plain."""
    groups = list(parameter_groups(model))
    replicated = [group for group in groups if group.replicas is not None]
    scattered = [group for group in groups if group.shards is not None]
    _check_groups(groups, hook is not None, scatter is not None)
    check_patterns(scatter, _names_in(groups), "within")
    if isinstance(state, HookState):
        state.names.check_names(_names_in(replicated))
        check_patterns(state.options, _names_in(replicated))
    settings = {name: str(value) for name, value in option_values(scatter).items()}
    process_groups = [each for group in groups for each in group.process_groups()]
    exchange = ShardedExchange(process_groups, groups[0].device, {"hook": "attach", **settings})
    report = []
    if hook is not None:
        replicas = replicated[0].replicas
        assert replicas is not None
        state = in_group(state, hook, replicas)
        line = _attach_average(replicated, state, hook, exchange)
        report.append(f"{name}{line} between {replicas.size()} replicas")
    if scatter is not None:
        report.append(_attach_scatter(scattered, scatter, exchange))
    plain = []
    if scattered and scatter is None:
        plain.append("the reduce-scatter")
    if replicated and hook is None:
        plain.append("the all-reduce between replicas")
    elif (left := len(replicated) - exchange.n_averages) > 0:
        plain.append(f"{left} parameter groups of several dtypes or without gradients")
    if plain:
        report.append(f"plain: {', '.join(plain)}")
    return Attachment(state, "; ".join(report), model, groups, exchange)


def _names_in(groups: Sequence[ParameterGroup]) -> list[str]:
    return [name for group in groups for name in group.parameters]


def _name_from_environment(model: nn.Module) -> str:
    """The hook that the environment names, equally on all ranks of the model. A collective call of these."""
    if isinstance(model, TorchDDP):
        process_groups = [model.process_group]
    else:
        process_groups = [each for group in parameter_groups(model) for each in group.process_groups()]
    values: dict[str, str] = {}
    for each in dict.fromkeys(process_groups):  # the last one brings what its ranks have found in the earlier ones
        values[str(dist.get_rank())] = environment_value()
        for found in gather_json(each, "gradwire.attach(model)", values):
            values |= found
    ranks = sorted(map(int, values))
    by_rank = [values[str(rank)] for rank in ranks]
    if lines := format_differences([{VARIABLE: repr(value)} if value else {} for value in by_rank], ranks):
        raise RuntimeError(
            f"The environment variable {VARIABLE} differs between ranks:{lines}\nSet it to the name of a hook on every "
            "rank, or pass the name: attach(model, 'int4')."
        )
    name = name_from_environment()
    if name is None:
        raise TypeError(
            f"attach was given neither a hook nor within, and the environment variable {VARIABLE} names no hook. Pass "
            "the name of a hook, as in attach(model, 'int4'), its state, or within='bf16' for the reduce-scatter of "
            "FSDP2."
        )
    log_name_from_environment(name)
    return name


def _named(
    model: nn.Module, name: str, hook: object, within: Any, options: Mapping[str, Any]
) -> tuple[Any, CommHook | None, Any]:
    """State, hook and ``within`` for the name of a hook."""
    if hook is not None:
        raise TypeError(f"attach got the name {name!r} and a hook. Leave out the hook, or pass a state with it.")
    named = hook_named(name)
    wire = named.options.get("wire", name)
    if within is None and not options and wire in WIRE_FORMATS and not isinstance(model, TorchDDP):
        groups = list(parameter_groups(model))
        if groups and all(group.replicas is None for group in groups):
            return None, None, wire
    return named.state(**options), named.hook, within


def is_attached(model: nn.Module) -> bool:
    """Whether gradwire compresses an exchange of this FSDP2 model."""
    return any(map(_is_changed, parameter_groups(model)))


def _is_changed(group: ParameterGroup) -> bool:
    averages = isinstance(group.replicas, CompressedGroup) and isinstance(group.replicas.compress, ReplicaAverage)
    return averages or isinstance(group.reduce_scatter, QuantizedReduceScatter)


def _reduce_scatter_options(within: object) -> ReduceScatterOptions | None:
    if within is None or isinstance(within, ReduceScatterOptions):
        return within
    wire = wire_name("within", within, "gradwire.sharded.ReduceScatterOptions")
    return ReduceScatterOptions(wire=wire, use_error_feedback=False)


def _check_model(model: object) -> None:
    if isinstance(model, TorchDDP) or (isinstance(model, nn.Module) and any(parameter_groups(model))):
        return
    remedy = "Wrap the module first: model = gradwire.DistributedDataParallel(module)."
    if not isinstance(model, nn.Module):
        remedy = "Pass the model first, then the name of a hook: attach(model, 'int4')."
    elif any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        remedy = "FSDP1 takes a process group: process_group=gradwire.collectives.compressed_group()."
    elif type(model).__name__.startswith("DDP"):  # the older `replicate` renames the class
        remedy = "Import replicate from torch.distributed._composable.replicate_with_fsdp."
    raise TypeError(
        f"attach was given {described(model)}; expected a DistributedDataParallel, or a model after "
        f"fully_shard(model) or replicate(model). {remedy}"
    )


def _check_groups(groups: Sequence[ParameterGroup], averages: bool, scatters: bool) -> None:
    replicas = [group.replicas for group in groups if group.replicas is not None]
    if averages and not replicas:
        raise NotImplementedError(
            "This model is sharded by fully_shard over a 1-D mesh, so nothing is averaged between replicas. "
            "States, their options and hooks that are no wire formats compress that average only. Name a wire format "
            "for the reduce-scatter, as in attach(model, 'bf16'), or shard over a 2-D mesh (replicate, shard) whose "
            "shards share fast links."
        )
    if scatters and all(group.shards is None for group in groups):
        raise ValueError("within has no effect on this model, which has no shards. Leave it out.")
    if any(map(_is_changed, groups)):
        raise ValueError("gradwire is attached to this model already. Call detach() of its Attachment first.")
    ranks = {tuple(dist.get_process_group_ranks(each)) for each in replicas}
    if averages and len(ranks) > 1:
        raise ValueError(
            f"The parameter groups of this model have replicas on different ranks: {sorted(ranks)}. Attach a state of "
            "its own to each submodule."
        )


def _attach_average(replicated: Sequence[ParameterGroup], state: Any, hook: CommHook, exchange: ShardedExchange) -> str:
    """Average parameter groups between replicas with a hook; returns the begin of a line of the report."""
    layouts: dict[str, torch.Tensor] = {}
    for group in replicated:
        layouts |= shard_layouts(group.parameters, group.reduced_dtype(), group.device)
    averaged = [[name for name in group.trainable() or {} if name in layouts] for group in replicated]
    exchange.n_averages = sum(map(bool, averaged))
    for group in replicated:
        average = ReplicaAverage(group, state, hook, exchange, layouts)
        group.replace_replicas(CompressedGroup(average.replicas, average))
    if isinstance(state, HookState):
        exchange.step_ends.append(state._end_open_step)
        # A pattern may match only parameters that are not compressed, or of which this rank has no rows.
        empty = {name: torch.empty(0, device=group.device) for group in replicated for name in group.parameters}
        state.names.bind_layouts(empty | {name: layouts[name] for names in averaged for name in names})
    return f"{name_of(hook)} compresses the all-reduce of {exchange.n_averages} parameter groups"


def _attach_scatter(
    scattered: Sequence[ParameterGroup], options: ReduceScatterOptions, exchange: ShardedExchange
) -> str:
    """Quantize the reduce-scatter of parameter groups; returns a line of the report."""
    for group in scattered:
        group.replace_reduce_scatter(QuantizedReduceScatter(group, options, exchange))
    errors = str(options.error_dtype).removeprefix("torch.")
    feedback = f", and error feedback in {errors}" if options.keeps_errors else ""
    return f"{len(scattered)} parameter groups are reduce-scattered in {options.wire}, with sums in fp32{feedback}"


def _hook_of(state: Any) -> CommHook:
    """The hook that a state is made for: the function of that name in the state's module."""
    found = None
    if isinstance(state, HookSettings):
        found = getattr(sys.modules[type(state).__module__], state._own_hook, None)
    if found is None:
        raise TypeError(
            f"attach needs the hook for {described(state)}: attach(model, state, hook), such as attach(model, "
            "CastState(), bf16_compress_hook). Or name both: attach(model, 'bf16')."
        )
    return found  # type: ignore[no-any-return]
