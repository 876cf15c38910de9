"""The handshake: before a hook's first collective on a process group, all ranks compare what they are about to run.

Ranks with different options would add up numbers that do not belong together, and drift apart without an error. So:

1. Each bucket asks `HookSettings.agree`. As long as the settings are those that all ranks have agreed on for the
   process group, it returns at once: a look-up and a comparison.
2. Otherwise (at the first bucket, after the state was loaded, after an option was changed) the ranks exchange a digest
   of the settings, of what must be replicated, of the bucket's layout and of gradwire's version. They do so through the
   process group's store, so no collective is issued, and nothing is changed before it.
3. If the digests differ, every rank knows. They exchange the full text, and each raises the same error.

A rank that does not come, because it runs another kind of hook or because its state was not loaded, is named after a
timeout.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire._version import __version__
from gradwire.comm.connections import connections_of
from gradwire.comm.store_collectives import (
    RanksMissing,
    collective_timeout,
    format_differences,
    format_ranks,
    store_all_gather,
)
from gradwire.hooks._types import GradBucket

# For the other ranks to shake hands again, or half of the process group's timeout: those that do not come wait in a
# collective already, and should hear the reason before that times out. The first time, when ranks may still be loading
# data, they have all of that timeout.
AGAIN_TIMEOUT = timedelta(seconds=30)

_PURPOSE = "The handshake of communication hooks"
_REMEDY = (
    "Register the same hook with the same options on every rank, load the same checkpoint on every rank or on none, "
    "and install the same gradwire."
)
_UNCHANGED = "Nothing was sent; gradients, parameters and states are as they were."


class HookSettings:
    """What must be equal on all ranks that run a hook, and the process groups on which it is.

    The state of a hook is one; a hook without a state has one in its module.

    Args:
        hook: the name of the hook.
    """

    def __init__(self, hook: str) -> None:
        self._hook = hook
        # The settings that all ranks have, by process group; None after a load. Ends with the group or the state.
        self._agreed: WeakKeyDictionary[dist.ProcessGroup, dict[str, object] | None] = WeakKeyDictionary()
        self._is_loaded_anew = False  # since the last handshake

    def settings(self) -> dict[str, object]:
        """The hook's name and options: plain values, cheap to collect, because every bucket compares them."""
        return {"hook": self._hook}

    def replicated(self) -> dict[str, object]:
        """What else must be equal at a handshake: counters, and a digest of loaded memory that ranks do not send."""
        return {}

    def parameter_names(self, bucket: GradBucket) -> Sequence[str]:
        """The names that the hook remembers the bucket's parameters by; none if it remembers nothing."""
        return ()

    def expect_handshake(self) -> None:
        """Shake hands again before the next bucket: the state has been loaded."""
        self._is_loaded_anew = True
        for group in list(self._agreed):
            self._agreed[group] = None

    def agree(self, group: dist.ProcessGroup, bucket: GradBucket, layout: Callable[[], Mapping[str, object]]) -> None:
        """Return if all ranks of ``group`` have the same settings; a collective call unless that is known already.

        Args:
            group: the ranks.
            bucket: the one at hand.
            layout: facts about it that must be equal; called in a handshake only.

        Raises:
            RuntimeError: the settings differ, on every rank; or some rank does not come.
        """
        settings = self.settings()
        if self._agreed.get(group) == settings:
            return
        again = group in self._agreed
        names = self.parameter_names(bucket)
        facts = {
            "gradwire": __version__,
            **settings,
            "loaded since the last handshake": again and self._is_loaded_anew,
            **self.replicated(),
            "names of its parameters": f"{names[0]} and so on, digest {digest(names)}" if names else "not needed",
            **layout(),
        }
        _compare(group, {name: str(fact) for name, fact in facts.items()}, again)
        self._agreed[group] = settings
        self._is_loaded_anew = False


def digest(value: object) -> str:
    """Eight bytes, as text: of a value's text, or of named tensors' names, shapes, dtypes and bits."""
    hashed = blake2b(digest_size=8)
    if isinstance(value, Mapping):
        for name, tensor in sorted(value.items()):
            hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            hash_bytes(hashed, tensor)
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


def hash_bytes(hashed: blake2b, tensor: torch.Tensor) -> None:
    """Add the bits of a tensor, in the order of its elements, to a hash."""
    here = tensor.detach().to("cpu").contiguous()
    if here.numel() > 0:
        hashed.update((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))


def _compare(group: dist.ProcessGroup, facts: dict[str, str], again: bool) -> None:
    """Raise on every rank unless all have the same facts."""
    text = json.dumps(facts, sort_keys=True)
    timeout = min(AGAIN_TIMEOUT, collective_timeout(group) / 2) if again else collective_timeout(group)
    try:
        digests = store_all_gather(group, _PURPOSE, digest(text), timeout, connections_of(group).check_peers)
    except RanksMissing as error:
        problem = (
            f"The state of {facts['hook']} was loaded, or an option was changed, on this rank but not on"
            if again
            else f"This rank runs {facts['hook']}, but no hook of gradwire's has begun on"
        )
        raise RuntimeError(f"{problem} {format_ranks(error.ranks)} within {timeout}. {_UNCHANGED} {_REMEDY}") from error
    if len(set(digests)) == 1:
        return
    everybodys = [json.loads(each) for each in store_all_gather(group, f"{_PURPOSE}, after a mismatch", text)]
    lines = format_differences(everybodys, dist.get_process_group_ranks(group))
    raise RuntimeError(f"Communication hooks differ between ranks:{lines}\n{_UNCHANGED} {_REMEDY}")
