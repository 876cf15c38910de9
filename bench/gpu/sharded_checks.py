"""Cases of the GPU lane: `gradwire.attach` on FSDP2, HSDP and `replicate`, on every rank of the default process group.

With n ranks, HSDP has n replicas of one shard, and FSDP2 one replica of n shards. A case raises if the property in its
name does not hold.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire
from gradwire.bench.gpu.case import LaneCase, require
from gradwire.hooks.default_hooks import allreduce_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState

PLACES = ("hsdp", "replicate", "fsdp")
STEPS = 8


def sharded(place: str, device: torch.device) -> nn.Module:
    """A model in several parameter groups, of which some have rows that the shards do not divide."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 301), nn.Tanh(), nn.Linear(301, 128), nn.Tanh(), nn.Linear(128, 17)).to(device)
    if place == "hsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    else:
        ranks = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        name = "shard" if place == "fsdp" else "replicate"
        mesh = DeviceMesh.from_group(cast("dist.ProcessGroup", ranks), device.type, mesh_dim_names=(name,))
    wrap: Any = replicate if place == "replicate" else fully_shard
    for module in (model[0], model[2], model):
        wrap(module, mesh=mesh)
    return model


def gradients(model: nn.Module, step: int, device: torch.device) -> list[Tensor]:
    """This rank's shards of the gradients of a step; batches differ by rank."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    model(torch.randn(16, 96, generator=generator).to(device)).square().mean().backward()
    return [cast("Any", parameter.grad).to_local().clone() for parameter in model.parameters()]


def _norm(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm over all elements of all ranks."""
    total = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def attached_plain_hook_gives_the_native_bits(place: str, device: torch.device) -> None:
    """A hook without compression averages to the bits of the native all-reduce."""
    native, ours = (sharded(place, device) for _ in range(2))
    gradwire.attach(ours, None, allreduce_hook)
    for step in range(STEPS):
        for exact, mine in zip(gradients(native, step, device), gradients(ours, step, device), strict=True):
            require(torch.equal(exact, mine), f"step {step}, {tuple(exact.shape)}: off by {(exact - mine).abs().max()}")


def missing_of(native: nn.Module, ours: nn.Module, steps: range, bound: float, device: torch.device) -> list[Tensor]:
    """The exact gradients of some steps minus the compressed ones. Raises if ``bound`` times a gradient is missing."""
    missing = [torch.zeros_like(cast("Any", parameter).to_local()) for parameter in native.parameters()]
    for step in steps:
        exact, mine = gradients(native, step, device), gradients(ours, step, device)
        torch._foreach_sub_(exact, mine)
        torch._foreach_add_(missing, exact)
        part = _norm(missing) / _norm(mine)
        require(0 < part <= bound, f"up to step {step}, {part} of a gradient is missing, bound {bound}")
    return missing


def attached_int4_keeps_what_it_drops(place: str, device: torch.device) -> None:
    """int4 with error feedback between replicas, or in the reduce-scatter: what is missing does not add up."""
    native, ours = (sharded(place, device) for _ in range(2))
    if place == "fsdp":
        gradwire.attach(ours, within=gradwire.sharded.ReduceScatterOptions(wire="int4", error_dtype=torch.float32))
    else:
        gradwire.attach(ours, QuantizationState(wire="int4", start_iter=0))
    missing_of(native, ours, range(STEPS), 0.25, device)


def attached_powersgd_keeps_what_it_drops(device: torch.device) -> None:
    """PowerSGD at a rank that drops little between the replicas of HSDP."""
    native, ours = (sharded("hsdp", device) for _ in range(2))
    gradwire.attach(ours, PowerSGDState(None, 16, 2, 1))
    for step in range(2):  # uncompressed
        gradients(ours, step, device)
    missing_of(native, ours, range(2, STEPS), 1.5, device)


def reduce_scatter_in_16_bits_sums_in_fp32(wire: str, device: torch.device) -> None:
    """FSDP2's reduce-scatter deviates by the rounding of each rank's gradient."""
    native, ours = (sharded("fsdp", device) for _ in range(2))
    gradwire.attach(ours, within=wire)
    for step in range(STEPS):
        exact, mine = gradients(native, step, device), gradients(ours, step, device)
        missing = _norm([a - b for a, b in zip(exact, mine, strict=True)])
        bound = 2.0 ** (-8 if wire == "bf16" else -11) * dist.get_world_size()
        require(missing <= bound * _norm(exact), f"step {step}: {missing / _norm(exact)} is missing, bound {bound}")


def attached_memory_survives_a_checkpoint(device: torch.device) -> None:
    """A state that continues from a checkpoint sends what the other one has kept."""
    native, first, second = (sharded("hsdp", device) for _ in range(3))
    states = [QuantizationState(wire="int4", start_iter=0) for _ in range(2)]
    before, after = (gradwire.attach(model, state) for model, state in zip((first, second), states, strict=True))
    kept = missing_of(native, first, range(STEPS), 0.25, device)
    after.load_state_dict(before.state_dict())
    exact, mine = gradients(native, STEPS, device), gradients(second, STEPS, device)
    torch._foreach_add_(exact, kept)  # the gradient that is compressed in the next step
    torch._foreach_sub_(exact, mine)
    part = _norm(exact) / _norm(mine)
    require(part <= 0.25, f"{part} of the gradient is missing after the load")


SHARDED_CHECKS: dict[str, LaneCase] = {
    **{
        f"attach on {place}: native bits without compression": partial(attached_plain_hook_gives_the_native_bits, place)
        for place in ("hsdp", "replicate")
    },
    **{
        f"attach on {place}: int4 keeps what it drops": partial(attached_int4_keeps_what_it_drops, place)
        for place in PLACES
    },
    "attach on hsdp: PowerSGD keeps what it drops": attached_powersgd_keeps_what_it_drops,
    **{
        f"attach on fsdp: {wire} sums in fp32": partial(reduce_scatter_in_16_bits_sums_in_fp32, wire)
        for wire in ("bf16", "fp16")
    },
    "attach on hsdp: memory survives a checkpoint": attached_memory_survives_a_checkpoint,
}
