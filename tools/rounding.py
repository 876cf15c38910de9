"""Error of the mean gradient against fp64, for every wire format, for published formats, and both ways to add.

All ranks are simulated in one process. A ring all-reduce adds in the wire's dtype, so an element is rounded once for
each rank on its way around the ring. A two-shot all-reduce rounds once before the exchange and once after it, and adds
in fp32 in between. Over several steps, its error memories make up for these roundings. Gradients are normal numbers,
and for the quantized formats also those of real trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from gradwire import kernels
from gradwire.bench.kernel_bytes import BLOCK_SIZE
from gradwire.bench.record import Measured, Record, records_of, unique
from gradwire.bench.tables import Cell, Group, Table, count, median_of, pivot, value
from gradwire.bench.tasks import OPTIMIZERS
from gradwire.compress.policy import WIRE_ALIASES
from tools import formats, recorded_gradients

BITS = "bits per element"
RELATIVE_ERROR = "relative error"
RELATIVE_ERROR_OF_STEPS = "relative error of several steps"
VNMSE = "vNMSE"
GAIN = "gain"
NORMAL = "normal"
RING = "ring, sum in wire dtype"
TWO_SHOT = "two-shot, sum in fp32"
RINGS = ("fp32", "fp16", "bf16")
TWO_SHOTS = {name: each for name, each in formats.GRADWIRE.items() if name != "fp32"} | formats.PUBLISHED
WORLD_SIZES = (2, 8, 32)  # powers of two, so that the check is exact
NUMEL = 1 << 18
SEEDS = 5
STEPS, STEPS_WORLD_SIZE = 16, 8  # for error feedback

Gradients = Sequence[Tensor]  # of one rank: a tensor per parameter
Mean = Callable[[Sequence[Gradients]], Tensor]  # takes the gradients of every rank and returns their mean as a vector


class SimulatedAllReduce(NamedTuple):
    """A simulated all-reduce."""

    format: formats.Format
    implementation: str  # `RING` or `TWO_SHOT`
    start: Callable[[], Mean]  # returns the function of a step, with empty error memories before the first


def vector_of(gradients: Gradients) -> Tensor:
    """All gradients one after another."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def ring_mean(gradients: Sequence[Gradients], dtype: torch.dtype) -> Tensor:
    """The mean that a ring all-reduce in a format without scales computes.

    The gradients are divided by the number of ranks before the cast, as gradwire's hooks divide them. Chunk c of n
    travels from rank c + 1 around the ring to rank c.
    """
    n = len(gradients)
    chunks = [(vector_of(own) * (1 / n)).to(dtype).tensor_split(n) for own in gradients]
    sums = []
    for c in range(n):
        total = chunks[(c + 1) % n][c]
        for hop in range(2, n + 1):
            total = total + chunks[(c + hop) % n][c]
        sums.append(total)
    return torch.cat(sums).to(gradients[0][0].dtype)


class TwoShot:
    """Steps of a two-shot all-reduce with error feedback."""

    def __init__(self, rounded: formats.Rounding) -> None:
        self._rounded = rounded
        self._errors: dict[tuple[int, int], Tensor] = {}  # by rank and tensor; the sum's belong to rank -1

    def mean(self, gradients: Sequence[Gradients]) -> Tensor:
        """The mean that every rank computes in one step."""
        means = []
        for index, tensors in enumerate(zip(*gradients, strict=True)):  # one parameter's on every rank
            sent = [self._sent(x * (1 / len(gradients)), (rank, index)) for rank, x in enumerate(tensors)]
            total = sent[0].clone()
            for other in sent[1:]:
                total += other
            means.append(self._sent(total, (-1, index)))
        return vector_of(means)

    def _sent(self, x: Tensor, memory: tuple[int, int]) -> Tensor:
        x = x + self._errors.get(memory, 0.0)
        sent = self._rounded(x)
        self._errors[memory] = x - sent
        return sent


def all_reduces() -> list[SimulatedAllReduce]:
    """Ring and two-shot all-reduces in every format."""

    def ring(name: str) -> Mean:
        return partial(ring_mean, dtype=kernels.WIRE_FORMATS[name].dtype)

    return [
        *(SimulatedAllReduce(formats.GRADWIRE[name], RING, partial(ring, name)) for name in RINGS),
        *(SimulatedAllReduce(each, TWO_SHOT, partial(_two_shot, each)) for each in TWO_SHOTS.values()),
    ]


