"""Runs of gradwire's and PyTorch's `powerSGD_hook` on chosen gradients, which may fail or hang, and their summary."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs

from gradwire.hooks import powerSGD_hook as ours
from tests.support.harness import CaseFailed
from tests.support.powersgd_checkpoints import EARLY, save_and_load
from tests.support.powersgd_steps import Fed, U
from tests.support.training import SMALLEST, WRAPPERS, gradients, register

MODULES = {"ours": ours, "pytorchs": pytorchs}
# Seconds. A probe of PyTorch's hook takes less than one; it may hang where ranks issue collectives in other orders.
PROBE_LIMIT = 10.0


@dataclass
class Run:
    """Gradients of every step on one rank until the run ended, errors that it raised, and error memory."""

    gradients: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    memory: dict = field(default_factory=dict)

    @property
    def is_finite(self):
        return [all(gradient.isfinite().all().item() for gradient in step) for step in self.gradients]


def wrapped(tensors, wrapper="pytorch", **options):
    """A DDP whose parameters have ``tensors``' layouts, and its inputs for gradients."""
    return WRAPPERS[wrapper](Fed(tensors), **options)


def registered(library, tensors, wrapper="pytorch", batched=False, options=None, **ddp_options):
    """A new state of the library that compresses from the third step on, and a DDP that has it."""
    module, ddp = MODULES[library], wrapped(tensors, wrapper, **ddp_options)
    state = module.PowerSGDState(None, **(EARLY | (options or {})))
    register(ddp, (state, module.batched_powerSGD_hook if batched else module.powerSGD_hook))
    return state, ddp


def step(ddp, tensors, set_to_none=True):
    """One backward pass; returns copies of the reduced gradients."""
    ddp.zero_grad(set_to_none=set_to_none)
    ddp(*tensors).backward()
    return list(gradients(ddp).values())


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
        run.memory = state.state_dict()["errors"]
    return run


def probe(world, case, **arguments):
    """The result of a case on rank 0, or None if the case ended the processes or hung."""
    try:
        return world.run(case, limit=PROBE_LIMIT, **arguments)[0]
    except CaseFailed as failure:
        if failure.errors:  # a mistake in the case
            raise
        return None


def relative_error(actual, expected):
    return ((actual.cdouble() - expected.cdouble()).norm() / expected.cdouble().norm()).item()


def mean(ranks, index):
    return torch.stack([tensors[index].cdouble() for tensors in ranks]).mean(0)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_values(world_size, steps, shapes, dtype=torch.float32):
    """Different on every rank and in every step."""
    g = generator(0)
    return [
        [[torch.randn(shape, generator=g, dtype=dtype) for shape in shapes] for _ in range(world_size)]
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
    known = run.memory.get(f"weights.{index}", torch.zeros(()))
    assert (left.mean(0) - known).abs().max() <= (2 * len(values) + 2) * U * largest


def resume(library, values, cut, share=False, new_steps=0):
    """The gradients of the steps from ``cut``, uninterrupted and resumed from a checkpoint.

    Args:
        library: "ours" or "pytorchs".
        values: gradients by step and rank.
        cut: the first step after the restart.
        share: whether every rank loads what rank 0 saved.
        new_steps: plain steps after the restart, before the state is used, in which PyTorch's DDP lays out its buckets.
    """
    mine = [ranks[dist.get_rank()] for ranks in values]
    module = MODULES[library]

    def fresh():
        return module.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)

    def trained(state, steps):
        ddp = wrapped(mine[0])
        register(ddp, (state, module.powerSGD_hook))
        return [step(ddp, tensors) for tensors in steps]

    uninterrupted = trained(fresh(), mine)[cut:]
    state, run = fresh(), Run()
    trained(state, mine[:cut])
    saved = state.state_dict() if library == "ours" else state
    try:
        loaded = save_and_load(saved)
    except Exception as error:
        run.errors.append(described(error))
        loaded = save_and_load(saved, weights_only=False)
    if share:
        box = [loaded]
        dist.broadcast_object_list(box, 0)
        (loaded,) = box
    if library == "ours":
        state = fresh()
        state.load_state_dict(loaded)
    else:
        state = loaded
    if new_steps:
        state.start_powerSGD_iter = state.iter + new_steps
    try:
        run.gradients = trained(state, [*mine[:new_steps], *mine[cut:]])[new_steps:]
    except Exception as error:
        run.errors.append(described(error))
    return uninterrupted, run


def deviations(uninterrupted, run):
    """Relative, of each step."""
    flat = [[torch.cat([g.flatten() for g in s]) for s in steps] for steps in (run.gradients, uninterrupted)]
    return [relative_error(*pair) for pair in zip(*flat, strict=False)]


def train_many_buckets(library):
    """Gradients after 30 steps of PyTorch's DDP, 16 buckets each."""
    dist.init_process_group("gloo")
    module = MODULES[library]
    model = torch.nn.Sequential(*(torch.nn.Linear(24 + 4 * i, 28 + 4 * i) for i in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=SMALLEST)
    state = module.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, module.powerSGD_hook)
    torch.manual_seed(dist.get_rank())
    for _ in range(30):
        ddp.zero_grad()
        ddp(torch.randn(8, 24)).square().mean().backward()
    return [parameter.grad for parameter in ddp.parameters()]


def end_of(outcomes):
    """How two ranks with many buckets ended, in a few words."""
    for outcome in outcomes:
        if outcome.how != "returned":
            reasons = {"killed": "hangs", "exited": f"exit code {outcome.exit_code}", "raised": outcome.error}
            return reasons[outcome.how]
    gradients = [outcome.value for outcome in outcomes]
    same = all(torch.equal(*pair) and pair[0].isfinite().all() for pair in zip(*gradients, strict=True))
    return "right" if same else "ranks hold different gradients"


def two_models(library, wrapper):
    """Train two models of different shapes with one state: number of models, steps, and the error."""
    module = MODULES[library]
    state = module.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    gradients = [[torch.ones(24, 20)], [torch.ones(16, 30)]]
    try:
        models = []
        for tensors in gradients:
            models.append(wrapped(tensors, wrapper))
            register(models[-1], (state, module.powerSGD_hook))
        for _ in range(4):
            for ddp, tensors in zip(models, gradients, strict=True):
                step(ddp, tensors)
    except Exception as error:
        return len(models), state.iter, described(error)
    return 2, state.iter, "trains"


outcomes = {}


class Summary:
    """Prints what PyTorch's hook did at the end of the run."""

    def pytest_terminal_summary(self, terminalreporter):
        if not outcomes:
            return
        absent = [name for name, (is_shown, _) in outcomes.items() if not is_shown]
        count = f"{len(outcomes) - len(absent)} of {len(outcomes)}"
        line = f"PyTorch {torch.__version__}'s powerSGD_hook goes wrong in {count} cases"
        terminalreporter.write_line(line + (f"; not in {', '.join(absent)}" if absent else ""))
        if terminalreporter.verbosity > 0:
            for name, (is_shown, evidence) in outcomes.items():
                terminalreporter.write_line(f"  {name}: {'shown' if is_shown else 'not shown'}: {evidence}")
