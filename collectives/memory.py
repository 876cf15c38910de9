"""`Memory`: error memory of compressed collectives, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.places import Calls, Place, every_tensor, facts_of, layout_key, named_wire


class Memory:
    """Error memory for collectives that are called in every step: ``memory=memory["layers.0.weight"]``.

    The rounding error of a call is added to the tensor of the same name in the next call. A memory serves one process
    group. A name stands for one tensor, and a tuple of names, as in ``memory["weight", "bias"]``, for the
    list of `all_reduce_coalesced`.

    Args:
        options: options of the hook's state, such as ``error_dtype`` or ``block_size``; see
            `QuantizationState`.

    Examples:
        >>> memory = gradwire.collectives.Memory()
        >>> for name, parameter in model.named_parameters():
        ...     gradwire.collectives.all_reduce(parameter.grad, wire="int4", memory=memory[name])
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._places: dict[tuple[str, ...], tuple[tuple[Any, ...], Place]] = {}  # with wire, layouts and ranks
        self._loaded: dict[str, Any] = {}  # saved states that no call has used yet, by names

    def __getitem__(self, names: str | tuple[str, ...]) -> Entry:
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise TypeError(f"memory[...] was given {names!r}; expected a name, or different names.")
        return Entry(self, names)

    @property
    def nbytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(place.state.error_memory_bytes for _, place in self._places.values())

    def state_dict(self) -> dict[str, Any]:
        """The errors of all ranks as plain CPU tensors, equal on all ranks. A collective call, between two steps.

        It can be loaded on any world size.

        Raises:
            RuntimeError: a rank has not called it.
        """
        made = {_key(names): place.state.state_dict() for names, (_, place) in self._places.items()}
        return {**self._loaded, **made}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, on every rank, with the same names.

        Raises:
            ValueError: an entry is missing, has another type or shape, or is not finite; at the latest in the first
                call with its name.
        """
        self._loaded = dict(state_dict)
        for names, (_, place) in self._places.items():
            if (saved := self._loaded.pop(_key(names), None)) is not None:
                place.state.load_state_dict(saved)

    def steps(self, group: dist.ProcessGroup) -> dict[str, int]:
        """The number of calls of each entry on a process group."""
        return {_key(names): place.state.iter for names, (made_for, place) in self._places.items() if group in made_for}

    def restart(self, group: dist.ProcessGroup, steps: Sequence[Mapping[str, int]]) -> None:
        """Continue from the `steps` of all ranks, of which some lack the latest call."""
        for key in self.steps(group):
            names = tuple(key.split("\n"))
            if all(key in each for each in steps):
                self._places[names][1].state.iter = min(each[key] for each in steps)
            else:  # no call has ended
                del self._places[names]

    def _place(
        self, names: tuple[str, ...], tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls
    ) -> Place:
        made_for = (wire, group, layout_key(tensors))
        if names in self._places and self._places[names][0] == made_for:
            return self._places[names][1]
        if names in self._places:
            raise ValueError(
                f"memory[{', '.join(map(repr, names))}] was used with other tensors, another wire or another process "
                "group before. Use a name of its own for each tensor."
            )
        named = named_wire(wire)
        if named.start_option is None:
            raise ValueError(f"wire {wire!r} keeps no errors. Leave out memory, or choose a format below 16 bits.")
        calls.compare(group, {"memory": ", ".join(names), **facts_of(tensors, wire)})
        options = {**every_tensor(named), "use_error_feedback": True, **self._options}
        state = named.state(group, **options)
        place = Place(state, named.hook, tensors, names, group)
        if (saved := self._loaded.get(_key(names))) is not None:
            state.load_state_dict(saved)
            del self._loaded[_key(names)]
        self._places[names] = (made_for, place)
        return place


def _key(names: Sequence[str]) -> str:
    return "\n".join(names)


class Entry(NamedTuple):
    """The memory of one tensor, or of a list."""

    memory: Memory
    names: tuple[str, ...]

    def place(self, tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls) -> Place:
        """The place of these tensors. Raises ValueError unless there is a name for each."""
        if len(tensors) != len(self.names):
            raise ValueError(f"There are {len(tensors)} tensors and {len(self.names)} names: {self.names}.")
        return self.memory._place(self.names, tensors, wire, group, calls)
