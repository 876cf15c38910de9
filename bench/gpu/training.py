"""Models for the cases of the GPU lane, and short trainings of them in either DDP."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.bench.implementations import TorchDDP, plainly_named

StateAndHook = tuple[Any, Callable[..., Any]]

OurDDP = gradwire.DistributedDataParallel


class Net(nn.Module):
    """Convolutions in channels_last, odd sizes, a scalar, and linear layers of more than one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(13)
        self.linear = nn.Linear(13 * 36, 301)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(301, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = self.out(torch.tanh(self.linear(x.flatten(1)))) * self.scale
        return x

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(4, 3, 8, 8, generator=generator)


class DropoutNet(Net):
    """Takes random numbers in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


class HalfNet(nn.Module):
    """fp16 matrices, biases and norms, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(96, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 64)).half()
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x).float()
        return x + (x.sum() * self.empty.float()).sum()

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(4, 96, generator=generator).half()


def wrap(wrapper: type[TorchDDP], module: nn.Module, device: torch.device, **options: Any) -> TorchDDP:
    """A module in a DDP, on the device, by default with small buckets."""
    devices = [device.index] if device.type == "cuda" else None
    return wrapper(module.to(device), device_ids=devices, **{"bucket_cap_mb": 0.1, **options})


def register(model: TorchDDP, state: object, hook: Callable[..., Any]) -> None:
    if hasattr(state, "bind"):
        state.bind(model)  # random numbers depend on names
    model.register_comm_hook(state, hook if isinstance(model, OurDDP) else plainly_named(hook))


def take_step(model: TorchDDP, batch: Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()


def train(
    wrapper: type[TorchDDP],
    device: torch.device,
    hook: StateAndHook | None = None,
    net: type[Net | HalfNet] = Net,
    steps: int = 4,
    **options: Any,
) -> tuple[TorchDDP, list[list[Tensor]]]:
    """A model and its gradients in every step; seeds and batches are equal for both DDPs, batches differ by rank."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    model = wrap(wrapper, net(), device, **options)
    if hook is not None:
        register(model, *hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    taken = []
    for _ in range(steps):
        take_step(model, net.batch(generator).to(device))
        taken.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return model, taken


def assert_same(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]], what: str) -> None:
    """Raise unless the gradients of two models are equal in every step."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            if not torch.equal(a, b):
                raise AssertionError(f"{what}, step {step}, gradient {i}: off by {(a - b).abs().max().item()}")


def assert_equal_on_all_ranks(gradients: Sequence[Sequence[Tensor]], what: str) -> None:
    """Raise unless the gradients of the last step equal those of rank 0. A collective call."""
    flat = torch.cat([gradient.double().flatten() for gradient in gradients[-1]])
    first = flat.clone()
    dist.broadcast(first, 0)
    if not torch.equal(flat, first):
        raise AssertionError(f"{what}: gradients of rank {dist.get_rank()} differ from those of rank 0")
