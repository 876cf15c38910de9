"""``python -m tools.validate``: errors of `gradwire advise` and of wire formats, losses with a sharded model, leaks."""

from functools import partial
from typing import Annotated

import typer

from gradwire.bench.models import JOBS
from gradwire.cli.bench_runs import run
from gradwire.cli.options import (
    DelayOption,
    HooksOption,
    LoopbackOption,
    ModelsOption,
    OutputOption,
    RatesOption,
    number,
    parse_choices,
    parse_hooks,
    parse_links,
    refuse_beside,
)
from tools import advice_error, rounding, sharded_losses, soak

PROGRAM = "python -m tools.validate"
app = typer.Typer(help="Validate gradwire's predictions, choices and wire formats.", add_completion=False)


@app.command("rounding")
def validate_rounding(output: OutputOption = None) -> None:
    """Measure the rounding error of the mean gradient, for each wire format and for sums in 16 bits and in fp32.

    Simulates the ranks in one process. Takes four minutes.
    """
    run(f"{PROGRAM} rounding", rounding.measure, rounding.tables, output, program=PROGRAM)


@app.command("sharded")
def validate_sharded(output: OutputOption = None) -> None:
    """Measure losses with a quantized reduce-scatter: gradwire's int4 with each error memory, and published methods.

    Simulates the ranks in one process. Takes half an hour.
    """
    run(f"{PROGRAM} sharded", sharded_losses.measure, sharded_losses.tables, output, program=PROGRAM)


@app.command("advise")
def validate_advise(
    context: typer.Context,
    models: ModelsOption = ", ".join(advice_error.DEFAULT_MODELS),
    rates: RatesOption = ", ".join(advice_error.DEFAULT_RATES),
    rounds: Annotated[int, number("Timed rounds of a few steps, per hook and rate.")] = 1,
    hooks: HooksOption = ", ".join(advice_error.DEFAULT_HOOKS),
    delay: DelayOption = 0.0,
    loopback: LoopbackOption = False,
    output: OutputOption = None,
) -> None:
    """Compare step times predicted by `gradwire advise` with measured ones, over a slow network.

    The hosts are network namespaces of this machine, joined by rate-limited links. Needs root on Linux.
    Takes ten minutes.
    """
    if loopback:
        refuse_beside(context, "--loopback", "rates", "delay")
    names, chosen = parse_hooks(hooks, advice_error.DEFAULT_HOOKS), parse_choices(models, JOBS, "--models")
    measure = partial(advice_error.measure, chosen, parse_links(rates, loopback), names, rounds, delay)
    run(f"{PROGRAM} advise", measure, advice_error.tables, output, is_networked=not loopback, program=PROGRAM)


@app.command("soak")
def soak_command(
    rounds: Annotated[int, number(f"Rounds of {soak.STEPS_PER_READING} steps.")] = 20,
    output: OutputOption = None,
) -> None:
    """Train with pauses, errors, checkpoints, new wrappers and new process groups; show what the processes hold.

    Takes three minutes.
    """
    run(f"{PROGRAM} soak", partial(soak.measure, rounds), soak.tables, output, program=PROGRAM)


if __name__ == "__main__":
    app()
