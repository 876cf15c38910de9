"""The command ``gradwire advise``, alone with a network given by hand or as a rank under torchrun, and its reports."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from enum import Enum
from importlib.util import find_spec
from json import dumps as dump_json
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from gradwire._version import __version__
from gradwire.bench.models import JOBS
from gradwire.bench.record import format_bytes
from gradwire.bench.tables import Table, count, format_bandwidth, print_tables
from gradwire.bench.timing import backend_of, bench_device
from gradwire.cli.options import MAX_RANKS, MAX_THREADS, finite, parse_choices, parse_hooks, parse_list, parse_rate
from gradwire.planner import jobs
from gradwire.planner.hook_registry import (
    ACCURACY_NOTE,
    HOOKS,
    MARK,
    MARK_NOTE,
    STEPS_TO_TARGET,
    accuracy_of,
    display_name,
    is_aggressive,
)
from gradwire.planner.jobs import JobError
from gradwire.planner.probe import CAST, PLAIN, GivenLink, Measurement, measure, on_all_ranks
from gradwire.planner.recommend import WORTHWHILE, Advice, Prediction, advise

DEFAULT_LATENCY, MAX_LATENCY = 50, 1_000_000  # microseconds
MAX_PRICE = 1_000_000
NOISY = 2.0  # spread of the model's step times above which predictions are not to be trusted
CHOICES = [name for name in HOOKS if name != "noop"]
_ALL_HOOKS = ", ".join(CHOICES)
_NOT_BASELINES = [name for name in CHOICES if name not in (PLAIN, CAST)]
_TIMEOUT = timedelta(minutes=2)
_HEADERS = (
    "hook",
    "step (ms)",
    "vs. no hook",
    f"vs. {CAST}",
    "pays below",
    "sent per step",
    "extra memory",
    "steps to target",
)
_SCHEMA = 1  # of the JSON file; rises when an entry changes its meaning or goes
_COST = "1,000 steps cost"
_WITH_OPTIMIZER = "step: forward, backward, gradient exchange and optimizer"
_WITHOUT_OPTIMIZER = (
    "step: forward, backward and gradient exchange, without the optimizer. To include it, return (model, loss, "
    "optimizer) from the job"
)


_Model = Annotated[
    str,
    typer.Argument(
        help="The job: module:function, where function(device) returns (model, loss) or (model, loss, optimizer), and "
        f"loss(model) runs one batch. Or a benchmark model: {', '.join(JOBS)}."
    ),
]
_Hooks = Annotated[str, typer.Option("--hooks", help="Hooks to compare, comma-separated.")]
_Exclude = Annotated[
    str | None, typer.Option("--exclude", help="Hooks not to measure, comma-separated; no hook and bf16 always are.")
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, max=MAX_THREADS, help="CPU threads of each rank. Default: what PyTorch or torchrun sets."
    ),
]
_Bandwidth = Annotated[
    str | None, typer.Option(help="Without torchrun: bandwidth of a node to assume, such as 100mbit.")
]
_WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", min=2, max=MAX_RANKS, help="Without torchrun: number of ranks to assume."),
]
_Latency = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MAX_LATENCY,
        callback=finite,
        help=f"Without torchrun: latency between two nodes to assume, in microseconds. Default: {DEFAULT_LATENCY}.",
    ),
]
_RanksPerNode = Annotated[
    int,
    typer.Option(
        "--ranks-per-node",
        min=1,
        max=MAX_RANKS,
        help="Without torchrun: number of ranks on each node. With several, a rank computes with one CPU thread "
        "unless --threads or OMP_NUM_THREADS is set, as under torchrun.",
    ),
]
_Price = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MAX_PRICE,
        callback=finite,
        help="Price of a GB (1e9 bytes) between nodes: prints the traffic's cost.",
    ),
]
_Json = Annotated[Path | None, typer.Option("--json", help="Write measurements and predictions to this file.")]
_Plot = Annotated[
    Path | None, typer.Option("--plot", help="Plot the step time against the bandwidth to this PNG file.")
]


def advise_command(
    model: _Model,
    hooks: _Hooks = _ALL_HOOKS,
    exclude: _Exclude = None,
    threads: _Threads = None,
    bandwidth: _Bandwidth = None,
    world_size: _WorldSize = None,
    latency: _Latency = None,
    ranks_per_node: _RanksPerNode = 1,
    price: _Price = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure your model and network, predict the step time with each hook, and recommend a hook or none.

    Run it on the machines you train on; it takes a few seconds:

    torchrun --nproc-per-node=8 --no-python gradwire advise train:job

    Or on one machine, for a network that you describe:

    gradwire advise train:job --bandwidth 100gbit --world-size 16 --ranks-per-node 8
    """
    excluded = () if exclude is None else _parse_excluded(exclude)
    names = tuple(name for name in parse_hooks(hooks, CHOICES) if name not in excluded)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    given = None if is_rank else _given_link(bandwidth, world_size, latency, ranks_per_node)
    if is_rank:
        per_node = ranks_per_node if ranks_per_node > 1 else None
        options = {"--bandwidth": bandwidth, "--world-size": world_size, "--latency": latency}
        _refuse_given_link({**options, "--ranks-per-node": per_node})
    _check_outputs(json, plot)
    if threads is None and not is_rank and ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = 1  # as torchrun sets
    if threads is not None:
        torch.set_num_threads(threads)
    started = time.monotonic()
    measured = _measured(model, names, given)
    if measured is None:
        return
    advice = advise(measured)
    print_advice(measured, advice, time.monotonic() - started, price=price)
    if json is not None:
        json.write_text(to_json(measured, advice) + "\n")
        typer.echo(f"\nJSON: {json}")
    if plot is not None:
        from gradwire.bench.plots import draw_advice  # matplotlib takes a second to import

        draw_advice(measured, advice, plot)
        typer.echo(f"\nPlot: {plot}")


