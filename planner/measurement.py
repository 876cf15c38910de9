"""`measure`: measures everything that a prediction needs, on all ranks at the same time."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.comm import connections_of, executor_for
from gradwire.comm.groups import is_gloo_on_cpu
from gradwire.comm.nodes import ranks_per_node
from gradwire.comm.torch_internals import default_group
from gradwire.planner import jobs
from gradwire.planner.hook_probe import EqualRanks, HookProbe
from gradwire.planner.hook_registry import CAST, PLAIN
from gradwire.planner.jobs import Build, JobError
from gradwire.planner.link_probe import MessageTime, ideal_link, measure_link, overhead_per_message
from gradwire.planner.model_probe import Buckets, measure_model, measure_optimizer
from gradwire.planner.step_model import GivenLink, HookCost, Link, ModelCost, Overlap

T = TypeVar("T")

MODEL_BUDGET = 1.5  # seconds for steps of the model
HOOK_BUDGET = 0.25  # seconds for steps of each hook


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements on which predictions are based."""

    model: ModelCost  # cost of a step without gradient exchange
    hooks: tuple[HookCost, ...]  # cost of each hook, including `PLAIN` and `CAST`
    link: Link  # between the ranks
    threads: int  # CPU threads with which this rank computed
    is_link_measured: bool  # whether the link was measured, or else described by the user
    # times of messages by their kind, to which the link's costs were fitted; empty if the link was given
    samples: Mapping[str, Sequence[MessageTime]] = field(default_factory=dict)


def measure(
    build: Build,
    hooks: Sequence[str],
    device: torch.device,
    given: GivenLink | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure a model, hooks, and the network of the default process group. A collective call.

    All numbers are from the slowest rank.

    With a ``given`` network, the process group has one rank. `PLAIN` and `CAST` are always measured. ``progress`` takes
    the name of each measurement as it starts. Raises JobError if the model cannot be measured, on this rank or another.
    """
    group = default_group()
    progress("model")
    job = on_all_ranks(lambda: jobs.check(build(device), device))
    overlap = overlap_with_backward(device, given.ranks_per_node if given is not None else None)
    model, buckets = measure_model(job, group, device, overlap, MODEL_BUDGET)
    model = replace(model, optimizer=on_all_ranks(lambda: measure_optimizer(job, device)))
    return measure_exchange(model, buckets, hooks, device, given, progress)


def measure_exchange(
    model: ModelCost,
    buckets: Buckets,
    hooks: Sequence[str],
    device: torch.device,
    given: GivenLink | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure hooks and the network of the default process group, for a model that was measured. As `measure`."""
    group = default_group()
    world_size = given.world_size if given is not None else group.size()
    names = tuple(dict.fromkeys((PLAIN, CAST, *hooks)))
    own = dist.new_group()  # its executor is replaced
    assert isinstance(own, dist.ProcessGroup)
    if given is None:
        real = executor_for(own, device).transport
        local_size, round_trip = real.local_size, real.round_trip
        per_node = ranks_per_node(connections_of(own).nodes())
    else:
        per_node = given.ranks_per_node
        local_size = per_node if per_node < world_size else 1
        round_trip = 2 * given.latency
    is_gloo = dist.get_backend(own) == "gloo" or (device.type == "cpu" and is_gloo_on_cpu(own))
    costs = []
    with _frozen_heap():
        for name in names:
            progress(f"hook {name}")
            dist.barrier(group)
            transport = EqualRanks(world_size, is_gloo, device, local_size, round_trip)
            costs.append(HookProbe(name, buckets, own, transport, device).measure(HOOK_BUDGET))
    dist.destroy_process_group(own)
    model, slowest = _slowest(_gathered((model, tuple(costs))))

    progress("network")
    messages = [message for hook in slowest for bucket in hook.buckets for message in bucket.messages]
    samples: Mapping[str, Sequence[MessageTime]] = {}
    if given is None:
        link, samples = measure_link(group, device, messages, per_node)
    else:
        overhead = overhead_per_message(group, device)
        link = ideal_link(given, messages, overhead)
    return Measurement(
        model=model,
        hooks=slowest,
        link=link,
        threads=torch.get_num_threads(),
        is_link_measured=given is None,
        samples=samples,
    )


def on_all_ranks(work: Callable[[], T]) -> T:
    """Call ``work`` on every rank. A collective call. Raises JobError on every rank if ``work`` raised it on any."""
    result, failure = None, None
    try:
        result = work()
    except JobError as error:
        failure = error
    complaints = _gathered(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(complaints):
        if other is not None:
            raise JobError(f"On rank {rank}: {other}")
    return result  # type: ignore[return-value]


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Hide all present objects from the garbage collector: a search for a hook's tensors takes milliseconds then."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _gathered(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def overlap_with_backward(device: torch.device, ranks_here: int | None = None) -> Overlap:
    """The work that overlaps the backward pass: on a CPU, all of it if each rank has a spare core, otherwise none.

    A collective call. ``ranks_here`` are the ranks on this machine; None: those of the default process group.
    """
    ranks_here = ranks_here or _gathered(socket.gethostname()).count(socket.gethostname())
    if device.type != "cpu":
        return Overlap.MESSAGES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    has_spare_core = cores / ranks_here >= torch.get_num_threads() + 1
    return Overlap.EVERYTHING if all(_gathered(has_spare_core)) else Overlap.NOTHING


def _slowest(ranks: Sequence[Any]) -> Any:
    """The maximum over the ranks of every number in costs; other values are equal on all ranks."""
    first = ranks[0]
    if isinstance(first, int | float):
        return max(ranks)
    if is_dataclass(first) and not isinstance(first, type):
        values = {each.name: [getattr(rank, each.name) for rank in ranks] for each in fields(first)}
        return replace(first, **{name: _slowest(numbers) for name, numbers in values.items()})
    if isinstance(first, tuple):
        parts = [_slowest(each) for each in zip(*ranks, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first
