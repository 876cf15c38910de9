"""The commands of ``gradwire``: parse, launch, report."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

import gradwire
from gradwire.bench import converge, hook_cost, kernel_cost, namespaces, network, reducer
from gradwire.bench.compare import ResultsError, changes_table, compare, load_ratios, missing
from gradwire.bench.hooks import DEMO_HOOKS, HOOKS
from gradwire.bench.launch import LaunchError, measured_by
from gradwire.bench.measuring import Neighbours, backend_of, bench_device
from gradwire.bench.models import MODELS
from gradwire.bench.namespaces import NamespaceError
from gradwire.bench.options import (
    HooksOption,
    OutputOption,
    RanksOption,
    parse_choice,
    parse_choices,
    parse_hooks,
    parse_list,
    parse_ranks,
    parse_rate,
    parse_sizes,
    refuse_beside,
)
from gradwire.bench.pages import PageError, write_pages
from gradwire.bench.report import results_table, save_plot
from gradwire.bench.results import Results, Settings, provenance, save_measurements, save_results
from gradwire.bench.shapes import SHAPES
from gradwire.bench.tasks import TASKS

app = typer.Typer(
    help="gradwire: gradient compression for PyTorch data-parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure what gradwire's parts cost, beside PyTorch's own.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_DEMO_HOOKS = ",".join(DEMO_HOOKS)
_COST_HOOKS = ",".join(hook_cost.DEFAULT_HOOKS)
_NETWORK_HOOKS = ",".join(network.DEFAULT_HOOKS)
_RACED_HOOKS = ",".join(converge.DEFAULT_HOOKS)
_SIZES = ",".join(map(str, kernel_cost.DEFAULT_SIZES))
_NETWORK_RATES = ",".join(network.DEFAULT_RATES)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradwire {gradwire.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for results.json and the plot.", file_okay=False, writable=True)
    ] = Path("demo"),
    processes: Annotated[int, typer.Option(min=1, max=16, help="Processes to train on, on this machine.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images, for each hook.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the data.")] = 0,
    hooks: HooksOption = _DEMO_HOOKS,
) -> None:
    """Train a small network on real images once with each hook, and compare loss, accuracy, bytes and time."""
    settings = Settings(
        hooks=parse_hooks(hooks, [name for name in HOOKS if name != "noop"]),  # with which ranks drift apart
        processes=processes,
        epochs=epochs,
        seed=seed,
        command=_command_line(),
    )
    _make_folder(output)
    console = Console()
    console.print(
        f"Training with {', '.join(settings.hooks)} in turns; processes: {processes} ...",
        highlight=False,
    )
    with _stoppable("gradwire demo", console):
        results = Results.of(measured_by("gradwire.bench.demo", asdict(settings), processes))
        save_results(results, output / "results.json")
        save_plot(results, output / "loss_vs_bytes.png")
    console.print()
    console.print(results_table(results))
    console.print(
        f"Plot:    {output / 'loss_vs_bytes.png'}\nNumbers: {output / 'results.json'}", highlight=False, soft_wrap=True
    )


@bench.command("kernels")
def bench_kernels(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Whose parameters, separated by commas.")] = ",".join(SHAPES),
    sizes: Annotated[str, typer.Option(help="MiB at which a bucket is full, separated by commas.")] = _SIZES,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each contender over the buckets.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="For the arithmetic of the CPU.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="5 rounds of resnet50 and gpt2-124m, at 25 MiB.")] = False,
    output: OutputOption = None,
) -> None:
    """Time every kernel on real parameter lists, beside PyTorch's own code and the bandwidth of a copy.

    On a GPU the Triton kernels, on a CPU the CPU paths, with which it takes a quarter of an hour.
    """
    if quick:
        refuse_beside(context, "--quick", "models", "sizes", "rounds")
    names = ("resnet50", "gpt2-124m") if quick else parse_choices(models, SHAPES, "--models")
    full = [25] if quick else parse_sizes(sizes)
    device, facts, neighbours = _begin(threads)
    torch.set_num_threads(threads)
    with _stoppable("gradwire bench kernels", Console()):
        measured = kernel_cost.measure(names, full, 5 if quick else rounds, device)
    facts |= {"cpus_busy_with_others": neighbours.busy_cpus()}
    Console().print(*kernel_cost.kernel_tables(measured, facts))
    _save(measured, facts, output)


@bench.command("reducer")
def bench_reducer(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=2, help="Timed backwards of each reducer on each model.")] = 40,
    models: Annotated[str, typer.Option(help="Which models, separated by commas.")] = ",".join(MODELS),
    ranks: RanksOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="20 steps of the transformer on one rank.")] = False,
    output: OutputOption = None,
) -> None:
    """Time a backward with PyTorch's reducer, with gradwire's, and with none, taking turns; weigh their memory."""
    if quick:
        refuse_beside(context, "--quick", "steps", "models", "ranks")
    names = ("transformer",) if quick else parse_choices(models, MODELS, "--models")
    device, facts, neighbours = _begin(threads=1)
    counts = [1] if quick else parse_ranks(ranks, device)
    console = Console()
    with _stoppable("gradwire bench reducer", console):
        measured = reducer.measure(names, counts, 20 if quick else steps)
    facts |= {"cpus_busy_with_others": neighbours.busy_cpus()}
    console.print(*reducer.reducer_tables(measured, facts))
    _save(measured, facts, output)


@bench.command("hooks")
def bench_hooks(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each hook on each DDP.")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="For the arithmetic of the CPU.")] = 1,
    hooks: HooksOption = _COST_HOOKS,
    ranks: RanksOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"10 steps of {', '.join(hook_cost.QUICK_HOOKS)} on one rank.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Time what hooks cost by themselves, on both DDPs and beside PyTorch's hooks; count their host time and memory."""
    if quick:
        refuse_beside(context, "--quick", "steps", "hooks", "ranks")
    names = hook_cost.QUICK_HOOKS if quick else parse_hooks(hooks, HOOKS)
    device, facts, neighbours = _begin(threads)
    counts = [1] if quick else parse_ranks(ranks, device)
    console = Console()
    with _stoppable("gradwire bench hooks", console):
        measured = hook_cost.measure(names, counts, 10 if quick else steps, threads)
    facts |= {"cpus_busy_with_others": neighbours.busy_cpus()}
    console.print(*hook_cost.cost_tables(measured, facts))
    _save(measured, facts, output)


