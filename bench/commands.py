"""The commands of ``gradwire``: parse, launch, report."""

import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

import gradwire
from gradwire.bench import reducer
from gradwire.bench.hooks import HOOKS
from gradwire.bench.launch import LaunchError, launch
from gradwire.bench.report import results_table, save_plot
from gradwire.bench.results import Results, Settings, load_results, save_measurements, save_results

app = typer.Typer(
    help="gradwire: gradient compression for PyTorch data-parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure what gradwire's parts cost, beside PyTorch's own.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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


def _parse_hooks(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise typer.BadParameter(
            f"unknown: {', '.join(map(repr, unknown))}. Choose from {', '.join(HOOKS)}.", param_hint="--hooks"
        )
    return names


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for results.json and the plot.", file_okay=False, writable=True)
    ] = Path("demo"),
    processes: Annotated[int, typer.Option(min=1, max=16, help="Processes to train on, on this machine.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images, for each hook.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the data.")] = 0,
    hooks: Annotated[str, typer.Option(help="Which hooks, in which order, separated by commas.")] = ",".join(HOOKS),
) -> None:
    """Train a small network on real images once with each hook, and compare loss, accuracy, bytes and time."""
    settings = Settings(
        hooks=_parse_hooks(hooks),
        processes=processes,
        epochs=epochs,
        seed=seed,
        command=shlex.join(["gradwire", *sys.argv[1:]]),
    )
    _make_folder(output)
    console = Console()
    console.print(
        f"Training with {', '.join(settings.hooks)} in turns; processes: {processes} ...",
        highlight=False,
    )
    signal.signal(signal.SIGTERM, _terminate)
    try:
        results = _measure(settings)
        save_results(results, output / "results.json")
        save_plot(results, output / "loss_vs_bytes.png")
    except KeyboardInterrupt:
        typer.echo("\nInterrupted.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except LaunchError as error:
        typer.echo(f"{error.log}\ngradwire demo: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        console.show_cursor()  # a worker that was stopped has left it hidden
    console.print()
    console.print(results_table(results))
    console.print(
        f"Plot:    {output / 'loss_vs_bytes.png'}\nNumbers: {output / 'results.json'}", highlight=False, soft_wrap=True
    )


@bench.command("reducer")
def bench_reducer(
    steps: Annotated[int, typer.Option(min=10, help="Timed backwards of each reducer.")] = 60,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.", dir_okay=False)] = None,
) -> None:
    """Time a backward with PyTorch's reducer, with gradwire's, and with none, taking turns."""
    measured = reducer.measure(steps)
    Console().print(*reducer.reducer_tables(measured))
    if output is not None:
        save_measurements(measured, shlex.join(["gradwire", *sys.argv[1:]]), output)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make the folder {path}: {error.strerror}.", param_hint="--output") from None


def _measure(settings: Settings) -> Results:
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        path = Path(folder) / "results.json"
        launch("gradwire.bench.demo", [settings.to_json(), str(path)], settings.processes)
        return load_results(path)


def _terminate(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
