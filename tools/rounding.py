"""Error of the mean gradient against fp64, for every wire format and both ways to add.

All ranks are simulated in one process, with the kernels of the hooks. A ring all-reduce adds in the wire's dtype, so an
element is rounded once for each rank on its way around the ring. A two-shot all-reduce rounds once before the exchange
and once after it, and adds in fp32 in between. Over several steps, its error memories make up for these roundings.
Gradients are normal numbers, and for the quantized formats also those of real trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from gradwire import kernels
from gradwire.bench.record import Measured, Record, records_of, unique
from gradwire.bench.tables import Cell, Group, Table, count, median_of, pivot, value
from gradwire.bench.tasks import OPTIMIZERS
from tools import recorded_gradients

BITS = "bits per element"
RELATIVE_ERROR = "relative error"
RELATIVE_ERROR_OF_STEPS = "relative error of several steps"
VNMSE = "vNMSE"
GAIN = "gain"
RING = "ring, sum in wire dtype"
TWO_SHOT = "two-shot, sum in fp32"
RINGS = ("fp32", "fp16", "bf16")
TWO_SHOTS = tuple(name for name in kernels.WIRE_FORMATS if name != "fp32")
WORLD_SIZES = (2, 8, 32)  # powers of two, so that the check is exact
NUMEL = 1 << 18
BLOCK_SIZE = 64
SEEDS = 5
STEPS, STEPS_WORLD_SIZE = 16, 8  # for error feedback

Gradients = Sequence[Tensor]  # of one rank: a tensor per parameter
Mean = Callable[[Sequence[Gradients]], Tensor]  # takes the gradients of every rank and returns their mean as a vector


class SimulatedAllReduce(NamedTuple):
    """A simulated all-reduce."""

    wire: kernels.WireFormat
    implementation: str  # `RING` or `TWO_SHOT`
    # (wire, world size, shapes) -> function of a step, with empty error memories before the first step
    start: Callable[[kernels.WireFormat, int, Sequence[torch.Size]], Mean]


def vector_of(gradients: Gradients) -> Tensor:
    """All gradients one after another."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def ring_mean(gradients: Sequence[Gradients], wire: kernels.WireFormat) -> Tensor:
    """The mean that a ring all-reduce in a format without scales computes.

    The gradients are divided by the number of ranks before the cast, as gradwire's hooks divide them. Chunk c of n
    travels from rank c + 1 around the ring to rank c.
    """
    n = len(gradients)
    chunks = [(vector_of(own) * (1 / n)).to(wire.dtype).tensor_split(n) for own in gradients]
    sums = []
    for c in range(n):
        total = chunks[(c + 1) % n][c]
        for hop in range(2, n + 1):
            total = total + chunks[(c + hop) % n][c]
        sums.append(total)
    return torch.cat(sums).to(gradients[0][0].dtype)


class TwoShot:
    """Steps of a two-shot all-reduce with error feedback, with the kernels of the quantization hooks."""

    def __init__(self, wire: kernels.WireFormat, world_size: int, shapes: Sequence[torch.Size]) -> None:
        table = kernels.BlockTable([torch.empty(shape) for shape in shapes], BLOCK_SIZE, keys=range(len(shapes)))
        self._layout = kernels.MessageLayout([(wire, table)], world_size)
        (self._section,) = self._layout.sections
        self._errors, self._pending = torch.zeros(2, world_size, table.numel + self._layout.shard_numel(self._section))

    def mean(self, gradients: Sequence[Gradients]) -> Tensor:
        """The mean that every rank computes in one step."""
        n, layout, section = len(gradients), self._layout, self._section
        bound = kernels.bound_quantization(section.table.device)
        first_shot, second_shot = slice(section.table.numel), slice(section.table.numel, None)
        messages = torch.zeros(n, *layout.message_shape, dtype=torch.uint8)
        for rank, own in enumerate(gradients):
            errors, pending = self._errors[rank, first_shot], self._pending[rank, first_shot]
            bound.quantize(own, section, messages[rank], 1 / n, errors, pending)
        gathered = torch.zeros(layout.message_shape, dtype=torch.uint8)
        for rank in range(n):
            errors, pending = self._errors[rank, second_shot], self._pending[rank, second_shot]
            received, result = messages[:, :, rank].transpose(0, 1).contiguous(), gathered[:, rank].clone()
            bound.reduce_quantized(received, section, result, rank, errors, pending)
            gathered[:, rank] = result
        means = [torch.empty_like(gradient) for gradient in gradients[0]]
        bound.dequantize(gathered, section, means)
        bound.commit_errors(gathered, self._pending.flatten(), self._errors.flatten())
        return vector_of(means)


def all_reduces() -> list[SimulatedAllReduce]:
    """Ring and two-shot all-reduces in every wire format."""

    def ring(wire: kernels.WireFormat, world_size: int, shapes: Sequence[torch.Size]) -> Mean:
        return partial(ring_mean, wire=wire)

    def two_shot(wire: kernels.WireFormat, world_size: int, shapes: Sequence[torch.Size]) -> Mean:
        return TwoShot(wire, world_size, shapes).mean

    sets = ((RINGS, RING, ring), (TWO_SHOTS, TWO_SHOT, two_shot))
    return [SimulatedAllReduce(kernels.WIRE_FORMATS[name], by, start) for names, by, start in sets for name in names]