def _parse_excluded(exclude: str) -> tuple[str, ...]:
    if {PLAIN, CAST} & set(parse_list(exclude)):
        raise typer.BadParameter(
            f"no hook and {CAST} are always measured, because the others are compared with them.",
            param_hint="--exclude",
        )
    return parse_choices(exclude, _NOT_BASELINES, "--exclude")


def _refuse_given_link(options: dict[str, object]) -> None:
    """Refuse options that describe a network, on every rank; rank 0 prints the reason."""
    given = [name for name, value in options.items() if value is not None]
    if given and os.environ["RANK"] != "0":
        raise typer.Exit(2)  # like a BadParameter
    if given:
        raise typer.BadParameter(
            f"under torchrun the network is measured. Leave {' and '.join(given)} out, or run without torchrun.",
            param_hint=", ".join(given),
        )


def _given_link(bandwidth: str | None, world_size: int | None, latency: float | None, ranks_per_node: int) -> GivenLink:
    """The network that the options describe."""
    if bandwidth is None or world_size is None:
        examples = {"--bandwidth 100mbit": bandwidth, "--world-size 8": world_size}
        missing = [example for example, value in examples.items() if value is None]
        raise typer.BadParameter(
            "a single process measures no network. Start one process per rank with torchrun, or describe the network: "
            f"add {' '.join(missing)}.",
            param_hint=", ".join(example.split()[0] for example in missing),
        )
    rate = parse_rate(bandwidth, "--bandwidth", is_modeled=True).mbit
    if rate is None:
        raise typer.BadParameter("expected a number, such as 400gbit.", param_hint="--bandwidth")
    if world_size % ranks_per_node != 0:
        raise typer.BadParameter(
            f"{ranks_per_node} is not a divisor of the world size, {world_size}.", param_hint="--ranks-per-node"
        )
    return GivenLink(
        world_size=world_size,
        bandwidth=1e6 * rate,
        latency=1e-6 * (DEFAULT_LATENCY if latency is None else latency),
        ranks_per_node=ranks_per_node,
    )


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse, before the measurement, files that cannot be written after it."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}; make it first.", param_hint=option)
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib. Run: pip install matplotlib", param_hint="--plot")


def _measured(model: str, names: tuple[str, ...], given: GivenLink | None) -> Measurement | None:
    """The measurement on rank 0, None on other ranks. Ends the command if the job cannot be measured."""
    device = bench_device()
    try:
        with _process_group(given is None, device):
            measured = _measure(model, names, device, given)
            return measured if dist.get_rank() == 0 else None
    except JobError as error:
        if error.__cause__ is not None:
            typer.echo("".join(traceback.format_exception(error.__cause__)), err=True)
        typer.echo(f"gradwire advise: {str(error).rstrip('.')}.", err=True)
        raise typer.Exit(1) from None


def _measure(model: str, names: tuple[str, ...], device: torch.device, given: GivenLink | None) -> Measurement:
    if given is None and dist.get_world_size() == 1:
        raise JobError(
            "The world size is 1, so there is nothing to exchange. Start more ranks, or run without torchrun "
            "and give --bandwidth and --world-size"
        )
    build = on_all_ranks(lambda: JOBS.get(model) or jobs.load(model))
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return measure(build, names, device, given)
    measured = measure(build, names, device, given, _show)
    _show("")
    return measured


def _show(what: str) -> None:
    sys.stderr.write(f"\r\033[K{f'Measuring: {what}' if what else ''}")
    sys.stderr.flush()


@contextmanager
def _process_group(is_rank: bool, device: torch.device) -> Iterator[None]:
    """The ranks of torchrun, or a group of one rank."""
    own = device if device.type == "cuda" else None  # without it, PyTorch warns at every barrier of NCCL
    if is_rank:
        dist.init_process_group(backend_of(device), timeout=_TIMEOUT, device_id=own)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1, device_id=own)
    try:
        yield
    finally:
        dist.destroy_process_group()


