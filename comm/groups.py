"""gradwire's own process groups: gloo groups with the ranks of a given group."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from gradwire.comm.store_collectives import wait_for_ranks
from gradwire.comm.torch_internals import PrefixStore, Store


def is_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives of CPU tensors run on gloo."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get("cpu") == "gloo"


def duplicate_group(group: dist.ProcessGroup, store: Store, key: str, check: Callable[[], None]) -> dist.ProcessGroup:
    """Make a gloo group with the ranks and the timeout of ``group``. A collective call of them only.

    ``dist.new_group`` does not serve: it names a group by the number of groups that the process has
    made, which may differ between the ranks.

    Args:
        group: the group to duplicate; it must have gloo for CPU tensors.
        store: where the ranks find each other.
        key: names the new group in ``store``; equal on all ranks, never used before.
        check: called while waiting for the other ranks; raises to end the wait.

    Raises:
        NotImplementedError: ``group`` has no gloo.
        RuntimeError: some ranks did not make this call within the group's timeout.
    """
    if not is_gloo_on_cpu(group):
        raise NotImplementedError(
            f"The process group's backends are {dist.get_backend_config(group)}; gradwire's hooks need gloo "
            'for CPU tensors. Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
        )
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    # Creating a gloo group blocks and cannot be interrupted, so the ranks meet in the store first.
    keys = [f"{key}/{rank} is here" for rank in range(group.size())]
    store.set(keys[group.rank()], "")
    if missing := wait_for_ranks(group, store, keys, timeout, check):
        raise RuntimeError(
            f"Ranks {missing} have not begun to exchange gradients within {timeout}, as this rank has. Use "
            "the same model, wrapper and hook on every rank."
        )
    own = dist.ProcessGroupGloo(PrefixStore(key, store), group.rank(), group.size(), timeout)
    return cast("dist.ProcessGroup", own)
