"""What a prediction is measured with: overlap with the backward, and the pieces of messages."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.planner import measurement
from gradwire.planner.step_model import GivenLink, Overlap


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "is_spare"), [(4, 1, 4, False), (4, 1, 3, True), (4, 2, 1, True), (4, 4, 1, False)]
)
def test_backward_pass_overlaps_if_each_rank_has_a_spare_core(monkeypatch, cores, ranks, threads, is_spare):
    monkeypatch.setattr(measurement.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(measurement, "_gathered", lambda value: [value])
    assert measurement.overlap_with_backward(torch.device("cpu"), ranks) is (
        Overlap.EVERYTHING if is_spare else Overlap.NOTHING
    )


class HookIsTimed(Exception):
    """Ends a measurement at its first hook."""


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_hooks_on_a_cpu_are_timed_in_the_pieces_of_gloo_however_the_backend_is_named(world_of_one, backend):
    group, seen = dist.new_group(backend=backend), []
    given = GivenLink(world_size=4, bandwidth=1e9, latency=0.0, ranks_per_node=1)

    def time(name, buckets, own, transport, device):
        seen.append(transport.pieces(1 << 23))
        raise HookIsTimed

    with (
        mock.patch.object(measurement.dist, "new_group", lambda: group),
        mock.patch.object(measurement, "HookProbe", time),
        pytest.raises(HookIsTimed),
    ):
        measurement.measure_exchange(None, None, ["int4"], torch.device("cpu"), given)
    assert seen[0] > 1