@bench.command("network")
def bench_network(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(min=2, max=16, help="Hosts, each with one rank.")] = 2,
    rates: Annotated[
        str | None, typer.Option(help=f"Rates of the hosts' links, separated by commas; by default {_NETWORK_RATES}.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each hook at each rate.")] = 15,
    hooks: HooksOption = _NETWORK_HOOKS,
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated",
            help=f"A model of a link, on one GPU that stands for all hosts; at {', '.join(network.EMULATED_RATES)}.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"5 steps of {', '.join(network.QUICK_HOOKS)} at 1gbit.")
    ] = False,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="No network: ranks share this machine's loopback. Needs no root.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Time steps over a slow network between hosts that are network namespaces of this machine. Needs root, iproute2.

    gradwire's hooks on its own DDP, PyTorch's on PyTorch's. A few minutes, most of them at 100mbit.
    """
    if quick:
        refuse_beside(context, "--quick", "steps", "hooks")
    if loopback:
        refuse_beside(context, "--loopback", "rates", "emulated")
    names = network.QUICK_HOOKS if quick else parse_hooks(hooks, HOOKS)
    if emulated and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; without --emulated the link is a real one.", param_hint="--emulated")
    defaults = network.EMULATED_RATES if emulated else network.QUICK_RATES if quick else network.DEFAULT_RATES
    links = [parse_rate(name, "--rates") for name in parse_list(rates if rates is not None else ",".join(defaults))]
    links = [network.LOOPBACK] if loopback else links
    measured, facts = _over_network(
        "network",
        loopback or emulated,
        lambda: network.measure(names, links, 5 if quick else steps, hosts, emulated),
        bench_device() if emulated else torch.device("cpu"),
    )
    Console().print(*network.step_tables(measured, facts))
    _save(measured, facts, output)


@bench.command("converge")
def bench_converge(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(min=2, max=16, help="Hosts, each with one rank.")] = 2,
    rate: Annotated[str, typer.Option(help="Of the hosts' links.")] = "100mbit",
    task: Annotated[str, typer.Option(help=f"What is trained: {' or '.join(TASKS)}.")] = "text",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each hook.")] = 3,
    hooks: HooksOption = _RACED_HOOKS,
    quick: Annotated[bool, typer.Option("--quick", help="One seed of none and powersgd-r4, of digits.")] = False,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="No network: ranks share this machine's loopback. Needs no root.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Train until a target over a slow network, with PyTorch's hooks and gradwire's. Needs root, iproute2.

    At 100mbit digits takes a few minutes, text three quarters of an hour.
    """
    if quick:
        refuse_beside(context, "--quick", "task", "seeds", "hooks")
    if loopback:
        refuse_beside(context, "--loopback", "rate")
    chosen = parse_choice("digits" if quick else task, TASKS, "--task")
    names = ("none", "powersgd-r4") if quick else parse_choices(hooks, converge.RACED, "--hooks")
    link = network.LOOPBACK if loopback else parse_rate(rate, "--rate")
    measured, facts = _over_network(
        "converge",
        loopback,
        lambda: converge.measure(chosen, names, link, 1 if quick else seeds, hosts),
        torch.device("cpu"),
    )
    Console().print(converge.race_table(measured, facts))
    _save(measured, facts, output)


