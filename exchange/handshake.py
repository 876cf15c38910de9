"""The handshake: before a hook's first collective on a process group, the ranks compare their hooks and options.

Ranks with different options would sum unrelated numbers and drift apart without an error. Therefore:

1. Each bucket calls `Handshake.agree`, which returns at once if all ranks of the process group have agreed on these
   settings for this model.
2. Otherwise, at the first bucket of a model and after a load, a changed option or ``resynchronize()``, the ranks
   exchange a digest of settings, replicated state, layout of the bucket and version, through the process group's store.
   No collective is issued, and nothing is modified before it.
3. If the digests differ, the ranks exchange the full text, and all raise the same error. If a rank does not join, the
   others name it after a timeout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm.connections import Connections, connections_of
from gradwire.comm.rank_differences import format_ranks
from gradwire.comm.store_collectives import RanksMissing, collective_timeout, differences_between_ranks
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.exchange.bucket import Bucket
from gradwire.exchange.decorators import is_gradwire_hook
from gradwire.exchange.names import registered_wrappers
from gradwire.version import __version__

# Longest wait for the other ranks in a later handshake, or half of the process group's timeout if that is less: a
# rank that does not join already waits in a collective, and must get the reason before its timeout. In the first
# handshake, ranks may still be loading data, and have the whole timeout.
AGAIN_TIMEOUT = timedelta(seconds=30)


class Words(NamedTuple):
    """The sentences of a comparison's errors."""

    subject: str  # begins the error of a difference
    missing: str  # {ranks} have not come to the first comparison of {what} within {timeout}; this one is {rank}
    missing_again: str  # to a later one
    hint: str  # the likely cause of a long wait
    remedy: str
    purpose: str  # names the collective call through the store
    waiting: str  # what a rank that waits announces


HOOKS = Words(
    subject="Communication hooks",
    missing="This rank runs {what}, but no gradwire hook has started on {ranks} within {timeout}.",
    missing_again="The state of {what} was loaded, or an option was changed, on this rank but not on {ranks} within "
    "{timeout}.",
    hint="If the hook was registered on this rank only, as after `if rank == 0:`, the others run without it and wait "
    "for this rank in their all-reduce: register it on every rank.",
    remedy="Register the same hook with the same options on every rank, load the same checkpoint on every rank or on "
    "none, and install the same gradwire.",
    purpose="The handshake of communication hooks",
    waiting="Rank {rank} has registered {what}",
)
_UNCHANGED = "Nothing was sent; gradients, parameters and states are as they were."


class Handshake:
    """The process groups that have agreed on the settings of a hook, for the models of each."""

    def __init__(self) -> None:
        self._agreed: WeakKeyDictionary[dist.ProcessGroup, dict[str, AgreedSettings]] = WeakKeyDictionary()  # by hook
        self.is_loaded_anew = False  # whether the state was loaded since the last handshake

    def expect(self) -> None:
        """Request a handshake at the next bucket; call it after the state was loaded."""
        self.is_loaded_anew = True
        self.revoke()

    def revoke(self) -> None:
        """Request a handshake at the next bucket of every process group."""
        for agreements in self._agreed.values():
            for agreement in agreements.values():
                agreement.settings = agreement.token = None

    def agreement(self, group: dist.ProcessGroup, hook: str) -> AgreedSettings | None:
        """The latest agreement on the settings of a hook on a process group; None if there was none."""
        return self._agreed.get(group, {}).get(hook)

    def agree(
        self, state: Any, bucket: Bucket, process_group: dist.ProcessGroup | None, names: Sequence[str] = ()
    ) -> Connections:
        """Compare the settings of ``state`` with the other ranks, once per model; returns the connections to them.

        Every hook calls it first. ``state`` is a `HookSettings`; ``names`` are those of the bucket's parameters, if the
        hook needs them.

        Without ``process_group``, that is the DistributedDataParallel's. PyTorch's does not name it: there it is the
        default group, which must have the same ranks. On gradwire's, a group of the same ranks is replaced by the
        model's.

        Raises:
            RuntimeError: the settings differ, a rank does not join, or on PyTorch's DistributedDataParallel a hook has
                stepped an optimizer before the average. Every rank that joins raises.
            ValueError: the DistributedDataParallel has other ranks.
        """
        group = _group_of(bucket, process_group)
        if bucket.note_use is not None:
            bucket.note_use(state, group)
        connections, own, telemetry = connections_of(group), state._compared_options(), state.telemetry
        settings = own if telemetry is None else {**own, **telemetry.settings()}
        agreements = self._agreed.setdefault(group, {})
        agreement = agreements.get(state.hook_name)
        if agreement is None or agreement.generation != connections.generation:
            agreement = agreements[state.hook_name] = AgreedSettings(connections.generation)
        again = bucket.first in agreement.parameters
        if again and agreement.settings == settings:
            return connections
        parameters, stepped = bucket.model_parameters, None
        if parameters is None:
            ddp = _pytorchs_ddp(bucket, group, process_group is None)
            parameters = bucket.parameters() if ddp is None else list(ddp.module.parameters())
            stepped = None if ddp is None else _find_stepped(ddp, bucket)
        is_loaded = {"loaded since the last handshake": again and self.is_loaded_anew}
        facts = {**settings, **is_loaded, **state._handshake_facts(), **_facts_of_bucket(bucket, names, stepped)}
        compare_settings(group, {name: str(fact) for name, fact in facts.items()}, again, bucket.model_number)
        if stepped is not None:
            raise RuntimeError(stepped_early(f"The gradient of {stepped} was removed"))
        settings = _copied(settings)
        state._apply_settings({name: settings[name] for name in own})  # measuring changes no buckets
        agreement.settings, agreement.token = settings, object()
        agreement.parameters.update(dict.fromkeys(parameters, True))
        self.is_loaded_anew = False
        if telemetry is not None:
            telemetry.agreed()
        return connections


