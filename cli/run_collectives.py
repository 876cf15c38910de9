"""``gradwire run --collectives int8``: the gradient collectives of a script that has no DDP, compressed."""

import gc
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from gradwire import collectives
from gradwire.bench.record import format_bytes
from gradwire.collectives.functions import SUM, is_mean_or_sum
from gradwire.collectives.group import MIN_NUMEL


class Place:
    """The calls of one collective in one line of the script.

    Attributes:
        why_passed: why they are passed on to PyTorch; None if they are compressed.
    """

    def __init__(self, where: str, name: str) -> None:
        self.where, self.name = where, name
        self.n_calls = self.nbytes = 0
        self.why_passed: str | None = None


class ScriptCollectives:
    """Compresses ``dist.all_reduce`` and ``dist.reduce_scatter_tensor`` of gradients on the default group.

    A tensor is known to be a gradient if it shares memory with the ``grad`` of a parameter. Others are passed on,
    unless ``calls`` names the line.

    Args:
        wire: a wire format without memory.
        calls: lines of calls to compress in any case, as ``FILE:LINE``.
    """

    def __init__(self, wire: str, calls: Collection[str]) -> None:
        self.wire, self.calls = wire, calls
        self.places: dict[tuple[str, str], Place] = {}

    def all_reduce(self, native: Callable[..., Any], where: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``dist.all_reduce(tensor, op, group, async_op)``."""
        op, group, async_op = _options(args, kwargs)
        if self._is_compressed("all_reduce", where, tensor, op, group):
            return collectives.all_reduce(tensor, op, None, async_op, wire=self.wire)
        return native(tensor, *args, **kwargs)

    def reduce_scatter_tensor(
        self, native: Callable[..., Any], where: str, output: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """``dist.reduce_scatter_tensor(output, input, op, group, async_op)``."""
        op, group, async_op = _options(args, kwargs)
        if self._is_compressed("reduce_scatter_tensor", where, input, op, group):
            return collectives.reduce_scatter_tensor(output, input, op, None, async_op, wire=self.wire)
        return native(output, input, *args, **kwargs)

    def _is_compressed(self, name: str, where: str, tensor: Tensor, op: Any, group: Any) -> bool:
        if tensor.numel() < MIN_NUMEL or not tensor.is_floating_point() or not is_mean_or_sum(op):
            return False
        if group is not None and group is not dist.group.WORLD:
            return False
        if (where, name) not in self.places:
            self.places[where, name] = Place(where, name)
            if not (_is_named(where, self.calls) or _is_gradient(tensor)):
                self.places[
                    where, name
                ].why_passed = f"it is not the grad of a parameter; --call {Path(where).name} compresses it"
        place = self.places[where, name]
        place.n_calls += 1
        place.nbytes += tensor.nbytes
        return place.why_passed is None

    def report(self) -> str:
        """The text that rank 0 prints at the end."""
        lines = [f"gradwire run: collectives of large tensors in {self.wire}"]
        for place in self.places.values():
            what = "compressed" if place.why_passed is None else f"passed on: {place.why_passed}"
            size = format_bytes(place.nbytes / place.n_calls)
            lines.append(f"  {place.where}  {place.name}, {place.n_calls:,} calls of {size}: {what}")
        if not self.places:
            lines.append(
                f"  none: the script has called neither all_reduce nor reduce_scatter_tensor of torch.distributed with "
                f"{MIN_NUMEL:,} floating-point elements or more on the default group. For DDP and FSDP2, use --hook"
            )
        return "\n".join(lines)


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Operation, group and ``async_op`` of a call."""
    given = dict(zip(("op", "group", "async_op"), args, strict=False)) | kwargs
    return given.get("op", SUM), given.get("group"), given.get("async_op", False)


def _is_named(where: str, calls: Collection[str]) -> bool:
    """Whether one of ``calls`` is this line, with or without its folders."""
    return any(where == call or where.endswith(f"/{call}") for call in calls)


def _is_gradient(tensor: Tensor) -> bool:
    """Whether a tensor shares memory with the gradient of a parameter."""
    # The type first: isinstance asks the object, which may be a proxy whose object is gone.
    parameters = [
        each for each in gc.get_objects() if issubclass(type(each), Tensor) and isinstance(each, nn.Parameter)
    ]
    gradients = [each.grad for each in parameters if each.grad is not None and each.grad.layout == torch.strided]
    return tensor.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in gradients}


@contextmanager
def compressed_collectives(wire: str, calls: Collection[str]) -> Iterator[ScriptCollectives]:
    """Meanwhile, the collectives that a script calls through ``torch.distributed`` are compressed."""
    made = ScriptCollectives(wire, calls)
    with ExitStack() as stack:
        for name in ("all_reduce", "reduce_scatter_tensor"):
            native, own = getattr(dist, name), getattr(made, name)

            @wraps(native)
            def wrapped(*args: Any, native: Any = native, own: Any = own, **kwargs: Any) -> Any:
                caller = sys._getframe(1)
                return own(native, f"{caller.f_code.co_filename}:{caller.f_lineno}", *args, **kwargs)

            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield made
