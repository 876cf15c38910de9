"""`StateMemory`: the memory of a hook state by parameter name, from bucket to bucket and from run to run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Connections, Executor, Task, executor_for
from gradwire.comm.shared_facts import SharedFacts
from gradwire.compress.memory import BucketMemory, Memory, MemoryByName
from gradwire.exchange.bucket import Bucket
from gradwire.exchange.handshake import digest
from gradwire.exchange.names import is_number, plain_name
from gradwire.kernels import SegmentTable, as_real, gradient_layout, layout_in_dtype, memory_order
from gradwire.validation import check_elements, check_memory_shape, check_range, checked_tensors

ERRORS = "errors"  # the entry with error memory

StateDict = dict[str, Any]  # a checkpoint, or a part of it: numbers and tensors in nested dictionaries with string keys

_REMEDY = (
    "Gradients and errors of different scales would be added up. Load the state of the gradient scaler on every rank, "
    "and call state.follow_scaler(scaler) on every rank. A rank without inputs left in join() does not update its "
    "scaler: let it load that of a rank with inputs."
)


def _describe_scale(scale: float | None) -> dict[str, str]:
    return {"scale": "none, because state.follow_scaler(scaler) was not called," if scale is None else repr(scale)}


class Scaler(Protocol):
    """A gradient scaler, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor by which the loss is multiplied."""


class StateMemory:
    """The declared memory of a hook state: one tensor per entry and parameter.

    A bucket keeps the memory of its parameters while its parameters, their layouts and the ranks stay the same. Its
    tensors are also here, by name, so that the next bucket of a parameter continues with them. Errors that a bucket
    holds in another form return here when it is dropped.

    Attributes:
        declared: declarations by name of the entry in a checkpoint.
        own: this rank's tensors, by entry and parameter name.
        loaded: sums of a checkpoint, of which this rank takes its share in the next compressed step, likewise.
        buckets: memory of each bucket, by parameter names, with the layouts and ranks for which it was made. None for
            a bucket that is sent uncompressed.
        is_loaded: whether the memory is from a checkpoint.
        scaler: the gradient scaler whose scale the errors follow, if there is one.
    """

    def __init__(self, state: Any, declared: Mapping[str, Memory]) -> None:
        for entry, each in declared.items():
            if not isinstance(each, Memory):
                raise TypeError(f"The memory {entry!r} is {each!r}; expected a Memory.")
        self._state = weakref.proxy(state)  # the `HookState`
        self.declared = dict(declared)
        self.own: dict[str, dict[str, Tensor]] = {entry: {} for entry in declared}
        self.loaded: dict[str, dict[str, Tensor]] = {entry: {} for entry in declared}
        self.buckets: dict[tuple[str, ...], tuple[object, BucketMemory | None]] = {}
        self.is_loaded = False
        self.scaler: Scaler | None = None
        self._scale: float | None = None  # scale of the errors; None until `match_scale` reads it
        self._shared_scale: SharedFacts | None = None  # the scale on which all ranks have agreed; None without a scaler
        self._n_loaded: dict[str, int] = {}  # tensors of the latest checkpoint, by entry
        self._fits_model = True  # whether the loaded memory was compared with the model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.declared})"

    def tensors(self, entry: str) -> dict[str, Tensor]:
        """This rank's memory by parameter name, including its share of a checkpoint not yet used."""
        return self.trained(entry) | {name: self._share(entry, each) for name, each in self.loaded[entry].items()}

    def trained(self, entry: str) -> dict[str, Tensor]:
        """This rank's own memory, without its share of a checkpoint not yet used."""
        tensors = dict(self.own[entry])
        for _, bucket in self._made():
            tensors |= bucket.folded().get(entry, {})
        return tensors

    def _made(self) -> list[tuple[tuple[str, ...], BucketMemory]]:
        """The memory of each compressed bucket, with its parameter names."""
        return [(names, bucket) for names, (_, bucket) in list(self.buckets.items()) if bucket is not None]

    def _share(self, entry: str, merged: Tensor) -> Tensor:
        """This rank's part of a tensor of a checkpoint."""
        return merged / self._state._group.size() if self.declared[entry].merge == "sum" else merged.clone()

    # Buckets.

    def memory_of(self, bucket: Bucket, names: tuple[str, ...], group: dist.ProcessGroup) -> BucketMemory | None:
        """The memory of a bucket. A new bucket starts from the memory of earlier ones, or from a checkpoint."""
        made_for = (id(bucket.first), bucket.layouts, bucket.dtype, bucket.device, group.size(), group.rank())
        kept = self.buckets.get(names)
        if kept is None or kept[0] != made_for:
            kept = self.buckets[names] = (made_for, self._new_bucket(bucket, names, group))
        return kept[1]

    def _new_bucket(self, bucket: Bucket, names: tuple[str, ...], group: dist.ProcessGroup) -> BucketMemory | None:
        self._state.names.check_parameters(names, bucket.parameters())
        self._check_loaded(names)
        for entry, loaded in self.loaded.items():
            self.own[entry] |= {name: self._share(entry, loaded.pop(name)) for name in names if name in loaded}
        executor = executor_for(group, bucket.device)
        if any(not set(names).isdisjoint(known) for known in self.buckets):
            executor.join()  # if a backward has raised, its work on this memory may still run
        self.drop_buckets(names)
        self._keep_while_copied(names, executor)
        parameters = [gradient_layout(parameter) for parameter in bucket.parameters()]
        made: BucketMemory | None = self._state.make_bucket(
            parameters, bucket.dtype, names, executor.transport, self.own
        )
        if made is not None:
            self.keep(made.memory)
            for name in made.inherited or ():  # the bucket holds these errors now, and has no views of them
                self.own[ERRORS].pop(name, None)
        return made

    def _keep_while_copied(self, names: Sequence[str], executor: Executor) -> None:
        """Keep the memory of earlier tensors, once nobody refers to them, until a new bucket has taken over from them.

        On a GPU, it does so on the current stream, which may be one of FSDP2's, and on those of the executor.
        """
        earlier = [own[name] for own in self.own.values() for name in names if name in own]
        executor.keep(earlier)
        for tensor in earlier:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def declared_memory(
        self, parameters: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str], earlier: MemoryByName
    ) -> BucketMemory:
        """New declared memory for these parameters, copied from earlier buckets where there is some, else zeros."""
        layouts = [layout_in_dtype(as_real(parameter), dtype) for parameter in parameters]
        tensors: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.declared}
        for entry, declared in self.declared.items():
            for name, layout in zip(names, layouts, strict=True):
                zeros = declared.zeros(layout, layout.device)
                kept = earlier[entry].get(name, zeros)
                check_memory_shape(entry, name, kept, zeros.shape)
                tensors[entry][name] = kept.to(zeros.device, zeros.dtype)
        return BucketMemory(SegmentTable(layouts), tensors)

    def keep(self, memory: MemoryByName) -> None:
        """Keep tensors by entry and parameter name."""
        for entry, tensors in memory.items():
            self.own[entry].update(tensors)

    def drop_buckets(self, names: Sequence[str] | None = None) -> None:
        """Drop the buckets that have one of these parameters, by default all, and keep their memory."""
        for key, (_, bucket) in list(self.buckets.items()):
            if names is None or not set(names).isdisjoint(key):
                if bucket is not None:
                    self.keep(bucket.folded())
                    bucket.is_retired = True
                del self.buckets[key]

    # Errors.

    def residuals(self) -> list[Tensor]:
        """This rank's error memory, of both shots where there are two; for ``residual_ratio``."""
        flat, own = [], dict(self.own.get(ERRORS, {}))
        for _, bucket in self._made():
            if bucket.errors is not None:
                flat.append(bucket.errors)
                for name in bucket.memory[ERRORS]:  # views of them
                    own.pop(name, None)
        return [*flat, *own.values()]

    def follow(self, scaler: Scaler | None) -> None:
        """Keep the errors in the scale of a gradient scaler from now on; None to follow none."""
        self.scaler, self._scale = scaler, None
        self.match_scale()

    def match_scale(self, connections: Connections | None = None) -> None:
        """Multiply all errors, also those that no step has used yet, if the scale has changed since the last call.

        With ``connections``, all ranks make this call: RuntimeError, on every rank, unless they have the same scale.
        """
        if ERRORS not in self.declared:
            return
        scale = None if self.scaler is None else float(self.scaler.get_scale())
        if connections is not None:
            if self._shared_scale is None or not self._shared_scale.belong_to(connections):
                self._shared_scale = SharedFacts(connections, "loss scales", _REMEDY, _describe_scale, agreed=None)
            self._shared_scale.check(scale)
        if scale is None:
            return
        before, self._scale = self._scale, scale
        if before is None or before == scale:
            return
        factor = scale / before if before else 0
        waiting = [self.loaded.get(ERRORS, {}), *(bucket.inherited or {} for _, bucket in self._made())]
        for error in [*self.residuals(), *(error for errors in waiting for error in errors.values())]:
            error.mul_(factor)

    def take_back(self, name: str, gradient: Tensor) -> bool:
        """Keep a reduced gradient that was not applied, for the next step; False if the parameter has no error memory.

        ``gradient`` is without this rank's contribution. It is of a failed step, or of a parameter that no rank used in
        a step, whose ``.grad`` stays unchanged although errors of earlier steps were sent.
        """
        name, gradient = plain_name(name), as_real(gradient)
        if ERRORS not in self.declared:
            return False
        for names, bucket in self._made():
            if name in names and bucket.take_back(name, self._share(ERRORS, gradient)):
                return True
        error = self.own[ERRORS].get(name)
        if error is not None:
            error.add_(self._share(ERRORS, gradient))
        return error is not None

    # Checkpoints.

    def merged(self, entry: str) -> dict[str, Tensor]:
        """The tensors of all ranks, merged as declared, on the CPU, in the order of their names. A collective call."""
        declared, names, group = self.declared[entry], self._state.names, self._state._group
        own = self.tensors(entry)
        present = set(own)
        if self._state._keeps(entry):
            for parameter, name in names.compressible().items():
                if name not in own:
                    own[name] = declared.zeros(as_real(parameter), torch.device("cpu"))
        if declared.merge == "same":
            return {name: own[name].to("cpu", copy=True) for name in sorted(own)}
        merged = {name: own[name] for name in own if name not in present}
        if own:
            divisor = group.size() if declared.merge == "mean" else 1
            device = next(iter([*names.parameters(), *own.values()])).device
            executor = executor_for(group, device)

            async def add_up() -> None:
                # After a failed step, some ranks may have a tensor and others not yet.
                order = sorted(own)  # the same on all ranks
                n_ranks = torch.tensor([float(name in present) for name in order], device=device)
                await executor.transport.all_reduce(n_ranks)
                for name, n in zip(order, n_ranks.tolist(), strict=True):
                    if n > 0:
                        total = (own[name].to(device) / divisor).contiguous()  # strides may differ between ranks
                        await executor.transport.all_reduce(memory_order(total))
                        merged[name] = total.cpu()

            executor.submit(Task(lambda _: add_up())).wait()
        return dict(sorted(merged.items()))

    def load(self, saved: MemoryByName) -> None:
        """Continue from `merged` memory, which was checked."""
        for entry, declared in self.declared.items():
            loaded = {name: tensor.detach().clone() for name, tensor in saved[entry].items()}
            # The world size, and with it this rank's share of a sum, may not be known yet.
            self.own[entry], self.loaded[entry] = ({}, loaded) if declared.merge == "sum" else (loaded, {})
            self._n_loaded[entry] = len(loaded)
        for _, bucket in self._made():
            bucket.is_retired = True
        self.buckets, self._scale = {}, None
        self.is_loaded, self._fits_model = True, False

    def restore(self, own: MemoryByName, loaded: MemoryByName | None = None) -> None:
        """Continue with this rank's tensors of a pickle, or those of another rank; keep entries that are missing."""
        self.drop_buckets()
        for target, source in ((self.own, own), (self.loaded, loaded or {})):
            for entry in self.declared.keys() & source.keys():
                target[entry] = {name: tensor.clone() for name, tensor in source[entry].items()}
        self.is_loaded, self._fits_model = True, False

    def replicated(self) -> dict[str, dict[str, Tensor]]:
        """The memory that is equal on all ranks."""
        return {entry: self.tensors(entry) for entry, declared in self.declared.items() if declared.merge == "same"}

    def digests(self) -> dict[str, object]:
        """Facts for a handshake: numbers and digests of the tensors that all ranks must share."""
        same = {entry: self.own[entry] for entry, declared in self.declared.items() if declared.merge == "same"}
        return {f"memory {entry}": f"{len(own)}, digest {digest(own)}" for entry, own in same.items()}

    def loaded_facts(self) -> dict[str, object]:
        """Facts for a handshake after a load: `digests`, and the numbers of other loaded tensors."""
        others = [entry for entry in self._n_loaded if self.declared[entry].merge != "same"]
        return self.digests() | {f"loaded {entry}": self._n_loaded[entry] for entry in others}

    # Validation.

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless the entries of a checkpoint are whole and fit the parameters known so far."""
        for entry, declared in self.declared.items():
            for name, tensor in checked_tensors(entry, saved[entry]):
                check_elements(name, tensor, tensor.isfinite(), "a finite number")
                if declared.dtype is not None:
                    check_range(name, tensor)
        self._check_fits({entry: saved[entry] for entry in self.declared})

    def _check_fits(self, memory: MemoryByName) -> None:
        """Raise ValueError unless loaded memory fits the model, as far as its parameters are known."""
        names = self._state.names
        parameters = names.known()
        layouts = {name: gradient_layout(parameter) for name, parameter in parameters.items()}
        for entry, declared in self.declared.items():
            for name, tensor in memory[entry].items():
                if declared.shape is not None and name in layouts:
                    check_memory_shape(entry, name, tensor, declared.shape(as_real(layouts[name])))
        self._state._check_shapes(memory, layouts)
        errors = memory.get(ERRORS, {})
        if not names.is_complete:
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

    def _check_loaded(self, names: Sequence[str]) -> None:
        """Raise ValueError, before anything is sent, if loaded memory does not fit the parameters known so far."""
        if not self.is_loaded or self._fits_model:
            return
        memory = {entry: self.own[entry] | self.loaded[entry] for entry in self.declared}
        known = {name for tensors in memory.values() for name in tensors}
        if known and known.isdisjoint(names) and all(map(is_number, known)) != all(map(is_number, names)):
            raise ValueError(
                f"The loaded state has an entry {min(known)!r}, this bucket has {names[0]!r}: parameter names were "
                "known in only one of the two runs. Call state.bind(model) before the first step in both."
            )
        self._check_fits(memory)
        self._fits_model = self._state.names.is_complete
