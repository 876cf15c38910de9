"""``gradwire run`` and ``python -m gradwire.run``: compress the gradients of a training script without changing it.

Every DistributedDataParallel that the script makes gets a hook, and every model of FSDP2, HSDP and `replicate` an
attachment. A hook that the script registers itself wins. At the end, rank 0 reports bytes and times.
"""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gradwire.cli.run_advise import AdviceGiven, advised, fail
from gradwire.cli.run_collectives import compressed_collectives
from gradwire.cli.run_comparison import LEAST_STEPS, STRETCH
from gradwire.cli.run_compression import AUTO, CompressedModel, compressed
from gradwire.cli.run_report import report
from gradwire.collectives.group import WITHOUT_MEMORY
from gradwire.comm.forks import in_this_process
from gradwire.hooks.by_name import NONE, VARIABLE, hook_named, name_from_environment
from gradwire.planner.model_probe import STEPS

COMPARED = 200  # steps of a comparison by default


def _own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--hook",
        type=_hook,
        metavar="NAME",
        help=f"compress with this hook, such as int4, bf16 or powersgd-r16-int8; or {AUTO}: measure {STEPS} steps, and "
        f"take what gradwire advise recommends. By default the hook that {VARIABLE} names",
    )
    what.add_argument(
        "--advise",
        action="store_true",
        help=f"measure the script for {STEPS} steps, print the step time with every hook as gradwire advise does, and "
        "end the script",
    )
    what.add_argument(
        "--collectives",
        choices=WITHOUT_MEMORY,
        metavar="WIRE",
        help="for scripts without DDP and FSDP2: send large gradients of dist.all_reduce and "
        f"dist.reduce_scatter_tensor in this format, one of {', '.join(WITHOUT_MEMORY)}",
    )
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="FILE:LINE",
        help="with --collectives, compress this call, too, although its tensor is not known to be a gradient",
    )
    parser.add_argument("--start", type=_at_least(2), default=2, metavar="STEP", help="first step to compress (2)")
    comparison = parser.add_mutually_exclusive_group()
    comparison.add_argument(
        "--measure",
        type=_at_least(LEAST_STEPS),
        default=COMPARED,
        metavar="STEPS",
        help=f"over STEPS steps, at least {LEAST_STEPS}, alternate {STRETCH} compressed and {STRETCH} plain steps, and "
        f"tell whether the hook makes them faster ({COMPARED})",
    )
    comparison.add_argument(
        "--no-measure", dest="measure", action="store_const", const=0, help="compress every step instead"
    )
    return parser


