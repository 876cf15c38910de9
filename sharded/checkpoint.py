"""Checkpoints of the hook and the reduce-scatter of a sharded model: `save` and `load`, as `Attachment` calls them.

Errors are saved as `DTensor`s, sharded like the parameters, so they load with other numbers of shards and replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire.exchange.hook_state import HookState
from gradwire.exchange.memory import StateDict
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter
from gradwire.sharded.torch_internals import ParameterGroup
from gradwire.validation import check_elements, check_entries, check_tensor

WITHIN = "within"  # the entry with the errors of the reduce-scatter


def save(
    state: Any,
    saved: StateDict,
    groups: Sequence[ParameterGroup],
    reduce_scatters: Sequence[QuantizedReduceScatter],
) -> StateDict:
    """The entries ``saved`` of a hook's state, sharded, and the errors of the reduce-scatters. A collective call."""
    if saved and not isinstance(state, HookState):
        raise NotImplementedError(f"The state is a {type(state).__name__}; only a HookState can be sharded.")
    if isinstance(state, HookState):
        saved = _sharded_entries(state, saved, groups)
    if reduce_scatters:
        within = {name: error for each in reduce_scatters for name, error in each.saved_errors().items()}
        saved[WITHIN] = _as_shards(within, groups)
    return saved


def _sharded_entries(state: HookState, saved: StateDict, groups: Sequence[ParameterGroup]) -> StateDict:
    memory = state.memory.declared
    entries = [entry for entry in saved if not isinstance(saved[entry], int)]
    if not memory and entries:
        return state.merge_shards(saved, list(dict.fromkeys(each.shards for each in groups if each.shards)))
    for entry in entries:
        if entry not in memory or memory[entry].shape is None:
            del saved[entry]
        elif saved[entry] or state._keeps(entry):
            saved[entry] = _as_shards(saved[entry], groups)
    return saved


def load(
    state: Any,
    saved: Mapping[str, Any],
    groups: Sequence[ParameterGroup],
    reduce_scatters: Sequence[QuantizedReduceScatter],
) -> None:
    """Continue from the result of `save`; raises ValueError, before anything is modified, if it does not fit."""
    within: StateDict = {}
    if reduce_scatters:
        within = _local_shards(saved, WITHIN)
        for name, parameter in _trainable(groups):
            check_tensor(f"within[{name!r}]", within.get(name), (torch.float32,), tuple(parameter.sharded_size))
            check_elements(f"within[{name!r}]", within[name], within[name].isfinite(), "a finite number")
    if isinstance(state, HookState):
        loaded: StateDict = {entry: {} for entry in state.memory.declared} | state._counts
        compressed = set(state.names.compressible().values())  # others have zeros in a checkpoint
        for entry, value in saved.items():
            if entry in state.memory.declared:
                shards = _local_shards(saved, entry)
                loaded[entry] = {
                    name: each for name, each in shards.items() if name in compressed or each.count_nonzero() > 0
                }
            elif entry != WITHIN:
                loaded[entry] = value
        state.load_state_dict(loaded)
    for each in reduce_scatters:
        each.load_errors(within)


def _trainable(groups: Sequence[ParameterGroup]) -> Iterable[tuple[str, Any]]:
    every = (pair for group in groups for pair in group.parameters.items())
    return ((name, each) for name, each in every if each.sharded_param.requires_grad)


def _as_shards(tensors: Mapping[str, Tensor], groups: Sequence[ParameterGroup]) -> dict[str, DTensor]:
    """Tensors in the layouts of the parameters' shards, as DTensors; zeros where there is none. Padding is cut off."""
    shards = {}
    for name, parameter in _trainable(groups):
        whole, size = parameter.sharded_param, parameter.sharded_size
        tensor = tensors[name] if name in tensors else torch.zeros(size)
        shards[name] = DTensor.from_local(
            tensor[tuple(map(slice, size))].contiguous(),
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return shards


def _local_shards(state_dict: Mapping[str, Any], entry: str) -> StateDict:
    """This rank's shards of an entry of a checkpoint, by parameter name."""
    check_entries(state_dict, "Attachment", (entry,))
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in state_dict[entry].items()}
