"""``python -m tools.compiled``: kernels compiled ahead of time for several GPUs, and counts from their assembly.

The kernels are those that the public functions launch on buckets of GPT-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.record import Measured, Record
from gradwire.bench.shapes import buckets, gpt2
from gradwire.bench.tables import Table, find, format_number, groups_of, median_of, pivot
from gradwire.cli.command_runs import measured, report
from gradwire.cli.options import OutputOption, parse_choices
from gradwire.compress import LowRankPolicy
from gradwire.kernels import (
    WIRE_FORMATS,
    BlockTable,
    Matrix,
    MatrixTable,
    MessageLayout,
    Operands,
    Renewal,
    SegmentTable,
    Uncompressed,
    backproject,
    commit_errors,
    dequantize,
    draw,
    flatten,
    orthogonalize,
    project,
    quantize,
    reconstruct,
    reduce_quantized,
    sum_quantized,
    unflatten,
    update_scale,
)
from gradwire.kernels.dispatch import HAS_TRITON

if TYPE_CHECKING:
    from tools.ahead_of_time import Launch

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

REGISTERS = "registers"
SPILLS = "spills"
SHARED = "shared memory (B)"
LOADED = "wide loads (B)"
STORED = "wide stores (B)"
INSTRUCTIONS = "instructions per element"
CONFLICTS = "worst bank conflict"
MEAN_CONFLICTS = "passes per necessary pass"

RANKS = 2
# Call of each public function, by its name.
Calls = dict[str, Callable[[], object]]


def _layer_bucket() -> list[Tensor]:
    """Gradients of one 25 MiB bucket of GPT-2: of a layer. Their values are not read."""
    return [torch.empty(shape) for shape in buckets(gpt2, 25 << 20)[0]]


def _cast(gradient: torch.dtype, wire: torch.dtype) -> Calls:
    gradients = [tensor.to(gradient) for tensor in _layer_bucket()]
    table = SegmentTable(gradients)
    sent = torch.empty(table.numel, dtype=wire)
    return {
        "flatten": lambda: flatten(gradients, sent, table=table, scale=1 / RANKS),
        "unflatten": lambda: unflatten(sent, gradients, table=table),
    }


def _scaled_cast(gradient: torch.dtype, wire: torch.dtype) -> Calls:
    gradients = [tensor.to(gradient) for tensor in _layer_bucket()]
    table = SegmentTable(gradients)
    sent = torch.empty(table.numel, dtype=wire)
    exponent, scales, absmax = torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(1)
    counters = torch.zeros(4, dtype=torch.int64)
    rule = {"top": 13, "margin": 4, "growth": 1, "backoff": 4, "inverse_world": 1 / RANKS}
    return {
        "flatten": lambda: flatten(gradients, sent, table=table, scale=scales[0], counters=counters),
        "unflatten": lambda: unflatten(sent, gradients, table=table, scale=scales[1], absmax=absmax),
        "update_scale": lambda: update_scale(exponent, scales, absmax, counters, **rule, is_last=True),  # type: ignore[arg-type]
    }


def _powersgd(gradient: torch.dtype, wire: torch.dtype, rank: int) -> Calls:
    # The token embedding comes last, in a bucket of its own: the only large P at rank 4.
    shapes = [*buckets(gpt2, 25 << 20)[0], *buckets(gpt2, 25 << 20)[-1]]
    policy = LowRankPolicy(rank=rank)
    found = [policy.matrix_shape("", torch.empty(shape, device="meta")) for shape in shapes]
    others = [torch.empty(shape, dtype=gradient) for shape, of in zip(shapes, found, strict=True) if of is None]
    matrices = [Matrix(shape.rows, shape.columns, shape.rank, i) for i, shape in enumerate(found) if shape is not None]
    table = MatrixTable(matrices, gradient, torch.device("cpu"))
    gradients = [torch.empty(m.rows, m.columns, dtype=gradient) for m in matrices]
    errors = [torch.empty(m.rows, m.columns) for m in matrices]
    q, basis = torch.zeros(table.q.numel), torch.zeros(table.p.numel)
    p_sent, q_sent = torch.zeros(table.p.numel, dtype=wire), torch.zeros(table.q.numel, dtype=wire)
    finite, step = torch.ones(len(table), dtype=torch.int32), torch.tensor([5])
    others_table = SegmentTable(others)
    uncompressed = Uncompressed(others_table, others, others, torch.empty(others_table.numel, dtype=gradient), table.p)
    renewal = Renewal(table.q, q, step, 6)
    keep = gradient == torch.float32
    operands = Operands(table, gradients, gradients, errors, keep, uncompressed, renewal)
    return {
        "project": lambda: project(operands, q, p_sent, scale=1 / RANKS),
        "orthogonalize": lambda: orthogonalize(p_sent, table.p, basis, finite),
        "backproject": lambda: backproject(operands, basis, q_sent, scale=1 / RANKS),
        "reconstruct": lambda: reconstruct(operands, basis, q_sent, finite),
        "draw": lambda: draw(table.q, table.keys, step, q),
    }


def _quantization(wire: str) -> Calls:
    gradients = _layer_bucket()
    table = BlockTable(gradients, 64, [0] * len(gradients))
    layout = MessageLayout([(WIRE_FORMATS[wire], table)], RANKS)
    (section,) = layout.sections
    message = torch.empty(layout.message_shape, dtype=torch.uint8)
    result = torch.empty(layout.result_shape, dtype=torch.uint8)
    errors, pending = torch.empty(table.numel), torch.empty(table.numel)
    shard_errors, shard_pending = torch.empty(2, layout.shard_numel(section))
    return {
        "quantize": lambda: quantize(gradients, section, message, scale=1 / RANKS, errors=errors, pending=pending),
        "reduce_quantized": lambda: reduce_quantized(
            message, section, result, rank=0, errors=shard_errors, pending=shard_pending
        ),
        "sum_quantized": lambda: sum_quantized(message, section, shard_errors, rank=0),
        "dequantize": lambda: dequantize(message, section, gradients),
        "commit_errors": lambda: commit_errors(message, pending, errors),
    }


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES: dict[str, Callable[[], Calls]] = {
    "Cast: fp32 gradients, fp16 wire": partial(_cast, FP32, FP16),
    "Cast: bf16 gradients, bf16 wire": partial(_cast, BF16, BF16),
    "Cast: fp32 gradients, scaled fp16 wire": partial(_scaled_cast, FP32, FP16),
    "PowerSGD, rank 4, fp32": partial(_powersgd, FP32, FP32, 4),
    "PowerSGD, rank 32, fp32": partial(_powersgd, FP32, FP32, 32),
    "PowerSGD, rank 4, bf16": partial(_powersgd, BF16, BF16, 4),
    "Quantization: int8 wire, fp32 errors": partial(_quantization, "int8"),
    "Quantization: int4 wire, fp32 errors": partial(_quantization, "int4"),
}
TARGET_NAMES = ("sm_80", "sm_90", "sm_100", "gfx942")


def launches(case: str) -> dict[str, Launch]:
    """One launch of every kernel variant that a case needs, by function and kernel."""
    from tools.ahead_of_time import recorded_launches, variant

    found: dict[str, Launch] = {}
    for function, call in CASES[case]().items():
        distinct = {(launch.name, variant(launch, "sm_90")): launch for launch in recorded_launches(call)}
        for launch in distinct.values():
            name = function if launch.name == function else f"{function}: {launch.name}"
            number = sum(other.partition(", ")[0] == name for other in found)
            found[name if number == 0 else f"{name}, variant {number + 1}"] = launch
    return found


def facts_of(launch: Launch, target: str) -> dict[str, float | None]:
    """The metrics of a kernel compiled for a target.

    Bank conflicts are missing if the kernel does not access shared memory, and None if they are not known: on AMD.
    """
    from tools.ahead_of_time import compile_launch
    from tools.assembly import inspect
    from tools.bank_conflicts import bank_conflicts

    compiled = compile_launch(launch, target)
    binary = inspect(compiled)
    facts: dict[str, float | None] = {
        REGISTERS: binary.registers,
        SPILLS: binary.spills,
        SHARED: binary.shared,
        LOADED: binary.loaded,
        STORED: binary.stored,
    }
    if binary.instructions_per_element is not None:
        facts[INSTRUCTIONS] = round(binary.instructions_per_element, 2)
    if not compiled.ptx:
        return facts | ({CONFLICTS: None} if binary.shared else {})
    try:
        conflicts = bank_conflicts(compiled.ptx, compiled.threads, parameters(launch, target))
    except ValueError:
        return facts | {CONFLICTS: None}
    if conflicts is None:
        return facts
    return facts | {CONFLICTS: round(conflicts.worst, 2), MEAN_CONFLICTS: round(conflicts.mean, 2)}


def parameters(launch: Launch, target: str) -> list[Any]:
    """The arguments that a compiled kernel takes, in order."""
    from tools.ahead_of_time import source_of

    source, _ = source_of(launch, target)
    return [launch.arguments[name] for name, kind in source.signature.items() if kind != "constexpr"]


def measure(cases: Iterable[str] = CASES, targets: Sequence[str] = TARGET_NAMES) -> Measured:
    """Facts about every kernel of the cases on every target."""
    import triton

    return Measured({"triton": triton.__version__}, list(_records(list(cases), targets)))


def _records(cases: Sequence[str], targets: Sequence[str]) -> Iterator[Record]:
    for case in cases:
        found = launches(case)
        for kernel, target in track([(k, t) for k in found for t in targets], case, transient=True):
            of = {"options": case, "kernel": kernel, "target": target}
            for metric, number in facts_of(found[kernel], target).items():
                yield Record(bench="compiled", case=of, implementation=GRADWIRE, ranks=1, metric=metric, p50=number)


def obstacle() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    from gradwire.kernels.dispatch import is_interpreted

    if not HAS_TRITON:
        return "Triton is not installed"
    return "TRITON_INTERPRET is set" if is_interpreted() else None


def tables(records: Sequence[Record]) -> list[Table]:
    """A table for each case: a row for every kernel and target."""

    def number(metric: str) -> Callable[[Sequence[Record]], str]:
        def cell(group: Sequence[Record]) -> str:
            found = median_of(group, metric)
            return "" if found is None else format_number(found)

        return cell

    def conflicts(group: Sequence[Record]) -> str:
        worst = find(group, CONFLICTS)
        if worst is None:
            return "no accesses"
        if worst.p50 is None:
            return "not computed"
        mean = median_of(group, MEAN_CONFLICTS)
        return "none" if worst.p50 == 1 else f"{worst.p50:.3g}-way, mean {mean:.2f}"

    metrics = (REGISTERS, SPILLS, SHARED, LOADED, STORED, INSTRUCTIONS)
    columns = [*((metric, number(metric)) for metric in metrics), ("bank conflicts", conflicts)]
    names = {"kernel": lambda record: f"{record['kernel']}", "target": lambda record: f"{record['target']}"}
    groups = groups_of(records, "options")
    note = f"compiled with Triton {records[0].provenance['settings']['triton']}; no kernel ran"
    notes = [()] * (len(groups) - 1) + [(note,)]
    return [pivot(case, group, names, columns, of) for ((case,), group), of in zip(groups, notes, strict=True)]


def refuse_without_compiler(program: str) -> None:
    """Exit with an error if kernels cannot be compiled here."""
    reason = obstacle()
    if reason is not None:
        typer.echo(f"{program}: {reason}. The command needs Triton's compiler.", err=True)
        raise typer.Exit(1)


@app.command()
def main(
    targets: Annotated[str, typer.Option(help="GPU architectures, comma-separated.")] = ", ".join(TARGET_NAMES),
    output: OutputOption = None,
) -> None:
    """Compile every kernel ahead of time; count registers, spills, wide accesses, instructions and bank conflicts.

    Needs Triton, but no GPU. Takes a few minutes.
    """
    names = parse_choices(targets, TARGET_NAMES, "--targets")
    refuse_without_compiler("tools.compiled")
    records = measured(
        "tools.compiled", partial(measure, targets=names), torch.device("cpu"), program="python -m tools.compiled"
    )
    report(records, tables, output)


if __name__ == "__main__":
    app()
