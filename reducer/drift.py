"""Comparing ranks while they train: ``DistributedDataParallel(check_every=N)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.rank_differences import MAX_SHOWN, format_differences, out_of_step
from gradwire.comm.store_collectives import gather_json
from gradwire.exchange.handshake import digest
from gradwire.exchange.hook_state import HookState
from gradwire.kernels import as_real, is_capturing
from gradwire.reducer import torch_internals
from gradwire.reducer.exchange import Exchange

WORDS_AT_ONCE = 1 << 19  # a checksum takes up to 16 bytes of temporary memory for each of them
HOOK_STATE = "hook state"
PASSES = "synchronized forward passes"
_ODD = 0x1E3779B97F4A7C15  # so that the two parts of a checksum do not cancel
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """A checksum over the bits of all elements, NaN included: int64, 0-d.

    The sum of f(x) + c f(x >> 32) over words x of 8 bytes, as integers modulo 2^64, with f(x) = x (2 x + 1), a
    permutation of the integers. In a plain sum of the words, one that is larger by one and another that is smaller by
    one would cancel; without the upper halves, so would some changes of two of these. The order of the words does not
    matter. The last elements, which do not fill a word, are words of their own.
    """
    elements = as_real(tensor.detach()).reshape(-1)
    elements = elements.view(_INTEGERS[elements.element_size()])
    per_word = 8 // elements.element_size()
    n_whole = elements.numel() // per_word * per_word
    whole = elements[:n_whole]
    if whole.stride(0) != 1 or whole.storage_offset() % per_word:
        whole = whole.clone(memory_format=torch.contiguous_format)
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for words in (*whole.view(torch.int64).split(WORDS_AT_ONCE), elements[n_whole:].to(torch.int64)):
        total += _mixed(words) + _ODD * _mixed(words >> 32)
    return total


def _mixed(x: Tensor) -> Tensor:
    """The sum of x (2 x + 1)."""
    squares = torch.dot(x, x) if x.device.type == "cpu" else x.square().sum()  # GPUs have no `dot` of integers
    return 2 * squares + x.sum()


class ChecksumComparison(NamedTuple):
    """A comparison of checksums in flight."""

    sums: dict[str, Tensor]  # this rank's, by name
    state_sums: dict[str, Tensor]  # those of the parts of the hook's state
    extremes: Tensor  # the largest sums of any rank, then the complements of the smallest ones
    wait: Callable[[], None]  # waits for the all-reduce


class DriftCheck:
    """Compares what must be equal on all ranks, in one of ``every`` backwards.

    An all-reduce of 16 bytes per tensor, in flight during the backward, finds the largest and the smallest checksum on
    any rank. Backwards are counted, and not forwards: a rank whose loss raised an error may run one forward more.

    Args:
        every: number of synchronized backwards from one comparison to the next.
        parameters: returns the parameters to compare, by name, at the beginning of a backward.
    """

    def __init__(self, every: int, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._every, self._parameters = every, parameters
        self.restart()

    def restart(self) -> None:
        """Count from zero: after an error, ranks may have counted differently."""
        self._n_backwards = 0
        self._buffers: dict[str, Tensor] = {}  # checksums
        self._in_flight: ChecksumComparison | None = None

    @property
    def _is_due(self) -> bool:
        return (self._n_backwards + 1) % self._every == 0

    @torch_internals.not_compiled
    def after_broadcast(self, buffers: Mapping[str, Tensor]) -> None:
        """Note the buffers for the next backward, if it compares: the forward will change them on each rank."""
        self._buffers = {f"buffer {name}": checksum(each) for name, each in buffers.items()} if self._is_due else {}

    def begin(self, hook_state: object, exchange: Exchange) -> None:
        """Count a backward, and start the comparison if it is due. A collective call.

        A backward that is captured in a CUDA graph only counts. `Exchange.n_passes` is compared, too.

        Raises:
            RuntimeError: on every rank, if the ranks have tensors of other names.
        """
        device, transport = exchange.device, exchange.transport
        is_due = self._is_due
        self._n_backwards += 1
        if not is_due or is_capturing(device):
            return
        sums = {f"parameter {name}": checksum(each) for name, each in self._parameters().items()} | self._buffers
        exchange.compare_names(list(sums))
        sums[PASSES] = torch.tensor(exchange.n_passes)
        sums = {name: each.to(device) for name, each in sums.items()}
        state_sums: dict[str, Tensor] = {}
        if isinstance(hook_state, HookState):
            # One sum, because ranks may have different entries.
            state_sums = {name: each.to(device) for name, each in _leaf_checksums(hook_state.replicated_state())}
            names = torch.tensor(_as_int64(list(state_sums)), device=device)
            sums[HOOK_STATE] = torch.stack([names, *state_sums.values()]).sum()
        stacked = torch.stack(list(sums.values()))
        extremes = torch.cat([stacked, ~stacked])  # the maximum of ~x is ~ the minimum of x
        wait = transport.launch(transport.all_reduce_max(extremes))
        self._in_flight = ChecksumComparison(sums, state_sums, extremes, wait)

    def finish(self, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
        """End the comparison, if one is in flight: RuntimeError, on every rank, if tensors differ. A collective call.

        ``check``, called while this rank waits for the others, raises if one of them has left.
        """
        if self._in_flight is None:
            return
        sums, state_sums, extremes, wait = self._in_flight
        wait()
        self._in_flight = None
        largest, smallest = extremes.view(2, -1)
        differs = dict(zip(sums, (largest != ~smallest).tolist(), strict=True))
        if not any(differs.values()):
            return
        if differs[PASSES]:
            counts = gather_json(group, "check_every: passes", sums[PASSES].item(), check)
            raise RuntimeError(out_of_step(counts))
        mine = {name: each for name, each in sums.items() if differs[name]}
        if mine.pop(HOOK_STATE, None) is not None:
            mine |= {f"{HOOK_STATE}, {name}": each for name, each in state_sums.items()}
        shown = {name: f"checksum {each.item():x}" for name, each in list(mine.items())[: MAX_SHOWN + 1]}
        by_rank = gather_json(group, "check_every", shown, check)
        lines = format_differences(by_rank, range(group.size()))
        raise RuntimeError(
            f"check_every: {sum(differs.values())} of {len(differs) - 1} tensors that must be equal on all ranks "
            f"differ:{lines}\nEvery rank must start from the same values and apply the same updates: the same "
            "optimizer, learning rate and order of steps, and the same kind of device. Call "
            "resynchronize(from_rank=0) on every rank to take the parameters, buffers and hook state of rank 0, or "
            "restart from a checkpoint."
        )


def _leaf_checksums(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The checksums of the leaves of nested dictionaries, with their paths."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaf_checksums(each, f"{path} {key}".lstrip())
    else:
        yield path, checksum(value) if isinstance(value, Tensor) else torch.tensor(_as_int64(value))


def _as_int64(value: object) -> int:
    return int(digest(value), 16) - 2**63
