"""A small regression task, hooks with memory, and the plain-PyTorch run that each trainer must equal."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.training import WRAPPERS

WORLD_SIZE, BATCH_SIZE = 2, 4
STEPS_PER_EPOCH, EPOCHS = 6, 2
LEARNING_RATE = 0.1

OPTIONS = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
# Each makes (state, hook) anew; compressing from the third step on.
HOOKS = {
    "powersgd": lambda: (PowerSGDState(None, matrix_approximation_rank=2, **OPTIONS), powerSGD_hook),
    "scaled_fp16": lambda: (ScaledCastState(None), scaled_cast_hook),
}
# How far a resumed run may be from the uninterrupted one: PowerSGD's errors are averaged, which rounds differently.
RESUME_TOLERANCE = {"powersgd": 1e-5, "scaled_fp16": 0.0}


def arguments_for(hook):
    """Arguments and options of a trainer for one of `HOOKS`: PowerSGD by its name, the other one as state and hook."""
    return (["powersgd-r2"], OPTIONS) if hook == "powersgd" else (HOOKS[hook](), {})


class Net(nn.Module):
    """Two layers under the name that they have in every trainer: names seed PowerSGD's random columns."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, inputs):
        return self.net(inputs)


def new_net(kind=Net, seed=0):
    """A model equal on all ranks."""
    torch.manual_seed(seed)
    return kind()


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(WORLD_SIZE * BATCH_SIZE * STEPS_PER_EPOCH, 32, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.flip(1)))


def rank_loader(rank):
    """One epoch of a rank: of every ``WORLD_SIZE`` batches the rank's."""
    batches = torch.arange(len(data())).view(STEPS_PER_EPOCH, WORLD_SIZE, BATCH_SIZE)
    return DataLoader(Subset(data(), batches[:, rank].flatten().tolist()), batch_size=BATCH_SIZE)


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def launched_by_torchrun():
    """Complete the environment of a fresh case to torchrun's; returns the rank."""
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], GROUP_RANK="0")
    os.environ.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_RESTART_COUNT="0", CUDA_VISIBLE_DEVICES="")
    return int(os.environ["RANK"])


def weights(model):
    """Copies of the parameters by name, without the components of wrappers."""
    return {name[name.index("net.") :]: p.detach().clone() for name, p in model.named_parameters()}


def plain_run(hook, wrapper="pytorch", epochs=EPOCHS):
    """The weights after training without a trainer, in the default group."""
    model = WRAPPERS[wrapper](new_net())
    model.register_comm_hook(*HOOKS[hook]())
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for batch in rank_loader(dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return weights(model)


def distance(one, other):
    """The relative difference of two sets of weights: the largest over the parameters."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / other[name].norm()).item() for name in one)


def assert_equals_plain_run_and_resumes(hook, plain, whole, resumed, forgetful):
    """Compare four sets of weights; ``forgetful`` was resumed without the state of the hook."""
    assert distance(whole, plain) == 0
    assert distance(resumed, whole) <= RESUME_TOLERANCE[hook]
    if hook == "powersgd":  # a power of two as scale changes no bits here
        assert distance(forgetful, whole) > 1000 * RESUME_TOLERANCE[hook]
