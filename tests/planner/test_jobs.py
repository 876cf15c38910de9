"""Jobs that `gradwire advise` measures: how they are named and loaded, and which are refused."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn

from gradwire.bench.models import JOBS
from gradwire.exchange import handshake
from gradwire.planner.jobs import Job, JobError, check, load
from gradwire.planner.measurement import measure
from gradwire.planner.model_probe import measure_optimizer
from gradwire.planner.step_model import GivenLink

CPU = torch.device("cpu")
MODULE = """
import torch
from torch import nn

def job(device):
    model = nn.Linear(3, 2).to(device)
    return model, lambda model: model(torch.ones(4, 3, device=device)).sum()

def with_optimizer(device):
    model, loss = job(device)
    return model, loss, torch.optim.SGD(model.parameters())

def with_a_number(device):
    return *job(device), 3

def breaks(device):
    raise RuntimeError("no data")

def returns_a_model(device):
    return nn.Linear(3, 2)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(MODULE)
    (tmp_path / "broken_training.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_training", "broken_training"):
        sys.modules.pop(name, None)


def test_job_in_current_folder_is_loaded(folder):
    job = load("my_training:job")(CPU)
    check(job, CPU)
    assert isinstance(job.model, nn.Linear)


def test_job_may_have_an_optimizer(folder):
    assert load("my_training:job")(CPU).optimizer is None
    assert isinstance(load("my_training:with_optimizer")(CPU).optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_training", "expected module:function"),
        ("no_such_module:job", "There is no module 'no_such_module'"),
        ("my_training.py:job", "names a file; .* write my_training:job"),
        ("broken_training:job", "cannot be imported: No module named 'no_such_package'"),
        ("my_training:absent", "has no function 'absent'"),
        ("my_training:number", "has no function 'number'"),
        ("my_training:breaks", "raised RuntimeError: no data"),
        ("my_training:returns_a_model", "returned Linear; expected"),
        ("my_training:with_a_number", "returned Linear, function, int; expected"),
    ],
)
def test_unknown_job_or_function_that_is_no_job_is_refused(folder, name, message):
    with pytest.raises(JobError, match=message):
        load(name)(CPU)


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        raise ValueError("no gradients today")


class FailsInBackward(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return Refuses.apply(super().forward(x))


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (frozen(), lambda model: model(torch.ones(1, 2)).sum(), "No parameter of the model requires a gradient"),
        (nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)), r"returned shape \(1, 2\); expected"),
        (nn.Linear(2, 2), lambda model: 3.0, "returned float; expected"),
        (nn.Linear(2, 2), lambda model: torch.ones(()), "does not depend on a parameter"),
        (HalfUsed(), lambda model: model(torch.ones(1, 2)).sum(), "leaves 2 parameters without a gradient, unused"),
        (nn.Embedding(3, 2, sparse=True), lambda model: model(torch.ones(1, dtype=torch.long)).sum(), "sparse"),
        (nn.Linear(2, 2, device="meta"), lambda model: model(torch.ones(1, 2)).sum(), "parameters on meta"),
        (nn.Linear(2, 2), lambda model: model(torch.ones(1, 3)).sum(), r"loss\(model\) raised RuntimeError: mat1"),
        (nn.Linear(2, 2), lambda model: model.weight.sum(), "your model is model.module"),
        (
            FailsInBackward(),
            lambda model: model(torch.ones(1, 2)).sum(),
            "backward pass .* raised ValueError: no gradients today",
        ),
    ],
)
def test_model_that_cannot_be_measured_is_refused(model, loss, message):
    with pytest.raises(JobError, match=message):
        check(Job(model, loss), CPU)


def test_optimizer_step_that_fails_is_refused():
    model = nn.Linear(2, 2)
    job = Job(model, lambda _: None, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(JobError, match=r"optimizer.step\(\) raised TypeError: .* 'closure'"):
        measure_optimizer(job, CPU)


def test_loss_that_does_not_call_its_argument_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(JobError, match="does not call its argument"):
        check(Job(model, lambda _: model(torch.ones(1, 2)).sum()), CPU)


def test_each_hook_joins_one_handshake(world_of_one, monkeypatch):
    """Ranks measure different numbers of steps, and a handshake costs more than a launch."""
    compare = mock.Mock(wraps=handshake.compare_settings)
    monkeypatch.setattr(handshake, "compare_settings", compare)
    link = GivenLink(world_size=2, bandwidth=1e9, latency=0)
    measure(JOBS["tiny-layers"], ("int4", "powersgd-r1"), CPU, link)
    hooks = [call.args[1]["hook"] for call in compare.call_args_list]
    assert hooks == ["bf16_compress_hook", "quantization_hook", "powerSGD_hook"]
