"""Runs of gradwire's and of PyTorch's `powerSGD_hook` on chosen gradients, which may fail or hang."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs

from gradwire.hooks import powerSGD_hook as ours
from tests.support.harness import CaseFailed
from tests.support.training import WRAPPERS, register
from tests.support.zoo import Probe

MODULES = {"ours": ours, "pytorchs": pytorchs}
# Seconds. A probe of PyTorch's hook takes less than one; it may hang where ranks issue collectives in other orders.
PROBE_LIMIT = 20.0
# Half an ulp of fp32.
U = 2.0**-24


@dataclass
class Run:
    """The outcome of a run on one rank: the gradients of every step until it ended, and the errors that were raised."""

    gradients: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    seen: list = field(default_factory=list)

    @property
    def is_finite(self):
        return [all(gradient.isfinite().all().item() for gradient in step) for step in self.gradients]


def wrapped(tensors, wrapper="pytorch", **options):
    """A DDP whose parameters are laid out as ``tensors``, and have for gradients what it is called with."""
    module = Probe()
    module.weights = torch.nn.ParameterList(torch.zeros_like(tensor) for tensor in tensors)
    return WRAPPERS[wrapper](module, **options)


def registered(library, tensors, wrapper="pytorch", batched=False, options=None, **ddp_options):
    """A new state of the library that compresses from the third step on, and a DDP that has it."""
    module, ddp = MODULES[library], wrapped(tensors, wrapper, **ddp_options)
    state = module.PowerSGDState(None, **({"start_powerSGD_iter": 2, "min_compression_rate": 1} | (options or {})))
    register(ddp, (state, module.batched_powerSGD_hook if batched else module.powerSGD_hook))
    return state, ddp


def step(ddp, tensors, set_to_none=True):
    """One backward pass; returns copies of the reduced gradients."""
    ddp.zero_grad(set_to_none=set_to_none)
    loss = ddp(*tensors)
    (loss.real if loss.is_complex() else loss).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def described(error):
    """Its type and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])[:160]


def run_steps(library, values, batched=False, options=None, wrapper="pytorch", **ddp_options):
    """One step for each of ``values``, where rank r has the gradients ``values[step][r]``.

    Goes on after an error, up to two.
    """
    mine = [ranks[dist.get_rank()] for ranks in values]
    state, ddp = registered(library, mine[0], wrapper, batched, options, **ddp_options)
    run = Run()
    for tensors in mine:
        try:
            run.gradients.append(step(ddp, tensors))
        except Exception as error:
            run.errors.append(described(error))
            if len(run.errors) == 2:
                break
    if library == "ours":
        run.seen = state.state_dict()["errors"]
    return run


def probe(world, case, **arguments):
    """The result of the case on rank 0 of a run of PyTorch's hook, or None if that ended the processes or hung."""
    try:
        return world.run(case, limit=PROBE_LIMIT, **arguments)[0]
    except CaseFailed as failure:
        if failure.errors:  # a mistake in the case
            raise
        return None


def probe_steps(world, **arguments):
    return probe(world, run_steps, library="pytorchs", **arguments) or Run(errors=["no answer"])


def relative_error(actual, expected):
    return ((actual.cdouble() - expected.cdouble()).norm() / expected.cdouble().norm()).item()


def mean(ranks, index):
    return torch.stack([tensors[index].cdouble() for tensors in ranks]).mean(0)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_values(world, steps, shapes, seed=0, dtype=torch.float32):
    """Different on every rank and in every step."""
    g = generator(seed)
    return [
        [[torch.randn(shape, generator=g, dtype=dtype) for shape in shapes] for _ in range(world.size)]
        for _ in range(steps)
    ]


def low_rank(n, m, rank, seed, dtype=torch.float32):
    g = generator(seed)
    sides = torch.randn(n, rank, generator=g, dtype=dtype), torch.randn(rank, m, generator=g, dtype=dtype)
    return sides[0] @ sides[1] / math.sqrt(rank)


def rounding(n, m, rank):
    """Relative error of a matrix of no more than that rank, when it comes out as it went in.

    Sums over the columns, the rows and the rank. Those of P are relative to |M| |q|, which is up to 100 times the
    smallest singular value of M Q' while Q is random (2 to 96 times in these tests). Measured: 0.02 of this.
    """
    return 100 * (n + m + rank) * U


def assert_nothing_lost(run, values, index, skipped=()):
    """The mean gradients of all steps but ``skipped`` are what was applied and the mean error that is left.

    A step rounds M = G + E and E = M - out, and the mean of the errors is two roundings more: 2 T + 2 half ulps of the
    largest element of M. Measured: 0.06 of that.
    """
    left = torch.zeros_like(values[0][0][index], dtype=torch.float64).expand(len(values[0]), *values[0][0][index].shape)
    largest = 0.0
    for i, ranks in enumerate(values):
        if i not in skipped:
            given = torch.stack([tensors[index].double() for tensors in ranks])
            largest = max(largest, (left + given).abs().max().item())
            left = left + given - run.gradients[i][index].double()
    known = run.seen.get(f"weights.{index}", torch.zeros(()))
    assert (left.mean(0) - known).abs().max() <= (2 * len(values) + 2) * U * largest
