"""Training loops without gradwire's DDP, plain and with `gradwire.collectives`, for ``gradwire bench anywhere``.

They are written as in other projects. A compressing loop differs from the plain one in the calls that exchange
gradients, and in nothing else; ``wire`` is None for the plain loop. Every loop exchanges all gradients before an
optimizer changes anything, so after an error in an exchange the parameters are those of before the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from gradwire import collectives
from gradwire.collectives import Memory, compressed_group

Loss = Callable[[nn.Module], Tensor]
Named = Mapping[str, Tensor]  # parameters or gradients by parameter name
Average = Callable[[Named, str | None, Memory | None], None]
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
WIRES_WITH_MEMORY = ("int4", "int2", "sign")


class Loop(Protocol):
    """A model in training."""

    def step(self, loss: Loss) -> None:
        """Train on this rank's batch. A collective call."""

    def means(self) -> dict[str, Tensor]:
        """The mean gradients that this rank's optimizers have used in the last step, by parameter name."""


def average_each(gradients: Named, wire: str | None, memory: Memory | None) -> None:
    """Replace gradients by their means over the ranks, in a message for each."""
    for name, gradient in gradients.items():
        if wire is None:
            dist.all_reduce(gradient)  # gloo has no AVG
            gradient /= dist.get_world_size()
        else:
            collectives.all_reduce(gradient, wire=wire, memory=None if memory is None else memory[name])


def average_all(gradients: Named, wire: str | None, memory: Memory | None) -> None:
    """Replace gradients by their means over the ranks, in one message."""
    tensors = list(gradients.values())
    if wire is not None:
        entry = None if memory is None else memory[tuple(gradients)]
        collectives.all_reduce_coalesced(tensors, wire=wire, memory=entry)
        return
    flat = nn.utils.parameters_to_vector(tensors)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


class Averaging:
    """Average ``p.grad`` after the backward by ``average``, `average_each` or `average_all`; AdamW on every rank."""

    def __init__(self, average: Average, model: nn.Module, wire: str | None) -> None:
        self.average = average
        self.model = model
        self.wire = wire
        self.memory = memory_for(wire)
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.average(self.means(), self.wire, self.memory)
        self.optimizer.step()

    def means(self) -> dict[str, Tensor]:
        return gradients_of(self.model.named_parameters())


class Muon:
    """`DistributedMuon` for the matrices of the layers, AdamW for all other parameters."""

    def __init__(self, model: nn.Module, wire: str | None) -> None:
        self.model = model
        self.wire = wire
        self.memory = memory_for(wire)
        named = dict(model.named_parameters())
        self.matrices = {name: p for name, p in named.items() if "layers." in name and p.ndim == 2}
        self.others = {name: p for name, p in named.items() if name not in self.matrices}
        self.muon = DistributedMuon(self.matrices.values(), wire, self.memory)
        self.adamw = torch.optim.AdamW(self.others.values(), **ADAMW)

    def step(self, loss: Loss) -> None:
        self.model.zero_grad()
        loss(self.model).backward()
        average_all(gradients_of(self.others.items()), self.wire, self.memory)
        self.muon.step()
        self.adamw.step()

    def means(self) -> dict[str, Tensor]:
        own = {id(p) for group in self.muon.param_groups for p in own_of(group["params"])}
        return gradients_of((*self.others.items(), *(each for each in self.matrices.items() if id(each[1]) in own)))


