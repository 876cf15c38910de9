"""The commands of ``gradwire bench``: parse options, run, print and save."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gradwire.bench import (
    anywhere,
    converge,
    demo,
    host,
    kernels,
    long_runs,
    namespaces,
    network,
    nodes,
    reducer,
    telemetry,
)
from gradwire.bench import hooks as hook_bench
from gradwire.bench.models import MODELS
from gradwire.bench.record import Measured, Record, RecordError, load, unique
from gradwire.bench.shapes import SHAPES
from gradwire.bench.tables import Table, machine_line, print_tables
from gradwire.bench.tasks import TASKS, TRAINED_HOOKS
from gradwire.bench.timing import bench_device
from gradwire.cli.bench_runs import CPU, run
from gradwire.cli.options import (
    DelayOption,
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
    parse_links,
    parse_ranks,
    parse_rate,
    parse_sizes,
    refuse_beside,
    require_packages,
)
from gradwire.planner.hook_registry import HOOKS, HookEntry

bench = typer.Typer(
    help="Benchmark gradwire against PyTorch; print tables and draw plots of saved results.", no_args_is_help=True
)
TABLES: dict[str, Callable[[Sequence[Record]], list[Table]]] = {
    module.__name__.rpartition(".")[2]: module.tables
    for module in (demo, network, nodes, anywhere, converge, long_runs, hook_bench, host, reducer, kernels, telemetry)
}
_LOOPBACK_SETS = ("rate", "rates", "delay")
_ALL_SHAPES, _DEFAULT_SIZES = ", ".join(SHAPES), ", ".join(map(str, kernels.DEFAULT_SIZES))


def _command(
    name: str, *, quick: dict[str, Any] | None = None, hooks: dict[str, HookEntry] | None = None
) -> Callable[[Callable[..., None]], None]:
    """Register a benchmark whose flag ``--quick`` stands for other options; ``--loopback`` excludes those of a link."""
    values = quick or {}
    stands_for = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in values.items())
    notes = [f"--quick stands for {stands_for}."] * bool(quick) + ([listed(hooks)] if hooks is not None else [])

    def register(function: Callable[..., None]) -> None:
        @wraps(function)
        def checked(context: typer.Context, **options: Any) -> None:
            require_packages(f"bench {name}")
            if options.get("quick"):
                refuse_beside(context, "--quick", *values)
                options |= values
            if options.get("loopback"):
                refuse_beside(context, "--loopback", *(options.keys() & _LOOPBACK_SETS))
            function(context, **options)

        bench.command(name, epilog="\n\n".join(notes) or None)(checked)

    return register


@_command("kernels", quick={"models": "resnet50,gpt2-124m", "sizes": "25", "rounds": 5})
def bench_kernels(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Models whose parameter shapes to use, comma-separated.")] = _ALL_SHAPES,
    sizes: Annotated[str, typer.Option(help="Bucket sizes in MiB, comma-separated.")] = _DEFAULT_SIZES,
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


@_command("host", quick={"hooks": "none,fp16,int4", "steps": 20}, hooks=HOOKS)
def bench_host(
    context: typer.Context,
    steps: Annotated[int, number("Timed steps per hook and DDP.")] = 60,
    hooks: HooksOption = ", ".join(host.DEFAULT_HOOKS),
    quick: QuickOption = False,
    output: OutputOption = None,
) -> None:
    """Time the host in steps on a GPU, without a GPU: every hook on both DDPs against PyTorch's fp16 hook.

    Kernels, streams and collectives do nothing; all else runs as on a GPU. Needs Linux and a C compiler.
    """
    _run(context, partial(host.measure, parse_hooks(hooks, HOOKS), steps), output)


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


@_command("network", quick={"hooks": "noop,none,powersgd-r4", "rates": "1gbit", "steps": 5}, hooks=HOOKS)
def bench_network(
    context: typer.Context,
    hosts: HostsOption = 2,
    rates: RatesOption = ", ".join(network.DEFAULT_RATES),
    delay: DelayOption = 0.0,
    steps: Annotated[int, number("Timed steps per hook and rate.")] = 15,
    hooks: HooksOption = ", ".join(network.DEFAULT_HOOKS),
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Time training steps over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes a few minutes, mostly at 100mbit.
    """
    links = parse_links(rates, loopback)
    _run(
        context,
        partial(network.measure, parse_hooks(hooks, HOOKS), links, steps, hosts, delay),
        output,
        is_networked=not loopback,
    )


