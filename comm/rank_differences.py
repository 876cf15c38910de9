"""Differences between ranks, as errors list them: counts of passes and of collectives, and facts by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN = 12  # largest number of differences between ranks that an error lists
OUT_OF_STEP = (
    "The ranks are out of step; {counts}. A rank has skipped a backward pass, or has made a forward or backward pass "
    "alone. This step would average gradients of different batches. Make the same forward and backward passes on every "
    "rank; run passes that only one rank makes under torch.no_grad() or no_sync(), or call model.module."
)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers: ``rank 1``, or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def check_collectives(counts: Sequence[Sequence[int]], which: str = "itself") -> None:
    """Raise RuntimeError unless all ranks have issued equally many collectives on a process group.

    Args:
        counts: the counts of each rank of the group.
        which: names the group in the error, after "the process group".
    """
    if any(count != counts[0] for count in counts):
        raise RuntimeError(
            f"The ranks have issued different numbers of collectives on the process group {which}: "
            f"{format_by_rank(counts)}. "
            "The missing collectives leave it stuck, and gradwire can replace only groups that it created. Restart "
            "the job from a checkpoint, or destroy the process group on every rank and initialize a new one."
        )


def out_of_step(n_forwards: Sequence[int], n_backwards: Sequence[int] = ()) -> str | None:
    """The error of ranks that have made different numbers of synchronized passes; None if they agree.

    The counts are by rank. A rank without a forward pass is not compared: it has joined, or is not known.
    """
    shown = []
    for kind, counts in ("forward", n_forwards), ("backward", n_backwards):
        known = {rank: count for rank, count in enumerate(counts) if count > 0}
        if len(set(known.values())) > 1:
            by_rank = [f"{count} on rank {rank}" for rank, count in known.items()][:MAX_SHOWN]
            shown.append(f"synchronized {kind} passes: {', '.join(by_rank)}")
    return OUT_OF_STEP.format(counts="; ".join(shown)) if shown else None


def format_by_rank(values: Sequence[Any]) -> str:
    """Format values: ``3 on rank 0, 4 on rank 1``."""
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def format_differences(facts_by_rank: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """One line for each fact, by name, that differs between ranks: every value, and the ranks that hold it."""
    lines = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in zip(ranks, facts_by_rank, strict=True):
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {format_ranks(on)}" for value, on in holders.items()))
    if len(lines) > MAX_SHOWN:
        lines[MAX_SHOWN:] = [f"and {len(lines) - MAX_SHOWN} more differences"]
    return "".join(f"\n  {line}" for line in lines)
