"""The commands of ``gradwire bench``: parse options, run, print and save."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from gradwire.bench import advise as advise_bench
from gradwire.bench import auto as auto_bench
from gradwire.bench import (
    converge,
    kernels,
    namespaces,
    network,
    reducer,
    rounding,
    telemetry,
)
from gradwire.bench import hooks as hook_bench
from gradwire.bench.models import JOBS, MODELS
from gradwire.bench.namespaces import NamespaceError, Rate
from gradwire.bench.record import Measured, RecordError, load
from gradwire.bench.report import TABLES
from gradwire.bench.shapes import SHAPES
from gradwire.bench.tables import machine_line, print_tables
from gradwire.bench.tasks import TASKS
from gradwire.bench.timing import bench_device
from gradwire.cli.command_runs import measured, report
from gradwire.cli.options import (
    MOST_STEPS,
    MOST_THREADS,
    HooksOption,
    HostsOption,
    LoopbackOption,
    OutputOption,
    RanksOption,
    listed,
    parse_choice,
    parse_choices,
    parse_hooks,
    parse_list,
    parse_ranks,
    parse_rate,
    parse_sizes,
    refuse_beside,
)
from gradwire.planner.hook_registry import HOOKS

CPU = torch.device("cpu")
bench = typer.Typer(
    help="Benchmark gradwire against PyTorch; print tables and draw plots of saved results.", no_args_is_help=True
)
_COST_HOOKS = ", ".join(hook_bench.DEFAULT_HOOKS)
_NETWORK_HOOKS = ", ".join(network.DEFAULT_HOOKS)
_TRAINED_HOOKS = ", ".join(converge.DEFAULT_HOOKS)
_ADVISED_HOOKS = ", ".join(advise_bench.DEFAULT_HOOKS)
_ADVISED_MODELS = ", ".join(advise_bench.DEFAULT_MODELS)
_ADVISED_RATES = ", ".join(advise_bench.DEFAULT_RATES)
_MODELS = ", ".join(SHAPES)
_SIZES = ", ".join(map(str, kernels.DEFAULT_SIZES))
_NETWORK_RATES = ", ".join(network.DEFAULT_RATES)


@bench.command("kernels")
def bench_kernels(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Models whose parameter shapes to use, comma-separated.")] = _MODELS,
    sizes: Annotated[str, typer.Option(help="Bucket sizes in MiB, comma-separated.")] = _SIZES,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Timed rounds over the buckets, per implementation.")
    ] = 5,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Only resnet50 and gpt2-124m, at 25 MiB.")] = False,
    output: OutputOption = None,
) -> None:
    """Time every kernel on the parameter shapes of real models, against plain PyTorch and a copy.

    Times the Triton kernels on a GPU, and gradwire's CPU code elsewhere. Takes 15 minutes on a CPU.
    """
    if quick:
        refuse_beside(context, "--quick", "models", "sizes", "rounds")
    names = ("resnet50", "gpt2-124m") if quick else parse_choices(models, SHAPES, "--models")
    full = [25] if quick else parse_sizes(sizes)
    device = bench_device()
    torch.set_num_threads(threads)
    measure = partial(kernels.measure, names, full, 5 if quick else rounds, device)
    _run("kernels", measure, output, device, threads)


@bench.command("rounding")
def bench_rounding(output: OutputOption = None) -> None:
    """Measure the rounding error of the mean gradient, for each wire format and for sums in 16 bits and in fp32.

    Simulates the ranks in one process. Takes half a minute.
    """
    _run("rounding", rounding.measure, output)


@bench.command("reducer")
def bench_reducer(
    context: typer.Context,
    steps: Annotated[
        int, typer.Option(min=2, max=MOST_STEPS, help="Timed backward passes per reducer and model.")
    ] = 40,
    models: Annotated[str, typer.Option(help="Models, comma-separated.")] = ", ".join(MODELS),
    ranks: RanksOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only 20 steps of the transformer, on one rank.")] = False,
    output: OutputOption = None,
) -> None:
    """Time backward passes with gradwire's reducer, with PyTorch's and with none; measure peak memory."""
    if quick:
        refuse_beside(context, "--quick", "steps", "models", "ranks")
    names = ("transformer",) if quick else parse_choices(models, MODELS, "--models")
    device = bench_device()
    sizes = [1] if quick else parse_ranks(ranks, device)
    measure = partial(reducer.measure, names, sizes, 20 if quick else steps)
    _run("reducer", measure, output, device)


@bench.command("hooks", epilog=listed(HOOKS))
def bench_hooks(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Timed steps per hook and DDP.")] = 30,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads per rank.")] = 1,
    hooks: HooksOption = _COST_HOOKS,
    ranks: RanksOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only 10 steps of {', '.join(hook_bench.QUICK_HOOKS)}, on one rank.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Time gradwire's and PyTorch's hooks without a network; measure host time and memory.

    gradwire's hooks run on both DDPs. The own cost of a hook is its step time minus that of noop_hook on the same DDP.
    """
    if quick:
        refuse_beside(context, "--quick", "steps", "hooks", "ranks")
    names = hook_bench.QUICK_HOOKS if quick else parse_hooks(hooks, HOOKS)
    device = bench_device()
    sizes = [1] if quick else parse_ranks(ranks, device)
    measure = partial(hook_bench.measure, names, sizes, 10 if quick else steps, threads)
    _run("hooks", measure, output, device, threads)


