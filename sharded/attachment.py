"""`attach`: compress the gradients of a model, wherever it averages them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.compress._validation import check_elements, check_entries, check_tensor
from gradwire.hooks._bucket import CommHook
from gradwire.hooks._names import check_patterns, plain_name
from gradwire.hooks.hook_state import HookSettings, HookState, check_pairing, in_group, option_values
from gradwire.kernels import WIRE_FORMATS
from gradwire.sharded.exchange import ShardedExchange, name_of
from gradwire.sharded.recovery import resynchronize
from gradwire.sharded.replicas import ReplicaGroup
from gradwire.sharded.shards import QuantizedReduceScatter, ReduceScatterOptions
from gradwire.sharded.torch_internals import (
    has_shards,
    mesh_groups,
    parameter_groups,
    parameter_names,
    reduce_scatter_of,
    reduced_dtype,
    replace_reduce_scatter,
    replace_replica_group,
    replica_group,
    replicas_of,
    restore,
    shard_group,
)

WITHIN = "within"  # the entry of a checkpoint with the errors of the reduce-scatter


class Attachment:
    """The place of a hook in a model, as `attach` returns it.

    Attributes:
        state: state of the hook.
        report: one line that says which gradients are compressed, and which stay plain.
        step_ends: functions that are called at the end of every backward that has raised no error; of FSDP2's models
            only.
    """

    def __init__(
        self,
        state: Any,
        report: str,
        groups: Sequence[tuple[Any, Any, Any]] = (),
        parameters: Mapping[str, Any] | None = None,
        exchange: ShardedExchange | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.state = state
        self.report = report
        self.step_ends = exchange.step_ends if exchange is not None else []
        self._model = model
        self._groups = groups  # parameter groups, with the mesh and the reduce-scatter that they had
        self._parameters = parameters or {}  # FSDP2's parameters by name
        self._exchange = exchange
        attached = [reduce_scatter_of(group) for group, _, _ in groups]
        self._quantized = [each for each in attached if isinstance(each, QuantizedReduceScatter)]
        self._scattered = [each for each in self._quantized if each.has_errors]

    def __repr__(self) -> str:
        return f"Attachment({self.report})"

    def detach(self) -> None:
        """Average without compression from the next backward on. Call it on every rank, between two steps.

        The error memory stays in the state, for a later `attach`.

        Raises:
            RuntimeError: the model is a DistributedDataParallel, which keeps its hook.
        """
        if not self._groups:
            raise RuntimeError(
                "A DistributedDataParallel keeps its communication hook. To average plainly, wrap the model again."
            )
        for group, mesh_info, reduce_scatter in self._groups:
            restore(group, mesh_info, reduce_scatter)

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
        if self._model is None or self._exchange is None:
            raise RuntimeError("The model is a DistributedDataParallel: call its own resynchronize().")
        resynchronize(
            self._model,
            self.state,
            self._parameters,
            self._exchange,
            self._quantized,
            next((found for _, mesh_info, _ in self._groups if (found := replicas_of(mesh_info)) is not None), None),
        )

    @property
    def within_error_bytes(self) -> int:
        """Bytes of the error memory of the reduce-scatter on this rank, which is allocated in the first backward."""
        return sum(each.error_bytes for each in self._scattered)

    def state_dict(self) -> dict[str, Any]:
        """The state of the hook, for ``torch.distributed.checkpoint``. A collective call: every rank must make it.

        Memory in the shapes of the gradients is sharded like the parameters (`DTensor`), so that it can be loaded with
        other numbers of shards and replicas. The entry ``within`` has the errors of the reduce-scatter. The factors of
        `PowerSGDState` are left out: they depend on the shards, and start anew after a load, as do its statistics. See
        `HookState.state_dict`. Empty for a hook whose state cannot be saved, unless the reduce-scatter has
        memory.

        Raises:
            NotImplementedError: the state has entries that fit one number of shards only, or is no `HookState`.
        """
        saved: dict[str, Any] = self.state.state_dict() if isinstance(self.state, Stateful) else {}
        if self._exchange is None:
            return saved
        if saved and not isinstance(self.state, HookState):
            raise NotImplementedError(f"The state is a {type(self.state).__name__}; only a HookState can be sharded.")
        if isinstance(self.state, HookState):
            memory = self.state.memory.declared
            entries = [entry for entry in saved if not isinstance(saved[entry], int)]
            if not memory and entries:
                saved = self.state.merge_shards(saved, self._shard_groups())
            for entry in entries if memory else ():
                if entry not in memory or memory[entry].shape is None:
                    del saved[entry]
                else:
                    errors = saved[entry]
                    saved[entry] = {name: self._as_shard(each, errors.get(name)) for name, each in self._trainable()}
        if self._scattered:
            within = {name: error for each in self._scattered for name, error in each.saved_errors().items()}
            saved[WITHIN] = {name: self._as_shard(each, within.get(name)) for name, each in self._trainable()}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: the state does not fit the model; see `HookState.load_state_dict`. Nothing is modified.
        """
        if self._exchange is None:
            if isinstance(self.state, Stateful):
                self.state.load_state_dict(dict(state_dict))
            return
        within = _local_shards(state_dict, WITHIN) if self._scattered else {}
        for name, parameter in self._trainable() if self._scattered else ():
            check_tensor(f"within[{name!r}]", within.get(name), (torch.float32,), tuple(parameter.sharded_size))
            check_elements(f"within[{name!r}]", within[name], within[name].isfinite(), "a finite number")
        if isinstance(self.state, HookState):
            state = self.state
            loaded: dict[str, Any] = {entry: {} for entry in state.memory.declared} | state._counts
            compressed = set(state.names.compressible().values())  # others have zeros in a checkpoint
            for entry, value in state_dict.items():
                if entry in state.memory.declared:
                    shards = _local_shards(state_dict, entry)
                    loaded[entry] = {
                        name: each for name, each in shards.items() if name in compressed or each.count_nonzero() > 0
                    }
                elif entry != WITHIN:
                    loaded[entry] = value
            state.load_state_dict(loaded)
        for each in self._scattered:
            each.load_errors(within)
        self._exchange.is_loaded = True

    def _shard_groups(self) -> list[dist.ProcessGroup]:
        found = (shard_group(group) for group, _, _ in self._groups)
        return list(dict.fromkeys(each for each in found if each is not None))

    def _trainable(self) -> Iterable[tuple[str, Any]]:
        return ((name, each) for name, each in self._parameters.items() if each.sharded_param.requires_grad)

    @staticmethod
    def _as_shard(parameter: Any, tensor: Tensor | None) -> DTensor:
        """A tensor in the layout of a parameter's shard as a DTensor; None: an empty shard. Padding is cut off."""
        whole = parameter.sharded_param
        tensor = torch.zeros(parameter.sharded_size) if tensor is None else tensor
        tensor = tensor[tuple(map(slice, parameter.sharded_size))].contiguous()
        return DTensor.from_local(
            tensor, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def _local_shards(state_dict: Mapping[str, Any], entry: str) -> dict[str, Any]:
    """This rank's shards of an entry of a checkpoint, by parameter name."""
    check_entries(state_dict, "Attachment", (entry,))
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in state_dict[entry].items()}