@_command("nodes", quick={"seams": "hsdp", "rates": "1gbit", "steps": 2, "training_steps": 3})
def bench_nodes(
    context: typer.Context,
    rates: RatesOption = ", ".join(nodes.DEFAULT_RATES),
    steps: Annotated[int, number("Timed steps per method and rate.")] = 11,
    training_steps: Annotated[int, number("Steps of training before the loss is measured.", least=3)] = 100,
    seams: Annotated[str, typer.Option(help="Kinds of data parallelism, comma-separated.")] = ", ".join(nodes.SEAMS),
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Train with DDP, HSDP, replicate and FSDP2 on two nodes of two ranks: step time, bytes, memory and loss.

    The link between the nodes is slow and the one inside is fast: the nodes are network namespaces of this machine,
    joined by a rate-limited link. Needs root on Linux. Also prints a model of larger clusters. Takes 45 minutes.
    """
    links = parse_links(rates, loopback)
    measure = partial(nodes.measure, parse_choices(seams, nodes.SEAMS, "--seams"), links, steps, training_steps)
    _run(context, measure, output, is_networked=not loopback)


@_command("anywhere", quick={"rates": "1gbit", "steps": 2, "training_steps": 3})
def bench_anywhere(
    context: typer.Context,
    rates: RatesOption = ", ".join(anywhere.DEFAULT_RATES),
    steps: Annotated[int, number("Timed steps per loop, method and rate.")] = 11,
    training_steps: Annotated[int, number("Steps of training before the loss is measured.")] = 300,
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Train with loops that do not use gradwire's DDP: averages of p.grad, Muon and ZeroRedundancyOptimizer.

    Each is measured as it is, and with gradwire.collectives: step time, bytes and loss. Two hosts of one rank, then of
    two, are network namespaces of this machine, joined by a rate-limited link. Needs root on Linux. Takes minutes.
    """
    links = parse_links(rates, loopback)
    _run(context, partial(anywhere.measure, links, steps, training_steps), output, is_networked=not loopback)


_OPTIMIZERS_OF_TASKS = " ".join(f"{name}: {', '.join(task.optimizers)}." for name, task in TASKS.items())


@_command("converge", quick={"task": "digits", "hooks": "none,powersgd-r4", "seeds": 1}, hooks=TRAINED_HOOKS)
def bench_converge(
    context: typer.Context,
    hosts: HostsOption = 2,
    rate: Annotated[str, typer.Option(help="Link rate, such as 100mbit or 2.5gbit.")] = "100mbit",
    delay: DelayOption = 0.0,
    task: Annotated[str, typer.Option(help=f"Training task: {' or '.join(TASKS)}.")] = "text",
    optimizers: Annotated[
        str | None,
        typer.Option(
            help=f"Optimizers, comma-separated. {_OPTIMIZERS_OF_TASKS} The first is the default. With several, the "
            "table compares steps."
        ),
    ] = None,
    seeds: Annotated[int, number("Number of seeds. Each hook trains once per seed.")] = 3,
    steps: Annotated[
        int | None,
        number(
            "Train for this many steps, and compare losses instead of times. Trainings whose results are in the output "
            "file are not repeated.",
            least=long_runs.LEAST_STEPS,
        ),
    ] = None,
    hooks: HooksOption = ", ".join(converge.DEFAULT_HOOKS),
    quick: QuickOption = False,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the time to a target loss or accuracy over a slow network: gradwire's hooks and DDP against PyTorch's.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    At 100mbit, the task digits takes a few minutes, and the task text 45 minutes.

    With --steps, measure the losses after trainings of this length instead, on two ranks without a slow network.
    2,000 steps of the task small-text take about two minutes per hook and seed.
    """
    chosen, names = parse_choice(task, TASKS, "--task"), parse_hooks(hooks, TRAINED_HOOKS)
    link = namespaces.LOOPBACK if loopback else parse_rate(rate, "--rate")
    of_task = TASKS[chosen].optimizers
    trained = parse_choices(of_task[0] if optimizers is None else optimizers, of_task, "--optimizers")
    if steps is None:
        measure = partial(converge.measure, chosen, trained, names, link, seeds, hosts, delay)
        _run(context, measure, output, is_networked=not loopback)
        return
    why = f"trains {long_runs.RANKS} ranks on this machine, without a link to limit; leave out {{}}."
    refuse_beside(context, "--steps", "rate", "hosts", "delay", "loopback", why=why)
    kept = _kept(output, "long_runs")
    measure = partial(long_runs.measure, chosen, trained, names, steps, seeds, kept)
    run("gradwire bench converge", measure, long_runs.tables, output, kept=kept)


def _kept(output: Path | None, name: str) -> list[Record]:
    """The results in the output file, if there is one. Refuses a file that has none of this benchmark."""
    if output is None or not output.exists():
        return []
    try:
        kept = load(output)
    except RecordError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--output") from None
    if kept[0].bench != name:
        message = f"{output} has results of {kept[0].bench!r}; choose another file."
        raise typer.BadParameter(message, param_hint="--output")
    return kept


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
        try:
            print_tables(TABLES[first.bench](records))
            for source in unique(f"{r.provenance['command']}\n{machine_line(r.provenance)}.\n" for r in records):
                typer.echo(source)
        except Exception as error:  # each benchmark has cases and settings of its own
            typer.echo(f"gradwire bench report: {path} is damaged, or from another version ({error!r}).", err=True)
            raise typer.Exit(1) from None
        if plots is not None and first.bench in DRAWINGS:
            DRAWINGS[first.bench](records, plots / f"{path.stem}.png")
            typer.echo(f"Plot: {plots / path.stem}.png\n")


def _run(
    context: typer.Context,
    measure: Callable[[], Measured],
    output: Path | None,
    device: torch.device = CPU,
    threads: int = 1,
    *,
    is_networked: bool = False,
) -> None:
    name = str(context.info_name)
    run(f"gradwire bench {name}", measure, TABLES[name], output, device, threads, is_networked=is_networked)