@bench.command("telemetry")
def bench_telemetry(
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Timed steps of each kind, per hook.")] = 60,
    ranks: RanksOption = None,
    output: OutputOption = None,
) -> None:
    """Measure the overhead of telemetry (state.observe()) in a training step. Takes two minutes."""
    device = bench_device()
    measure = partial(telemetry.measure, parse_ranks(ranks, device), steps)
    _run("telemetry", measure, output, device)


@bench.command("network", epilog=listed(HOOKS))
def bench_network(
    context: typer.Context,
    hosts: HostsOption = 2,
    rates: Annotated[
        str | None, typer.Option(help=f"Link rates such as 2.5gbit, comma-separated. Default: {_NETWORK_RATES}.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Timed steps per hook and rate.")] = 15,
    hooks: HooksOption = _NETWORK_HOOKS,
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated",
            help=f"Emulate the link on one GPU. Default rates: {', '.join(network.EMULATED_RATES)}.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only 5 steps of {', '.join(network.QUICK_HOOKS)}, at 1gbit.")
    ] = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Time training steps over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes a few minutes, mostly at 100mbit.
    """
    if quick:
        refuse_beside(context, "--quick", "steps", "hooks")
    if loopback:
        refuse_beside(context, "--loopback", "rates", "emulated")
    names = network.QUICK_HOOKS if quick else parse_hooks(hooks, HOOKS)
    if emulated and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; without --emulated the link is real.", param_hint="--emulated")
    defaults = network.EMULATED_RATES if emulated else network.QUICK_RATES if quick else network.DEFAULT_RATES
    links = _links(rates if rates is not None else ",".join(defaults), loopback, emulated)
    measure = partial(network.measure, names, links, 5 if quick else steps, hosts, emulated)
    _refuse_without_namespaces("network", loopback or emulated)
    _run("network", measure, output, bench_device() if emulated else CPU)


@bench.command("advise")
def bench_advise(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Models, comma-separated.")] = _ADVISED_MODELS,
    rates: Annotated[str, typer.Option(help="Link rates such as 2.5gbit, comma-separated.")] = _ADVISED_RATES,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Timed rounds of a few steps, per hook and rate.")
    ] = 1,
    hooks: HooksOption = _ADVISED_HOOKS,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"Only the transformer with {', '.join(advise_bench.QUICK_HOOKS)}, at 1gbit."),
    ] = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Compare step times predicted by `gradwire advise` with measured ones, over a slow network.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes ten minutes.
    """
    if quick:
        refuse_beside(context, "--quick", "models", "rates", "hooks")
    if loopback:
        refuse_beside(context, "--loopback", "rates")
    chosen = ("transformer",) if quick else parse_choices(models, JOBS, "--models")
    names = advise_bench.QUICK_HOOKS if quick else parse_hooks(hooks, advise_bench.DEFAULT_HOOKS)
    links = _links("1gbit" if quick else rates, loopback)
    _refuse_without_namespaces("advise", loopback)
    _run("advise", partial(advise_bench.measure, chosen, links, names, rounds), output)


