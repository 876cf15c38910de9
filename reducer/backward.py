"""`Backward`: the state of one synchronised backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from gradwire.reducer.bucketing import Bucket

__all__ = ["Backward", "ForwardResults", "Phase"]


@dataclass
class ForwardResults:
    """Handles and futures that forwards have set for the next reduction.

    Attributes:
        live_ranks: in `join`, the all-reduce that counts the ranks with inputs left; None to divide
            by the world size.
        futures: to wait for at the end of the backward.
    """

    live_ranks: dist.Work | None = None
    futures: list[Future[Any]] = field(default_factory=list)
    _divisor: int | None = None

    def divisor(self, world_size: int) -> int:
        """The divisor of sums over ranks: the world size; in `join`, the ranks with inputs left."""
        if self._divisor is None:
            self._divisor = world_size
            if self.live_ranks is not None:
                self.live_ranks.wait()
                self._divisor = int(self.live_ranks.result()[0].item())
        return self._divisor


class Phase(Enum):
    """The progress of a backward."""

    PREPARED = "no gradient is ready yet"
    REDUCING = "gradients are ready, and buckets are launched once they are complete"
    DONE = "all results are in the gradients, or the backward was discarded"


class Backward:
    """The state of one synchronised backward pass: ready gradients, launched buckets, and their results.

    A gradient is *ready* once autograd adds nothing more to it. A bucket is *complete* once all its gradients are
    ready. It is *launched* once it and all buckets before it are complete.

    Args:
        buckets: in the order of launch.
        bucket_of: the index of each parameter's bucket.
        phase: the phase to begin in.

    Attributes:
        phase: how far the backward has come.
        ready: 1 for each parameter whose gradient is ready.
        ready_order: the parameters whose gradients autograd has completed, in that order; unused
            parameters are not listed.
        calls: with a static graph, how often each parameter's autograd hook was called.
        n_launched: number of launched buckets, skipped ones included.
        futures: for each bucket the result of its reduction; None before its launch, and if it is not reduced.
    """

    def __init__(self, buckets: Sequence[Bucket], bucket_of: Sequence[int], phase: Phase = Phase.PREPARED) -> None:
        self._buckets = buckets
        self._bucket_of = bucket_of
        self.phase = phase
        self.ready = bytearray(len(bucket_of))
        self.ready_order: list[int] = []
        self.calls = [0] * len(bucket_of)
        self.n_launched = 0
        self.futures: list[Future[Any] | None] = [None] * len(buckets)
        self._n_pending = [len(bucket.members) for bucket in buckets]  # gradients that a bucket still waits for
        self._expected_last: list[int | None] = [None] * len(buckets)  # per bucket: the parameter whose hook notifies

    def mark_ready(self, index: int) -> None:
        """Count a gradient as ready. Call it once per gradient."""
        self.ready[index] = 1
        self._n_pending[self._bucket_of[index]] -= 1

    def next_complete(self) -> Bucket | None:
        """The next bucket to launch, if it is complete."""
        if self.n_launched < len(self._buckets) and self._n_pending[self.n_launched] == 0:
            return self._buckets[self.n_launched]
        return None

    @property
    def is_launched(self) -> bool:
        """Whether all buckets are launched."""
        return self.n_launched == len(self._buckets)

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]

    def deferrable(self, first: int, unused: Sequence[int], expected_calls: Sequence[int] | None) -> bytearray:
        """The mask of parameters whose autograd hooks need only record: see `AutogradHooks`.

        In each bucket the hook of the gradient expected last is not deferred. Nor are the hooks of
        gradients that several calls add up, or that never come.

        Args:
            first: the parameter whose gradient has just come.
            unused: parameters that get no gradient.
            expected_calls: with a static graph, how often each hook is called in a backward.
        """
        mask = bytearray(b"\1") * len(self._bucket_of)
        for index in unused:
            mask[index] = 0
        if expected_calls is not None:
            for index, (expected, calls) in enumerate(zip(expected_calls, self.calls, strict=True)):
                if expected - calls > 1:
                    mask[index] = 0
        for bucket in self._buckets:
            last = next((i for i in reversed(bucket.members) if mask[i]), None)
            self._expected_last[bucket.index()] = last
            if last is not None:
                mask[last] = 0
        mask[first] = 0
        return mask

    def is_expected_last(self, index: int) -> bool:
        """Whether a bucket that is not complete has no other gradient whose autograd hook notifies."""
        b = self._bucket_of[index]
        return self._n_pending[b] > 0 and self._expected_last[b] == index

    def expect_last(self, index: int, other: int | None) -> None:
        """Let ``other`` be the gradient expected last in the bucket of ``index``."""
        self._expected_last[self._bucket_of[index]] = other

    def missing_beside(self, index: int) -> Iterator[int]:
        """The parameters in the bucket of ``index`` whose gradients are not ready."""
        return (i for i in self._buckets[self._bucket_of[index]].members if not self.ready[i])