def attach(
    model: nn.Module,
    state: Any = None,
    hook: Callable[..., Any] | None = None,
    *,
    within: str | ReduceScatterOptions | None = None,
) -> Attachment:
    """Compress the gradients of ``model``, wherever the model exchanges them.

    - `DistributedDataParallel`, gradwire's or PyTorch's: ``model.register_comm_hook(state, hook)``.
    - HSDP (``fully_shard`` with a 2-D mesh) and ``replicate``: the hook averages between replicas.
    - FSDP2 and HSDP with ``within``: the reduce-scatter within a replica sends 1 to 16 bits per element, and sums in
      fp32.

    Call it on every rank, after ``fully_shard`` or ``replicate`` and before the first forward.

    Args:
        model: the wrapped model.
        state: state of the hook. A `HookState` serves one model.
        hook: the communication hook; by default the one that the state is made for.
        within: the exchange within a replica: a wire format, such as "bf16", "fp16", "int8" or "int4", without error
            feedback, or `ReduceScatterOptions`; None for PyTorch's reduce-scatter.

    Returns:
        A handle; its ``report`` says what is compressed.

    Raises:
        TypeError: ``model`` is none of these, ``state`` and ``within`` are both missing, or ``hook`` is missing for a
            state that several hooks share.
        NotImplementedError: a hook on FSDP2 without replicas, or a release of PyTorch that gradwire does not know.
        ValueError: ``within`` is not a wire format, has no effect on this model, or has a name pattern that matches no
            parameter; the model has replicas of different ranks; or the state belongs to another model.

    Examples:
        >>> fully_shard(model, mesh=init_device_mesh("cuda", (n_nodes, 8), mesh_dim_names=("replicate", "shard")))
        >>> gradwire.attach(model, QuantizationState(wire="int4"), within="bf16")
    """
    options = _reduce_scatter_options(within)
    averages = state is not None or hook is not None or within is None
    if averages:
        hook = hook or _hook_of(state)
        check_pairing(state, hook)
    if isinstance(model, TorchDDP):
        if within is not None:
            raise ValueError("within has no effect on a DistributedDataParallel, which has no shards. Leave it out.")
        model.register_comm_hook(state, cast("CommHook", hook))
        return Attachment(state, f"{name_of(hook)} compresses the all-reduce of {type(model).__name__}")
    groups = list(parameter_groups(model))
    replicated = [(group, replicas) for group in groups if (replicas := replica_group(group)) is not None]
    scattered = [group for group in groups if has_shards(group)]
    _check_groups(model, groups, [replicas for _, replicas in replicated], scattered, averages, within)
    module_names = {module: plain_name(found) for found, module in model.named_modules()}
    names = {group: parameter_names(group, module_names) for group in groups}
    check_patterns(options, [name for each in names.values() for name in each], "within")
    if averages and isinstance(state, HookState):
        replicated_names = [name for group, _ in replicated for name in names[group]]
        state.names.check_names(replicated_names)
        check_patterns(state.options, replicated_names)
    before = [(group, group.mesh_info, reduce_scatter_of(group)) for group in groups]
    process_groups = [
        each for group in groups for each in (shard_group(group), replica_group(group), *mesh_groups(group)) if each
    ]
    settings = {name: str(value) for name, value in option_values(options).items()}
    exchange = ShardedExchange(process_groups, groups[0].device, {"hook": "attach", **settings})
    report = []
    if averages:
        assert hook is not None
        state = in_group(state, hook, replicated[0][1])
        report.append(_attach_to_replicas(replicated, names, state, hook, exchange))
    if options is not None:
        report.append(_attach_to_shards(scattered, names, dict(replicated), options, exchange))
    plain = ["the reduce-scatter"] if scattered and options is None else []
    if replicated and not averages:
        plain.append("the all-reduce between replicas")
    elif exchange.n_groups < len(replicated):
        left = len(replicated) - exchange.n_groups
        plain.append(f"{left} parameter groups of several dtypes or without gradients")
    if plain:
        report.append(f"plain: {', '.join(plain)}")
    parameters = {name: each for group in groups for name, each in zip(names[group], group.fsdp_params, strict=True)}
    return Attachment(state, "; ".join(report), before, parameters, exchange, model)


