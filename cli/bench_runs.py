"""Runs of benchmark commands: provenance, clean interruption, printed tables and the output file."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import typer
from rich.console import Console

from gradwire.bench import namespaces
from gradwire.bench.launch import LaunchError
from gradwire.bench.namespaces import NamespaceError
from gradwire.bench.record import Measured, Record, provenance, save
from gradwire.bench.tables import Table, print_tables
from gradwire.bench.timing import BackgroundLoad, backend_of

CPU = torch.device("cpu")


def measured(
    command: str, measure: Callable[[], Measured], device: torch.device, threads: int = 1, program: str = "gradwire"
) -> list[Record]:
    """Records of a bench with their provenance; exits cleanly if it is interrupted or fails."""
    ran = " ".join([program, *map(shlex.quote, sys.argv[1:])])
    facts = provenance(device, backend_of(device), threads) | {"command": ran}
    load = BackgroundLoad()
    with _stoppable(command):
        outcome = measure()
    return outcome.with_provenance(facts | {"background_cpu_load": load.busy_cpus()})


def run(
    command: str,
    measure: Callable[[], Measured],
    tables: Callable[[Sequence[Record]], list[Table]],
    output: Path | None,
    device: torch.device = CPU,
    threads: int = 1,
    *,
    is_networked: bool = False,
    kept: Sequence[Record] = (),
    program: str = "gradwire",
) -> None:
    """Measure, print the tables, and save the results. Exits with the reason if a network is needed and impossible.

    The output and the tables begin with ``kept``, results of earlier runs.
    """

    def measure_or_refuse() -> Measured:
        if is_networked and (reason := namespaces.obstacle()) is not None:
            raise NamespaceError(reason)
        return measure()

    records = measured(command, measure_or_refuse, device, threads, program)
    report([*kept, *records], tables, output)


def report(records: Sequence[Record], tables: Callable[[Sequence[Record]], list[Table]], output: Path | None) -> None:
    print_tables(tables(records))
    if output is not None:
        save(records, output)


@contextmanager
def _stoppable(command: str) -> Iterator[None]:
    """End the command cleanly if it is interrupted or terminated, if a worker fails, or without a network."""
    ends = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    handlers = {end: signal.signal(end, _terminate) for end in ends}
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\nInterrupted.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except LaunchError as error:
        typer.echo(f"{error.log}\n{command}: {error}", err=True)
        raise typer.Exit(1) from None
    except NamespaceError as error:
        typer.echo(
            f"{command}: {error}. The command needs Linux, root and pyroute2; with --loopback it needs none of them, "
            "and the link is memory.",
            err=True,
        )
        raise typer.Exit(1) from None
    finally:
        for end, handler in handlers.items():
            signal.signal(end, handler)
        Console().show_cursor()  # a stopped worker may have hidden it


def _terminate(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
