"""``gradwire run --advise``: the advice of `gradwire advise` for a running script."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.planner.hook_registry import COMPARABLE
from gradwire.planner.jobs import JobError
from gradwire.planner.measurement import Measurement, measure_exchange, on_all_ranks, overlap_with_backward
from gradwire.planner.model_probe import ScriptProbe
from gradwire.planner.recommend import advise
from gradwire.reducer import DistributedDataParallel as OurDDP


@contextmanager
def on_ddp_init(callback: Callable[[TorchDDP], object]) -> Iterator[None]:
    """While active, call ``callback(ddp)`` for each model that is wrapped in PyTorch's DistributedDataParallel.

    Not for one with a hook from the start (``mixed_precision``), for compiled autograd's Python reducer, which cannot
    have one, and for gradwire's own class. The class stays the same, also for modules that have imported it.
    """
    native = TorchDDP.__init__

    @wraps(native)
    def __init__(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if not (isinstance(self, OurDDP) or self._comm_hooks or self._use_python_reducer):
            callback(self)

    with mock.patch.object(TorchDDP, "__init__", __init__):
        yield


@contextmanager
def advised() -> Iterator[None]:
    """Meanwhile, measure the first model that is wrapped in PyTorch's DistributedDataParallel.

    After its steps, print what `gradwire advise` prints, and end the script on every rank.
    """
    probes: list[ScriptProbe] = []

    def measure_first(ddp: TorchDDP) -> None:
        if not probes and ddp.process_group.size() == dist.get_world_size():
            probes.append(ScriptProbe(ddp, _advise_script, averages=False))
            ddp.register_comm_hook(probes[0], ScriptProbe.reduce)
            ddp._comm_hooks.clear()
            # A hook of the script is ignored.
            ddp.register_comm_hook = ddp._register_builtin_comm_hook = lambda *_, **__: None  # type: ignore

    with on_ddp_init(measure_first):
        yield


class AdviceGiven(SystemExit):
    """Ends the script after the measurement."""


def measured_script(probe: ScriptProbe) -> Measurement:
    """Measure every hook for the model of a script. A collective call.

    Raises:
        JobError: there is one rank, or the model cannot be measured.
    """
    if dist.get_world_size() == 1:
        raise JobError("The world size is 1, so there is nothing to exchange. Start more ranks.")
    model, buckets = on_all_ranks(partial(probe.model, overlap_with_backward(probe.device)))
    return measure_exchange(model, buckets, tuple(COMPARABLE), probe.device)


def _advise_script(probe: ScriptProbe) -> NoReturn:
    from gradwire.cli.advice_report import print_advice  # takes a second to import

    began = time.monotonic()
    try:
        measured = measured_script(probe)
    except JobError as error:
        fail(str(error))
    if dist.get_rank() == 0:
        print_advice(measured, advise(measured), time.monotonic() - began)
    raise AdviceGiven(0)


def fail(message: str) -> NoReturn:
    """End this rank; rank 0 prints the message."""
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
        print(f"gradwire run: {message}", file=sys.stderr, flush=True)
    sys.exit(1)