def print_advice(
    measured: Measurement, advice: Advice, seconds: float, console: Console | None = None, price: float | None = None
) -> None:
    """Print the model, the network, the predictions, the recommendation, and the code to register the hook.

    With a ``price`` per GB sent between nodes, also print what the traffic of 1,000 steps costs.
    """
    console = console or Console()
    model, link = measured.model, measured.link
    latency = max(cost.latency for cost in link.costs.values())
    buckets = count(len(model.ready), "bucket")
    how, digits = ("measured", 2) if measured.is_link_measured else ("given", 6)
    bandwidth = format_bandwidth(link.bandwidth, digits)
    optimizer = "" if model.optimizer is None else f"optimizer {1e3 * model.optimizer:.3g} ms, "
    lines = [
        f"Model:    {format_bytes(model.gradient_bytes)} of gradients in {buckets}",
        f"Compute:  forward {1e3 * model.forward:.3g} ms, backward {1e3 * model.backward:.3g} ms, {optimizer}"
        f"with {count(measured.threads, 'CPU thread')}",
        f"Network:  {count(link.world_size, 'rank')} on {count(link.nodes, 'node')}, "
        f"{bandwidth} per {'node' if link.nodes > 1 else 'rank'} {how}",
        f"Latency:  {1e3 * latency:.2g} ms for the smallest collective",
        f"Measured in {seconds:.0f} s.",
    ]
    if model.spread > NOISY:
        lines.append(
            f"NOISE: the slowest step of the model took {model.spread:.2g} times as long as the fastest. Stop other "
            "programs on these machines, and repeat."
        )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    ranked = sorted(advice.predictions, key=lambda each: each.step_seconds)
    styles = ["bold" if each.hook == advice.recommended else "" for each in ranked]
    console.print()
    headers, rows = list(_HEADERS), [_cells(each) for each in ranked]
    if price is not None:
        headers.append(_COST)
        for row, each in zip(rows, ranked, strict=True):
            row.append(f"{price * each.network_bytes / 1e6:,.2f}")
    notes = [
        _WITHOUT_OPTIMIZER if model.optimizer is None else _WITH_OPTIMIZER,
        ACCURACY_NOTE,
        *([MARK_NOTE] if any(is_aggressive(each.hook) for each in ranked) else []),
    ]
    print_tables([Table(title="", headers=headers, rows=rows, styles=styles, notes=notes)], console)
    console.print(_recommendation(advice), style="bold", highlight=False, markup=False)
    if code := HOOKS[advice.recommended].code:
        console.print(f"\n{code}", highlight=False, markup=False, soft_wrap=True)


def _recommendation(advice: Advice) -> str:
    text = f"{advice.headline}: {advice.reason}."
    if advice.buckets is not None:
        cap_mb, step_seconds = advice.buckets
        text += f" Pass bucket_cap_mb={cap_mb} to DistributedDataParallel: the gradients then travel in fewer "
        text += f"messages, and a step should take {1e3 * step_seconds:.1f} ms."
    if advice.recommended != PLAIN:
        text += f" {accuracy_of(advice.recommended)}"
    fastest = max(advice.predictions, key=lambda each: each.speed_up)
    (recommended,) = [each for each in advice.predictions if each.hook == advice.recommended]
    if is_aggressive(fastest.hook) and fastest.speed_up >= WORTHWHILE * recommended.speed_up:
        steps = STEPS_TO_TARGET.get(fastest.hook)
        why = "was not trained" if steps is None else f"took {steps:.2f} times the steps to the same loss"
        text += f" {fastest.hook} would be {fastest.speed_up:.2f}x as fast as without a hook, but {why}: compare loss "
        text += "curves before you use it."
    return text


def _cells(each: Prediction) -> list[str]:
    return [
        display_name(each.hook) + MARK * is_aggressive(each.hook),
        f"{1e3 * each.step_seconds:.1f}",
        f"{each.speed_up:.2f}x",
        f"{each.speed_up_over_bf16:.2f}x",
        "" if each.hook == PLAIN else _break_even(each.break_even),
        format_bytes(each.payload_bytes),
        format_bytes(each.memory_bytes),
        f"{STEPS_TO_TARGET[each.hook]:.2f}x" if each.hook in STEPS_TO_TARGET else "",
    ]


def _break_even(bandwidth: float | None) -> str:
    if bandwidth is None:
        return "never"
    return "always" if math.isinf(bandwidth) else format_bandwidth(bandwidth)


def to_json(measured: Measurement, advice: Advice) -> str:
    """Measurement, predictions and recommendation as JSON.

    The break-even bandwidth is null if a hook never pays off, and "always" if it pays off at every bandwidth.
    """
    predictions = [
        asdict(each)
        | {
            "break_even": "always" if each.break_even == math.inf else each.break_even,
            "steps_to_target": STEPS_TO_TARGET.get(each.hook),
            "is_aggressive": is_aggressive(each.hook),
        }
        for each in advice.predictions
    ]
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "gradwire": __version__,
        "torch": torch.__version__,
        "device": str(bench_device()),
        "recommended": advice.recommended,
        "reason": advice.reason,
        "bucket_cap_mb": None if advice.buckets is None else advice.buckets.cap_mb,
        "code": HOOKS[advice.recommended].code,
        "predictions": predictions,
        "measurement": _plain(asdict(measured)),
    }
    return dump_json(content, indent=1)


def _plain(value: Any) -> Any:
    """Named tuples as objects with their names, members of an enumeration by their names."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
