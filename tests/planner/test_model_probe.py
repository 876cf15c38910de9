"""The times of a script's buckets, as `ScriptProbe` takes them."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.planner import model_probe
from gradwire.planner.model_probe import STEPS, ScriptProbe
from gradwire.planner.step_model import Overlap
from tests.support.training import SMALLEST


class Tick(torch.autograd.Function):
    """Lets a clock run in the forward and in the backward."""

    @staticmethod
    def forward(context, values, clock, forward, backward):
        context.clock, context.seconds = clock, backward
        clock[0] += forward
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        context.clock[0] += context.seconds
        return gradient, None, None, None


def test_probe_counts_times_of_buckets_from_the_begin_of_the_backward(world_of_one, monkeypatch):
    clock = [0.0]

    class Mark:
        def __init__(self, device):
            self.seconds = clock[0]

        def milliseconds_since(self, earlier):
            return 1e3 * (self.seconds - earlier.seconds)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, values):
            return self.second(Tick.apply(self.first(values), clock, 40, 20))

    monkeypatch.setattr(model_probe, "Mark", Mark)
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALLEST)
    ddp_probe = ScriptProbe(ddp, lambda _: None, averages=False)
    ddp.register_comm_hook(ddp_probe, ScriptProbe.reduce)
    for _ in range(STEPS + 1):
        output = ddp(torch.ones(1, 4))
        clock[0] += 1  # the loss
        output.sum().backward()
        clock[0] += 3  # the optimizer
    cost, buckets = ddp_probe.model(Overlap.NOTHING)
    names = [name for spec in buckets.specs for name in spec.names]
    assert names == ["second.bias", "second.weight", "first.bias", "first.weight"]
    assert cost.forward == pytest.approx(40)
    assert cost.ready == pytest.approx((1, 1, 21, 21))
    assert cost.backward == pytest.approx(21)
    assert cost.optimizer == pytest.approx(3)
