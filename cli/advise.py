"""The command ``gradwire advise``: alone with a network given by hand, or as a rank under torchrun."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer

from gradwire.bench.models import JOBS
from gradwire.bench.timing import backend_of, bench_device
from gradwire.cli import advice_report
from gradwire.cli.options import MAX_RANKS, finite, parse_hooks, parse_rate
from gradwire.planner import jobs
from gradwire.planner.advice import advise
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import JobError
from gradwire.planner.probe import GivenLink, measure, on_all_ranks

MAX_LATENCY = 1_000_000  # microseconds
CHOICES = [name for name in HOOKS if name != "noop"]
_TIMEOUT = timedelta(minutes=2)


def advise_command(
    model: Annotated[
        str,
        typer.Argument(
            help="The job: module:function, where function(device) returns (model, loss) and loss(model) runs one "
            f"batch. Or a benchmark model: {', '.join(JOBS)}."
        ),
    ],
    hooks: Annotated[str, typer.Option("--hooks", help="Hooks to compare, comma-separated.")] = ", ".join(CHOICES),
    bandwidth: Annotated[
        str | None, typer.Option(help="Without torchrun: bandwidth of a node to assume, such as 100mbit.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=2, max=MAX_RANKS, help="Without torchrun: number of ranks to assume."),
    ] = None,
    latency: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_LATENCY,
            callback=finite,
            help="Without torchrun: latency between two nodes to assume, in microseconds.",
        ),
    ] = 50.0,
    ranks_per_node: Annotated[
        int,
        typer.Option(
            "--ranks-per-node",
            min=1,
            max=MAX_RANKS,
            envvar="LOCAL_WORLD_SIZE",
            help="Without torchrun: number of ranks on each node. With several, a rank computes with one CPU thread "
            "unless OMP_NUM_THREADS is set, as under torchrun.",
        ),
    ] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write measurements and predictions to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot the step time against the bandwidth to this PNG file.")
    ] = None,
) -> None:
    """Measure your model and network, predict the step time with each hook, and recommend a hook or none.

    Run it on the machines you train on; it takes a few seconds:

    torchrun --nproc-per-node=8 --no-python gradwire advise train:job

    Or on one machine, for a network that you describe:

    gradwire advise train:job --bandwidth 100gbit --world-size 16 --ranks-per-node 8
    """
    names = parse_hooks(hooks, CHOICES)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    given = None
    if not is_rank:
        if bandwidth is None or world_size is None:
            raise typer.BadParameter(
                "a single process measures no network. Start one process per rank with torchrun, or give the network: "
                "--bandwidth 100mbit --world-size 8.",
                param_hint="--bandwidth, --world-size",
            )
        rate = parse_rate(bandwidth, "--bandwidth", is_modeled=True).mbit
        if rate is None:
            raise typer.BadParameter("expected a number, such as 400gbit.", param_hint="--bandwidth")
        if world_size % ranks_per_node != 0:
            raise typer.BadParameter(
                f"{ranks_per_node} is not a divisor of the world size, {world_size}.", param_hint="--ranks-per-node"
            )
        given = GivenLink(world_size=world_size, bandwidth=1e6 * rate, latency=1e-6 * latency)
        if ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does for a rank
    elif bandwidth is not None or world_size is not None:
        raise typer.BadParameter(
            "under torchrun the network is measured. Leave the option out, or run without torchrun.",
            param_hint="--bandwidth, --world-size",
        )
    for path in (json, plot):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}; make it first.", param_hint="--json, --plot")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib. Run: pip install matplotlib", param_hint="--plot")
    device = bench_device()
    try:
        with _process_group(is_rank, device):
            if is_rank and dist.get_world_size() == 1:
                raise JobError(
                    "The world size is 1, so there is nothing to exchange. Start more ranks, or run without torchrun "
                    "and give --bandwidth and --world-size"
                )
            _run(model, names, device, given, ranks_per_node, json, plot)
    except JobError as error:
        _fail(error)


def _run(
    model: str,
    names: tuple[str, ...],
    device: torch.device,
    given: GivenLink | None,
    ranks_per_node: int,
    json: Path | None,
    plot: Path | None,
) -> None:
    is_first = dist.get_rank() == 0
    started = time.monotonic()
    build = on_all_ranks(lambda: JOBS.get(model) or jobs.load(model))
    shows_progress = is_first and sys.stderr.isatty()
    measured = measure(build, names, device, given, _show if shows_progress else lambda _: None, ranks_per_node)
    seconds = time.monotonic() - started
    if shows_progress:
        _show("")
    if not is_first:
        return
    advice = advise(measured)
    advice_report.print_advice(measured, advice, seconds)
    if json is not None:
        json.write_text(advice_report.to_json(measured, advice) + "\n")
        typer.echo(f"\nJSON: {json}")
    if plot is not None:
        advice_report.draw(measured, advice, plot)
        typer.echo(f"\nPlot: {plot}")


def _show(what: str) -> None:
    sys.stderr.write(f"\r\033[K{f'Measuring: {what}' if what else ''}")
    sys.stderr.flush()


@contextmanager
def _process_group(is_rank: bool, device: torch.device) -> Iterator[None]:
    """The ranks of torchrun, or a group of one rank."""
    if is_rank:
        dist.init_process_group(backend_of(device), timeout=_TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fail(error: JobError) -> NoReturn:
    if error.__cause__ is not None:
        typer.echo("".join(traceback.format_exception(error.__cause__)), err=True)
    typer.echo(f"gradwire advise: {str(error).rstrip('.')}.", err=True)
    raise typer.Exit(1)
