"""The hooks on autograd's nodes that tell the reducer of completed gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.reducer import torch_internals


class AutogradHooks:
    """Hooks on the autograd nodes of the parameters, which call back only where a gradient can complete a bucket.

    A call from autograd into Python is the largest cost of a small parameter in a backward, and a bucket waits for its
    last gradient. So the hook of a *deferred* parameter only records its index, once; the next hook that is not
    deferred calls ``notify``, which takes all recorded indices. One gradient that the next bucket waits for is always
    not deferred.

    Args:
        parameters: the parameters, by index. None of their hooks is deferred.
        notify: called with the gradient that has come in, from any of autograd's threads; takes the `recorded` indices,
            which another call may have taken.

    Attributes:
        nodes: the autograd node of each parameter that accumulates its gradient.
        recorded: indices of completed gradients that ``notify`` has not taken yet, in order. Other threads append.
        deferred: 1 for each parameter whose next hook only records. The hook sets it back to 0.
        undefined: indices of parameters for which autograd had no gradient, since the last `reset`.
    """

    def __init__(self, parameters: Sequence[Tensor], notify: Callable[[Tensor | None], None]) -> None:
        self._parameters, self._dtypes = parameters, [parameter.dtype for parameter in parameters]
        self.nodes = [torch_internals.gradient_node(parameter) for parameter in parameters]
        self.recorded: list[int] = []
        self.deferred = bytearray(len(parameters))
        self.undefined: set[int] = set()
        # The nodes must not keep the reducer alive: a module may be wrapped again, and the old reducer is then freed.
        method = weakref.WeakMethod(notify)
        shared = self.recorded, self.deferred, self.undefined, method
        self._hooks = [_make_hook(index, *shared) for index in range(len(self.nodes))]
        handles = [node.register_hook(hook) for node, hook in zip(self.nodes, self._hooks, strict=True)]
        self.remove = weakref.finalize(self, _remove_all, handles)  # removes the hooks

    def reset(self) -> None:
        """Drop the recorded and the undefined indices, and defer no hook any longer."""
        self.recorded.clear()
        self.undefined.clear()
        self.deferred[:] = bytes(len(self.deferred))

    def record(self, index: int) -> None:
        """Act as the hook of a parameter whose gradient came through another autograd node."""
        self._hooks[index](None, (None,))

    def defer_others(self, indices: Iterable[int]) -> None:
        """Defer all hooks but those of these parameters."""
        mask = bytearray(b"\1") * len(self.deferred)
        for index in indices:
            mask[index] = 0
        self.deferred[:] = mask

    def expect(self, members: Iterable[int], ready: bytearray) -> None:
        """Stop deferring the hook of the first of these parameters whose gradient is not ready."""
        for index in members:
            if not ready[index]:
                self.deferred[index] = 0
                return

    def find_lost(self, indices: Iterable[int]) -> int | None:
        """The first parameter that has lost its hook, or None: by a cast, or by a change of node among ``indices``.

        A cast that was undone, and a move, show in the node only.
        """
        dtypes = [parameter.dtype for parameter in self._parameters]
        if dtypes != self._dtypes:
            return next(i for i, (now, before) in enumerate(zip(dtypes, self._dtypes, strict=True)) if now != before)
        for index in indices:
            parameter = self._parameters[index]
            if parameter.requires_grad and torch_internals.gradient_node(parameter) is not self.nodes[index]:
                return index
        return None


def _make_hook(
    index: int,
    recorded: list[int],
    deferred: bytearray,
    undefined: set[int],
    notify: weakref.WeakMethod[Callable[[Tensor | None], None]],
) -> Callable[[object, Sequence[Tensor | None]], None]:
    record = recorded.append

    def hook(_: object, incoming: Sequence[Tensor | None]) -> None:
        if incoming[0] is None:
            undefined.add(index)
        record(index)  # first: a thread that stops deferring it meanwhile must find it
        if deferred[index]:
            deferred[index] = 0
        elif (method := notify()) is not None:
            method(incoming[0])

    return hook


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