class DistributedMuon(torch.optim.Optimizer):
    """Muon whose ranks share the work: each orthogonalizes its part of the matrices of every shape.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Gradients of one shape are
    stacked and reduce-scattered, and all-gathers return the weights. Updates have the root mean square of AdamW's (Liu
    et al., "Muon is scalable for LLM training", 2025), so both optimizers take one learning rate.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], wire: str | None, memory: Memory | None, lr: float = 1e-3
    ) -> None:
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        defaults = {"lr": lr, "momentum": 0.95, "weight_decay": 0.1}
        super().__init__([{"params": alike} for alike in by_shape.values()], defaults)
        self.wire, self.memory = wire, memory

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        stacks = [stacked([p.grad for p in group["params"]]) for group in self.param_groups]
        means = [torch.empty_like(part_of(stack)) for stack in stacks]
        works = [self._reduce_scatter(mean, stack) for mean, stack in zip(means, stacks, strict=True)]
        for work in works:
            work.wait()
        weights = [self._updated(group, mean) for group, mean in zip(self.param_groups, means, strict=True)]
        works = [
            dist.all_gather_into_tensor(stack, part, async_op=True) for stack, part in zip(stacks, weights, strict=True)
        ]
        for group, stack, work in zip(self.param_groups, stacks, works, strict=True):
            work.wait()
            for parameter, weight in zip(group["params"], stack, strict=False):
                parameter.copy_(weight)

    def _reduce_scatter(self, mean: Tensor, stack: Tensor) -> Any:
        """Begin to write this rank's part of the mean of ``stack``; returns the work."""
        if self.wire is None:
            stack /= dist.get_world_size()  # gloo has no AVG
            return dist.reduce_scatter_tensor(mean, stack, async_op=True)
        entry = None if self.memory is None else self.memory[f"matrices {tuple(mean.shape[1:])}"]
        return collectives.reduce_scatter_tensor(mean, stack, async_op=True, wire=self.wire, memory=entry)

    def _updated(self, group: dict[str, Any], mean: Tensor) -> Tensor:
        """This rank's weights of a group after the step. The ``.grad`` of its matrices becomes their mean."""
        for parameter, gradient in zip(own_of(group["params"]), mean, strict=False):
            parameter.grad = gradient
        momentum = self.state[group["params"][0]].setdefault("momentum", torch.zeros_like(mean))
        momentum.lerp_(mean, 1 - group["momentum"])
        update = orthogonalized(mean.lerp(momentum, group["momentum"]))
        decay, scale = 1 - group["lr"] * group["weight_decay"], 0.2 * math.sqrt(max(mean.shape[1:]))
        return part_of(stacked(group["params"])).mul(decay).sub_(update, alpha=group["lr"] * scale)


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices of one shape, and zeros up to a multiple of the world size: [count, rows, columns]."""
    padding = [torch.zeros_like(matrices[0])] * (-len(matrices) % dist.get_world_size())
    return torch.stack([*matrices, *padding])


def part_of(stack: Tensor) -> Tensor:
    """This rank's part of a stack."""
    return stack.chunk(dist.get_world_size())[dist.get_rank()]


def own_of(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """The matrices in this rank's part of their stack: fewer or none on the last ranks."""
    count = -(-len(matrices) // dist.get_world_size())
    return matrices[dist.get_rank() * count :][:count]


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices [count, rows, columns] with their singular values moved to about 1, by five Newton-Schulz iterations."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Zero:
    """PyTorch's DDP and `ZeroRedundancyOptimizer`; the compressing loop passes both a compressed process group."""

    def __init__(self, model: nn.Module, wire: str | None) -> None:
        group = None if wire is None else compressed_group(wire=wire)
        self.model = nn.parallel.DistributedDataParallel(model, process_group=group)
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, **ADAMW)

    def step(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.optimizer.step()

    def means(self) -> dict[str, Tensor]:
        return gradients_of(self.model.module.named_parameters())


def memory_for(wire: str | None) -> Memory | None:
    """Error memory, if the wire format needs it."""
    return Memory() if wire in WIRES_WITH_MEMORY else None


def gradients_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of parameters, by name."""
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


LOOPS: dict[str, Callable[[nn.Module, str | None], Loop]] = {
    "each": partial(Averaging, average_each),
    "all": partial(Averaging, average_all),
    "muon": Muon,
    "zero": Zero,
}
