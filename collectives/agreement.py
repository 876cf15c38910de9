"""`Agreement`: whether to compress a call, when the ranks may want different things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.collectives.functions import CompressedWork
from gradwire.comm import connections_of
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.comm.torch_internals import default_group

Kind = tuple[str, torch.dtype, torch.device, torch.Size]  # collective, and dtype, device and shape of its tensor
Exchange = Callable[[Tensor, bool], CompressedWork | None]  # starts a call that writes a tensor, with a mark
PLAIN_AFTER = 20  # calls that no rank wanted to compress; then the ranks no longer ask each other


@dataclass
class _History:
    """The calls of one kind. Equal on all ranks."""

    n_unwanted: int = 0
    n_wanted: int = 0


class Agreement:
    """Compresses the calls on the default group that any rank wants to compress. All ranks make the same calls.

    For each kind of call:

    1. Before a call, the ranks ask each other, in a message of one number.
    2. While all calls so far were wanted, they do not ask. A rank that wants the call exchanges at once. A rank that
       does not takes part with a copy of its tensor: messages carry a mark of the ranks that want the call. If no rank
       does, all drop the result, and ask from then on.
    3. If no rank has wanted any of `PLAIN_AFTER` calls, none is compressed from then on.

    On GPUs, and on nodes of several ranks, messages do not bring every rank's mark to all, so the ranks ask until 3.
    """

    def __init__(self) -> None:
        self._histories: dict[Kind, _History] = {}

    def exchange(self, kind: Kind, wanted: bool, written: Tensor, exchange: Exchange) -> CompressedWork | None:
        """The handle of a compressed call that overwrites ``written``; None if no rank wants it, and nothing changed.

        Args:
            kind: the kind of the call.
            wanted: whether this rank wants it.
            exchange: starts it.
        """
        history = self._histories.setdefault(kind, _History())
        if history.n_wanted == 0 and history.n_unwanted >= PLAIN_AFTER:
            return None
        is_sure = history.n_wanted > 0 and history.n_unwanted == 0 and _carries_marks(written.device)
        if is_sure and wanted:
            return exchange(written, True)
        if is_sure:
            return self._join(history, written, exchange)
        if _on_any_rank(wanted, written.device):
            history.n_wanted += 1
            return exchange(written, wanted)
        history.n_unwanted += 1
        return None

    @staticmethod
    def _join(history: _History, written: Tensor, exchange: Exchange) -> CompressedWork | None:
        """Take part with a copy, and drop the result if no rank wants it."""
        copy = written.detach().clone(memory_format=torch.preserve_format)
        work = exchange(copy, False)
        if work is None:
            return None
        work.wait()
        if work.is_marked:
            with torch.no_grad():
                written.copy_(copy)
            return work
        history.n_unwanted += 1
        return None


def _carries_marks(device: torch.device) -> bool:
    """Whether the messages of a call bring the mark of every rank to all."""
    executor = connections_of(default_group()).executor(device)
    return not isinstance(executor, StreamExecutor) and executor.transport.local_size == 1


def _on_any_rank(value: bool, device: torch.device) -> bool:
    """Whether a value is true on any rank of the default group. A collective call."""
    group = default_group()
    transport = connections_of(group).transport("what to compress", device)
    found = torch.tensor([int(value)], device=device)
    transport.launch(transport.all_reduce_max(found))()
    return bool(found)
