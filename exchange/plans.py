"""`Plans` of a bucket: when its steps are recorded, and when a recorded step may be repeated.

A hook on a GPU spends 10 times as long on Python as on its launches, and computes the same calls in every step. After
`WARM_UP_STEPS` equal steps, the next one is recorded as bound calls, a `gradwire.comm.plan.Plan`, and later ones repeat
them. Where a hook's algorithm launches anything but gradwire's kernels, nothing is recorded. A plan serves while

- the ranks' agreement on the settings stands: the handshake would return at once;
- the executor is the same: no exchange has failed, and the workspaces are those of the plan;
- the step is of the same variant (`HookSettings._variant`), and the bucket has the same layout of tensors and divisor;
- nothing measures the step, and no CUDA graph is captured.

Addresses and the number of the step may change: they lie in device memory, and are replaced before a replay. But a
collective may hold a gradient itself, such as a vector that is alone in its bucket, or a launch a buffer. A plan that
holds memory which later steps do not use is dropped, and nothing is recorded again if this happens before its first
replay, `MOST_MISFITS` times in a row. Nor does a plan outlive its kind of steps: its buffer is as large as their
messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Algorithm, Connections
from gradwire.comm.plan import Plan
from gradwire.comm.stream_executor import Handle, Result, StreamExecutor
from gradwire.compress import Step, is_repeatable
from gradwire.compress.memory import BucketMemory
from gradwire.exchange.bucket import Bucket, BucketWork
from gradwire.exchange.handshake import AgreedSettings
from gradwire.exchange.settings import HookSettings
from gradwire.kernels import Recording, SegmentTable, layout_guard

# Kernels are then compiled, tables uploaded, and the workspace, which shrinks after
# `Workspace.STEPS_BEFORE_SHRINKING` smaller steps, has the size that it keeps.
WARM_UP_STEPS = 5
MOST_MISFITS = 2
MOST_IDLE_STEPS = 4  # then a workspace without its plan still shrinks before the next one is recorded


class Plans:
    """The recorded steps of one bucket, by variant, workspace and divisor.

    Attributes:
        settings: those of the hook that has taken the latest step in full; None before the first.
    """

    def __init__(self) -> None:
        self.settings: HookSettings | None = None
        self._entries: dict[Hashable, _Entry] = {}
        self._n_steps = 0

    def to_record(
        self,
        bucket: Bucket,
        settings: HookSettings,
        executor: StreamExecutor,
        group: dist.ProcessGroup,
        work: BucketWork,
        memory: Any,
        number: int,
    ) -> Plan | None:
        """Count a step that runs in full. After `WARM_UP_STEPS` equal ones, return the plan that records this one.

        The ranks of ``group`` have agreed on the settings; ``memory`` is that of the bucket, None for a cast.
        """
        can_replay = memory is None or (isinstance(memory, BucketMemory) and memory.can_replay)
        if not can_replay or torch.cuda.is_current_stream_capturing():
            return None
        self.settings = settings
        key = (settings._variant(number), executor.workspace_index, bucket.divisor)
        agreement = settings.handshake.agreement(group, settings.hook_name)
        token = _Token(executor, agreement and agreement.token, memory, work.source.table, work.target.table)
        entry = self._entries.get(key)
        if entry is None or entry.token != token:
            entry = self._entries[key] = _Entry(token, agreement)
            if bucket.plans is None and memory is not None:
                entry.watch(bucket.parameters())
        self._count_step(entry)
        self._entries = {k: e for k, e in self._entries.items() if self._n_steps - e.latest <= MOST_IDLE_STEPS}
        entry.n_steps += 1
        if entry.n_steps <= WARM_UP_STEPS or entry.plan is not None or entry.n_misfits == MOST_MISFITS:
            return None
        gradients = [*work.source.tensors, *work.target.tensors]
        entry.plan = Plan(Recording, executor.workspace_index, gradients, partial(entry.refresh, work, number))
        return entry.plan

    def replay(self, bucket: Bucket, connections: Connections, number: int | None = None) -> Result | Handle | None:
        """Repeat the recorded step of a bucket; None, and nothing has changed, if there is none that fits.

        ``number`` is that of the step, for a hook that has begun it and returns a future; None for the reducer.
        """
        settings, executor = self.settings, connections.existing_executor(bucket.device)
        if settings is None or not isinstance(executor, StreamExecutor):
            return None
        is_in_hook = number is not None
        if number is None:
            number = 0 if settings.steps is None else settings.steps.number(bucket.position)
        if settings._measurer(number) is not None:
            return None
        entry = self._entries.get((settings._variant(number), executor.workspace_index, bucket.divisor))
        if entry is None or not entry.stands(settings, executor, bucket) or torch.cuda.is_current_stream_capturing():
            return None
        work = bucket.work(executor.transport, None if entry.token.memory is None else entry.token.memory.layout)
        if work.source.table is not entry.token.source or work.target.table is not entry.token.target:
            return None
        assert entry.plan is not None
        if not entry.plan.fits(work.source.tensors, work.target.tensors):
            entry.drop_plan()
            return None
        self._count_step(entry)
        entry.n_misfits = 0
        if not is_in_hook and settings._begin_bucket(bucket.position):
            settings._match_scale(connections)
        settings._count_bucket(bucket, entry.token.memory)
        flight = executor.replay(entry.plan, work.result, partial(entry.refresh, work, number), is_in_hook)
        if bucket.is_final or bucket.ends_late:
            executor.finish()
        return flight

    def _count_step(self, entry: _Entry) -> None:
        self._n_steps += 1
        entry.latest = self._n_steps


def replayed(
    settings: HookSettings,
    bucket: Bucket,
    connections: Connections,
    algorithm: Callable[[Step], Algorithm[None]],
    number: int = 0,
) -> Future[torch.Tensor] | None:
    """The future of a bucket whose recorded step is repeated; None if there is none that fits: see `reduce_bucket`."""
    plans = bucket.plans or (settings._plans.get(bucket.first) if settings._plans.data else None)
    if plans is None or plans.settings is not settings or bucket.is_sparse or not is_repeatable(algorithm):
        return None  # a user's hook may call several of gradwire's
    return cast("Future[torch.Tensor] | None", plans.replay(bucket, connections, number))


class _Token(NamedTuple):
    """The objects on which a plan depends, compared by identity."""

    executor: StreamExecutor
    agreement: object  # that of the ranks on the settings; None without a hook
    memory: BucketMemory | None  # None for a cast
    source: SegmentTable  # the layouts of the tensors of a step
    target: SegmentTable


class _Entry:
    """A variant of a bucket's steps, and its plan. ``agreement``: of the ranks on the settings; None without a hook."""

    def __init__(self, token: _Token, agreement: AgreedSettings | None) -> None:
        self.token, self._agreement = token, agreement
        self.n_steps = 0  # since the token is this one, or the plan was dropped
        self.n_misfits = 0  # plans that were dropped since the last replay
        self.latest = 0  # number of its latest step among those of the bucket
        self.plan: Plan | None = None
        self._parameters: list[weakref.ref[Tensor]] | None = None  # on PyTorch's DDP, with memory
        self._guard: Callable[..., bool] | None = None  # whether they have the layouts of the plan

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Serve only these parameters in these layouts: in PyTorch's DDP, both may change."""
        self._parameters, self._guard = list(map(weakref.ref, parameters)), layout_guard(parameters)

    def _has_parameters_of(self, bucket: Bucket) -> bool:
        """Whether a bucket has the parameters and layouts of `watch`; true without a call of that."""
        if self._parameters is None or self._guard is None:
            return True
        known, parameters = self._parameters, bucket.parameters()
        if len(known) != len(parameters) or any(own() is not each for own, each in zip(known, parameters, strict=True)):
            return False
        return self._guard(*parameters)

    def stands(self, settings: HookSettings, executor: StreamExecutor, bucket: Bucket) -> bool:
        """Whether the plan is complete, and nothing has changed since it was recorded."""
        memory = self.token.memory
        if self.plan is None or not self.plan.is_complete or self.token.executor is not executor:
            return False
        if memory is not None and memory.is_retired:
            return False
        if not self._has_parameters_of(bucket):
            return False
        agreement = self._agreement
        return agreement is None or (
            agreement.token is self.token.agreement and agreement.settings == settings._compared_options()
        )

    def drop_plan(self) -> None:
        """Drop a plan that does not fit a step: it would keep the memory whose addresses it holds."""
        self.plan, self.n_steps, self.n_misfits = None, 0, self.n_misfits + 1

    def refresh(self, work: BucketWork, number: int) -> None:
        """Replace the addresses of the tensors in device memory, and the number of the step."""
        source, target = work.source, work.target
        if self.token.memory is not None:
            gradients = source.each()
            self.token.memory.refresh(
                gradients, gradients if target.tensors is source.tensors else target.each(), number
            )
            return
        source.table.packed(source.tensors)
        if target.table is not source.table:
            target.table.packed(target.tensors)
