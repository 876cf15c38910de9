"""The command ``gradwire advise``: alone, for a network given by hand, or as a rank under torchrun."""

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
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from gradwire.bench.models import JOBS
from gradwire.bench.timing import backend_of, bench_device
from gradwire.cli.advice_report import print_advice, to_json
from gradwire.cli.options import (
    MAX_RANKS,
    MAX_THREADS,
    number,
    output_file,
    parse_choices,
    parse_hooks,
    parse_list,
    parse_rate,
    real_number,
)
from gradwire.planner import jobs
from gradwire.planner.hook_registry import CAST, COMPARABLE, PLAIN
from gradwire.planner.jobs import JobError
from gradwire.planner.measurement import Measurement, measure, on_all_ranks
from gradwire.planner.recommend import advise
from gradwire.planner.step_model import GivenLink

DEFAULT_LATENCY, MAX_LATENCY = 50, 1_000_000  # microseconds
MAX_PRICE = 1_000_000
_ALL_HOOKS = ", ".join(COMPARABLE)
_NOT_BASELINES = [name for name in COMPARABLE if name not in (PLAIN, CAST)]
_TIMEOUT = timedelta(minutes=2)

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
    int | None, number("CPU threads of each rank. Default: what PyTorch or torchrun sets.", most=MAX_THREADS)
]
_Bandwidth = Annotated[
    str | None, typer.Option(help="Without torchrun: bandwidth of a node to assume, such as 100mbit.")
]
_WorldSize = Annotated[int | None, number("Without torchrun: number of ranks to assume.", least=2, most=MAX_RANKS)]
_LATENCY = f"Without torchrun: latency between two nodes to assume, in microseconds. Default: {DEFAULT_LATENCY}."
_Latency = Annotated[float | None, real_number("--latency", _LATENCY, MAX_LATENCY)]
_RanksPerNode = Annotated[
    int,
    number(
        "Without torchrun: number of ranks on each node. With several, a rank computes with one CPU thread unless "
        "--threads or OMP_NUM_THREADS is set, as under torchrun.",
        most=MAX_RANKS,
    ),
]
_PRICE = "Price of a GB (1e9 bytes) between nodes: prints the traffic's cost."
_Price = Annotated[float | None, real_number("--price", _PRICE, MAX_PRICE)]
_Json = Annotated[Path | None, output_file("--json", "Write measurements and predictions to this file.")]
_Plot = Annotated[Path | None, output_file("--plot", "Plot the step time against the bandwidth to this PNG file.")]


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
    names = tuple(name for name in parse_hooks(hooks, COMPARABLE) if name not in excluded)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank:
        per_node = ranks_per_node if ranks_per_node > 1 else None
        options = {"--bandwidth": bandwidth, "--world-size": world_size, "--latency": latency}
        _refuse_given_link({**options, "--ranks-per-node": per_node})
    given = None if is_rank else _given_link(bandwidth, world_size, latency, ranks_per_node)
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib. Run: pip install matplotlib", param_hint="--plot")
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


def _measured(model: str, names: tuple[str, ...], given: GivenLink | None) -> Measurement | None:
    """The measurement on rank 0, None on other ranks. Ends the command if the job cannot be measured."""
    device = bench_device()
    try:
        with _process_group(given is None, device):
            if given is None and dist.get_world_size() == 1:
                raise JobError(
                    "The world size is 1, so there is nothing to exchange. Start more ranks, or run without torchrun "
                    "and give --bandwidth and --world-size"
                )
            build = on_all_ranks(lambda: JOBS.get(model) or jobs.load(model))
            measured = measure(build, names, device, given, _show)
            _show("")
            return measured if dist.get_rank() == 0 else None
    except JobError as error:
        if error.__cause__ is not None:
            typer.echo("".join(traceback.format_exception(error.__cause__)), err=True)
        typer.echo(f"gradwire advise: {str(error).rstrip('.')}.", err=True)
        raise typer.Exit(1) from None


def _show(what: str) -> None:
    """Show on the terminal of rank 0 what is being measured."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
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
