"""``gradwire run --collectives int8``: the gradient collectives of a script that has no DDP, compressed."""

import gc
import sys
import weakref
from collections import Counter
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
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.bench.record import format_bytes
from gradwire.collectives.agreement import Agreement, Kind
from gradwire.collectives.call_site import SUM
from gradwire.collectives.functions import CompressedWork, start_all_reduce, start_reduce_scatter_tensor
from gradwire.collectives.group import MIN_NUMEL, is_compressible

NO_GRADIENT = "not the grad of a parameter"


class GradientFinder:
    """Knows which tensors are gradients: those that share memory with the ``grad`` of a parameter.

    It finds the parameters that modules register while it is `watching`, and before that, or elsewhere, by `search`.
    """

    def __init__(self) -> None:
        self._parameters = WeakIdKeyDictionary()
        self._by_storage: dict[int, weakref.ref[Tensor]] = {}  # of a gradient, as last seen

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile, note the parameters of new modules."""
        handle = register_module_parameter_registration_hook(lambda _, __, each: self._note(each))
        try:
            yield
        finally:
            handle.remove()

    def _note(self, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._parameters[parameter] = True

    def search(self) -> None:
        """Find all parameters that are alive."""
        for each in gc.get_objects():
            # The type first: isinstance asks the object, which may be a proxy whose object is gone.
            if issubclass(type(each), Tensor) and isinstance(each, nn.Parameter):
                self._note(each)

    def __contains__(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        if not self._is_current(at):
            found = ((_storage_of_gradient(each), weakref.ref(each)) for each in list(self._parameters))
            self._by_storage = {storage: each for storage, each in found if storage is not None}
        return at in self._by_storage

    def _is_current(self, at: int) -> bool:
        parameter = self._by_storage[at]() if at in self._by_storage else None
        return parameter is not None and _storage_of_gradient(parameter) == at


def _storage_of_gradient(parameter: Tensor) -> int | None:
    """Address of the memory of a parameter's gradient; None without a dense one."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return None
    return gradient.untyped_storage().data_ptr()


class ScriptCollectives:
    """Compresses ``dist.all_reduce`` and ``dist.reduce_scatter_tensor`` of gradients on the default group.

    A tensor is compressed if it is the gradient of a parameter on any rank: a rank without data may pass zeros. Others
    are passed on, unless ``calls`` names the line.

    Args:
        wire: a wire format without memory.
        calls: lines of calls to compress in any case, as ``FILE:LINE``.
    """

    def __init__(self, wire: str, calls: Collection[str]) -> None:
        self.wire, self.calls = wire, calls
        self.gradients = GradientFinder()
        self._agreement = Agreement()
        # Calls by line, name, shape, and whether they were compressed, and bytes of each.
        self.counts: Counter[tuple[str, str, tuple[int, ...], bool]] = Counter()
        self._nbytes: dict[tuple[str, str, tuple[int, ...], bool], int] = {}
        self._unknown: Counter[str] = Counter()  # calls by line whose tensor was not known to be a gradient

    def all_reduce(self, native: Callable[..., Any], where: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``dist.all_reduce(tensor, op, group, async_op)``."""
        op, group, async_op = _options(args, kwargs)
        if not self._may_compress(group, op, tensor):
            return native(tensor, *args, **kwargs)
        kind: Kind = ("all_reduce", tensor.dtype, tensor.device, tensor.shape)
        wanted = self._is_wanted(where, tensor)

        def exchange(written: Tensor, mark: bool) -> CompressedWork | None:
            return start_all_reduce([written], op, None, self.wire, mark=mark)

        work = self._agreement.exchange(kind, wanted, tensor, exchange)
        self._count(where, "all_reduce", tensor, work is not None)
        return native(tensor, *args, **kwargs) if work is None else _handle(work, async_op)

    def reduce_scatter_tensor(
        self, native: Callable[..., Any], where: str, output: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """``dist.reduce_scatter_tensor(output, input, op, group, async_op)``."""
        op, group, async_op = _options(args, kwargs)
        if not self._may_compress(group, op, output, input):
            return native(output, input, *args, **kwargs)
        kind: Kind = ("reduce_scatter_tensor", input.dtype, input.device, input.shape)
        wanted = self._is_wanted(where, input)

        def exchange(written: Tensor, mark: bool) -> CompressedWork | None:
            return start_reduce_scatter_tensor(written, input, op, None, self.wire, mark=mark)

        work = self._agreement.exchange(kind, wanted, output, exchange)
        self._count(where, "reduce_scatter_tensor", input, work is not None)
        return native(output, input, *args, **kwargs) if work is None else _handle(work, async_op)

    @staticmethod
    def _may_compress(group: Any, op: Any, *tensors: Tensor) -> bool:
        return (group is None or group is dist.group.WORLD) and is_compressible(op, tensors, MIN_NUMEL)

    def _is_wanted(self, where: str, tensor: Tensor) -> bool:
        """Whether this rank wants a tensor compressed."""
        if _is_named(where, self.calls) or tensor in self.gradients:
            return True
        self._unknown[where] += 1
        if self._unknown[where].bit_count() > 1:  # it takes some milliseconds: after 1, 2, 4, 8, ... such calls
            return False
        self.gradients.search()
        return tensor in self.gradients

    def _count(self, where: str, name: str, tensor: Tensor, is_compressed: bool) -> None:
        key = where, name, tuple(tensor.shape), is_compressed
        self.counts[key] += 1
        self._nbytes[key] = tensor.nbytes

    def report(self) -> str:
        """The text that rank 0 prints at the end."""
        lines = [f"gradwire run: collectives of large tensors in {self.wire}"]
        for call in dict.fromkeys(key[:2] for key in self.counts):
            where, name = call
            lines.append(f"  {where}  {name}")
            for key, n_calls in self.counts.items():
                if key[:2] == call:
                    shape, is_compressed = key[2:]
                    remedy = f": {NO_GRADIENT}; --call {Path(where).name} compresses it"
                    what = "compressed" if is_compressed else f"passed on{remedy}"
                    size = format_bytes(self._nbytes[key])
                    lines.append(f"    {list(shape)}, {n_calls:,} calls of {size}: {what}")
        if not self.counts:
            lines.append(
                f"  none: the script has called neither all_reduce nor reduce_scatter_tensor of torch.distributed with "
                f"{MIN_NUMEL:,} floating-point elements or more on the default group. For DDP and FSDP2, use --hook"
            )
        return "\n".join(lines)


def _handle(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Operation, group and ``async_op`` of a call."""
    given = dict(zip(("op", "group", "async_op"), args, strict=False)) | kwargs
    return given.get("op", SUM), given.get("group"), given.get("async_op", False)


def _is_named(where: str, calls: Collection[str]) -> bool:
    """Whether one of ``calls`` is this line, with or without its folders."""
    return any(where == call or where.endswith(f"/{call}") for call in calls)


@contextmanager
def compressed_collectives(wire: str, calls: Collection[str]) -> Iterator[ScriptCollectives]:
    """Meanwhile, the collectives that a script calls through ``torch.distributed`` are compressed."""
    made = ScriptCollectives(wire, calls)
    with ExitStack() as stack:
        stack.enter_context(made.gradients.watching())
        for name in ("all_reduce", "reduce_scatter_tensor"):
            native, own = getattr(dist, name), getattr(made, name)

            @wraps(native)
            def wrapped(*args: Any, native: Any = native, own: Any = own, **kwargs: Any) -> Any:
                caller = sys._getframe(1)
                return own(native, f"{caller.f_code.co_filename}:{caller.f_lineno}", *args, **kwargs)

            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield made