@bench.command("auto")
def bench_auto(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ", ".join(auto_bench.DEFAULT_MODELS),
    rates: Annotated[str, typer.Option(help="Link rates such as 2.5gbit, separated by commas.")] = _ADVISED_RATES,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Turns of each candidate at each rate, of a few steps each.")
    ] = 4,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Compare the choice of auto_hook with no hook and with each of its candidates, over a slow network.

    The hosts are network namespaces of this machine, joined by links with a rate limit. Needs Linux and root.
    Takes ten minutes.
    """
    if loopback:
        refuse_beside(context, "--loopback", "rates")
    links, names = _links(rates, loopback), parse_choices(models, JOBS, "--models")
    _refuse_without_namespaces("auto", loopback)
    _run("auto", partial(auto_bench.measure, names, links, rounds), output)


@bench.command("converge", epilog=listed(converge.TRAINED_HOOKS))
def bench_converge(
    context: typer.Context,
    hosts: HostsOption = 2,
    rate: Annotated[str, typer.Option(help="Link rate, such as 100mbit or 2.5gbit.")] = "100mbit",
    task: Annotated[str, typer.Option(help=f"Training task: {' or '.join(TASKS)}.")] = "text",
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Number of seeds. Each hook trains once per seed.")
    ] = 3,
    hooks: HooksOption = _TRAINED_HOOKS,
    quick: Annotated[bool, typer.Option("--quick", help="Only none and powersgd-r4, one seed of digits.")] = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the time to a target loss or accuracy over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    At 100mbit, the task digits takes a few minutes, and the task text 45 minutes.
    """
    if quick:
        refuse_beside(context, "--quick", "task", "seeds", "hooks")
    if loopback:
        refuse_beside(context, "--loopback", "rate")
    chosen = parse_choice("digits" if quick else task, TASKS, "--task")
    names = ("none", "powersgd-r4") if quick else parse_choices(hooks, converge.TRAINED_HOOKS, "--hooks")
    link = network.LOOPBACK if loopback else parse_rate(rate, "--rate")
    _refuse_without_namespaces("converge", loopback)
    _run("converge", partial(converge.measure, chosen, names, link, 1 if quick else seeds, hosts), output)


@bench.command("report")
def bench_report(
    results: Annotated[
        list[Path], typer.Argument(help="Files that --output has written.", exists=True, dir_okay=False)
    ],
    plots: Annotated[
        Path | None, typer.Option(help="Draw the plots of the results into this folder.", file_okay=False, exists=True)
    ] = None,
) -> None:
    """Print the tables of saved results, with the command and the machine that they come from; draw their plots."""
    from gradwire.bench.plots import DRAWINGS  # matplotlib takes a second to import

    for path in results:
        try:
            records = load(path)
        except RecordError as error:
            typer.echo(f"gradwire bench report: {error}.", err=True)
            raise typer.Exit(1) from None
        first = records[0]
        if first.bench not in TABLES:
            typer.echo(f"gradwire bench report: {path} has results of {first.bench!r}, not of a benchmark.", err=True)
            raise typer.Exit(1)
        print_tables(TABLES[first.bench](records))
        typer.echo(f"{first.provenance['command']}\n{machine_line(first.provenance)}.\n")
        if plots is not None and first.bench in DRAWINGS:
            DRAWINGS[first.bench](records, plots / f"{path.stem}.png")
            typer.echo(f"Plot: {plots / path.stem}.png\n")


def _links(rates: str, loopback: bool, is_modeled: bool = False) -> list[Rate]:
    """The links to measure; wrong rates are refused with ``--loopback`` too."""
    links = [parse_rate(name, "--rates", is_modeled=is_modeled) for name in parse_list(rates)]
    return [network.LOOPBACK] if loopback else links


def _refuse_without_namespaces(command: str, needs_none: bool) -> None:
    obstacle = None if needs_none else namespaces.obstacle()
    if obstacle is not None:
        _refuse_network(command, obstacle)


def _run(
    command: str, measure: Callable[[], Measured], output: Path | None, device: torch.device = CPU, threads: int = 1
) -> None:
    """Measure, print the tables, and save the results."""
    try:
        records = measured(f"gradwire bench {command}", measure, device, threads)
    except NamespaceError as error:
        _refuse_network(command, str(error))
    report(records, TABLES[command], output)


def _refuse_network(command: str, reason: str) -> NoReturn:
    typer.echo(
        f"gradwire bench {command}: {reason}. The command needs Linux, root and pyroute2; with --loopback it "
        "needs none of them, and the link is memory.",
        err=True,
    )
    raise typer.Exit(1)
