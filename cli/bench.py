"""The commands of ``gradwire bench``: parse options, run, print and save."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gradwire.bench import advise as advise_bench
from gradwire.bench import auto as auto_bench
from gradwire.bench import converge, kernels, namespaces, network, reducer, rounding, telemetry
from gradwire.bench import hooks as hook_bench
from gradwire.bench.models import JOBS, MODELS
from gradwire.bench.namespaces import NamespaceError, Rate
from gradwire.bench.record import Measured, RecordError, load
from gradwire.bench.report import TABLES
from gradwire.bench.shapes import SHAPES
from gradwire.bench.tables import machine_line, print_tables
from gradwire.bench.tasks import TASKS, TRAINED_HOOKS
from gradwire.bench.timing import bench_device
from gradwire.cli.command_runs import measured, report
from gradwire.cli.options import (
    HooksOption,
    HostsOption,
    LoopbackOption,
    ModelsOption,
    OutputOption,
    QuickOption,
    RanksOption,
    RatesOption,
    ThreadsOption,
    listed,
    number,
    parse_choice,
    parse_choices,
    parse_hooks,
    parse_list,
    parse_ranks,
    parse_rate,
    parse_sizes,
    refuse_beside,
)
from gradwire.planner.hook_registry import HOOKS, HookEntry

CPU = torch.device("cpu")
bench = typer.Typer(
    help="Benchmark gradwire against PyTorch; print tables and draw plots of saved results.", no_args_is_help=True
)
_LOOPBACK_SETS = ("rate", "rates", "emulated")


def _command(
    name: str, *, quick: dict[str, Any] | None = None, hooks: dict[str, HookEntry] | None = None
) -> Callable[[Callable[..., None]], None]:
    """Register a benchmark whose flag ``--quick`` stands for other options; ``--loopback`` excludes those of a link."""
    values = quick or {}
    stands_for = " ".join(f"--{option} {value}" for option, value in values.items())
    notes = [f"--quick stands for {stands_for}."] * bool(quick) + ([listed(hooks)] if hooks is not None else [])

    def register(function: Callable[..., None]) -> None:
        @wraps(function)
        def run(context: typer.Context, **options: Any) -> None:
            if options.get("quick"):
                refuse_beside(context, "--quick", *values)
                options |= values
            if options.get("loopback"):
                refuse_beside(context, "--loopback", *(options.keys() & _LOOPBACK_SETS))
            function(context, **options)

        bench.command(name, epilog="\n\n".join(notes) or None)(run)

    return register


@_command("kernels", quick={"models": "resnet50,gpt2-124m", "sizes": "25", "rounds": 5})
def bench_kernels(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Models whose parameter shapes to use, comma-separated.")] = ", ".join(
        SHAPES
    ),
    sizes: Annotated[str, typer.Option(help="Bucket sizes in MiB, comma-separated.")] = ", ".join(
        map(str, kernels.DEFAULT_SIZES)
    ),
    rounds: Annotated[int, number("Timed rounds over the buckets, per implementation.")] = 5,
    threads: ThreadsOption = 1,
    quick: QuickOption = False,
    output: OutputOption = None,
) -> None:
    """Time every kernel on the parameter shapes of real models, against plain PyTorch and a copy.

    Times the Triton kernels on a GPU, and gradwire's CPU code elsewhere. Takes 15 minutes on a CPU.
    """
    device = bench_device()
    torch.set_num_threads(threads)
    names, mib = parse_choices(models, SHAPES, "--models"), parse_sizes(sizes)
    _run(context, partial(kernels.measure, names, mib, rounds, device), output, device, threads)


@_command("rounding")
def bench_rounding(context: typer.Context, output: OutputOption = None) -> None:
    """Measure the rounding error of the mean gradient, for each wire format and for sums in 16 bits and in fp32.

    Simulates the ranks in one process. Takes half a minute.
    """
    _run(context, rounding.measure, output)


@_command("reducer", quick={"models": "transformer", "ranks": "1", "steps": 20})
def bench_reducer(
    context: typer.Context,
    steps: Annotated[int, number("Timed backward passes per reducer and model.", least=2)] = 40,
    models: ModelsOption = ", ".join(MODELS),
    ranks: RanksOption = None,
    quick: QuickOption = False,
    output: OutputOption = None,
) -> None:
    """Time backward passes with gradwire's reducer, with PyTorch's and with none; measure peak memory."""
    device = bench_device()
    names, sizes = parse_choices(models, MODELS, "--models"), parse_ranks(ranks, device)
    _run(context, partial(reducer.measure, names, sizes, steps), output, device)


@_command("hooks", quick={"hooks": "noop,fp16,powersgd-r4", "ranks": "1", "steps": 10}, hooks=HOOKS)
def bench_hooks(
    context: typer.Context,
    steps: Annotated[int, number("Timed steps per hook and DDP.")] = 30,
    threads: ThreadsOption = 1,
    hooks: HooksOption = ", ".join(hook_bench.DEFAULT_HOOKS),
    ranks: RanksOption = None,
    quick: QuickOption = False,
    output: OutputOption = None,
) -> None:
    """Time gradwire's and PyTorch's hooks without a network; measure host time and memory.

    gradwire's hooks run on both DDPs. The own cost of a hook is its step time minus that of noop_hook on the same DDP.
    """
    device = bench_device()
    names, sizes = parse_hooks(hooks, HOOKS), parse_ranks(ranks, device)
    _run(context, partial(hook_bench.measure, names, sizes, steps, threads), output, device, threads)


@_command("telemetry")
def bench_telemetry(
    context: typer.Context,
    steps: Annotated[int, number("Timed steps of each kind, per hook.")] = 60,
    ranks: RanksOption = None,
    output: OutputOption = None,
) -> None:
    """Measure the overhead of telemetry (state.observe()) in a training step. Takes two minutes."""
    device = bench_device()
    _run(context, partial(telemetry.measure, parse_ranks(ranks, device), steps), output, device)


@_command("network", quick={"hooks": "noop,none,powersgd-r4", "steps": 5}, hooks=HOOKS)
def bench_network(
    context: typer.Context,
    hosts: HostsOption = 2,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Link rates such as 2.5gbit, comma-separated. "
            f"Default: {', '.join(network.DEFAULT_RATES)}; with --quick 1gbit; "
            f"with --emulated {', '.join(network.EMULATED_RATES)}."
        ),
    ] = None,
    steps: Annotated[int, number("Timed steps per hook and rate.")] = 15,
    hooks: HooksOption = ", ".join(network.DEFAULT_HOOKS),
    emulated: Annotated[bool, typer.Option("--emulated", help="Emulate the link on one GPU.")] = False,
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Time training steps over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes a few minutes, mostly at 100mbit.
    """
    if emulated and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; without --emulated the link is real.", param_hint="--emulated")
    defaults = network.EMULATED_RATES if emulated else ("1gbit",) if quick else network.DEFAULT_RATES
    links = _links(rates if rates is not None else ",".join(defaults), loopback, emulated)
    measure = partial(network.measure, parse_hooks(hooks, HOOKS), links, steps, hosts, emulated)
    _run(context, measure, output, bench_device() if emulated else CPU, is_networked=not (loopback or emulated))


