"""Cases: small models and their gradients, drawn by hypothesis, and training with them on a rank."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwire.exchange.decorators import CommHook
from gradwire.reducer import DistributedDataParallel

PYTORCH, GRADWIRE = "PyTorch's DDP", "gradwire's DDP"
WRAPPERS: dict[str, Callable[..., Any]] = {
    PYTORCH: nn.parallel.DistributedDataParallel,
    GRADWIRE: DistributedDataParallel,
}


@dataclass(frozen=True)
class Parameter:
    """A parameter, and how its gradients are drawn."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"  # or "transposed" or "strided" (with gaps)
    # or "zeros", "sparse" (mostly zero, in blocks), "outliers" (a few elements are much larger) or "constant" (equal on
    # all ranks)
    values: str = "normal"
    exponent: int = 0  # decimal exponent of the gradients' magnitude

    def new(self) -> nn.Parameter:
        """The parameter, filled with zeros.

        PyTorch's DDP cannot broadcast a lone parameter whose strides differ from those of its flat view in dimensions
        of size 1 only, so one without two dimensions to transpose is contiguous.
        """
        data = torch.zeros(self.shape, dtype=self.dtype)
        if self.layout == "transposed" and sum(size > 1 for size in self.shape) > 1:
            data = torch.zeros(self.shape[::-1], dtype=self.dtype).permute(tuple(reversed(range(len(self.shape)))))
        elif self.layout == "strided" and data.numel() > 1:
            data = torch.zeros(*self.shape, 2, dtype=self.dtype)[..., 0]
        return nn.Parameter(data)

    def gradient(self, generator: torch.Generator) -> Tensor:
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.values == "constant":
            values.fill_(1)
        elif self.values == "zeros":
            values.zero_()
        elif self.values == "sparse":
            values.view(-1)[torch.arange(values.numel()) // 32 % 4 > 0] = 0
        elif self.values == "outliers":
            values *= 1e-6
            values.view(-1)[::32] *= 1e6
        return (values * 10.0**self.exponent).to(self.dtype)


class Poison(NamedTuple):
    """An element of a gradient that is not finite, on one rank. Positions count modulo what there is."""

    rank: int
    parameter: int
    element: int
    value: float


@dataclass(frozen=True)
class Case:
    """A model, its buckets and its training loop."""

    parameters: tuple[Parameter, ...]  # named weights.0, weights.1, ...
    bucket_cap_mb: float = 25  # the smallest gives every parameter a bucket of its own
    gradient_as_bucket_view: bool = False
    set_to_none: bool = True  # how gradients are cleared
    micro_batches: int = 1  # backward passes per step, all but the last under ``no_sync``
    steps: int = 1  # compressed steps
    seed: int = 0  # of the gradients and of the order in which they become ready
    wrapper: str = GRADWIRE  # the DDP, in laws that need one only
    poison: Poison | None = None  # an element that is not finite, in a step after the others

    @property
    def names(self) -> list[str]:
        return [f"weights.{index}" for index in range(len(self.parameters))]

    def inputs(self, rank: int, step: int) -> list[list[Tensor]]:
        """The gradients of a rank, for each micro-batch of a step."""
        return [
            [
                each.gradient(torch.Generator().manual_seed(hash((self.seed, index, rank, step, batch)) % 2**63))
                for index, each in enumerate(self.parameters)
            ]
            for batch in range(self.micro_batches)
        ]

    def gradients(self, rank: int, step: int) -> dict[str, Tensor]:
        """The gradients that a rank computes in a step."""
        first, *others = self.inputs(rank, step)
        for batch in others:
            first = [total + each for total, each in zip(first, batch, strict=True)]
        return dict(zip(self.names, first, strict=True))

    def __str__(self) -> str:
        lines = [
            f"{name}: {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}, {each.layout}, "
            f"{each.values} gradients of about 1e{each.exponent}"
            for name, each in zip(self.names, self.parameters, strict=True)
        ]
        options = [f"{each.name}={getattr(self, each.name)}" for each in fields(self) if each.name != "parameters"]
        return "\n".join([", ".join(options), *lines])


class Model(nn.Module):
    """Parameters whose gradients are the inputs, exactly: the loss is the sum of parameter * input."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList(each.new() for each in case.parameters)
        order = torch.randperm(len(self.weights), generator=torch.Generator().manual_seed(case.seed))
        self.order: list[int] = order.tolist()

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([(self.weights[i] * inputs[i]).sum().double() for i in self.order]).sum()


class Training:
    """A model of a case on this rank, in one of the two DDPs.

    ``wrapper`` is a key of `WRAPPERS`; without a ``hook``, DDP's own all-reduce runs. ``options`` are further ones of
    DDP.
    """

    def __init__(self, case: Case, wrapper: str, rank: int, state: Any, hook: CommHook | None, **options: Any) -> None:
        self._case, self._rank = case, rank
        self.module: nn.Module = Model(case)
        options |= {"bucket_cap_mb": case.bucket_cap_mb, "gradient_as_bucket_view": case.gradient_as_bucket_view}
        self.ddp: Any = WRAPPERS[wrapper](self.module, **options)
        if hook is not None:
            is_ours = isinstance(self.ddp, DistributedDataParallel)
            self.ddp.register_comm_hook(state, hook if is_ours else plainly_named(hook))

    def step(self, number: int, poison: Poison | None = None) -> dict[str, Tensor]:
        """Train a step; returns the reduced gradients by parameter name."""
        self.ddp.zero_grad(set_to_none=self._case.set_to_none)
        *local, last = self._case.inputs(self._rank, number)
        with self.ddp.no_sync() if local else nullcontext():
            for batch in local:
                self.ddp(*batch).backward()
        if poison is not None and poison.rank == self._rank:
            elements = last[poison.parameter].view(-1)
            elements[poison.element % elements.numel()] = poison.value
        self.ddp(*last).backward()
        return {name: p.grad.detach().clone() for name, p in self.module.named_parameters() if p.grad is not None}

    def run(self, steps: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self.step(number) for number in steps]


def plainly_named(hook: CommHook) -> Callable[..., Any]:
    """``hook`` under a name that PyTorch's DDP does not look up in its list of hooks that need NCCL."""

    def plain_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    return plain_hook


SHAPES = st.one_of(
    st.sampled_from([(), (1,), (17,), (0,), (5, 3), (13, 11), (0, 3), (1, 31), (31, 1), (3, 5, 2), (2, 1, 4, 3)]),
    st.tuples(st.integers(0, 300)),
    st.lists(st.integers(0, 13), max_size=3).map(tuple),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
BUCKET_CAPS_MB = st.sampled_from([25, 0.0005, 1e-6])


@st.composite
def parameters(draw: st.DrawFn, is_moderate: bool) -> Parameter:
    """A parameter; of ordinary magnitude, or of any.

    Magnitudes stay within what the mean of gradients in fp32 can have, and the squares of a few of them in fp64.
    """
    dtype = draw(DTYPES)
    exponents = st.integers(-4, 2)
    if not is_moderate and dtype != torch.float16:
        exponents |= st.sampled_from([-38, -20, -8, 6, 20, 30])
    return Parameter(
        draw(SHAPES),
        dtype,
        draw(st.sampled_from(["contiguous", "transposed", "strided"])),
        draw(st.sampled_from(["normal", "zeros", "sparse", "outliers", "constant"])),
        draw(exponents),
    )


def cases(is_moderate: bool = False) -> st.SearchStrategy[Case]:
    """Cases; with gradients of ordinary magnitude, or of any."""
    return st.builds(
        Case,
        parameters=st.lists(parameters(is_moderate), min_size=1, max_size=6).map(tuple),
        bucket_cap_mb=BUCKET_CAPS_MB,
        gradient_as_bucket_view=st.booleans(),
        set_to_none=st.booleans(),
        micro_batches=st.integers(1, 2),
        steps=st.integers(1, 3),
        seed=st.integers(0, 1000),
        wrapper=st.sampled_from([GRADWIRE, PYTORCH]),
    )


@st.composite
def poisoned_cases(draw: st.DrawFn, world_size: int) -> Case:
    """Cases with an element that is not finite."""
    case = draw(cases(is_moderate=True))
    sized = [index for index, each in enumerate(case.parameters) if 0 not in each.shape]
    hypothesis.assume(sized)
    poison = Poison(
        draw(st.integers(0, world_size - 1)),
        draw(st.sampled_from(sized)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])),
    )
    return replace(case, poison=poison)
