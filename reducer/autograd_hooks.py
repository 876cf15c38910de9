"""`AutogradHooks`: records which gradients autograd has completed, and in which order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.reducer import torch_internals

__all__ = ["AutogradHooks"]


class AutogradHooks:
    """Hooks on the autograd nodes of the parameters, which call back only where a gradient can complete a bucket.

    A call from autograd into Python is the largest cost of a small parameter in a backward, and
    most calls launch nothing: a bucket waits for its last gradient. So the hook of a *deferred*
    parameter only records its index. The next hook that is not deferred calls ``notify``, which
    takes all recorded indices. A hook is deferred once; its second call notifies.

    Args:
        parameters: the parameters, by index. None of their hooks is deferred.
        notify: called with the gradient that has come in; takes the indices from `recorded`. May be called from any of
            autograd's threads, and may find that another call has taken them.

    Attributes:
        nodes: the autograd node of each parameter that accumulates its gradient.
    """

    def __init__(self, parameters: Sequence[Tensor], notify: Callable[[Tensor | None], None]) -> None:
        self._parameters = parameters
        self.nodes = [torch_internals.gradient_node(parameter) for parameter in parameters]
        self._recorded: list[int] = []
        self._deferred = bytearray(len(parameters))
        # The nodes must not keep the reducer alive: a module may be wrapped again, and the old reducer is then freed.
        method = weakref.WeakMethod(notify)
        self._hooks = [_make_hook(index, self._recorded, self._deferred, method) for index in range(len(self.nodes))]
        self._handles = [node.register_hook(hook) for node, hook in zip(self.nodes, self._hooks, strict=True)]
        weakref.finalize(self, _remove_all, self._handles)

    def reset(self) -> None:
        """Drop the recorded indices, and defer no hook any longer."""
        self._recorded.clear()
        self._deferred[:] = bytes(len(self._deferred))

    def record(self, index: int) -> None:
        """Act as the hook of a parameter whose gradient came through another autograd node."""
        self._hooks[index](None, (None,))

    def defer(self, mask: bytes | bytearray) -> None:
        """Defer the hooks of the parameters that have a 1 in ``mask``, once each; no others."""
        self._deferred[:] = mask

    def recorded(self) -> Iterator[int]:
        """Take the recorded indices, in order, including those recorded meanwhile."""
        while self._recorded:
            taken = self._recorded[:]
            del self._recorded[: len(taken)]  # other threads may append meanwhile
            yield from taken

    def expect_one(self, indices: Iterable[int]) -> int | None:
        """Stop deferring one of these parameters; returns it. None if none of them is deferred.

        Args:
            indices: parameters that have not been taken from `recorded`. The next call of ``notify`` takes an index
                that is recorded already.
        """
        for index in indices:
            if self._deferred[index]:
                self._deferred[index] = 0
                return index
        return None

    def find_lost(self, indices: Iterable[int]) -> int | None:
        """The first of these parameters whose gradient another node accumulates, without the hook; None if none."""
        for index in indices:
            parameter = self._parameters[index]
            if parameter.requires_grad and torch_internals.gradient_node(parameter) is not self.nodes[index]:
                return index
        return None

    def remove(self) -> None:
        """Remove the hooks."""
        _remove_all(self._handles)


def _make_hook(
    index: int, recorded: list[int], deferred: bytearray, notify: weakref.WeakMethod[Callable[[Tensor | None], None]]
) -> Callable[[object, Sequence[Tensor | None]], None]:
    record = recorded.append

    def hook(_: object, incoming: Sequence[Tensor | None]) -> None:
        record(index)  # first: a thread that stops deferring it meanwhile must find it
        if deferred[index]:
            deferred[index] = 0
        elif (method := notify()) is not None:
            method(incoming[0])

    return hook


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