@_command("advise", quick={"models": "transformer", "hooks": "none,bf16,int4,powersgd-r4", "rates": "1gbit"})
def bench_advise(
    context: typer.Context,
    models: ModelsOption = ", ".join(advise_bench.DEFAULT_MODELS),
    rates: RatesOption = ", ".join(advise_bench.DEFAULT_RATES),
    rounds: Annotated[int, number("Timed rounds of a few steps, per hook and rate.")] = 1,
    hooks: HooksOption = ", ".join(advise_bench.DEFAULT_HOOKS),
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Compare step times predicted by `gradwire advise` with measured ones, over a slow network.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes ten minutes.
    """
    names, chosen = parse_hooks(hooks, advise_bench.DEFAULT_HOOKS), parse_choices(models, JOBS, "--models")
    measure = partial(advise_bench.measure, chosen, _links(rates, loopback), names, rounds)
    _run(context, measure, output, is_networked=not loopback)


@_command("auto")
def bench_auto(
    context: typer.Context,
    models: ModelsOption = ", ".join(auto_bench.DEFAULT_MODELS),
    rates: RatesOption = ", ".join(auto_bench.DEFAULT_RATES),
    rounds: Annotated[int, number("Turns of each candidate at each rate, of a few steps each.")] = 4,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Compare the choice of auto_hook with no hook and with each of its candidates, over a slow network.

    The hosts are network namespaces of this machine, joined by links with a rate limit. Needs Linux and root.
    Takes ten minutes.
    """
    links, names = _links(rates, loopback), parse_choices(models, JOBS, "--models")
    _run(context, partial(auto_bench.measure, names, links, rounds), output, is_networked=not loopback)


@_command("converge", quick={"task": "digits", "hooks": "none,powersgd-r4", "seeds": 1}, hooks=TRAINED_HOOKS)
def bench_converge(
    context: typer.Context,
    hosts: HostsOption = 2,
    rate: Annotated[str, typer.Option(help="Link rate, such as 100mbit or 2.5gbit.")] = "100mbit",
    task: Annotated[str, typer.Option(help=f"Training task: {' or '.join(TASKS)}.")] = "text",
    seeds: Annotated[int, number("Number of seeds. Each hook trains once per seed.")] = 3,
    hooks: HooksOption = ", ".join(converge.DEFAULT_HOOKS),
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the time to a target loss or accuracy over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    At 100mbit, the task digits takes a few minutes, and the task text 45 minutes.
    """
    chosen, names = parse_choice(task, TASKS, "--task"), parse_hooks(hooks, TRAINED_HOOKS)
    link = network.LOOPBACK if loopback else parse_rate(rate, "--rate")
    measure = partial(converge.measure, chosen, names, link, seeds, hosts)
    _run(context, measure, output, is_networked=not loopback)


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


def _run(
    context: typer.Context,
    measure: Callable[[], Measured],
    output: Path | None,
    device: torch.device = CPU,
    threads: int = 1,
    *,
    is_networked: bool = False,
) -> None:
    """Measure, print the tables, and save the results."""
    name = str(context.info_name)
    reason = namespaces.obstacle() if is_networked else None
    try:
        if reason is not None:
            raise NamespaceError(reason)
        records = measured(f"gradwire bench {name}", measure, device, threads)
    except NamespaceError as error:
        typer.echo(
            f"gradwire bench {name}: {error}. The command needs Linux, root and pyroute2; with --loopback it "
            "needs none of them, and the link is memory.",
            err=True,
        )
        raise typer.Exit(1) from None
    report(records, TABLES[name], output)
