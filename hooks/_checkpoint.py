"""Declared memory of a hook state: checkpoints for any world size, validation, resynchronization and pickling.

A loaded checkpoint is validated before the state is modified: a ValueError names the entry, its value and the
expectation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, connections_of, executor_for
from gradwire.comm.store_collectives import RanksMissing, named_barrier
from gradwire.compress._validation import (
    check_count,
    check_elements,
    check_entries,
    check_memory_shape,
    check_range,
    checked_tensors,
)
from gradwire.compress.memory import BucketMemory, Memory, MemoryByName, Merge
from gradwire.hooks._bucket import (
    GradBucket,
    ParameterNames,
    bucket_device,
    bucket_dtype,
    described,
    is_number,
    plain_name,
)
from gradwire.hooks._handshake import HookSettings, digest
from gradwire.kernels import SegmentTable, as_real, gradient_layout, layout_in_dtype, memory_order

ERRORS = "errors"  # the entry with error memory
PREPARE_TIMEOUT = timedelta(minutes=2)
STATE_DICT_TIMEOUT = timedelta(seconds=10)  # early: a waiting rank is usually the only caller


class Scaler(Protocol):
    """A gradient scaler, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor by which the loss is multiplied."""


class DeclaredMemory(HookSettings):
    """The memory of a state, by parameter name: that of the current buckets, and that of a loaded checkpoint."""

    memory: ClassVar[Mapping[str, Memory]] = {}
    serves_one_model = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for entry, declared in cls.memory.items() if isinstance(cls.memory, Mapping) else ():
            if not isinstance(declared, Memory) or declared.merge not in get_args(Merge):
                raise TypeError(
                    f"{cls.__name__}.memory[{entry!r}] is {declared!r}; expected a Memory whose merge is one of "
                    f"{', '.join(map(repr, get_args(Merge)))}."
                )
            if declared.shape is None and (declared.merge != "same" or cls.make_bucket is DeclaredMemory.make_bucket):
                # After an error, ranks may have tensors of different parameters: the others add zeros.
                raise TypeError(
                    f"{cls.__name__}.memory[{entry!r}] is {declared!r}; expected a shape. Declare how it follows from "
                    "the gradient, such as shape=lambda gradient: (gradient.numel(),). Only memory with merge='same' "
                    "may have none, in a class that overrides make_bucket."
                )

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None, options: Any) -> None:
        super().__init__(hook, process_group)
        parameters = getattr(type(options), "__dataclass_params__", None)
        if options is not None and not getattr(parameters, "frozen", False):
            raise TypeError(f"options is {options!r}; expected an instance of a frozen dataclass, or None.")
        self.options = options
        self._names = ParameterNames(self)
        self._tensors: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.memory}  # by parameter name
        # Sums of a checkpoint, of which this rank takes its share in the next compressed step, by parameter name.
        self._loaded: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.memory}
        # Memory of each bucket, by parameter names, with the dtype and ranks for which it was made.
        self._buckets: dict[tuple[str, ...], tuple[object, Any]] = {}
        self._scaler: Scaler | None = None
        self._scale: float | None = None  # scale of the errors; None until `match_scale` reads it

    def new_bucket(self, bucket: GradBucket, names: tuple[str, ...], group: dist.ProcessGroup) -> Any:
        """The result of `make_bucket`, which starts from the memory of earlier buckets, or from loaded memory that
        fits.
        """
        self.check_loaded(names)
        self._take_shares(names, group)
        self.drop_buckets(names)
        parameters = [gradient_layout(parameter) for parameter in bucket.parameters()]
        transport = executor_for(group, bucket_device(bucket)).transport
        made = self.make_bucket(parameters, bucket_dtype(bucket), names, transport)
        if made is not None:
            self._keep(made.memory)
        return made

    def make_bucket(
        self, parameters: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str], transport: Transport
    ) -> Any:
        """The memory of new buckets, which starts from that of earlier ones, or from zeros.

        Args:
            parameters: tensors in the layouts of the gradients, which may be complex.
            dtype: real dtype of the gradients.
            names: parameter names.
            transport: transport of the algorithm.

        Returns:
            A `BucketMemory`, or an object with its attributes; None to send the bucket uncompressed.
        """
        layouts = [layout_in_dtype(as_real(parameter), dtype) for parameter in parameters]
        tensors: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.memory}
        for entry, declared in self.memory.items():
            for name, layout in zip(names, layouts, strict=True):
                zeros = declared.zeros(layout, layout.device)
                kept = self._tensors[entry].get(name, zeros)
                check_memory_shape(entry, name, kept, zeros.shape)
                tensors[entry][name] = kept.to(zeros.device, zeros.dtype)
        return BucketMemory(SegmentTable(layouts), tensors)

    def _keep(self, memory: MemoryByName) -> None:
        """Keep tensors by entry and parameter name."""
        for entry, tensors in memory.items():
            self._tensors[entry].update(tensors)

    def drop_buckets(self, names: Sequence[str] | None = None) -> None:
        """Drop the buckets that have one of these parameters, by default all, and keep their memory."""
        for key, (_, bucket) in list(self._buckets.items()):
            if names is None or not set(names).isdisjoint(key):
                self._keep(self.folded(bucket))
                del self._buckets[key]

    def check_loaded(self, names: Sequence[str]) -> None:
        """Raise ValueError, before anything is sent, if loaded memory does not fit the parameters known so far."""

    def folded(self, bucket: Any) -> MemoryByName:
        """What the next bucket inherits where it differs from ``bucket.memory``."""
        return {}

    def tensors(self, entry: str) -> dict[str, Tensor]:
        """This rank's memory by name, including its share of a checkpoint not yet used."""
        loaded = self._loaded[entry]
        return self._trained(entry) | {name: self._share(entry, each, self._group) for name, each in loaded.items()}

    def _trained(self, entry: str) -> dict[str, Tensor]:
        """This rank's memory that needs no share of a checkpoint."""
        self.match_scale()
        tensors = dict(self._tensors[entry])
        for _, bucket in self._buckets.values():
            tensors.update(self.folded(bucket).get(entry, {}))
        return tensors

    def _take_shares(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        """Move this rank's share of loaded memory into its own memory, for these parameters."""
        for entry, loaded in self._loaded.items():
            shares = {name: self._share(entry, loaded.pop(name), group) for name in names if name in loaded}
            self._tensors[entry].update(shares)

    def _share(self, entry: str, merged: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's part of a tensor of a checkpoint."""
        return merged / group.size() if self.memory[entry].merge == "sum" else merged.clone()

    def residuals(self) -> Sequence[Tensor]:
        """This rank's error memory, for `metrics`."""
        return list(self._tensors.get(ERRORS, {}).values())

    def follow_scaler(self, scaler: Scaler | None) -> None:
        """Multiply the error memory by the same factor as the scale of a gradient scaler whenever that changes.

        Errors are parts of earlier gradients, in the scale of their step. Without this, they count twice or half after
        a change of the scale by 2. With it, nothing is rounded if the factor is a power of two.

        The scale is read before the first bucket of each step. On a GPU, the host waits there for the forward pass, as
        it does in ``scaler.step``.

        Args:
            scaler: a ``torch.amp.GradScaler``, or another object with ``get_scale()``. It is not saved in checkpoints:
                save and load its own state. None to follow none.

        Raises:
            TypeError: ``scaler`` has no method ``get_scale``.

        Examples:
            >>> scaler = torch.amp.GradScaler()
            >>> state.follow_scaler(scaler)
        """
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler is {described(scaler)}; expected a torch.amp.GradScaler, or None.")
        self._scaler, self._scale = scaler, None
        self.match_scale()

    def match_scale(self) -> None:
        """Multiply the error memory if the scale has changed since the last call."""
        if self._scaler is None:
            return
        scale, before = float(self._scaler.get_scale()), self._scale
        self._scale = scale
        if before is None or before == scale:
            return
        for error in self._every_error():
            error.mul_(scale / before if before else 0)

    def forget_errors(self) -> None:
        """Set the error memory to zero."""
        for error in self._every_error():
            error.zero_()

    def _every_error(self) -> list[Tensor]:
        """The error memory of buckets, of earlier buckets, and of a checkpoint that no step has used yet."""
        kept = list(self.residuals())
        of_buckets = {error.untyped_storage().data_ptr() for error in kept}  # tensors by name may be views of them
        others = [*self._tensors.get(ERRORS, {}).values(), *self._loaded.get(ERRORS, {}).values()]
        return kept + [error for error in others if error.untyped_storage().data_ptr() not in of_buckets]

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(error.nbytes for error in self.residuals())

    def take_back(self, name: str, gradient: Tensor) -> bool:
        """Keep a reduced gradient that was not applied, for the next step; False if the parameter has no error memory.

        gradwire's DistributedDataParallel calls it for results of a failed step, and for a parameter that no rank used
        in a step: its ``.grad`` stays unchanged, although error feedback of earlier steps may have reduced to a nonzero
        gradient.

        Args:
            name: parameter name.
            gradient: the reduced gradient minus this rank's contribution.
        """
        error = self._tensors.get(ERRORS, {}).get(plain_name(name))
        if error is None:
            return False
        error.add_(self._share(ERRORS, as_real(gradient), self._group))
        return True


class Checkpointed(DeclaredMemory):
    """Declared memory, with checkpoints that load on any world size, and their validation."""

    iter: int  # number of steps so far

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None, options: Any) -> None:
        super().__init__(hook, process_group, options)
        self._is_loaded = False  # whether the memory is from a checkpoint
        self._n_loaded: dict[str, int] = {}  # tensors of the latest checkpoint, by entry
        self._fits_model = True  # whether the loaded memory was compared with the model
        self._prepared: dict[str, Any] | None = None  # the result of `state_dict` until the next step

    def counts(self) -> dict[str, Any]:
        """Further numbers of a checkpoint, equal on all ranks."""
        return {}

    def load_counts(self, saved: Mapping[str, Any]) -> None:
        """Take `counts` from a checkpoint."""

    def prepare_checkpoint(self) -> None:
        """Collect the errors of all ranks, and keep the copy for `state_dict` until the next step.

        A collective call: every rank must make it, between two steps. Afterwards, any rank may call `state_dict` alone,
        for trainers that save on rank 0. The copy takes CPU memory on every rank.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within two minutes.

        Examples:
            >>> state.prepare_checkpoint()
            >>> if dist.get_rank() == 0:
            ...     torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        """
        self._prepared = None
        self._check_can_be_saved()
        self._meet("prepare_checkpoint()", PREPARE_TIMEOUT)
        self._prepared = self._collected()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain CPU tensors and numbers, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all ranks. Between
        `prepare_checkpoint` and the next step, any rank may call it alone: it then returns the prepared copy, and two
        such calls share tensors.

        Every parameter with a dense gradient has an entry even before the first step, so that
        ``torch.distributed.checkpoint`` can load: register the hook or `bind` the model before you load.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten seconds. A later
                call on all ranks works.
        """
        if self._prepared is not None:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._prepared.items()}
        self._check_can_be_saved()
        try:
            self._meet("state_dict()", STATE_DICT_TIMEOUT)
        except RanksMissing as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error
        return self._collected()

    def merge_shards(self, saved: dict[str, Any], shards: Sequence[dist.ProcessGroup]) -> dict[str, Any]:
        """Merge the entries of a `state_dict` that have no shape over the shards of a model. A collective call.

        Raises:
            NotImplementedError: they depend on the shards.
        """
        raise NotImplementedError(
            f"The {', '.join(saved)} of {type(self).__name__} cannot be loaded with another number of shards. Save "
            "state.state_dict() of every rank in a separate file, and resume with the same mesh."
        )

    def _meet(self, call: str, timeout: timedelta) -> None:
        """Wait for the same call on every rank."""
        group = self._group
        named_barrier(group, f"{type(self).__name__}.{call}", timeout, connections_of(group).check_peers)

    def _check_can_be_saved(self) -> None:
        """Raise RuntimeError if a checkpoint would hold numbers instead of names, or no entries."""
        self._names.search()
        self._names.require(f"A checkpoint of a {type(self).__name__}")
        if not self._names.is_complete and self.iter == 0 and not self._is_loaded:
            raise RuntimeError(
                f"This {type(self).__name__} has no model yet, so the entries of its checkpoint are not known. "
                f"Register it with model.register_comm_hook(state, {self.hook_name}), or call state.bind(model), "
                "before it is saved or loaded."
            )

    def _collected(self) -> dict[str, Any]:
        """A new `state_dict`. A collective call."""
        self.initialize(self._names.compressible())
        return {"iter": self.iter, **{entry: self._merged(entry) for entry in self.memory}, **self.counts()}

    def initialize(self, parameters: Mapping[Tensor, str]) -> None:
        """Allocate memory, before it is saved, that no step has used yet and that does not start from zeros."""

    def keeps(self, entry: str) -> bool:
        """Whether every parameter will have this memory, from zeros, under the current options."""
        return self.memory[entry].shape is not None

    def _merged(self, entry: str) -> dict[str, Tensor]:
        """The tensors of all ranks, merged as declared, on the CPU. A collective call."""
        own = self.tensors(entry)
        present = set(own)
        if self.keeps(entry):
            for parameter, name in self._names.compressible().items():
                if name not in own:
                    own[name] = self.memory[entry].zeros(as_real(parameter), torch.device("cpu"))
        names = sorted(own)  # in the same order on all ranks
        merged = {name: own[name] for name in names if name not in present}
        if self.memory[entry].merge == "same":
            merged |= {name: own[name].to("cpu", copy=True) for name in present}
        elif names:
            divisor = self._group.size() if self.memory[entry].merge == "mean" else 1
            device = next(iter([*self._names.parameters(), *own.values()])).device
            executor = executor_for(self.process_group, device)

            async def add_up() -> None:
                # After a failed step, some ranks may have a tensor and others not yet.
                n_ranks = torch.tensor([float(name in present) for name in names], device=device)
                await executor.transport.all_reduce(n_ranks)
                for name, n in zip(names, n_ranks.tolist(), strict=True):
                    if n > 0:
                        total = (own[name].to(device) / divisor).contiguous()  # strides may differ between ranks
                        await executor.transport.all_reduce(memory_order(total))
                        merged[name] = total.cpu()

            executor.submit(lambda _: add_up()).wait()
        return merged

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size.

        Memory is checked against the parameters; if those are not known yet, before the first compressed step.

        Raises:
            ValueError: an entry is missing, has the wrong type, dtype or shape, is not finite, or is out of range. The
                message names the entry. The state is not modified.
        """
        self._check_state(state_dict)
        for entry, declared in self.memory.items():
            loaded = {name: tensor.detach().clone() for name, tensor in state_dict[entry].items()}
            # The world size, and with it this rank's share of a sum, may not be known yet.
            self._tensors[entry], self._loaded[entry] = ({}, loaded) if declared.merge == "sum" else (loaded, {})
            self._n_loaded[entry] = len(loaded)
        self._buckets, self._scale = {}, None
        self._restored(state_dict)

    def _restored(self, saved: Mapping[str, Any]) -> None:
        """Take the counts that belong to restored memory, which is compared with the model before it is used."""
        self._prepared = None
        self._is_loaded, self._fits_model = True, False
        self.load_counts(saved)
        self.iter = saved["iter"]

    def replicated(self) -> dict[str, object]:
        """The number of steps; after a load also numbers of tensors, and digests of those equal on all ranks."""
        facts: dict[str, object] = {"iter": self.iter}
        for entry, declared in self.memory.items():
            if declared.merge == "same" and (self._is_loaded_anew or self.compares_memory()):
                facts[f"memory {entry}"] = f"{len(self._tensors[entry])}, digest {digest(self._tensors[entry])}"
            elif self._is_loaded_anew and entry in self._n_loaded:
                facts[f"loaded {entry}"] = self._n_loaded[entry]
        return facts

    def compares_memory(self) -> bool:
        """Whether every handshake compares the memory that is the same on all ranks, not only one after a load."""
        return False

    def replicated_state(self) -> dict[str, Any]:
        """The part of the state that is equal on all ranks: numbers and tensors, in dictionaries with string keys."""
        same = [entry for entry, declared in self.memory.items() if declared.merge == "same"]
        return {"iter": self.iter, **{entry: self.tensors(entry) for entry in same}, **self.counts()}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Continue from the `replicated_state` of another rank; keep this rank's error memory."""
        self.drop_buckets()
        for entry in self.memory.keys() & replicated.keys():
            self._tensors[entry] = {name: tensor.clone() for name, tensor in replicated[entry].items()}
        self._restored(replicated)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch's hook states."""
        memory = {"iter": self.iter, **{entry: self._trained(entry) for entry in self.memory}, **self.counts()}
        return {"options": option_values(self.options), "memory": memory, "loaded": self._loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        memory, loaded = state["memory"], state.get("loaded", {})  # pickles of earlier versions may lack "loaded"
        if "iter" in state:  # and have the step count here
            memory = {"iter": state["iter"], **memory}
        for entry in self.memory:
            self._tensors[entry] = {name: tensor.clone() for name, tensor in memory[entry].items()}
            self._loaded[entry] = {name: tensor.clone() for name, tensor in loaded.get(entry, {}).items()}
        self._restored(memory)

    # Validation.

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a `state_dict` is whole and fits the parameters known so far."""
        check_entries(state, type(self).__name__, ("iter", *self.memory, *self.counts()))
        check_count("iter", state["iter"])
        self.check_counts(state)
        for entry, declared in self.memory.items():
            for place, tensor in checked_tensors(entry, state[entry]):
                check_elements(place, tensor, tensor.isfinite(), "a finite number")
                if declared.dtype is not None:
                    check_range(place, tensor)
        self._check_fits({entry: state[entry] for entry in self.memory})

    def check_counts(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the entries of `counts` are valid."""

    def check_shapes(self, memory: MemoryByName, layouts: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless loaded memory has the declared shapes for these layouts of gradients, by parameter
        name.
        """
        for entry, (_, _, shape_of) in self.memory.items():
            for name, tensor in memory[entry].items():
                if shape_of is not None and name in layouts:
                    check_memory_shape(entry, name, tensor, shape_of(as_real(layouts[name])))

    def _check_fits(self, memory: MemoryByName) -> None:
        """Raise ValueError unless loaded memory fits the model, as far as its parameters are known."""
        parameters = self._names.known()
        self.check_shapes(memory, {name: gradient_layout(parameter) for name, parameter in parameters.items()})
        errors = memory.get(ERRORS, {})
        if not self._names.is_complete:
            return
        if unknown := [name for name in errors if name not in parameters]:
            raise ValueError(
                f"{len(unknown)} of {len(errors)} entries of the error memory belong to parameters that this model "
                f"does not have, such as {unknown[0]!r}; it has {next(iter(parameters), 'none')!r} and others. "
                "The checkpoint belongs to another model. Load the state that was saved with this model, or start with "
                "a new state."
            )
        for name, error in errors.items():
            if parameters[name].dtype.to_real() != torch.float64:
                check_range(f"{ERRORS}[{name!r}]", error)

    def check_loaded(self, names: Sequence[str]) -> None:
        if not self._is_loaded or self._fits_model:
            return
        memory = {entry: self._tensors[entry] | self._loaded[entry] for entry in self.memory}
        known = {name for tensors in memory.values() for name in tensors}
        if known and known.isdisjoint(names) and all(map(is_number, known)) != all(map(is_number, names)):
            raise ValueError(
                f"The loaded state has an entry {min(known)!r}, this bucket has {names[0]!r}: parameter names were "
                "known in only one of the two runs. Call state.bind(model) before the first step in both."
            )
        self._check_fits(memory)
        self._fits_model = self._names.is_complete


def option_values(options: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; empty for None."""
    return {each.name: getattr(options, each.name) for each in fields(options)} if options is not None else {}