@bench.command("compare")
def bench_compare(
    before: Annotated[list[Path], typer.Option("--before", help="Results of one state; again for each repeated run.")],
    after: Annotated[list[Path], typer.Option("--after", help="Results of the other; again for each repeated run.")],
) -> None:
    """Say what got slower between two states, and fail if anything did, beyond the noise of repeated runs.

    It also fails if anything is missing: a target that is not reached any more, say.
    """
    try:
        states = [[load_ratios(path) for path in paths] for paths in (before, after)]
    except ResultsError as error:
        typer.echo(f"gradwire bench compare: {error}.", err=True)
        raise typer.Exit(1) from None
    changes, lost = compare(*states), missing(*states)
    if not changes:
        typer.echo("gradwire bench compare: the files have no measurement in common.", err=True)
        raise typer.Exit(1)
    Console().print(changes_table(changes))
    slower = [change for change in changes if change.verdict == "slower"]
    typer.echo(f"{len(slower)} of {len(changes)} got slower." + "".join(f"\nMissing after: {what}" for what in lost))
    raise typer.Exit(1 if slower or lost else 0)


@bench.command("report")
def bench_report(
    root: Annotated[
        Path, typer.Argument(help="A checkout: its bench/results are read, its README.md and docs/ written.")
    ] = Path(),
) -> None:
    """Make the tables and plots of README and docs from the results in bench/results."""
    try:
        for path in write_pages(root):
            typer.echo(path)
    except (PageError, OSError) as error:
        typer.echo(f"gradwire bench report: {error}", err=True)
        raise typer.Exit(1) from None


def _over_network(
    command: str, needs_none: bool, measure: Callable[[], dict[str, Any]], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``measure`` returns, with its provenance; refuses where namespaces are needed and cannot be made."""
    obstacle = None if needs_none else namespaces.obstacle()
    if obstacle is not None:
        _refuse_network(command, obstacle)
    facts, neighbours = _facts(device, threads=1), Neighbours()
    with _stoppable(f"gradwire bench {command}", Console()):
        try:
            measured = measure()
        except NamespaceError as error:
            _refuse_network(command, str(error))
    return measured, facts | {"cpus_busy_with_others": neighbours.busy_cpus()}


def _refuse_network(command: str, reason: str) -> NoReturn:
    typer.echo(
        f"gradwire bench {command}: {reason}. It needs Linux, root and iproute2 (ip, tc); with --loopback it needs "
        "none of them, and measures hooks where the link is memory.",
        err=True,
    )
    raise typer.Exit(1)


def _begin(threads: int) -> tuple[torch.device, dict[str, Any], Neighbours]:
    """Where to measure, and with what; the neighbours are watched from now on."""
    device = bench_device()
    return device, _facts(device, threads), Neighbours()


def _facts(device: torch.device, threads: int) -> dict[str, Any]:
    return provenance(device, backend_of(device), threads) | {"command": _command_line()}


def _command_line() -> str:
    return shlex.join(["gradwire", *sys.argv[1:]])


def _save(measured: dict[str, Any], facts: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        save_measurements(measured, facts, path)


@contextmanager
def _stoppable(command: str, console: Console) -> Iterator[None]:
    """Ends the command in good order if it is interrupted or terminated, or if a worker fails."""
    for end in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        signal.signal(end, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\nInterrupted.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except LaunchError as error:
        typer.echo(f"{error.log}\n{command}: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        console.show_cursor()  # a worker that was stopped has left it hidden


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make the folder {path}: {error.strerror}.", param_hint="--output") from None


def _terminate(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