def _two_shot(each: formats.Format) -> Mean:
    return TwoShot(each.rounded).mean


def on_grid(name: str) -> Tensor:
    """A gradient that the format sends as it is."""
    signs = 2.0 * torch.randint(2, (NUMEL,)) - 1
    wire = kernels.WIRE_FORMATS.get(name)
    if wire is None:
        return signs
    gradient = max(wire.levels, 1) * signs
    if wire.kind == "integers":
        gradient.clamp_(max=wire.levels - 1)
    if wire.spacing == 2:
        gradient[torch.arange(NUMEL) % 4 > 0] /= wire.levels
    return gradient


def check(simulated: SimulatedAllReduce, world_size: int) -> None:
    """Raise RuntimeError unless the mean of equal gradients on the grid of the format is exact."""
    gradient = on_grid(simulated.format.name)
    mean = simulated.start()([[gradient]] * world_size)
    if not torch.equal(mean, gradient):
        raise RuntimeError(
            f"The mean of {world_size} equal gradients is wrong: {simulated.format.name}, {simulated.implementation}. "
            "Nothing is measured."
        )


def relative_error(simulated: SimulatedAllReduce, world_size: int, steps: int, seed: int) -> float:
    """The norm of the error of the mean of normal gradients over ranks and steps, relative to their mean in fp64."""
    generator = torch.Generator().manual_seed(seed)
    mean_of = simulated.start()
    actual, expected = torch.zeros(2, NUMEL, dtype=torch.float64)
    for _ in range(steps):
        gradients = [torch.randn(NUMEL, generator=generator) for _ in range(world_size)]
        actual += mean_of([[gradient] for gradient in gradients])
        expected += torch.stack(gradients).double().mean(0)
    return float((actual - expected).norm() / expected.norm())


def vnmse_and_gain(simulated: SimulatedAllReduce, gradients: Sequence[Gradients]) -> dict[str, float]:
    """For one step and the mean in fp64: |error|^2 / |mean|^2, and <result, mean> / |mean|^2."""
    result = simulated.start()(gradients)
    mean = torch.stack([vector_of(own) for own in gradients]).double().mean(0)
    found = {VNMSE: (result - mean).square().sum(), GAIN: torch.dot(result.double(), mean)}
    return {metric: float(f"{value / mean.square().sum():.4g}") for metric, value in found.items()}


def one_step_records() -> Iterator[Record]:
    """The vNMSE and the gain of every two-shot all-reduce, of normal and of recorded gradients."""
    two_shots = [simulated for simulated in all_reduces() if simulated.implementation == TWO_SHOT]

    def of(name: str, gradients: Sequence[Gradients]) -> Iterator[Record]:
        for simulated in two_shots:
            case, found = {"wire": simulated.format.name, "gradients": name}, vnmse_and_gain(simulated, gradients)
            yield from records_of("rounding", case, TWO_SHOT, len(gradients), found)

    yield from of(NORMAL, [[torch.randn(NUMEL)] for _ in range(recorded_gradients.RANKS)])
    for task, optimizer in track(recorded_gradients.TRAININGS, description="recorded gradients"):
        for step, gradients in recorded_gradients.recorded(task, optimizer):
            yield from of(f"{task}, {OPTIMIZERS[optimizer]}, step {step:,}", gradients)


def measure() -> Measured:
    """The relative error of every all-reduce for every world size. Raises RuntimeError if one is wrong."""
    torch.manual_seed(0)
    records: list[Record] = []
    for simulated in track(all_reduces(), description="rounding"):

        def add(world_size: int, metric: str, numbers: Any, simulated: SimulatedAllReduce = simulated) -> None:
            case = {"wire": simulated.format.name}
            records.extend(records_of("rounding", case, simulated.implementation, world_size, {metric: numbers}))

        add(1, BITS, simulated.format.bits)
        for world_size in WORLD_SIZES:
            check(simulated, world_size)
            errors = [relative_error(simulated, world_size, 1, seed) for seed in range(SEEDS)]
            p20, p50, p80 = (float(f"{cut:.4g}") for cut in quantiles(errors, n=10, method="inclusive")[1:8:3])
            add(world_size, RELATIVE_ERROR, {"p20": p20, "p50": p50, "p80": p80})
        error = relative_error(simulated, STEPS_WORLD_SIZE, STEPS, seed=0)
        add(STEPS_WORLD_SIZE, RELATIVE_ERROR_OF_STEPS, float(f"{error:.4g}"))
    records += one_step_records()
    return Measured({"numel": NUMEL, "block_size": BLOCK_SIZE, "seeds": SEEDS, "steps": STEPS}, records)


