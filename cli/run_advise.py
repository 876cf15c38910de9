"""``gradwire run --advise``: the advice of `gradwire advise` for a running script."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.hooks._bucket import GradBucket
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import JobError
from gradwire.planner.probe import Measurement, measure_exchange, on_all_ranks, overlap_with_backward
from gradwire.planner.recommend import advise
from gradwire.planner.script_probe import ScriptProbe
from gradwire.reducer import DistributedDataParallel as OurDDP


def is_left_alone(ddp: TorchDDP) -> bool:
    """Whether the model has a hook from the start, chooses its own, or cannot have one."""
    return isinstance(ddp, OurDDP) or bool(ddp._comm_hooks) or ddp._use_python_reducer


@contextmanager
def advised() -> Iterator[None]:
    """Meanwhile, measure the first model that is wrapped in PyTorch's DistributedDataParallel.

    After its steps, print what `gradwire advise` prints, and end the script on every rank.
    """
    probes: list[ScriptProbe] = []
    native = TorchDDP.__init__

    @wraps(native)
    def __init__(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if not probes and not is_left_alone(self) and self.process_group.size() == dist.get_world_size():
            probes.append(ScriptProbe(self, _advise_script, averages=False))
            TorchDDP.register_comm_hook(self, probes[0], reduce)
            self._comm_hooks.clear()  # a hook of the script is ignored
            self.register_comm_hook = self._register_builtin_comm_hook = _ignore  # type: ignore

    with mock.patch.object(TorchDDP, "__init__", __init__):
        yield


def _ignore(*_: object, **__: object) -> None:
    pass


def reduce(owner: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook of a model that ``owner`` measures."""
    future: Future[torch.Tensor] = owner.reduce(bucket)
    return future


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
    names = [name for name in HOOKS if name != "noop"]
    return measure_exchange(model, buckets, names, probe.device)


def _advise_script(probe: ScriptProbe) -> NoReturn:
    from gradwire.cli.advise import print_advice  # needs the extra `cli`

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