def is_attached(model: nn.Module) -> bool:
    """Whether gradwire compresses an exchange of this FSDP2 model."""
    return any(map(_is_changed, parameter_groups(model)))


def _is_changed(group: Any) -> bool:
    return isinstance(replica_group(group), ReplicaGroup) or isinstance(
        reduce_scatter_of(group), QuantizedReduceScatter
    )


def _reduce_scatter_options(within: object) -> ReduceScatterOptions | None:
    if within is None or isinstance(within, ReduceScatterOptions):
        return within
    if not isinstance(within, str) or within not in WIRE_FORMATS:
        raise ValueError(
            f"within is {within!r}; expected one of {', '.join(map(repr, WIRE_FORMATS))}, a "
            "gradwire.sharded.ReduceScatterOptions, or None."
        )
    return ReduceScatterOptions(wire=within, use_error_feedback=False)


def _check_groups(
    model: nn.Module,
    groups: Sequence[Any],
    replicas: Sequence[dist.ProcessGroup],
    scattered: Sequence[Any],
    averages: bool,
    within: object,
) -> None:
    """Raise an error with the remedy unless the model has the exchanges that are to be compressed."""
    if not groups:
        raise TypeError(
            f"attach was given a {type(model).__name__}; expected a DistributedDataParallel, or a model after "
            "fully_shard(model) or replicate(model). FSDP1 (FullyShardedDataParallel) has no place for a compressor: "
            "use fully_shard."
        )
    if averages and not replicas:
        raise NotImplementedError(
            "This model is sharded by fully_shard over a 1-D mesh, so nothing is averaged between replicas. Pass "
            "attach(model, within='bf16') for the reduce-scatter, or shard over a 2-D mesh (replicate, shard) whose "
            "shards share fast links."
        )
    if within is not None and not scattered:
        raise ValueError("within has no effect on this model, which has no shards. Leave it out.")
    if any(map(_is_changed, groups)):
        raise ValueError("gradwire is attached to this model already. Call detach() of its Attachment first.")
    ranks = {tuple(dist.get_process_group_ranks(each)) for each in replicas}
    if averages and len(ranks) > 1:
        raise ValueError(
            f"The parameter groups of this model have replicas on different ranks: {sorted(ranks)}. Attach a state of "
            "its own to each submodule."
        )


