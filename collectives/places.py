"""`Place`: the tensors that calls of a collective pass again and again, with the hook that averages them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.algorithms import Gradients, ScatterBucket
from gradwire.algorithms.policy import wire_name
from gradwire.comm import Connections, Transport
from gradwire.hooks._bucket import BucketWork, OwnBucket, layout_without_memory
from gradwire.hooks._by_name import NamedHook, hook_named
from gradwire.hooks._handshake import compare_settings
from gradwire.hooks.hook_state import HookState
from gradwire.kernels import SegmentTable

MOST_PLACES = 256  # without memory on a process group; then the oldest is dropped
FULL = {"fp32": "allreduce", "bf16": "bf16-fp32-sum", "fp16": "scaled-fp16"}  # hooks of wires without scales per block


def named_wire(wire: str) -> NamedHook:
    """The hook that sends a wire format. Raises ValueError for any other name."""
    wire = wire_name("wire", wire)
    return hook_named(FULL.get(wire, wire))


def every_tensor(named: NamedHook) -> dict[str, Any]:
    """Options of a state that sends every tensor in this format, from the first call on."""
    return {str(named.start_option): 0, "wires": {"*": named.options["wire"]}}


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
    """Tensors in these layouts on a process group, with a state of their own.

    Args:
        state, hook: as for ``register_comm_hook``.
        tensors: tensors in the layouts of all calls.
        names: their names.
        group: the ranks.
    """

    def __init__(
        self, state: Any, hook: Any, tensors: Sequence[Tensor], names: Sequence[str], group: dist.ProcessGroup
    ) -> None:
        self.state, self._hook, self._bucket = state, hook, TensorBucket(tensors, names, group)
        self.table = SegmentTable(self._bucket.parameters())  # of `finish`, while another call is in flight
        self._in_flight: Future[Tensor] | None = None
        if isinstance(state, HookState):
            state.names.bind_layouts(dict(zip(names, self._bucket.parameters(), strict=True)))

    def average(self, tensors: Sequence[Tensor]) -> Future[Tensor]:
        """Start to replace the tensors by their mean over the ranks; `finish` takes the result of the future."""
        if self._in_flight is not None and not self._in_flight.done():
            self._in_flight.wait()  # kernels read the addresses of one step
        self._bucket.tensors = tensors
        self._in_flight = self._hook(self.state, self._bucket)
        return self._in_flight

    def finish(self, tensors: Sequence[Tensor], result: Tensor) -> None:
        """Write a hook's result into the tensors, unless the hook has."""
        if result.data_ptr() != tensors[0].data_ptr():
            Gradients(tensors, self.table).unflatten(result)


class Calls:
    """The calls on a process group, which all its ranks make in one order.

    Attributes:
        count: number of calls so far.
        op: the operation of the latest call, "AVG" or "SUM".
        places: places of all-reduces without memory, by operation, wire and layouts, the latest last.
        scatters: buckets of reduce-scatters, by operation, wire and size.
    """

    def __init__(self, connections: Connections) -> None:
        self.count, self.op, self._number = 0, "AVG", connections.new_reducer(self)
        self.places: OrderedDict[object, Place] = OrderedDict()
        self.scatters: dict[object, ScatterBucket] = {}

    def restart(self, count: int) -> None:
        """Begin anew after ``count`` calls: some ranks have finished the latest one, others have not."""
        self.count = count
        self.places.clear()
        self.scatters.clear()

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


def facts_of(tensors: Sequence[Tensor], wire: str) -> dict[str, object]:
    """The facts that must be equal on all ranks, for `Calls.compare`."""
    shapes = {f"shape of tensor {i}": tuple(tensor.shape) for i, tensor in enumerate(tensors)}
    return {"wire": wire, "dtype": tensors[0].dtype, "device": tensors[0].device.type, **shapes}


def layout_key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """The key of a place on this rank: its tensors have this dtype, device, shapes and strides."""
    return (tensors[0].dtype, tensors[0].device, *((tensor.shape, tensor.stride()) for tensor in tensors))


def stateless_place(tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup, calls: Calls) -> Place:
    """The place of calls without memory; made at the first call, on every rank."""
    places, key = calls.places, (calls.op, wire, layout_key(tensors))
    if key not in places:
        named = named_wire(wire)
        calls.compare(group, facts_of(tensors, wire))
        options = {} if named.start_option is None else {**every_tensor(named), "use_error_feedback": False}
        if len(places) == MOST_PLACES:
            places.popitem(last=False)
        names = [str(i) for i in range(len(tensors))]
        places[key] = Place(named.state(group, **options), named.hook, tensors, names, group)
    return places[key]