def check(simulated: SimulatedAllReduce, world_size: int) -> None:
    """Raise RuntimeError unless the mean of equal gradients on the grid of the format is exact."""
    gradient = max(simulated.wire.levels, 1) * (2.0 * torch.randint(2, (NUMEL,)) - 1)
    if simulated.wire.kind == "integers":
        gradient.clamp_(max=simulated.wire.levels - 1)
    if simulated.wire.spacing == 2:
        gradient[torch.arange(NUMEL) % 4 > 0] /= simulated.wire.levels
    mean = simulated.start(simulated.wire, world_size, [gradient.shape])([[gradient]] * world_size)
    if not torch.equal(mean, gradient):
        raise RuntimeError(
            f"The mean of {world_size} equal gradients is wrong: {simulated.wire.name}, {simulated.implementation}. "
            "Nothing is measured."
        )


def relative_error(simulated: SimulatedAllReduce, world_size: int, steps: int, seed: int) -> float:
    """The norm of the error of the mean of normal gradients over ranks and steps, relative to their mean in fp64."""
    generator = torch.Generator().manual_seed(seed)
    mean_of = simulated.start(simulated.wire, world_size, [torch.Size([NUMEL])])
    actual, expected = torch.zeros(2, NUMEL, dtype=torch.float64)
    for _ in range(steps):
        gradients = [torch.randn(NUMEL, generator=generator) for _ in range(world_size)]
        actual += mean_of([[gradient] for gradient in gradients])
        expected += torch.stack(gradients).double().mean(0)
    return float((actual - expected).norm() / expected.norm())


def vnmse_and_gain(simulated: SimulatedAllReduce, gradients: Sequence[Gradients]) -> dict[str, float]:
    """For one step and the mean in fp64: |error|^2 / |mean|^2, and <result, mean> / |mean|^2."""
    result = simulated.start(simulated.wire, len(gradients), [each.shape for each in gradients[0]])(gradients)
    mean = torch.stack([vector_of(own) for own in gradients]).double().mean(0)
    found = {VNMSE: (result - mean).square().sum(), GAIN: torch.dot(result.double(), mean)}
    return {metric: float(f"{value / mean.square().sum():.4g}") for metric, value in found.items()}


def one_step_records() -> Iterator[Record]:
    """The vNMSE and the gain of every quantized all-reduce, of normal and of recorded gradients."""
    quantized = [simulated for simulated in all_reduces() if simulated.implementation == TWO_SHOT]

    def of(name: str, gradients: Sequence[Gradients]) -> Iterator[Record]:
        for simulated in quantized:
            case, found = {"wire": simulated.wire.name, "gradients": name}, vnmse_and_gain(simulated, gradients)
            yield from records_of("rounding", case, TWO_SHOT, len(gradients), found)

    yield from of("normal", [[torch.randn(NUMEL)] for _ in range(recorded_gradients.RANKS)])
    for task, optimizer in track(recorded_gradients.TRAININGS, description="recorded gradients"):
        for step, gradients in recorded_gradients.recorded(task, optimizer):
            yield from of(f"{task}, {OPTIMIZERS[optimizer]}, step {step:,}", gradients)


def measure() -> Measured:
    """The relative error of every all-reduce for every world size. Raises RuntimeError if one is wrong."""
    torch.manual_seed(0)
    records: list[Record] = []
    for simulated in track(all_reduces(), description="rounding"):

        def add(world_size: int, metric: str, numbers: Any, simulated: SimulatedAllReduce = simulated) -> None:
            case = {"wire": simulated.wire.name}
            records.extend(records_of("rounding", case, simulated.implementation, world_size, {metric: numbers}))

        add(1, BITS, 8 * simulated.wire.block_bytes(BLOCK_SIZE) / BLOCK_SIZE)
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
    """Relative errors by exchange and world size; vNMSE and gain by gradients and wire."""
    facts = records[0].provenance["settings"]
    of_gradients = [record for record in records if record.metric in (VNMSE, GAIN)]
    records = [record for record in records if record.metric not in (VNMSE, GAIN)]
    names = {"wire": lambda record: record["wire"], "all-reduce": lambda record: record.implementation}
    metrics = (RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS)
    sizes = {metric: unique(record.ranks for record in records if record.metric == metric) for metric in metrics}
    columns = [
        ("bits per element", value(BITS)),
        *((count(size, "rank"), _error(RELATIVE_ERROR, size)) for size in sizes[RELATIVE_ERROR]),
        *(
            (f"{count(size, 'rank')}, {facts['steps']} steps", _error(RELATIVE_ERROR_OF_STEPS, size))
            for size in sizes[RELATIVE_ERROR_OF_STEPS]
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
    relative_errors = pivot("relative error of the mean gradient", records, names, columns, notes)
    return [relative_errors, *(_one_step_table(metric, of_gradients) for metric in (VNMSE, GAIN) if of_gradients)]


def _one_step_table(metric: str, records: Sequence[Record]) -> Table:
    def value_in(wire: str) -> Cell:
        def cell(group: Group) -> str:
            found = median_of([record for record in group if record["wire"] == wire], metric)
            return "" if found is None else f"{found:.1e}" if metric == VNMSE else f"{found:.3f}"

        return cell

    names = {"gradients": lambda record: str(record["gradients"])}
    columns = [(wire, value_in(wire)) for wire in unique(record["wire"] for record in records)]
    meaning = {
        VNMSE: "vNMSE: squared norm of the error, divided by that of the mean",
        GAIN: "gain: inner product of the result and the mean, divided by the squared norm of the mean",
    }
    notes = [
        f"{meaning[metric]} of {count(records[0].ranks, 'rank')} in fp64; two-shot, one step",
        "digits and text: gradients of all matrices and convolution kernels of the models of `gradwire bench "
        "converge`, in a training of one rank",
    ]
    return pivot(f"{metric} of the mean gradient", records, names, columns, notes)


def _error(metric: str, world_size: int) -> Cell:
    def cell(group: Group) -> str:
        found = median_of([record for record in group if record.ranks == world_size], metric)
        return "" if found is None else f"{found:.1e}"

    return cell