def _attach_to_replicas(
    replicated: Sequence[tuple[Any, dist.ProcessGroup]],
    names: Mapping[Any, Sequence[str]],
    state: Any,
    hook: CommHook,
    exchange: ShardedExchange,
) -> str:
    """Let a hook average all parameter groups; returns a line of the report."""
    buckets = []
    for group, own in replicated:
        stand_in = ReplicaGroup(own, group, names[group], state, hook, exchange)
        replace_replica_group(group, stand_in)
        buckets.append(stand_in.bucket(reduced_dtype(group)))
    found = [bucket for bucket in buckets if bucket is not None]
    exchange.n_groups = len(found)
    layouts = {
        name: each for bucket in found for name, each in zip(bucket.parameter_names(), bucket.parameters(), strict=True)
    }
    for bucket in found:
        bucket.model_parameters = list(layouts.values())
    if isinstance(state, HookState):
        # A pattern may match only parameters that are not compressed, or of which this rank has no rows.
        empty = {name: torch.empty(0, device=group.device) for group, _ in replicated for name in names[group]}
        state.names.bind_layouts(empty | layouts)
        exchange.step_ends.append(state._begin_step)
    return (
        f"{name_of(hook)} compresses the all-reduce of {exchange.n_groups} parameter groups between "
        f"{replicated[0][1].size()} replicas"
    )


def _attach_to_shards(
    scattered: Sequence[Any],
    names: Mapping[Any, Sequence[str]],
    replicas: Mapping[Any, dist.ProcessGroup],
    options: ReduceScatterOptions,
    exchange: ShardedExchange,
) -> str:
    """Quantize the reduce-scatter of parameter groups; returns a line of the report."""
    for group in scattered:
        native = reduce_scatter_of(group)
        compressed = QuantizedReduceScatter(native, group, names[group], replicas.get(group), options, exchange)
        replace_reduce_scatter(group, compressed)
    errors = str(options.error_dtype).removeprefix("torch.")
    feedback = f", and error feedback in {errors}" if options.use_error_feedback else ""
    return f"{len(scattered)} parameter groups are reduce-scattered in {options.wire}, with sums in fp32{feedback}"


def _hook_of(state: Any) -> CommHook:
    """The hook that a state is made for: the function of that name in the state's module."""
    if state is None:
        raise TypeError(
            "attach was given neither a state nor within. Pass the state of a hook, as in "
            "attach(model, QuantizationState()), or within='bf16' for the reduce-scatter of FSDP2."
        )
    found = None
    if isinstance(state, HookSettings):
        found = getattr(sys.modules[type(state).__module__], state.hook_name, None)
    if found is None:
        raise TypeError(f"attach needs the hook for {type(state).__name__}: attach(model, state, hook).")
    return found  # type: ignore[no-any-return]
