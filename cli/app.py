"""The ``gradwire`` command: doctor, run, advise and demo. `gradwire.cli.bench` has ``gradwire bench``."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer.core import TyperCommand

from gradwire.bench import demo as demo_bench
from gradwire.bench import namespaces
from gradwire.bench.tables import format_link
from gradwire.cli import doctor as doctor_command
from gradwire.cli import run as run_command
from gradwire.cli.advise import advise_command
from gradwire.cli.bench import bench
from gradwire.cli.bench_runs import measured, report
from gradwire.cli.options import (
    MAX_SEED,
    MAX_STEPS,
    DelayOption,
    HooksOption,
    LoopbackOption,
    listed,
    parse_hooks,
    parse_rate,
    refuse_beside,
    require_packages,
)
from gradwire.planner.hook_registry import COMPARABLE, DEMO_HOOKS
from gradwire.version import __version__

app = typer.Typer(
    help="Gradient compression for PyTorch data-parallel training: check, predict, demo and benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEMO_HOOKS = ", ".join(DEMO_HOOKS)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradwire {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of gradwire and torch, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


@app.command("doctor")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Check this installation: versions, devices, kernels, backends and environment; run a self-test of all hooks.

    Takes a few seconds on a CPU. The exit status is 1 if a check failed.
    """
    raise typer.Exit(doctor_command.main(as_json))


class _Unparsed(TyperCommand):
    """A command that gets its arguments as they are."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.args = args
        return args


@app.command("run", cls=_Unparsed)
def run(context: typer.Context) -> None:
    """Run an unchanged training script under torchrun, with its gradients compressed, and report bytes and times."""
    run_command.launch(context.args)


app.command("advise")(advise_command)
app.add_typer(bench, name="bench")


@app.command(epilog=listed(COMPARABLE))
def demo(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option(help="Folder for the results and the plot.", file_okay=False, writable=True)
    ] = Path("demo"),
    processes: Annotated[int, typer.Option(min=1, max=16, help="Number of processes (ranks) on this machine.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Epochs to train with each hook.")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed for initial weights and data order.")] = 0,
    hooks: HooksOption = _DEMO_HOOKS,
    rate: Annotated[str, typer.Option(help="Link rate, such as 100mbit or 2.5gbit. Needs Linux and root.")] = "100mbit",
    delay: DelayOption = 0.0,
    loopback: LoopbackOption = False,
) -> None:
    """Train a small network with each hook over a slow link; compare loss, accuracy and time.

    The hosts are network namespaces of this machine, joined by rate-limited links. This needs root on Linux; otherwise
    the demo trains over loopback, where sending less saves no time. Takes about 2 minutes.
    """
    require_packages("demo")
    if loopback:
        refuse_beside(context, "--loopback", "rate", "delay")
    names, link = parse_hooks(hooks, COMPARABLE), parse_rate(rate, "--rate")
    asked = format_link(link.name, {"delay_ms": delay})
    obstacle = "--loopback" if loopback else "one sends nothing" if processes == 1 else namespaces.obstacle()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make the folder {output}: {error.strerror}.", param_hint="--output") from None
    if obstacle is None:
        typer.echo(f"Training with {processes} processes over a {asked} link, once with each hook.\n")
    else:
        training = f"Training with {processes} process{'' if processes == 1 else 'es'}"
        typer.echo(f"{training} over loopback ({obstacle}), where sending less saves no time.")
        if processes > 1:
            typer.echo(
                f"As root on Linux, gradwire demo trains over a {asked} link. Most of a step is then\n"
                "communication, so hooks that send less train faster."
            )
        typer.echo()
        link, delay = namespaces.LOOPBACK, 0.0
    threads = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0].strip()  # a number per level of nesting
    records = measured(
        "gradwire demo",
        partial(demo_bench.measure, names, link, processes, epochs, seed, delay),
        demo_bench.demo_device(processes, link),
        int(threads) if threads.isdecimal() else 1,
    )
    from gradwire.bench.plots import draw_demo  # matplotlib takes a second to import

    results, plot = output / "results.jsonl", output / "loss_vs_bytes.png"
    draw_demo(records, plot)
    typer.echo()
    report(records, demo_bench.tables, results)
    if obstacle is None:
        typer.echo(f"{demo_bench.verdict(records)}\n")
    typer.echo(f"Plot:    {plot}\nResults: {results}")
