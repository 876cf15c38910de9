"""`Memory`: error memory of compressed collectives, by name."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.call_site import CallSite
from gradwire.collectives.calls import Calls, new_compressor
from gradwire.collectives.compressors import Compressor, check_errors
from gradwire.comm import Task, connections_of, executor_for
from gradwire.comm.store_collectives import store_all_gather
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.compress import WirePolicy
from gradwire.exchange.handshake import digest
from gradwire.exchange.hook_state import STATE_DICT_TIMEOUT
from gradwire.exchange.memory import StateDict
from gradwire.kernels import WIRE_FORMATS
from gradwire.validation import (
    check_count,
    check_elements,
    check_entries,
    check_range,
    checked_tensors,
    wrong,
)

ERRORS = "errors"
logger = logging.getLogger("gradwire.collectives")


class Memory:
    """Error memory for collectives that are called in every step: ``memory=memory["layers.0.weight"]``.

    The rounding error of a call is added to the tensor of the same name in the next call. A name stands for one tensor
    in one collective, and a tuple of names, as in ``memory["weight", "bias"]``, for the list of `all_reduce_coalesced`.
    On each rank, the errors of an all-reduce take 1 + 1 / world size values of ``error_dtype`` per element, those of a
    reduce-scatter one per element of its input.

    A memory serves one process group at a time. If that is destroyed, a call on another one goes on with the errors.

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
        self._options = (("error_dtype", error_dtype), ("block_size", block_size), ("seed", seed))
        policy = WirePolicy(use_error_feedback=True, **dict(self._options))  # type: ignore[arg-type]  # raises
        self._quantization = policy.quantization()
        self._used: dict[tuple[str, ...], _Used] = {}
        self._loaded: dict[tuple[str, ...], Mapping[str, Any]] = {}  # saved entries that no call has used yet
        self._has_warned = False  # of these

    def __getitem__(self, names: str | tuple[str, ...]) -> Entry:
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise TypeError(f"memory[...] was given {names!r}; expected a name, or different names.")
        return Entry(self, names)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options)
        return f"Memory({options}, {len(self._used)} entries of {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(used.compressor.error_memory_bytes for used in self._used.values())

    # Checkpoints.

    def state_dict(self) -> StateDict:
        """The errors of all ranks as plain CPU tensors, equal on all ranks. A collective call, between two steps.

        It can be loaded on any world size. An error is what the results of the calls so far lack: the mean over the
        ranks, or the sum. It has the shape of the tensor; for a reduce-scatter, it is flat. The keys of the entries are
        the names; for several names, their list in JSON.

        Raises:
            RuntimeError: a rank has not called it, or the ranks have used other entries.
        """
        made = {}
        for group, members in self._by_group().items():
            keys = sorted(map(_key, members))
            call, check = "Memory.state_dict()", connections_of(group).check_peers
            digests = store_all_gather(group, call, digest(keys), STATE_DICT_TIMEOUT, check)
            if len(set(digests)) > 1:
                raise RuntimeError(
                    f"The ranks have used other entries of a Memory; on rank {dist.get_rank()}: {', '.join(keys)}. Use "
                    "the same names on every rank, and save between two steps."
                )
            for key in keys:
                made[key] = self._used[_names_of(key)].merged(group)
        return {**{_key(names): dict(saved) for names, saved in self._loaded.items()}, **made}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, on every rank, with the same names.

        Raises:
            ValueError: an entry is missing, has another type or shape, or is not finite or out of range. Nothing is
                modified. The shape of an entry that no call has used yet is checked in its first call.
        """
        loaded = {_names_of(key): _checked(key, entry) for key, entry in state_dict.items()}
        for names, saved in loaded.items():
            if (used := self._used.get(names)) is not None:
                check_errors(used.compressor.site, saved[ERRORS])
        self._loaded, self._has_warned = loaded, False
        for names, used in self._used.items():
            if names in self._loaded:
                used.load(self._loaded.pop(names))

    def _by_group(self) -> dict[dist.ProcessGroup, list[tuple[str, ...]]]:
        """The names that were used on each process group; for one that is gone, on the default group."""
        found: dict[dist.ProcessGroup, list[tuple[str, ...]]] = {}
        for names, used in self._used.items():
            found.setdefault(used.group or default_group(), []).append(names)
        return found

    # After an error.

    def steps(self, group: dist.ProcessGroup) -> dict[str, int]:
        """The number of calls of each entry on a process group."""
        return {_key(names): used.compressor.n_calls for names, used in self._used.items() if used.group is group}

    def restart(self, group: dist.ProcessGroup, steps: Sequence[Mapping[str, int]]) -> None:
        """Continue from the `steps` of all ranks, of which some lack the latest call."""
        for key in self.steps(group):
            if all(key in each for each in steps):
                self._used[_names_of(key)].compressor.n_calls = min(each[key] for each in steps)
            else:  # nothing was exchanged
                self._used[_names_of(key)].is_agreed = False

    # Calls.

    def _compressor(self, site: CallSite, group: dist.ProcessGroup, calls: Calls) -> Compressor:
        """The compressor of a call. A collective call if it is new, was loaded, or had another process group."""
        names, used = site.names, self._used.get(site.names)
        if used is not None and used.group is group and used.compressor.site == site and used.is_agreed:
            used.n_calls, used.origin = used.n_calls + 1, "earlier calls"
            if used.n_calls == 2 and self._loaded and not self._has_warned:  # a step has passed
                self._has_warned = True
                text = "Entries of the loaded Memory that no call has used: %s. Use the names of the run that saved it."
                logger.warning(text, ", ".join(map(_key, self._loaded)))
            return used.compressor
        if not WIRE_FORMATS[site.wire].is_scaled:
            raise ValueError(f"wire {site.wire!r} keeps no errors. Leave out memory, or choose a format below 16 bits.")
        saved = None
        if used is not None:
            self._check_moves(used, site, group)
            origin = used.origin
        elif (saved := self._loaded.get(names)) is not None:
            check_errors(site, saved[ERRORS])
            origin = _origin(saved)
        else:
            origin = "none"
        calls.compare(site, group, {"errors": f"of {origin}"})
        compressor = new_compressor(site, group, self._quantization)
        if used is not None:
            compressor.take(used.compressor)
        elif saved is not None:
            compressor.load(saved[ERRORS], saved["iter"])
        calls.know(compressor)
        self._used[names] = _Used(compressor, origin)
        self._loaded.pop(names, None)
        return compressor

    @staticmethod
    def _check_moves(used: _Used, site: CallSite, group: dist.ProcessGroup) -> None:
        """Raise ValueError unless the errors of an entry may go on at this call site on this process group."""
        earlier = used.compressor.site
        if used.group is None:
            fits = (earlier.collective, earlier.op) == (site.collective, site.op)
        else:
            fits = used.group is group and earlier == site
        if not fits:
            raise ValueError(
                f"memory[{', '.join(map(repr, site.names))}] was used with other tensors, or with another collective, "
                "operation, wire or process group before. Use a name of its own for each tensor."
            )
        check_errors(site, used.compressor.errors())


class _Used:
    """An entry that calls have used.

    Attributes:
        compressor: has the errors.
        origin: where its errors were from in its latest comparison with the other ranks.
        is_agreed: whether the ranks need not compare it again.
        n_calls: number of calls since the memory was loaded.
    """

    def __init__(self, compressor: Compressor, origin: str) -> None:
        self.compressor, self.origin = compressor, origin
        self.is_agreed, self.n_calls = True, 1
        self._group = weakref.ref(compressor.group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of its latest call; None if that was destroyed."""
        group = self._group()
        return group if group is not None and is_initialized_group(group) else None

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checked entry of a checkpoint; the next call compares it with the other ranks."""
        self.compressor.load(saved[ERRORS], saved["iter"])
        self.is_agreed = False
        self.origin = _origin(saved)
        self.n_calls = 0

    def merged(self, group: dist.ProcessGroup) -> StateDict:
        """The entry of a checkpoint. A collective call."""
        compressor = self.compressor
        errors = sorted(compressor.errors().items())
        own = {name: (error * compressor.weight).contiguous() for name, error in errors}
        executor = executor_for(group, compressor.site.device)

        async def add_up() -> None:
            for error in own.values():
                await executor.transport.all_reduce(error)

        executor.submit(Task(lambda _: add_up())).wait()
        return {"iter": compressor.n_calls, ERRORS: {name: error.cpu() for name, error in own.items()}}


def _origin(saved: Mapping[str, Any]) -> str:
    """Names the origin of errors that were loaded, for comparison with the other ranks."""
    return f"a loaded memory, digest {digest(saved[ERRORS])}"


def _key(names: Sequence[str]) -> str:
    """The key of an entry in a `state_dict`: the name, or a list in JSON, with which no name begins."""
    return names[0] if len(names) == 1 and not names[0].startswith("[") else json.dumps(list(names))


def _names_of(key: str) -> tuple[str, ...]:
    """The names of a key of a `state_dict`. Raises ValueError if it is none."""
    if not isinstance(key, str):
        raise wrong("a key of the Memory", key, "a name, or a list of names in JSON")
    if not key.startswith("["):
        return (key,)
    try:
        names = json.loads(key)
    except json.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise wrong("a key of the Memory", key, "a name, or a list of names in JSON")
    return tuple(names)


def _checked(key: str, entry: object) -> Mapping[str, Any]:
    """An entry of a `state_dict`. Raises ValueError unless it is whole, finite and in range."""
    check_entries(entry, f"Memory entry {key!r}", ("iter", ERRORS))
    check_count("iter", entry["iter"])  # type: ignore[index]
    names, saved = set(_names_of(key)), entry[ERRORS]  # type: ignore[index]
    tensors: dict[str, Tensor] = {}
    for name, tensor in checked_tensors(ERRORS, saved):
        check_elements(name, tensor, tensor.isfinite(), "a finite number")
        check_range(name, tensor)
        tensors[name] = tensor
    if set(saved) != names:
        raise ValueError(
            f"The errors of {key!r} are of {', '.join(sorted(saved))}; expected {', '.join(sorted(names))}."
        )
    return {"iter": entry["iter"], ERRORS: {name: tensor.clone() for name, tensor in saved.items()}}  # type: ignore[index]


class Entry(NamedTuple):
    """The memory of one tensor, or of a list."""

    memory: Memory
    names: tuple[str, ...]

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """Names and values of the memory's options."""
        return self.memory._options

    def compressor(self, site: CallSite, group: dist.ProcessGroup, calls: Calls) -> Compressor:
        """The compressor of a call. Raises ValueError if the names serve another one."""
        return self.memory._compressor(site, group, calls)
