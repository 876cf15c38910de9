"""The own cost of a reducer: backward with it, minus backward without, for each parameter, in one process.

One rank over gloo (or NCCL) runs every autograd hook, copy and collective for real, while the collective itself costs
next to nothing: what is left is the price of the reducer. gradwire's and PyTorch's take turns step by step, so that
whatever else the machine does falls on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks

from gradwire import DistributedDataParallel
from gradwire.bench.measuring import percentiles_ms, synchronize, world_of_one
from gradwire.hooks import debugging_hooks, default_hooks

TorchDDP = nn.parallel.DistributedDataParallel
WARM_UP = 5  # the first steps build and rebuild buckets


class Residual(nn.Module):
    """x + tanh(A_k x) / 10 for each of many small layers: two parameters a layer, gradients of ordinary size."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in turn."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


MODELS: dict[str, Callable[[], Residual]] = {
    "200 parameters, 54 k elements": lambda: Residual(100, 16),
    "200 parameters, 6.6 M elements": lambda: Residual(100, 256),
    "12 parameters, 25 M elements": lambda: Residual(6, 2048),
}

# Name: (the class that wraps the model, the hook).
PROVIDERS: dict[str, tuple[Any, Any]] = {
    "no reducer": (None, None),
    "PyTorch": (TorchDDP, None),
    "gradwire": (DistributedDataParallel, None),
    "PyTorch, noop_hook": (TorchDDP, torch_debugging_hooks.noop_hook),
    "gradwire, noop_hook": (DistributedDataParallel, debugging_hooks.noop_hook),
    "PyTorch, fp16_compress_hook": (TorchDDP, torch_default_hooks.fp16_compress_hook),
    "gradwire, fp16_compress_hook": (DistributedDataParallel, default_hooks.fp16_compress_hook),
}


@dataclass
class Case:
    """One model behind one reducer, and the seconds that its backwards took."""

    model: nn.Module
    batch: Tensor
    seconds: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Forward, and the time of the backward until every gradient is final."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.batch).square().mean()
        synchronize(self.batch.device)
        start = time.perf_counter()
        loss.backward()
        synchronize(self.batch.device)
        return time.perf_counter() - start


def measure(steps: int, device: torch.device) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a backward (p20, p50, p80) by model and provider, after a check that the gradients agree.

    Raises:
        RuntimeError: a provider's gradients differ from those without a reducer by more than its wire rounds.
    """
    with world_of_one(device, threads=1):
        return {name: _measure_model(name, build, device, steps) for name, build in MODELS.items()}


def _measure_model(
    name: str, build: Callable[[], Residual], device: torch.device, steps: int
) -> dict[str, dict[str, float]]:
    cases = {provider: _case(build, device, wrap, hook) for provider, (wrap, hook) in PROVIDERS.items()}
    for _ in range(WARM_UP):
        for case in cases.values():
            case.step()
    _check(cases)
    for _ in track(range(steps), description=name):
        for case in cases.values():
            case.seconds.append(case.step())
    return {provider: percentiles_ms(case.seconds) for provider, case in cases.items()}


def _case(build: Callable[[], Residual], device: torch.device, wrap: Any, hook: Any) -> Case:
    torch.manual_seed(0)
    model = build().to(device)
    batch = torch.randn(8, model.width, device=device)
    if wrap is None:
        return Case(model, batch)
    wrapped = wrap(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return Case(wrapped, batch)


def _check(cases: dict[str, Case]) -> None:
    expected = [p.grad for p in cases["no reducer"].model.parameters()]
    for provider, case in cases.items():
        # fp16 rounds to 11 bits, or to the subnormal step of 6e-8.
        rtol, atol = (2**-11, 2**-24) if "fp16" in provider else (0.0, 0.0)
        for parameter, reference in zip(case.model.parameters(), expected, strict=True):
            grad = parameter.grad
            if grad is None or reference is None or not torch.allclose(grad, reference, rtol=rtol, atol=atol):
                raise RuntimeError(f"{provider}: the gradients differ from those without a reducer; nothing is timed.")


def reducer_tables(results: dict[str, dict[str, dict[str, float]]]) -> Iterator[Table]:
    """A table for each model: medians, microseconds for each parameter beyond no reducer, and ratios to PyTorch's."""
    for model, providers in results.items():
        out = Table(title=f"Backward of one rank, {model}", title_justify="left", box=box.SIMPLE_HEAD)
        for header in ("reducer", "ms (p20-p80)", "us a parameter", "vs PyTorch"):
            out.add_column(header, justify="left" if header == "reducer" else "right")
        parameters = int(model.split()[0])
        bare = providers["no reducer"]["p50"]
        for provider, ms in providers.items():
            peer = providers[provider.replace("gradwire", "PyTorch")]
            out.add_row(
                provider,
                f"{ms['p50']:.2f} ({ms['p20']:.1f}-{ms['p80']:.1f})",
                f"{1e3 * (ms['p50'] - bare) / parameters:.1f}",
                f"{ms['p50'] / peer['p50']:.2f}x" if provider.startswith("gradwire") else "",
            )
        yield out
