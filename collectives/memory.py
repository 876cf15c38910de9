"""`Memory`: error memory of compressed collectives, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.places import Calls, P, Place, facts_of, layout_key, named_wire
from gradwire.compress import WirePolicy


class Memory:
    """Error memory for collectives that are called in every step: ``memory=memory["layers.0.weight"]``.

    The rounding error of a call is added to the tensor of the same name in the next call. A memory serves one process
    group. A name stands for one tensor in one collective, and a tuple of names, as in ``memory["weight", "bias"]``, for
    the list of `all_reduce_coalesced`. On each rank, the errors of an all-reduce take 1 + 1 / world size values of
    ``error_dtype`` per element, those of a reduce-scatter one per element of its input.

    Args:
        error_dtype, block_size, seed: as in `QuantizationState`. Equal on all ranks.

    Raises:
        ValueError: an option is of another type or out of range.

    Examples:
        >>> memory = gradwire.collectives.Memory()
        >>> for name, parameter in model.named_parameters():
        ...     gradwire.collectives.all_reduce(parameter.grad, wire="int4", memory=memory[name])
    """

    def __init__(self, *, error_dtype: torch.dtype = torch.float32, block_size: int = 64, seed: int = 0) -> None:
        self._options = {"error_dtype": error_dtype, "block_size": block_size, "seed": seed}
        WirePolicy(**self._options)  # type: ignore[arg-type]  # raises
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

        It can be loaded on any world size. An error is what the mean over the ranks lacks. It has the shape of the
        tensor; for a reduce-scatter, it is flat.

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
        self,
        kind: type[P],
        names: tuple[str, ...],
        tensors: Sequence[Tensor],
        wire: str,
        group: dist.ProcessGroup,
        calls: Calls,
    ) -> P:
        made_for = (kind, calls.op, wire, group, layout_key(tensors))
        if names in self._places and self._places[names][0] == made_for:
            return self._places[names][1]  # type: ignore[return-value]
        if names in self._places:
            raise ValueError(
                f"memory[{', '.join(map(repr, names))}] was used with other tensors, or with another collective, "
                "operation, wire or process group before. Use a name of its own for each tensor."
            )
        if named_wire(wire).start_option is None:
            raise ValueError(f"wire {wire!r} keeps no errors. Leave out memory, or choose a format below 16 bits.")
        calls.compare(group, {"memory": ", ".join(names), **self._options, **facts_of(kind, tensors, wire)})
        place = kind(tensors, names, wire, group, {"use_error_feedback": True, **self._options})
        if (saved := self._loaded.get(_key(names))) is not None:
            place.state.load_state_dict(saved)
            del self._loaded[_key(names)]
        self._places[names] = (made_for, place)
        return place


def _key(names: Sequence[str]) -> str:
    return "\n".join(names)


class Entry(NamedTuple):
    """The memory of one tensor, or of a list."""

    memory: Memory
    names: tuple[str, ...]

    def place(self, kind: type[P], tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls) -> P:
        """The place of these tensors. Raises ValueError unless there is a name for each."""
        if len(tensors) != len(self.names):
            raise ValueError(f"There are {len(tensors)} tensors and {len(self.names)} names: {self.names}.")
        return self.memory._place(kind, self.names, tensors, wire, group, calls)
