"""The network: bytes that leave a node, messages by kind, and fits that one slow message does not change."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.planner import link_probe
from gradwire.planner.hook_probe import EqualRanks, message_of
from gradwire.planner.link_probe import bytes_out_of_node, ideal_link, measure_link, message_maker
from gradwire.planner.step_model import BETWEEN_NODES, IN_NODE, GivenLink, Message

CPU = torch.device("cpu")
KINDS = ("all-reduce float32", "all-reduce bfloat16", "all-to-all", "all-gather")
ON_NODES = tuple(shot + place for shot in ("all-to-all", "all-gather") for place in (IN_NODE, BETWEEN_NODES))


@pytest.mark.parametrize("kind", (*KINDS, *ON_NODES))
@pytest.mark.parametrize("is_gloo", [False, True], ids=["one-piece", "pieces"])
@pytest.mark.parametrize("nbytes", [256, 1 << 23])
def test_probe_message_has_requested_payload(kind, is_gloo, nbytes):
    make = message_maker(kind, nbytes, EqualRanks(4, is_gloo, CPU, local_size=2), CPU)
    assert message_of(make()) == Message(kind, nbytes)


# A ring of W ranks sends 2 (W - 1) / W of its payload out of each of m nodes. Each shot of a two-shot all-reduce counts
# half of the payload: of G ranks on a node, the all-to-all sends 2 G (m - 1) / m, the all-gather as much as the ring.
# The ranks of a single node count as nodes.
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "ring", "two_shot"),
    [
        *((2, 1, 1, 1), (8, 1, 1.75, 1.75), (8, 8, 1.75, 1.75), (4, 2, 1.5, 1.75)),
        *((16, 8, 1.875, 4.9375), (16, 4, 1.875, 3.9375), (64, 8, 1.96875, 7.984375)),
    ],
)
def test_bytes_out_of_a_node_follow_the_formula(world_size, ranks_per_node, ring, two_shot):
    out = {kind: bytes_out_of_node(kind, world_size, ranks_per_node) for kind in KINDS}
    assert out["all-reduce float32"] == out["all-reduce bfloat16"] == ring
    assert (out["all-to-all"] + out["all-gather"]) / 2 == two_shot


# A rank on a node of G exchanges 1 / G of the message of a bucket, so K nodes send it 2 (K - 1) / K times.
@pytest.mark.parametrize(("world_size", "ranks_per_node", "expected"), [(4, 2, 1), (16, 8, 1), (64, 8, 1.75)])
def test_shots_between_nodes_leave_a_node_once(world_size, ranks_per_node, expected):
    out = {kind: bytes_out_of_node(kind, world_size, ranks_per_node) / ranks_per_node for kind in ON_NODES}
    assert [out[kind] for kind in ON_NODES if kind.endswith(BETWEEN_NODES)] == [expected] * 2
    assert [out[kind] for kind in ON_NODES if kind.endswith(IN_NODE)] == [0, 0]


def on_nodes(nodes, ranks_per_node):
    size = nodes * ranks_per_node
    return GivenLink(world_size=size, bandwidth=8e9, latency=1e-3, ranks_per_node=ranks_per_node)


def test_messages_in_a_node_take_no_bandwidth_between_nodes():
    link = ideal_link(on_nodes(2, 8), [Message(kind, 1) for kind in ON_NODES], overhead=1e-4)
    measured = link.at(8e9)
    measured.costs["all-to-all" + IN_NODE] = link.costs["all-to-all" + IN_NODE]._replace(per_byte=1e-10)
    inside, between = (Message("all-to-all" + place, 1 << 20) for place in (IN_NODE, BETWEEN_NODES))
    slower = measured.at(4e9)
    assert measured.busy(inside) == slower.busy(inside) == 0
    assert measured.latency(inside) == slower.latency(inside) == pytest.approx(1e-4 + 1e-10 * (1 << 20))
    assert slower.busy(between) == 2 * measured.busy(between) == pytest.approx(16e-9 * (1 << 20))


def test_given_link_sends_the_bytes_out_of_a_node_at_its_bandwidth():
    messages = [Message(kind, 1) for kind in KINDS]
    link = ideal_link(on_nodes(2, 8), messages, overhead=1e-4)
    assert link.costs["all-reduce float32"] == pytest.approx((1e-4 + 2e-3, 1.875e-9))  # there and back
    assert link.costs["all-to-all"] == pytest.approx((1e-4 + 1e-3, 8e-9))
    assert link.costs["all-gather"] == pytest.approx((1e-4 + 1e-3, 1.875e-9))
    for single in (ideal_link(on_nodes(2, 1), messages), ideal_link(on_nodes(1, 2), messages)):
        assert single.costs["all-to-all"] == pytest.approx((1e-3, 1e-9))
        assert single.costs["all-reduce float32"] == pytest.approx((2e-3, 1e-9))


@pytest.fixture
def probe(monkeypatch):
    """Messages of two ranks on a link of 800 Mb/s with 1 ms of latency; the function that measures it.

    The first of each repeated messages takes 2 s more, and ``slow_kind`` ten times as long.
    """

    def measure_with(slow_kind, ranks_per_node=1):
        counts = {}

        def once(self, message):
            counts[message] = counts.get(message, 0) + 1
            kind, nbytes = message
            seconds = 1e-3 + 1e-8 * nbytes * (10 if kind == slow_kind else 1)
            return seconds + (2.0 if counts[message] == 1 else 0.0)

        monkeypatch.setattr(link_probe._Probe, "_once", once)
        return measure_link(group, CPU, [Message(kind, 1) for kind in KINDS], ranks_per_node)

    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(link_probe, "executor_for", lambda *_: SimpleNamespace(transport=None))
    monkeypatch.setattr(link_probe, "message_maker", lambda kind, nbytes, *_: (kind, nbytes))
    monkeypatch.setattr(link_probe.dist, "all_reduce", lambda *_, **__: None)
    return measure_with


def test_one_slow_message_of_each_size_changes_no_cost(probe):
    link, samples = probe(slow_kind=None)
    for kind in KINDS:
        assert link.costs[kind] == pytest.approx((1e-3 + 256e-8, 1e-8))
        assert [sample.nbytes for sample in samples[kind]] == list(link_probe.SIZES)
    assert link.bandwidth == pytest.approx(800e6)
