"""Models of the benches, with few and with many parameters, and the same as jobs of `gradwire advise`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.bench.implementations import make_batch, make_model
from gradwire.planner.jobs import Build, Job


class Model(NamedTuple):
    """A model and its input."""

    build: Callable[[], nn.Module]  # makes the model, with random weights
    input_shape: tuple[int, ...]


class Residual(nn.Module):
    """x + tanh(A_k x) / 10 for each of many small layers: little compute per parameter."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


class Transformer(nn.Module):
    """An encoder over patches, as in "An Image is Worth 16x16 Words" (arXiv:2010.11929), without dropout."""

    def __init__(self, layers: int, width: int, patches: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1) + self.position
        logits: Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return logits


class DenseLayer(nn.Module):
    """Appends ``growth`` channels, computed from all before by a bottleneck of 1 x 1 and 3 x 3 convolutions."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.make(x)], dim=1)


def dense_net(blocks: int, layers: int, growth: int) -> nn.Sequential:
    """A DenseNet-BC (arXiv:1608.06993): six parameters per layer, most of them tiny."""
    channels = 2 * growth
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(blocks):
        for _ in range(layers):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if block < blocks - 1:
            half = channels // 2
            parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)]
            channels = half
    parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*parts)


def mlp(layers: int, width: int) -> nn.Sequential:
    """Linear layers of one width with ReLU between them."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


MODELS = {
    "tiny-layers": Model(lambda: Residual(100, 16), (8, 16)),
    "transformer": Model(lambda: Transformer(16, 128, 16), (8, 16, 128)),
    "densenet": Model(lambda: dense_net(4, 25, 8), (4, 3, 16, 16)),
    "mlp": Model(lambda: mlp(5, 3162), (8, 3162)),
}


def _job(model: Callable[[], nn.Module], batch: Callable[[], Tensor], device: torch.device) -> Job:
    torch.manual_seed(0)
    inputs = batch().to(device)

    def loss(module: nn.Module) -> Tensor:
        outputs: Tensor = module(inputs)
        return outputs.square().sum() / len(inputs)

    return Job(model().to(device), loss)


JOBS: dict[str, Build] = {
    "linear": partial(_job, make_model, partial(make_batch, 0, 0, torch.device("cpu"))),
    **{name: partial(_job, model.build, partial(torch.randn, model.input_shape)) for name, model in MODELS.items()},
}