def tables(records: Sequence[Record]) -> list[Table]:
    """Errors of all-reduces, and formats."""
    return [errors_table(records), formats_table(records)]


def errors_table(records: Sequence[Record]) -> Table:
    """Errors by all-reduce and world size."""
    facts = records[0].provenance["settings"]
    names = {"wire": _wire, "all-reduce": lambda record: record.implementation}
    sizes = unique(record.ranks for record in records if record.metric == RELATIVE_ERROR)
    columns = [
        ("bits per element", value(BITS)),
        *((count(size, "rank"), _error(RELATIVE_ERROR, size)) for size in sizes),
        (
            f"{count(STEPS_WORLD_SIZE, 'rank')}, {facts['steps']} steps",
            _error(RELATIVE_ERROR_OF_STEPS, STEPS_WORLD_SIZE),
        ),
    ]
    notes = (
        f"relative error: norm of the error divided by the norm of the mean in fp64; {facts['numel']:,} normally "
        f"distributed elements on each simulated rank, median of {facts['seeds']} seeds",
        "ring: the gradients are divided by the number of ranks before the cast",
        f"two-shot: values are rounded before the exchange and after the sum; blocks of {facts['block_size']}",
        f"{facts['steps']} steps: error of the mean over these steps, each with new gradients; with error "
        "feedback if two-shot",
    )
    own = [record for record in records if _wire(record) in kernels.WIRE_FORMATS]
    return pivot("relative error of the mean gradient", own, names, columns, notes)


def formats_table(records: Sequence[Record]) -> Table:
    """gradwire's and published formats in a two-shot all-reduce of recorded gradients."""
    ranks, steps = count(recorded_gradients.RANKS, "rank"), records[0].provenance["settings"]["steps"]
    columns = [
        ("bits per element", value(BITS)),
        ("vNMSE, normal", _of_gradients(VNMSE, ".1e", in_trainings=False)),
        ("vNMSE in trainings", _of_gradients(VNMSE, ".1e")),
        ("gain in trainings", _of_gradients(GAIN, ".3f")),
        (f"error, {steps} steps", _error(RELATIVE_ERROR_OF_STEPS, STEPS_WORLD_SIZE)),
    ]
    notes = [
        "MX formats, NVFP4 and int4-128 are re-implemented from their specifications",
        f"the vNMSE is the squared norm of one step's error, divided by that of the mean of {ranks} in fp64; two-shot",
        "gain: inner product of the result and the mean, divided by the squared norm of the mean",
        f"in trainings: median (range) over the steps {', '.join(f'{step:,}' for step in recorded_gradients.STEPS)} of "
        f"{len(recorded_gradients.TRAININGS)} trainings of `gradwire bench converge`; gradients of all matrices and "
        "convolution kernels",
        f"error, {steps} steps: relative error of the mean over these steps, with error feedback; normal numbers, "
        f"{count(STEPS_WORLD_SIZE, 'rank')}",
    ]
    two_shots = [record for record in records if record.implementation == TWO_SHOT]
    bits = {record["wire"]: record.p50 for record in two_shots if record.metric == BITS}
    two_shots.sort(key=lambda record: bits[record["wire"]] or 0, reverse=True)
    return pivot("formats", two_shots, {"format": _wire}, columns, notes)


def _wire(record: Record) -> str:
    """The wire format, which early records call by another name."""
    wire: str = record["wire"]
    return WIRE_ALIASES.get(wire, wire)


def _error(metric: str, world_size: int) -> Cell:
    def cell(group: Group) -> str:
        found = median_of([record for record in group if record.ranks == world_size], metric)
        return "" if found is None else f"{found:.1e}"

    return cell


def _of_gradients(metric: str, form: str, *, in_trainings: bool = True) -> Cell:
    def cell(group: Group) -> str:
        found = [r.p50 for r in group if r.metric == metric and (r["gradients"] != NORMAL) == in_trainings]
        numbers = [number for number in found if number is not None]
        spread = f" ({min(numbers):{form}} to {max(numbers):{form}})" if len(numbers) > 1 else ""
        return f"{median(numbers):{form}}{spread}" if numbers else ""

    return cell
