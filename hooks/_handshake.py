"""The handshake: before a hook's first collective on a process group, the ranks compare their hooks and options.

Ranks with different options would sum unrelated numbers and drift apart without an error. Therefore:

1. Each bucket calls `HookSettings.agree`. If the settings are those that all ranks of the process group have agreed
   on for this model, it returns at once, after two look-ups and a comparison.
2. Otherwise the ranks exchange a digest of the settings, of the replicated state, of the bucket's layout and of
   gradwire's version. This happens at the first bucket of a model, after the state was loaded, after an option was
   changed, and after ``resynchronize()``.
   The exchange goes through the process group's store: no collective is issued, and nothing is modified before it.
3. If the digests differ, every rank sees it. The ranks exchange the full text, and all raise the same error.

If a rank does not join, because it runs another kind of hook or did not load its state, the others name it after a
timeout.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradwire._version import __version__
from gradwire.comm.connections import connections_of
from gradwire.comm.store_collectives import (
    RanksMissing,
    collective_timeout,
    format_differences,
    format_ranks,
    store_all_gather,
)
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.hooks._bucket import ModelBucket, bucket_device, bucket_dtype, is_gradwire_hook, is_sparse
from gradwire.hooks._parameter_names import registered_wrappers
from gradwire.hooks._types import GradBucket
from gradwire.hooks.telemetry import Recorder

# Longest wait for the other ranks in a later handshake, or half of the process group's timeout if that is less: a
# rank that does not join already waits in a collective, and must get the reason before its timeout. In the first
# handshake, ranks may still be loading data, and have the whole timeout.
AGAIN_TIMEOUT = timedelta(seconds=30)

_PURPOSE = "The handshake of communication hooks"
_REMEDY = (
    "Register the same hook with the same options on every rank, load the same checkpoint on every rank or on none, "
    "and install the same gradwire."
)
_UNCHANGED = "Nothing was sent; gradients, parameters and states are as they were."


class HookSettings:
    """The settings of a hook, which must be equal on all ranks, and the process groups that have agreed on them.

    States of hooks derive from this class; for a hook without a state, its module has an instance.

    Args:
        hook: name of the hook.

    Attributes:
        hook_name: name of the hook.
    """

    def __init__(self, hook: str) -> None:
        self.hook_name = hook
        self._agreed: WeakKeyDictionary[dist.ProcessGroup, _Agreement] = WeakKeyDictionary()
        self._is_loaded_anew = False  # since the last handshake

    def settings(self) -> dict[str, object]:
        """The hook's name and options, as plain values. Every bucket compares them, so this must be cheap."""
        return {"hook": self.hook_name}

    def replicated(self) -> dict[str, object]:
        """Further values that a handshake compares: counters, and digests of loaded memory."""
        return {}

    def parameter_names(self, bucket: GradBucket) -> Sequence[str]:
        """Names of the bucket's parameters in the state; empty for a hook without memory."""
        return ()

    def expect_handshake(self) -> None:
        """Request a handshake at the next bucket; call it after the state was loaded."""
        self._is_loaded_anew = True
        for agreement in self._agreed.values():
            agreement.settings = None

    def agree(
        self, bucket: GradBucket, process_group: dist.ProcessGroup | None, recorder: Recorder | None = None
    ) -> dist.ProcessGroup:
        """Compare the settings with the other ranks, once per model. Every hook calls it before anything else.

        Args:
            bucket: the current bucket.
            process_group: the ranks; None for the DistributedDataParallel's. PyTorch's does not tell them: there it
                is the default group, which must have the same ranks. On gradwire's, a group of the same ranks is
                replaced by the model's.
            recorder: measurements of the hook's state, whose settings must be equal, too; None if there are none.

        Returns:
            The process group to average over.

        Raises:
            RuntimeError: the settings differ, or a rank does not join. Every rank that joins raises.
            ValueError: the DistributedDataParallel has other ranks.
        """
        group = getattr(bucket, "process_group", None)  # of gradwire's DDP; None if no reducer has launched the bucket
        if group is None:
            group = process_group or default_group()
        elif process_group is not None and process_group is not group:
            group = _chosen_group(cast("ModelBucket", bucket), process_group)
        settings, generation = self.settings(), connections_of(group).generation
        if recorder is not None:
            settings = settings | recorder.settings()
        agreement = self._agreed.get(group)
        if agreement is None or agreement.generation != generation:
            agreement = self._agreed[group] = _Agreement(generation)
        again = bucket.parameters()[0] in agreement.parameters
        if again and agreement.settings == settings:
            return group
        layout, names = _layout(bucket), self.parameter_names(bucket)
        parameters = (
            bucket.model_parameters
            if hasattr(bucket, "model_parameters")
            else _parameters_in_pytorchs_ddp(bucket, group, process_group is None)
        )
        facts = {
            "gradwire": __version__,
            **settings,
            "loaded since the last handshake": again and self._is_loaded_anew,
            **self.replicated(),
            "names of its parameters": f"{names[0]} and so on, digest {digest(names)}" if names else "not needed",
            **layout,
        }
        _compare(group, {name: str(fact) for name, fact in facts.items()}, again)
        agreement.settings = copied(settings)
        agreement.parameters.update(dict.fromkeys(parameters, True))
        self._is_loaded_anew = False
        if recorder is not None:
            recorder.agreed()
        return group


