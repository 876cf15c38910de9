"""`gradwire bench nodes` on 2 nodes of 2 ranks: it measures every method, and refuses wrong gradients."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import nodes
from gradwire.bench.namespaces import LOOPBACK
from gradwire.bench.nodes import FLAT, HIERARCHICAL, HSDP, SEAMS, UNCOMPRESSED, Bytes
from gradwire.bench.record import Metric
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import error_of

SETTINGS = {"seams": list(SEAMS), "rates": [LOOPBACK.name], "steps": 1, "training_steps": 4, "hosts": 2}


def on_two_nodes():
    """This rank's place among 2 nodes of 2, and a small model."""
    node, local = divmod(dist.get_rank(), 2)
    small = mock.patch.multiple(Bytes, layers=1, width=64)
    environment = mock.patch.dict(os.environ, GROUP_RANK=str(node), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2")
    return small, environment


@on_ranks(4)
def test_loss_and_memory_belong_to_one_method():
    small, environment = on_two_nodes()
    with small, environment:
        memory, loss = nodes.main(SETTINGS | {"trained": [HSDP, "int8"]}, torch.device("cpu"))
        plain = nodes.main(SETTINGS | {"trained": [HSDP, UNCOMPRESSED]}, torch.device("cpu"))[1]
    assert (memory.metric, loss.metric) == (Metric.MEMORY, Metric.VALIDATION_LOSS)
    assert memory.p50 > 100e6 and abs(loss.p50 - plain.p50) < 0.01
    assert len(set(from_all_ranks((loss.p50, plain.p50)))) == 1


@pytest.mark.parametrize(
    ("seam", "method"),
    [
        (FLAT, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(HIERARCHICAL, "int4"), (HSDP, "powersgd-r4")]),
    ],
)
@on_ranks(4)
def test_gradients_of_one_rank_are_refused(seam, method):
    small, environment = on_two_nodes()
    settings = SETTINGS | {"seams": [seam]}

    def deviates(self, batch):
        self.model.zero_grad()
        loss = self.task.loss(self.model, batch)
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.grad.mul_(1 + (self.method == method) * (1 + dist.get_rank()))
        return 1.0

    with small, environment, mock.patch.object(nodes.NodesCase, "step", deviates):
        kind, message = error_of(lambda: nodes.main(settings, torch.device("cpu")))
    assert kind == "RuntimeError"
    assert message.startswith(f"{seam}, {method}: the gradients deviate") and message.endswith("Nothing is timed.")
