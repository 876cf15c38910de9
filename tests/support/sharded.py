"""A model sharded by FSDP2 in several ways, and its gradients."""

import functools
import tempfile
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.support.ranks import from_all_ranks
from tests.support.training import Fault, message_of

PLACES = ["hsdp", "replicate"]
SHARDED = ["hsdp", "fsdp"]


@functools.cache
def mesh(place):
    if place.startswith("hsdp"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (4,), mesh_dim_names=("replicate" if place == "replicate" else "shard",))


class Model(nn.Module):
    """Rows that 4 does not divide, fewer rows than shards, a tied weight, and a layer that not every step uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, 15)
        self.between = nn.Linear(15, 16)
        self.second = nn.Linear(16, 16)
        self.spare = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(16, 1)

    def forward(self, x, spare=True):
        x = torch.tanh(self.tied(torch.tanh(self.second(torch.tanh(self.between(self.first(x)))))))
        return self.last(self.spare(x) if spare else x)


def other_mesh(parameter):
    """Vectors are sharded on a mesh of their own, so that a module has two parameter groups."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    return ShardPlacementResult(Shard(0), _info(HSDPMeshInfo)) if parameter.dim() == 1 else None


@functools.cache
def _info(kind):
    return kind(mesh("hsdp, other"), shard_mesh_dim=1, replicate_mesh_dim=0)


def sharded(place, *, prepare=lambda model: None, columns=False, layers=("first", "spare"), **options):
    torch.manual_seed(0)
    model = Model()
    prepare(model)
    if columns and place != "replicate":  # those that divide by the number of shards
        options["shard_placement_fn"] = lambda each: Shard(each.dim() - 1 if each.shape[-1] % 4 == 0 else 0)
    wrap = replicate if place == "replicate" else fully_shard
    for layer in layers:
        wrap(model.get_submodule(layer), mesh=mesh(place), **options)
    wrap(model, mesh=mesh(place), **options)
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for each in model.parameters():
            nn.init.uniform_(each, -0.3, 0.3)
    return model


def backward(model, step, **options):
    """Gradients of one backward of this rank's own batch."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    model(torch.randn(5, 9, generator=generator), **options).square().mean().backward()


def contributions(model, step):
    """The gradients of each rank by parameter name, divided by the world size, from a model that is not sharded."""
    plain = Model()
    with torch.no_grad():
        for (name, own), (same, parameter) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == same
            own.copy_(parameter.full_tensor())
    backward(plain, step)
    by_rank = from_all_ranks({name: own.grad.double() for name, own in plain.named_parameters()})
    return {name: torch.stack([one[name] for one in by_rank]) / len(by_rank) for name in by_rank[0]}


def gradients(model):
    """This rank's shards of all gradients by name; None where there is none."""
    named = model.named_parameters()
    return {name: None if each.grad is None else each.grad.to_local().clone() for name, each in named}


def train(model, steps=4):
    """The gradients of each step of plain SGD."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        model.zero_grad()
        backward(model, step)
        seen.append(gradients(model))
        optimizer.step()
    return seen


def norm(tensors):
    """Euclidean norm of all elements."""
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


FEATURES = {
    "plain": {},
    "frozen": {"prepare": lambda model: model.first.weight.requires_grad_(False)},
    "bf16 reduction": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16 wire": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)},
    "columns": {"columns": True},
    "compiled": {"prepare": lambda model: model.spare.compile(backend="eager")},
    "meta device": {"prepare": lambda model: model.to("meta")},
    "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpointed": {"prepare": lambda model: setattr(model, "spare", checkpoint_wrapper(model.spare))},
}


def missing_over(steps, native, ours):
    """The sums over some steps of the exact gradients minus the compressed ones, by parameter name."""
    total = {}
    for step in range(steps):
        for model in (native, ours):
            model.zero_grad()
            backward(model, step)
        for name, gradient in gradients(ours).items():
            total[name] = total.get(name, 0) + (gradients(native)[name] - gradient)
    return total


def shared_folder():
    """A new temporary folder, the same on all ranks."""
    (path,) = {each for each in from_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else None) if each}
    return path


def message_after_fault_on_rank_1(owner, name, model):
    """The message that a backward raises on this rank, if the function ``name`` of ``owner`` raises on rank 1."""
    fails = mock.patch.object(owner, name, side_effect=Fault("on one rank"))
    with fails if dist.get_rank() == 1 else nullcontext():
        return message_of(backward, model, 1)