class AgreedSettings:
    """The agreement of all ranks of a process group on the settings of a hook."""

    def __init__(self, generation: int) -> None:
        # Generation of the connections: a handshake that succeeded here may have failed on another rank.
        self.generation = generation
        self.settings: dict[str, object] | None = None  # None before the first handshake, and if another one is due
        self.token: object = None  # another object after every handshake; None like the settings
        self.parameters = WeakIdKeyDictionary()  # parameters of the models whose handshake is over


def digest(value: object) -> str:
    """Eight bytes in hexadecimal: a hash of ``repr(value)``, or of a mapping of names to tensors, bits included."""
    hashed = blake2b(digest_size=8)
    if isinstance(value, Mapping):
        for name, tensor in sorted(value.items()):
            hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            here = tensor.detach().to("cpu").contiguous()  # in row-major order
            if here.numel() > 0:
                hashed.update((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


def compare_settings(
    group: dist.ProcessGroup,
    settings: Mapping[str, str],
    again: bool,
    model_number: int = 0,
    words: Words = HOOKS,
) -> None:
    """Raise RuntimeError on every rank unless the settings, with the name of the ``hook``, are equal on all.

    While a rank waits, it announces ``words.waiting``: a rank without a hook waits in its all-reduce, and then raises.
    ``again``: whether the ranks have compared settings before, and do not wait long for each other.
    """
    connections, facts = connections_of(group), {"gradwire": __version__, **settings}
    has_told = False

    def check() -> None:
        nonlocal has_told
        connections.check_peers()
        if model_number > 0 and not has_told:
            text = words.waiting.format(rank=dist.get_rank(), what=facts["hook"])
            connections.announce(model_number, "hook", text)
            has_told = True

    try:
        if lines := _compare_through_store(group, facts, again, check, words):
            raise RuntimeError(f"{words.subject} differ between ranks:{lines}\n{_UNCHANGED} {words.remedy}")
    finally:
        if has_told:
            connections.announce(model_number, "hook", "")


def _compare_through_store(
    group: dist.ProcessGroup, facts: dict[str, str], again: bool, check: Callable[[], None], words: Words
) -> str:
    """The differences, one in a line; empty without any. Raises RuntimeError if a rank does not join."""
    timeout = min(AGAIN_TIMEOUT, collective_timeout(group) / 2) if again else collective_timeout(group)
    try:
        return differences_between_ranks(group, words.purpose, facts, timeout, check, "" if again else words.hint)
    except RanksMissing as error:
        problem = words.missing_again if again else words.missing
        problem = problem.format(
            rank=dist.get_rank(), what=facts["hook"], ranks=format_ranks(error.ranks), timeout=timeout
        )
        raise RuntimeError(f"{problem} {_UNCHANGED} {words.remedy}") from error


def _copied(settings: Mapping[str, object]) -> dict[str, object]:
    """A copy: dictionaries among the options may be modified in place."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


def _facts_of_bucket(bucket: Bucket, names: Sequence[str], stepped: str | None) -> dict[str, object]:
    kind = "sparse gradients" if bucket.is_sparse else "gradients"
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    return {
        "parameter whose gradient was removed in the backward": stepped or "none",
        "names of its parameters": f"{names[0]} and so on, digest {digest(names)}" if names else "not needed",
        "bucket": f"{bucket.position}, the last" if bucket.is_final else bucket.position,
        kind: f"{bucket.dtype} on {bucket.device.type}",
        "parameters of the bucket": len(shapes),
        **{f"shape of its parameter {i}": shape for i, shape in enumerate(shapes)},
    }


def _group_of(bucket: Bucket, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group of a bucket's exchange, if the hook or its state has ``process_group``."""
    own = bucket.process_group
    if own is None:
        return process_group or default_group()
    return own if process_group is None or process_group is own else _chosen_group(bucket, process_group)


def _chosen_group(bucket: Bucket, chosen: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that a hook on gradwire's DistributedDataParallel uses, if its own is another object."""
    own = bucket.process_group
    assert own is not None
    if not is_initialized_group(chosen):
        return own
    if bucket.note_use is not None:
        return chosen
    check_same_ranks(chosen, own, "hook's process group")
    return own


def _pytorchs_ddp(bucket: Bucket, group: dist.ProcessGroup, is_default: bool) -> TorchDDP | None:
    """The wrapper of a bucket of PyTorch's DDP; None if there is not exactly one.

    Raises ValueError if the DDP averages over other ranks than a group that was not passed explicitly.
    """
    parameters = bucket.parameters()
    wrappers = [ddp for ddp in registered_wrappers(None, parameters) if not hasattr(ddp, "resynchronize")]
    # Only DDPs with a hook of gradwire's: other hooks may have their own process groups.
    checked = [ddp for ddp in wrappers if is_default or any(is_gradwire_hook(hook) for hook, _ in ddp._comm_hooks)]
    ranks = set(dist.get_process_group_ranks(group))
    if checked and not any(ranks == set(dist.get_process_group_ranks(ddp.process_group)) for ddp in checked):
        check_same_ranks(group, checked[0].process_group, "default group" if is_default else "hook's process group")
    return wrappers[0] if len(wrappers) == 1 else None


def _find_stepped(ddp: TorchDDP, bucket: Bucket) -> str | None:
    """The name of a parameter of the bucket whose gradient is gone, and which has hooks that run before DDP's own."""
    if ddp.find_unused_parameters or ddp.static_graph:  # it may have had none
        return None
    gone = [each for each in bucket.parameters() if each.grad is None and each._post_accumulate_grad_hooks]
    return next((name for name, each in ddp.module.named_parameters() if gone and each is gone[0]), None)


def stepped_early(event: str) -> str:
    """The error of an optimizer that was stepped before the average, in which ``event`` has shown it."""
    return (
        f"{event} before the gradient was averaged. An optimizer does that if it is stepped in a hook of the "
        "parameter, such as one of register_post_accumulate_grad_hook, or before finalize_backward(): each rank "
        "applies its own gradient, and parameters drift apart. Step the optimizer after the backward pass, or call "
        "torch.distributed.optim._apply_optimizer_in_backward before you wrap the model in "
        "gradwire.DistributedDataParallel, which then steps it with the averaged gradient. If parameters differ "
        "between ranks already, copy those of one rank, as resynchronize(from_rank=0) does."
    )


def check_same_ranks(group: dist.ProcessGroup, wrapper_group: dist.ProcessGroup, what: str) -> None:
    """Raise ValueError unless a hook averages over the ranks of its DistributedDataParallel, in any order."""
    ranks, wanted = map(dist.get_process_group_ranks, (group, wrapper_group))
    if set(ranks) != set(wanted):
        raise ValueError(
            f"The {what} has ranks {ranks}, the DistributedDataParallel {wanted}: its gradients would be averaged over "
            "other ranks than its parameters. Pass the hook or its state the process group of the model, "
            "model.process_group."
        )
