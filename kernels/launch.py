"""Launches of Triton kernels, and their recording as calls with all arguments bound.

A launch through Triton costs the host 10 to 30 us: it looks up the compiled kernel by the types of its arguments. A
bound launch holds the compiled kernel, its stream, its numbers and its addresses, and costs one call into C.

While a `Recording` is entered, every launch of this thread also becomes a bound launch. A recorded algorithm must do no
other work on the device: the recording notes any operator of PyTorch that does not only allocate or view, and the
step is then not replayed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_aten = torch.ops.aten
# Operators that need not be repeated: they allocate, or keep memory that a plan keeps alive in any case.
_HOST_ONLY = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    _aten.record_stream,
}


class Recording(TorchDispatchMode):
    """The launches of one part of an algorithm, in the thread and the context in which it is entered.

    Args:
        stream: handle of the stream of all launches.

    Attributes:
        calls: the bound launches, in order.
        kept: the tensors whose addresses they hold.
        operator: an operator of PyTorch that the calls lack; None if they are complete.
    """

    def __init__(self, stream: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream
        self.calls: list[Callable[[], object]] = []
        self.kept: list[Tensor] = []
        self.operator: str | None = None

    def __enter__(self) -> Recording:
        _thread.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _thread.recording = None

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note it if it `needs_repetition`."""
        if needs_repetition(function):
            self.operator = self.operator or str(function)
        return function(*arguments, **(keywords or {}))


def needs_repetition(operator: Any) -> bool:
    """Whether an operator of PyTorch does work on the device, which a later step would have to repeat."""
    schema = operator._schema
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    is_view = not writes and any(each.alias_info is not None for each in schema.returns)
    return not is_view and operator.overloadpacket not in _HOST_ONLY


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def is_recording() -> bool:
    """Whether this thread records launches."""
    return _thread.recording is not None


def bound(compiled: Any, stream: int, grid: Sequence[int], values: Sequence[Any]) -> Callable[[], object]:
    """A launch of a compiled kernel as a call without arguments, unseen by Triton's hooks for profilers.

    ``CompiledKernel.run`` has the same arguments in Triton 3.6 to 3.9. From 3.7 on it is a Python function around one
    in C, which is private: without its attributes, a launch takes 1 us more.
    """
    run, packed, no_hooks = compiled.run, compiled.packed_metadata, (None, None, None)
    has_extras = any(getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    if type(run).__name__ == "CudaLauncher" and hasattr(run, "arg_annotations") and not has_extras:
        options = (run.launch_cooperative_grid, run.launch_pdl, packed, *no_hooks, None, None)
        types = (run.arg_annotations, run.kernel_signature)
        return partial(run.launch, *grid, stream, compiled.function, *options, *types, tuple(values))
    return partial(run, *grid, stream, compiled.function, packed, *no_hooks, *values)


class Kernel:
    """A Triton kernel: ``kernel[grid](name=value, ...)`` launches it, and records the launch in a `Recording`.

    Attributes:
        jitted: what `triton.jit` returned.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        parameters = inspect.signature(jitted.fn).parameters.values()
        self._defaults = {each.name: each.default for each in parameters}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _thread.recording is None:
            return self.jitted[grid]  # type: ignore[no-any-return]
        return partial(self._record, _thread.recording, grid)

    def _record(self, recording: Recording, grid: tuple[int, ...], **arguments: Any) -> None:
        with _disable_current_modes():  # Triton's interpreter copies tensors
            compiled = self.jitted[grid](**arguments)
        values = [arguments.get(name, default) for name, default in self._defaults.items()]
        recording.kept += [value for value in values if isinstance(value, Tensor)]
        if hasattr(compiled, "packed_metadata"):
            # Addresses as numbers: Triton asks the driver about a tensor.
            numbers = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
            recording.calls.append(bound(compiled, recording.stream, (*grid, 1, 1)[:3], numbers))
        else:  # Triton's interpreter, or an unknown Triton: a launch as before, in the current stream
            recording.calls.append(partial(self.jitted[grid], **arguments))
