"""Places: the tensors that calls of a collective pass again and again, with what reduces them."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Connections, Executor, Transport, connections_of
from gradwire.comm.store_collectives import named_barrier
from gradwire.comm.transport import wait_for
from gradwire.compress import Gradients, ScatterBucket, WirePolicy, start_reduce_scatter
from gradwire.compress._validation import check_count, check_elements, check_entries, checked_tensors
from gradwire.compress.policy import wire_name
from gradwire.hooks._bucket import BucketWork, OwnBucket, layout_without_memory
from gradwire.hooks._by_name import NamedHook, hook_named
from gradwire.hooks._handshake import compare_settings
from gradwire.hooks._memory import ERRORS
from gradwire.hooks.hook_state import STATE_DICT_TIMEOUT, HookState
from gradwire.kernels import WIRE_FORMATS, SegmentTable

logger = logging.getLogger("gradwire.collectives")
MOST_PLACES = 256  # without memory on a process group; then the oldest is dropped
PASS_MEMORY = "Pass memory=memory['name'] with memory = gradwire.collectives.Memory(), or choose int8."
FULL = {"fp32": "allreduce", "bf16": "bf16-fp32-sum", "fp16": "scaled-fp16"}  # hooks of wires without scales per block


def named_wire(wire: str) -> NamedHook:
    """The hook that sends a wire format. Raises ValueError for any other name."""
    wire = wire_name("wire", wire)
    return hook_named(FULL.get(wire, wire))


class TensorBucket(OwnBucket):
    """Dense tensors of one dtype, as the bucket of a hook, which reads and writes them in place."""

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], group: dist.ProcessGroup) -> None:
        self._parameters = [layout_without_memory(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        self._names = list(names)
        self._table = SegmentTable(self._parameters)
        self.position, self.is_first, self.is_final, self.zero_copy = 0, True, True, True
        self.device, self.dtype, self.process_group = tensors[0].device, tensors[0].dtype.to_real(), group
        self.names = tuple(names)
        self.first, self.model_parameters = self._parameters[0], self._parameters
        self.layouts = [(layout.shape, layout.stride()) for layout in self._parameters]
        self.tensors: Sequence[Tensor] = ()

    def buffer(self) -> Tensor:
        """The first tensor: the result of the hook's future."""
        return self.tensors[0]

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The tensors themselves."""
        gradients = Gradients(self.tensors, self._table)
        return BucketWork(gradients, gradients, self.tensors[0])

    def empty_buffer(self) -> Tensor:
        """A flat tensor for the mean."""
        return torch.empty(self._table.numel, dtype=self._parameters[0].dtype, device=self.device)


class Place:
    """The tensors of one collective on a process group, and what reduces them.

    Args:
        tensors: tensors in the layouts of those that calls pass.
        names: their names, keys of the error memory.
        wire: the wire format.
        options: ``use_error_feedback``, and options of `Memory`.

    Attributes:
        collective: name of the collective.
        state: has the error memory.
        in_flight: the exchange of the latest call; None once a `CompressedWork.wait` has ended.
    """

    collective: str
    state: Any

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        wire: str,
        group: dist.ProcessGroup,
        options: Mapping[str, Any],
    ) -> None:
        self._group, self._device = group, tensors[0].device
        self.in_flight: Future[Any] | None = None
        self._prepare(tensors, names, wire, options)

    def _prepare(self, tensors: Sequence[Tensor], names: Sequence[str], wire: str, options: Mapping[str, Any]) -> None:
        """Make ``state``, and what else a call needs."""
        raise NotImplementedError

    @property
    def _executor(self) -> Executor:
        return connections_of(self._group).executor(self._device)

    def _wait_for_earlier(self) -> None:
        """Wait for the earlier call: its kernels read the addresses of one call, and its errors come first.

        On a GPU, the current stream waits. Errors of that call are left to its `CompressedWork.wait`. Raises
        RuntimeError if a rank has left.
        """
        if self.in_flight is not None:
            wait_for(self.in_flight.then(lambda _: None), connections_of(self._group).check_peers)


class AveragePlace(Place):
    """The tensors of all-reduces, averaged by a hook."""

    collective = "all_reduce"

    def _prepare(self, tensors: Sequence[Tensor], names: Sequence[str], wire: str, options: Mapping[str, Any]) -> None:
        named, group = named_wire(wire), self._group
        if named.start_option is None:
            self.state = named.state(group)
        else:  # every tensor in this format, from the first call on
            all_options = {named.start_option: 0, "wires": {"*": named.options["wire"]}, **options}
            self.state = named.state(group, **all_options)
        self._hook: Any = named.hook
        self._bucket = TensorBucket(tensors, names, group)
        self._table = SegmentTable(self._bucket.parameters())  # of `finish`, while another call is in flight
        if isinstance(self.state, HookState):
            self.state.names.bind_layouts(dict(zip(names, self._bucket.parameters(), strict=True)))

    def start(self, tensors: Sequence[Tensor]) -> Future[Any]:
        """Start to replace the tensors by their mean over the ranks; `finish` takes the result of the future."""
        self._wait_for_earlier()
        self._bucket.tensors = tensors
        try:
            self.in_flight = self._hook(self.state, self._bucket)
        finally:
            self._bucket.tensors = ()
        self._executor.keep(tensors)
        return self.in_flight

    def finish(self, tensors: Sequence[Tensor], result: Tensor) -> None:
        """Write a hook's result into the tensors, unless the hook has."""
        if result.data_ptr() != tensors[0].data_ptr():
            Gradients(tensors, self._table).unflatten(result)


