"""Options that several commands of ``gradwire`` share, and the parsing of their values."""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gradwire.bench.namespaces import LOOPBACK, MAX_LIMITED_MBIT, MAX_MODELED_MBIT, Rate
from gradwire.planner.hook_registry import HookEntry

# Upper bounds of options. Larger values would take weeks or exceed any machine.
MAX_STEPS = 1_000_000
MAX_SEED = 2**32 - 1
MAX_THREADS = 1024
MAX_RANKS = 65_536
MAX_DELAY_MS = 10_000
# The extra `bench`, by import names.
BENCH_PACKAGES = ("matplotlib", "sklearn", *(("pyroute2",) if sys.platform == "linux" else ()))


def number(help: str, least: int = 1, most: int = MAX_STEPS) -> Any:
    """An option that takes a whole number."""
    return typer.Option(min=least, max=most, help=help)


def missing_packages() -> list[str]:
    """The packages of the demo and the benchmarks that are not installed."""
    return [name for name in BENCH_PACKAGES if importlib.util.find_spec(name) is None]


def require_packages(command: str) -> None:
    """End the program if packages of the demo and the benchmarks are missing."""
    if missing := missing_packages():
        remedy = 'In a checkout of gradwire, run: pip install ".[bench]"'
        sys.exit(f"gradwire {command}: missing {', '.join(missing)}. {remedy}")


ThreadsOption = Annotated[int, number("CPU threads of each process.", most=MAX_THREADS)]
ModelsOption = Annotated[str, typer.Option(help="Models, comma-separated.")]
RatesOption = Annotated[str, typer.Option(help="Link rates such as 2.5gbit, comma-separated.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Run for a minute or less; see below.")]
HooksOption = Annotated[str, typer.Option("--hooks", help="Hooks, comma-separated.")]
RanksOption = Annotated[
    str | None,
    typer.Option("--ranks", help="World sizes, comma-separated. Default: 1,2, or 1 on a machine with one GPU."),
]
LoopbackOption = Annotated[
    bool, typer.Option("--loopback", help="Use loopback instead of a rate-limited link. Needs no root.")
]


def finite(number: float | None) -> float | None:
    """The callback of options that are floats: in older versions of typer, NaN is in every range."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number.")
    return number


def real_number(flag: str, help: str, most: int) -> Any:
    """An option that takes a number from 0 to ``most``."""
    return typer.Option(flag, min=0, max=most, help=help, callback=finite)


DelayOption = Annotated[float, real_number("--delay", "Delay of the link in ms, each way.", MAX_DELAY_MS)]
HostsOption = Annotated[int, number("Number of hosts, one rank each.", least=2, most=16)]


def in_a_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of options that are output files: refuse those that could not be written after the measurement."""
    if path is None:
        return None
    try:
        is_there = path.parent.is_dir()
    except OSError:  # its name is too long
        is_there = False
    complaint = None
    if not is_there:
        complaint = f"there is no folder {path.parent}; make it first."
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        complaint = f"no permission to write to {path.parent}; choose another folder."
    if complaint is not None:
        raise typer.BadParameter(complaint, param_hint=parameter.opts[0])
    return path


def output_file(flag: str, help: str) -> Any:
    """An option that names a file to write."""
    return typer.Option(flag, help=help, dir_okay=False, callback=in_a_folder)


OutputOption = Annotated[Path | None, output_file("--output", "Write the results to this file as JSON lines.")]


def listed(hooks: dict[str, HookEntry]) -> str:
    """A sentence with the names and descriptions of hooks, for the help."""
    return f"Available hooks: {', '.join(f'{name} ({entry.description})' for name, entry in hooks.items())}."


def parse_list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def parse_choices(text: str, choices: Collection[str], option: str) -> tuple[str, ...]:
    names = parse_list(text)
    unknown = [name for name in names if name not in choices]
    if unknown:
        raise typer.BadParameter(
            f"unknown: {', '.join(map(repr, unknown))}. Choose from {', '.join(choices)}.", param_hint=option
        )
    return names


def parse_choice(text: str, choices: Collection[str], option: str) -> str:
    names = parse_choices(text, choices, option)
    if len(names) > 1:
        raise typer.BadParameter(
            f"expected one, got {len(names)}: {text!r}. Run the command once for each.", param_hint=option
        )
    return names[0]


def parse_hooks(text: str, choices: Collection[str]) -> tuple[str, ...]:
    return parse_choices(text, choices, "--hooks")


def parse_ranks(text: str | None, device: torch.device) -> list[int]:
    """Parse world sizes: by default 1 and 2; on GPUs at most one rank per GPU."""
    most = torch.cuda.device_count() if device.type == "cuda" else 16
    choices = [str(count) for count in range(1, most + 1)]
    asked = text if text is not None else ",".join(choices[:2])
    return [int(count) for count in parse_choices(asked, choices, "--ranks")]


def parse_sizes(text: str) -> list[int]:
    sizes = parse_list(text)
    wrong = [size for size in sizes if re.fullmatch("[1-9][0-9]{0,5}", size) is None]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not a whole number of MiB from 1 to 999999.", param_hint="--sizes")
    return [int(size) for size in sizes]


def parse_rate(text: str, option: str, *, is_modeled: bool = False) -> Rate:
    """Parse the rate of a link: of an interface, or, if ``is_modeled``, of a link that is only computed."""
    try:
        return Rate.parse(text, MAX_MODELED_MBIT if is_modeled else MAX_LIMITED_MBIT)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint=option) from None


def parse_links(rates: str, loopback: bool) -> list[Rate]:
    """The links to measure; wrong rates are refused with ``--loopback`` too."""
    links = [parse_rate(name, "--rates") for name in parse_list(rates)]
    return [LOOPBACK] if loopback else links


def refuse_beside(
    context: typer.Context, option: str, *others: str, why: str = "already sets {}; use only one of the two."
) -> None:
    """Refuse ``others`` on the command line, because ``option`` sets their values or for another reason."""
    sources = {name: context.get_parameter_source(name) for name in others}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(why.format(f"--{given[0].replace('_', '-')}"), param_hint=option)
