"""What autograd tells: which gradients are complete, in which order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.reducer import torch_internals


class Arrivals:
    """Notes each parameter whose gradient autograd has completed, and calls ``react`` only where that is asked for.

    A hook in Python is what a small parameter costs most in a backward, and most arrivals change nothing: a bucket
    waits for its last one. So the hook of a *quiet* parameter only notes its index, and the next one that is not
    quiet has them all looked at. A parameter is quiet for one arrival; the second calls ``react``.

    Args:
        parameters: to watch, by index; none of them is quiet.
        react: takes what is `new`. May be called from any of autograd's threads, also for what another call took.

    Attributes:
        nodes: the autograd node of each parameter that adds to its gradient.
    """

    def __init__(self, parameters: Sequence[Tensor], react: Callable[[], None]) -> None:
        self.nodes = [torch_internals.gradient_node(parameter) for parameter in parameters]
        self._noted: list[int] = []
        self._quiet = bytearray(len(parameters))
        # The nodes must not keep the reducer alive: a model may be wrapped anew, and the old reducer then has to go.
        method = weakref.WeakMethod(react)
        self._hooks = [_hook(index, self._noted, self._quiet, method) for index in range(len(self.nodes))]
        self._handles = [node.register_hook(hook) for node, hook in zip(self.nodes, self._hooks, strict=True)]
        weakref.finalize(self, _remove_all, self._handles)

    def begin(self) -> None:
        """Forget what has arrived. No parameter is quiet."""
        self._noted.clear()
        self._quiet[:] = bytes(len(self._quiet))

    def arrive(self, index: int) -> None:
        """Take note of a gradient that came by another node than the parameter's first."""
        self._hooks[index](None, None)

    def quieten(self, quiet: bytes | bytearray) -> None:
        """From now on, the parameters that have a 1 in ``quiet`` are quiet, once each."""
        self._quiet[:] = quiet

    def new(self) -> Iterator[int]:
        """What has arrived and was not yet taken from here, in order; also what arrives meanwhile."""
        while self._noted:
            arrived = self._noted[:]
            del self._noted[: len(arrived)]  # other threads may add to it meanwhile
            yield from arrived

    def wake_one(self, indices: Iterable[int]) -> int | None:
        """Let one of these that is quiet react after all; returns it.

        Args:
            indices: of parameters that have not been taken from what is `new`; one that waits there will be.
        """
        for index in indices:
            if self._quiet[index]:
                self._quiet[index] = 0
                return index
        return None

    def remove(self) -> None:
        """Stop watching."""
        _remove_all(self._handles)


def _hook(
    index: int, noted: list[int], quiet: bytearray, react: weakref.WeakMethod[Callable[[], None]]
) -> Callable[[object, object], None]:
    note = noted.append

    def hook(_: object, __: object) -> None:
        note(index)  # first, so that a thread that wakes it meanwhile finds it
        if quiet[index]:
            quiet[index] = 0
        elif (method := react()) is not None:
            method()

    return hook


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
