"""``gradwire run`` and ``python -m gradwire.run``: compress the gradients of a training script without changing it.

Every DistributedDataParallel that the script makes gets a hook, and every model of FSDP2, HSDP and `replicate` an
attachment. A hook that the script registers itself wins. At the end, rank 0 reports bytes and times. Needs torch only.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed.run as torchrun

from gradwire.cli import missing_packages
from gradwire.cli.run_advise import AdviceGiven, advised, fail
from gradwire.cli.run_compression import CHOICES, STRETCH, compressed
from gradwire.cli.run_report import MIN_PAIRS, report
from gradwire.planner.model_probe import STEPS


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gradwire")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--hook", choices=CHOICES, metavar="HOOK", help=f"one of {', '.join(CHOICES)}")
    what.add_argument(
        "--advise",
        action="store_true",
        help=f"measure the script for {STEPS} steps, print the step time with every hook as gradwire advise does, and "
        "end the script",
    )
    group.add_argument("--start", type=_at_least(2), default=2, metavar="STEP", help="first step to compress (2)")
    group.add_argument(
        "--measure",
        type=_at_least(2 * STRETCH * MIN_PAIRS),
        default=0,
        metavar="STEPS",
        help=f"over STEPS steps, at least {2 * STRETCH * MIN_PAIRS}, alternate {STRETCH} compressed and {STRETCH} "
        "plain steps, and report the speed-up",
    )


def _check_choice(parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """End the program unless there is ``--hook`` or ``--advise`` before the script; ``arguments`` are the script's."""
    if options.hook is not None or options.advise:
        return
    for name in (each.partition("=")[0] for each in arguments):
        if name in ("--hook", "--advise"):
            parser.error(
                f"{name} stands after the script's name, so it is an option of the script. Options of {parser.prog} "
                f"stand before the script's name: {parser.prog} --hook int4 train.py"
            )
    parser.error("one of the arguments --hook --advise is required")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of steps, at least {least}")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m gradwire.run``, in each process that torchrun, or another launcher, has started."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.run",
        usage="%(prog)s (--hook HOOK | --advise) [options] script ...",
        description="Train with an unchanged script of DDP, FSDP2 or HSDP, and compress its gradients.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    _check_choice(parser, options, options.arguments)
    if options.advise and options.measure:
        parser.error("--measure compares a hook with plain steps; --advise takes no hook")
    if options.advise and (missing := missing_packages("cli")):
        parser.error(f'--advise needs {", ".join(missing)}. In a checkout of gradwire, run: pip install ".[cli]"')
    if not options.module and not Path(options.script).exists():
        parser.error(f"there is no script {options.script}")
    sys.argv = [options.script, *options.arguments]
    if not options.module and not sys.flags.safe_path:
        sys.path[0] = str(Path(options.script).resolve().parent)  # as `python SCRIPT` does
    if options.advise:
        try:
            with advised():
                _run_script(options)
        except SystemExit as end:
            if isinstance(end, AdviceGiven) or end.code not in (None, 0):
                raise
        fail(f"the script ended before the {STEPS + 1} steps of DistributedDataParallel that --advise takes")
    with compressed(options.hook, options.start, options.measure) as made:
        try:
            _run_script(options)
        finally:
            error = sys.exc_info()[1]
            has_ended = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            rank = made[0].rank if made else int(os.environ.get("RANK", "0"))
            if rank == 0 and (made or has_ended):
                for compression in made:
                    compression.release()
                print(report(made), file=sys.stderr, flush=True)


def _run_script(options: argparse.Namespace) -> None:
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")


def options() -> argparse.ArgumentParser:
    """The options of ``gradwire run``: torchrun's, and those of `main`."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.allow_abbrev = "gradwire run", False
    parser.description = "torchrun, with compressed gradients for an unchanged script of DDP, FSDP2 or HSDP."
    parser.usage = "gradwire run [options of torchrun] (--hook HOOK | --advise) [options] script ..."
    _add_options(parser)
    return parser


def launch(arguments: Sequence[str]) -> None:
    """``gradwire run``: start `main` with a script in each process of torchrun."""
    parser = options()
    given = parser.parse_args(arguments)
    _check_choice(parser, given, given.training_script_args)
    if given.no_python:
        parser.error("--no-python starts a program that is not a Python script; gradwire run needs a script")
    given.run_path = False  # `main` runs the script in this way
    own = ["--advise"] if given.advise else ["--hook", given.hook]
    own += ["--start", str(given.start)]
    own += ["--measure", str(given.measure)] if given.measure else []
    own += ["--module"] if given.module else []
    given.training_script_args = [*own, given.training_script, *given.training_script_args]
    given.training_script, given.module = "gradwire.run", True
    torchrun.run(given)