def copied(settings: Mapping[str, object]) -> dict[str, object]:
    """A copy of settings, so that dictionaries among them may be modified in place and compared."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


class _Agreement:
    """The settings that all ranks of a process group have agreed on.

    Attributes:
        generation: generation of the connections. A handshake that one rank finished may have failed on another.
        settings: those of the hook; None before the first handshake, and after a load.
        parameters: parameters of the models whose handshake is over.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.settings: dict[str, object] | None = None
        self.parameters = WeakIdKeyDictionary()


def digest(value: object) -> str:
    """Eight bytes in hexadecimal: a hash of ``repr(value)``, or of a mapping of names to tensors, bits included."""
    hashed = blake2b(digest_size=8)
    if isinstance(value, Mapping):
        for name, tensor in sorted(value.items()):
            hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            hash_bytes(hashed, tensor)
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


def hash_bytes(hashed: blake2b, tensor: torch.Tensor) -> None:
    """Update a hash with the bits of a tensor, in row-major order."""
    here = tensor.detach().to("cpu").contiguous()
    if here.numel() > 0:
        hashed.update((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))


def _compare(group: dist.ProcessGroup, facts: dict[str, str], again: bool) -> None:
    """Raise RuntimeError on every rank unless the facts are equal on all."""
    text = json.dumps(facts, sort_keys=True)
    timeout = min(AGAIN_TIMEOUT, collective_timeout(group) / 2) if again else collective_timeout(group)
    try:
        digests = store_all_gather(group, _PURPOSE, digest(text), timeout, connections_of(group).check_peers)
    except RanksMissing as error:
        problem = (
            f"The state of {facts['hook']} was loaded, or an option was changed, on this rank but not on"
            if again
            else f"This rank runs {facts['hook']}, but no gradwire hook has started on"
        )
        raise RuntimeError(f"{problem} {format_ranks(error.ranks)} within {timeout}. {_UNCHANGED} {_REMEDY}") from error
    if len(set(digests)) == 1:
        return
    everybodys = [json.loads(each) for each in store_all_gather(group, f"{_PURPOSE}, after a mismatch", text)]
    lines = format_differences(everybodys, dist.get_process_group_ranks(group))
    raise RuntimeError(f"Communication hooks differ between ranks:{lines}\n{_UNCHANGED} {_REMEDY}")


def _layout(bucket: GradBucket) -> dict[str, object]:
    """The facts about a bucket that must be equal on all ranks, for a handshake."""
    kind = "sparse gradients" if is_sparse(bucket) else "gradients"
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    return {
        "bucket": f"{bucket.index()}, the last" if bucket.is_last() else bucket.index(),
        kind: f"{bucket_dtype(bucket)} on {bucket_device(bucket).type}",
        "parameters of the bucket": len(shapes),
        **{f"shape of its parameter {i}": shape for i, shape in enumerate(shapes)},
    }


def _chosen_group(bucket: ModelBucket, chosen: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that a hook on gradwire's DistributedDataParallel uses, if its own is another object."""
    own = bucket.process_group
    assert own is not None
    if not is_initialized_group(chosen):
        return own
    if bucket.hook_has_groups:
        return chosen
    check_same_ranks(chosen, own, "hook's process group")
    return own


def _parameters_in_pytorchs_ddp(
    bucket: GradBucket, group: dist.ProcessGroup, is_default: bool
) -> Sequence[torch.Tensor]:
    """All parameters of the model of a bucket of PyTorch's DDP, as far as that is found.

    Raises:
        ValueError: the DDP averages over other ranks than ``group``, which nobody has chosen.
    """
    parameters = bucket.parameters()
    wrappers = [ddp for ddp in registered_wrappers(None, parameters) if not hasattr(ddp, "resynchronize")]
    # Only DDPs with a hook of gradwire's: other hooks may have their own process groups.
    checked = [ddp for ddp in wrappers if is_default or any(is_gradwire_hook(hook) for hook, _ in ddp._comm_hooks)]
    if checked and not any(have_same_ranks(group, ddp.process_group) for ddp in checked):
        check_same_ranks(group, checked[0].process_group, "default group" if is_default else "hook's process group")
    return list(wrappers[0].module.parameters()) if len(wrappers) == 1 else parameters


def have_same_ranks(group: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two process groups have the same ranks, in any order."""
    return set(dist.get_process_group_ranks(group)) == set(dist.get_process_group_ranks(other))


def check_same_ranks(group: dist.ProcessGroup, of_wrapper: dist.ProcessGroup, what: str) -> None:
    """Raise ValueError unless a hook averages over the ranks of its DistributedDataParallel."""
    ranks, wanted = map(dist.get_process_group_ranks, (group, of_wrapper))
    if not have_same_ranks(group, of_wrapper):
        raise ValueError(
            f"The {what} has ranks {ranks}, the DistributedDataParallel {wanted}: its gradients would be averaged over "
            "other ranks than its parameters. Pass the hook or its state the process group of the model, "
            "model.process_group."
        )