def _hook(text: str) -> str:
    """The name of a hook, which is checked."""
    if text not in (AUTO, NONE):
        try:
            hook_named(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of steps, at least {least}")
        return int(text)

    return number


def _take_variable(parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Without ``--hook`` and ``--advise``, take the hook of the environment variable, or end the program.

    ``arguments`` are the script's.
    """
    if options.call and not options.collectives:
        parser.error("--call names a line of --collectives; choose a format, as in --collectives int8")
    if options.hook is not None or options.advise or options.collectives:
        return
    try:
        options.hook = name_from_environment()
    except ValueError as error:
        parser.error(str(error))
    if options.hook is not None:
        return
    for name in (each.partition("=")[0] for each in arguments):
        if name in ("--hook", "--advise"):
            parser.error(
                f"{name} stands after the script's name, so it is an option of the script. Options of {parser.prog} "
                f"stand before the script's name: {parser.prog} --hook int4 train.py"
            )
    parser.error(f"name a hook, as in --hook int4 or {VARIABLE}=int4; or choose --advise to compare them")


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m gradwire.run``, in each process that torchrun, or another launcher, has started."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.run",
        usage="%(prog)s (--hook NAME | --collectives WIRE | --advise) [options] script ...",
        description="Train with an unchanged script of DDP, FSDP2 or HSDP, and compress its gradients.",
        allow_abbrev=False,
        parents=[_own_options()],
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    is_named = options.hook is not None
    _take_variable(parser, options, options.arguments)
    if not options.module and not Path(options.script).exists():
        parser.error(f"there is no script {options.script}")
    if options.hook is not None and not is_named and os.environ.get("RANK", "0") == "0":
        print(f"gradwire run: {VARIABLE}={options.hook}", file=sys.stderr, flush=True)
    sys.argv = [options.script, *options.arguments]
    if not options.module and not sys.flags.safe_path:
        sys.path[0] = str(Path(options.script).resolve().parent)  # as `python SCRIPT` does
    if options.advise:
        _run_advised(options)
    elif options.collectives:
        _run_with_collectives(options)
    else:
        _run_compressed(options)


# A child that the script forks, and that ends it too, prints nothing.


def _run_advised(options: argparse.Namespace) -> None:
    process = os.getpid()
    try:
        with advised():
            _run_script(options)
    except SystemExit as end:
        if isinstance(end, AdviceGiven) or end.code not in (None, 0) or os.getpid() != process:
            raise
    if os.getpid() == process:
        fail(f"the script ended before the {STEPS + 1} steps of DistributedDataParallel that --advise takes")


def _run_with_collectives(options: argparse.Namespace) -> None:
    process = os.getpid()
    with compressed_collectives(options.collectives, options.call) as found:
        try:
            _run_script(options)
        finally:
            if os.environ.get("RANK", "0") == "0" and os.getpid() == process:
                print(found.report(), file=sys.stderr, flush=True)


def _run_compressed(options: argparse.Namespace) -> None:
    reports, print_report = options.hook != NONE, in_this_process(_print_report)
    with compressed(options.hook, options.start, options.measure) as made:
        try:
            _run_script(options)
        except SystemExit as end:
            print_report(made, has_ended=reports and end.code in (None, 0))
            raise
        print_report(made, has_ended=reports)


def _print_report(made: Sequence[CompressedModel], has_ended: bool) -> None:
    rank = made[0].rank if made else int(os.environ.get("RANK", "0"))
    if rank == 0 and (made or has_ended):
        for compression in made:
            compression.release()
        print(report(made), file=sys.stderr, flush=True)


def _run_script(options: argparse.Namespace) -> None:
    """Run the script; print its error with its own frames, as Python does without gradwire, and exit."""
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if is_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher interrupts once more
        frames = _frames_of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(128 + signal.SIGINT if is_interrupt else 1)


def _frames_of_script(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames


def options() -> argparse.ArgumentParser:
    """The options of ``gradwire run``: its own, and torchrun's."""
    theirs = torchrun.get_args_parser()
    theirs._optionals.title = "options of torchrun"
    return argparse.ArgumentParser(
        prog="gradwire run",
        usage="gradwire run (--hook NAME | --collectives WIRE | --advise) [options] [options of torchrun] script ...",
        description="torchrun, with compressed gradients for an unchanged script of DDP, FSDP2 or HSDP.",
        allow_abbrev=False,
        add_help=False,
        parents=[_own_options(), theirs],
    )


def launch(arguments: Sequence[str]) -> None:
    """``gradwire run``: start `main` with a script in each process of torchrun."""
    parser = options()
    given = parser.parse_args(arguments)
    own = ["--hook", given.hook] if given.hook is not None else ["--advise"] if given.advise else []
    own += ["--collectives", given.collectives] if given.collectives else []
    own += [part for call in given.call for part in ("--call", call)]
    _take_variable(parser, given, given.training_script_args)
    if given.no_python:
        parser.error("--no-python starts a program that is not a Python script; gradwire run needs a script")
    given.run_path = False  # `main` runs the script in this way
    own += ["--start", str(given.start)]
    own += ["--measure", str(given.measure)] if given.measure else ["--no-measure"]
    own += ["--module"] if given.module else []
    given.training_script_args = [*own, given.training_script, *given.training_script_args]
    given.training_script, given.module = "gradwire.run", True
    try:
        torchrun.run(given)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = f"status {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        sys.exit(f"gradwire run: rank {rank} ended first, with {status}")
    except SignalException as end:
        sys.exit(128 + end.sigval)