class ScatterPlace(Place):
    """The input of reduce-scatters, and its error memory.

    Attributes:
        iter: number of calls.
    """

    collective = "reduce_scatter_tensor"

    def _prepare(self, tensors: Sequence[Tensor], names: Sequence[str], wire: str, options: Mapping[str, Any]) -> None:
        (source,), (self._name,) = tensors, names
        lengths, formats = [source.numel() // self._group.size()], [WIRE_FORMATS[wire_name("wire", wire)]]
        transport, quantization = self._executor.transport, WirePolicy(**options).quantization()
        self._bucket = ScatterBucket(lengths, formats, names, source.dtype, source.device, transport, quantization)
        self.state, self.iter = self, 0

    def start(self, source: Tensor, output: Tensor, scale: float) -> Future[Any]:
        """Start to write this rank's part of ``scale`` times the sum of ``source`` over the ranks into ``output``."""
        self._wait_for_earlier()
        self.iter += 1
        executor = self._executor
        self.in_flight = start_reduce_scatter(self._bucket, source, output, scale, self.iter, executor)
        executor.keep([source, output])
        return self.in_flight

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return 0 if self._bucket.errors is None else self._bucket.errors.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The number of calls, and the mean of all ranks' errors, one per element of the input. A collective call."""
        connections = connections_of(self._group)
        named_barrier(self._group, "Memory.state_dict()", STATE_DICT_TIMEOUT, connections.check_peers)
        mean = self._bucket.errors_by_name()[self._name].flatten().float() / self._group.size()
        dist.all_reduce(mean, group=self._group)
        return {"iter": self.iter, ERRORS: {self._name: mean.cpu()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Padding at the end of the input, of zeros, may differ.

        Raises:
            ValueError: an entry is missing, not finite, or of an input of another size. Nothing is modified.
        """
        check_entries(state_dict, "Memory", ("iter", ERRORS))
        check_count("iter", state_dict["iter"])
        saved = dict(checked_tensors(ERRORS, state_dict[ERRORS]))
        place = f"{ERRORS}[{self._name!r}]"
        if list(saved) != [place]:
            raise ValueError(f"The errors are of {', '.join(saved)}; expected {place}.")
        check_elements(place, saved[place], saved[place].isfinite(), "a finite number")
        errors = self._bucket.errors_by_name()[self._name]
        padded, flat = errors.new_zeros(errors.numel(), dtype=torch.float32), saved[place].flatten()
        if flat[padded.numel() :].any():
            raise ValueError(
                f"{place} has {flat.numel()} elements; expected {padded.numel()}, or only zeros after them."
            )
        n_kept = min(flat.numel(), padded.numel())
        padded[:n_kept] = flat[:n_kept]
        errors.copy_(padded.view_as(errors))
        self.iter = state_dict["iter"]


class Calls:
    """The calls on a process group, which all its ranks make in one order.

    Attributes:
        count: number of calls so far.
        op: the operation of the latest call, "AVG" or "SUM".
        places: places without memory, by collective, operation, wire and layouts, the latest last.
    """

    def __init__(self, connections: Connections) -> None:
        self.count, self.op, self._number = 0, "AVG", connections.new_reducer(self)
        self.places: OrderedDict[object, Place] = OrderedDict()

    def restart(self, count: int) -> None:
        """Begin anew after ``count`` calls: some ranks have finished the latest one, others have not."""
        self.count = count
        self.places.clear()

    def compare(self, group: dist.ProcessGroup, facts: Mapping[str, object]) -> None:
        """Raise RuntimeError on every rank unless all make this call, with equal facts. For a call of a new kind."""
        settings = {name: str(fact) for name, fact in {"op": self.op, **facts}.items()}
        settings = {"hook": f"call {self.count} of gradwire.collectives", **settings}
        remedy = "Make the same calls in the same order on every rank, then resynchronize."
        compare_settings(group, settings, False, self._number, "Calls of gradwire.collectives", remedy)

    def check(self, connections: Connections, call: int) -> None:
        """Raise RuntimeError if a rank has left, or compares another call of this number."""
        connections.check_peers()
        told = connections.announced(self._number, "hook") or ""
        if f" call {call} of " in told:
            raise RuntimeError(
                f"{told}, with a tensor, wire or operation that is new, and rank {dist.get_rank()} with known ones."
            )


_calls: weakref.WeakKeyDictionary[Connections, Calls] = weakref.WeakKeyDictionary()


def calls_on(connections: Connections) -> Calls:
    """The calls on the group of these connections."""
    if connections not in _calls:
        _calls[connections] = Calls(connections)
    return _calls[connections]


def layout_key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """The key of a place on this rank: its tensors have this dtype, device, shapes and strides."""
    return (tensors[0].dtype, tensors[0].device, *((tensor.shape, tensor.stride()) for tensor in tensors))


def facts_of(kind: type[Place], tensors: Sequence[Tensor], wire: str) -> dict[str, object]:
    """The facts that must be equal on all ranks, for `Calls.compare`."""
    shapes = {f"shape of tensor {i}": tuple(tensor.shape) for i, tensor in enumerate(tensors)}
    dtype, device = tensors[0].dtype, tensors[0].device.type
    return {"collective": kind.collective, "wire": wire, "dtype": dtype, "device": device, **shapes}


P = TypeVar("P", bound=Place)


def stateless_place(kind: type[P], tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls) -> P:
    """The place of calls without memory; made at the first call, on every rank."""
    places, key = calls.places, (kind, calls.op, wire, layout_key(tensors))
    if key not in places:
        named_wire(wire)
        calls.compare(group, facts_of(kind, tensors, wire))
        if len(places) == MOST_PLACES:
            places.popitem(last=False)
        if kind is AveragePlace and WIRE_FORMATS[wire_name("wire", wire)].bits < WIRE_FORMATS["int6"].bits:
            logger.warning("all_reduce in %s without memory loses small values in every call. %s", wire, PASS_MEMORY)
        names = [str(i) for i in range(len(tensors))]
        places[key] = kind(tensors, names, wire, group, {"use_error_feedback": False})
    return places[key]  # type: ignore[return-value]  # the key has its class
