"""The all-reduce between replicas: `ReplicaAverage` passes a `ShardBucket` to the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, connections_of
from gradwire.comm.connections import has_streams
from gradwire.comm.transport import wait_for
from gradwire.compress import Gradients
from gradwire.exchange.bucket import BucketFacts, BucketWork, OwnBucket, layout_without_memory, tensor_in
from gradwire.exchange.decorators import CommHook, is_zero_copy, name_of
from gradwire.exchange.hook_state import HookState
from gradwire.exchange.names import plain_name
from gradwire.kernels import SegmentTable
from gradwire.sharded.exchange import ShardedExchange
from gradwire.sharded.torch_internals import ParameterGroup


def shard_layouts(parameters: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Tensors without memory in the layouts of this rank's shards of FSDP2's parameters, by name; none if empty."""
    layouts = {}
    for name, parameter in parameters.items():
        size, stride = parameter.sharded_size, parameter.contiguous_sharded_stride
        if size.numel() > 0:  # a shard is empty if dimension 0 has fewer rows than there are shards
            layouts[name] = layout_without_memory(size, stride, dtype, device)
    return layouts


class ShardBucket(OwnBucket):
    """The bucket that a hook gets: this rank's shards of the gradients of one parameter group.

    It is to FSDP2 what `gradwire.reducer.bucket.DenseBucket` is to gradwire's DDP. FSDP2 has collected the gradients in
    one flat tensor, whose shards are padded along dimension 0; the bucket has a view of it for each parameter.

    Args:
        parameters: FSDP2's parameters by name, in the order of the flat tensor. One has elements on this rank, or more.
        dtype: dtype of the flat tensor.
        device: its device.
        replicas: the ranks that hold the same shards.
        model_layouts: the `shard_layouts` of all parameters between whose replicas the hook averages. By these tensors
            a handshake knows the model.

    Attributes:
        numel: number of elements of the flat tensor, padding included.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        replicas: dist.ProcessGroup,
        model_layouts: Mapping[str, Tensor],
    ) -> None:
        layouts = shard_layouts(parameters, dtype, device)
        names = list(layouts)
        facts = BucketFacts(
            parameters=list(layouts.values()),
            names=names,
            plain_names=tuple(map(plain_name, names)),
            device=device,
            dtype=dtype.to_real(),
            process_group=replicas,
            model_parameters=list(model_layouts.values()),
            first=model_layouts[names[0]],
        )
        super().__init__(facts)
        self.zero_copy, self.is_final = True, False
        self.numel = 0
        self._offsets: list[int] = []
        for name, parameter in parameters.items():
            if name in layouts:
                self._offsets.append(self.numel)
            self.numel += parameter.padded_sharded_param_size.numel()
        self._table = SegmentTable(self._parameters)
        self._flat: Tensor | None = None
        self._replaced: Tensor | None = None  # the tensor that a hook passed to `set_buffer`

    def collect(self, flat: Tensor, position: int, is_last: bool, zero_copy: bool) -> None:
        """Hold the gradients of a backward, the bucket number ``position`` of it."""
        self._flat = flat
        self.zero_copy = zero_copy
        self.dtype = flat.dtype.to_real()
        self.position = position
        self.is_first = position == 0
        self.is_final = is_last

    def release(self) -> None:
        """Drop the gradients."""
        self._flat = self._replaced = None

    def gradients(self) -> list[Tensor]:
        """One view of `buffer` per parameter."""
        buffer = self.buffer()
        return self.views(buffer) if buffer.numel() == self.numel else list(self._table.views(buffer))

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view of a flat tensor per parameter."""
        return [
            flat.as_strided(layout.shape, layout.stride(), flat.storage_offset() + offset)
            for layout, offset in zip(self._parameters, self._offsets, strict=True)
        ]

    def buffer(self) -> Tensor:
        """The flat tensor, padding included, or that of `set_buffer`."""
        buffer = self._flat if self._replaced is None else self._replaced
        assert buffer is not None
        return buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor that `buffer` and `gradients` return. The new one may be without padding."""
        if buffer.dim() != 1 or buffer.numel() not in (self.numel, self._table.numel) or buffer.device != self.device:
            raise ValueError(
                f"The new buffer has shape {tuple(buffer.shape)} on {buffer.device}; expected ({self.numel},), as "
                f"the old one, or ({self._table.numel},) without padding, on {self.device}."
            )
        self._replaced = buffer
        self.dtype = buffer.dtype
        self.zero_copy = False

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The gradients, one tensor per parameter, which receive the mean; or the flat tensor.

        A hook with memory, which a user's hook calls, needs the ``layout`` without padding.
        """
        if not self.zero_copy and (layout is None or self._replaced is not None):
            return super().work(transport, layout)
        gradients = Gradients(self.gradients(), self._table)
        return BucketWork(gradients, gradients, gradients.tensors[0] if self.zero_copy else self.buffer())

    def empty_buffer(self) -> Tensor:
        """A flat tensor for the mean, without padding."""
        return torch.empty(self._table.numel, dtype=self._parameters[0].dtype, device=self.device)

    def finish(self, result: Tensor) -> None:
        """Write a hook's result into the flat tensor, unless the hook has."""
        flat = self._flat
        assert flat is not None
        if result.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            return
        if result.numel() == flat.numel() and not self.zero_copy:
            flat.copy_(result.view_as(flat))
        else:
            Gradients(self.views(flat), self._table).unflatten(result.view(-1))


class Done(dist.Work):
    """The handle of a collective whose result is there."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True


class ReplicaAverage:
    """Averages the shards of one parameter group with a hook, for a `CompressedGroup` of its replicas.

    FSDP2 knows no hooks; but it calls the all-reduce of the process group between replicas, which that one replaces.

    Args:
        group: the parameter group, which has replicas.
        state: state of the hook.
        hook: a communication hook.
        exchange: shared by all parameter groups of a model.
        model_layouts: see `ShardBucket`.
    """

    def __init__(
        self,
        group: ParameterGroup,
        state: Any,
        hook: CommHook,
        exchange: ShardedExchange,
        model_layouts: Mapping[str, Tensor],
    ) -> None:
        assert group.replicas is not None
        self.replicas, self._group = group.replicas, group
        self._state = state
        self._hook = hook
        self._is_zero_copy = is_zero_copy(hook)
        self._exchange, self._model_layouts = exchange, model_layouts
        self._buckets: dict[object, ShardBucket | None] = {}

    def __call__(self, name: str, operation: Any, flat: Tensor) -> dist.Work | None:
        """All-reduce one flat tensor with the hook, or return None if it cannot.

        It cannot if a trainable parameter has no gradient, or if the parameter group has reduced other gradients in
        this backward.
        """
        exchange = self._exchange
        exchange.begin()
        bucket = None if exchange.is_plain else self._bucket(flat.dtype)
        is_mean = operation == dist.ReduceOp.AVG
        is_whole = bucket is not None and flat.numel() == bucket.numel and not exchange.has_averaged(self._group)
        if bucket is None or not is_whole or not (is_mean or operation == dist.ReduceOp.SUM):
            exchange.wait()  # FSDP2 may add to the gradients
            return None
        turn = exchange.begin_average(self._group)
        name = f"all-reduce of {self._group} by {name_of(self._hook)}"
        exchange.attempt(self.replicas, name, partial(self._start, name, bucket, flat, turn, is_mean))
        if has_streams(flat.device) or not is_mean or self._group.is_read_in_backward(flat.dtype):
            exchange.wait()
        if not is_mean:
            flat.mul_(self.replicas.size())
        return Done()

    def _start(self, name: str, bucket: ShardBucket, flat: Tensor, turn: tuple[int, bool], is_mean: bool) -> None:
        bucket.collect(flat, *turn, self._is_zero_copy)
        try:
            future = self._hook(self._state, bucket)  # type: ignore[arg-type]
        except BaseException:
            connections_of(self.replicas).keep([flat])  # FSDP2 frees it
            bucket.release()
            raise
        finish = partial(self._finish, bucket, flat, is_mean, future)
        self._exchange.finish_later(self._group, self.replicas, name, finish)

    def _finish(self, bucket: ShardBucket, flat: Tensor, is_mean: bool, future: Any) -> None:
        connections = connections_of(self.replicas)
        connections.finish()
        try:
            value: Any = wait_for(future, connections.check_peers)
            bucket.finish(tensor_in(value))
        except BaseException:
            connections.keep([flat])
            raise
        finally:
            bucket.release()
        if isinstance(self._state, HookState):
            kept = flat if is_mean else flat.clone()  # FSDP2 divides sums
            take_back = partial(self._take_back, bucket, kept, getattr(self._group.reduce_scatter, "take_back", None))
            self._exchange.keep_result(self._group, take_back, replaces_earlier=True)

    def _take_back(self, bucket: ShardBucket, mean: Tensor, to_shards: Callable[..., None] | None) -> None:
        """Add a mean that was not applied to the errors of the hook, or of the reduce-scatter if the hook has none."""
        if not mean.isfinite().all():  # the errors have not changed
            return
        names = bucket.parameter_names()
        taken = [
            name
            for name, view in zip(names, bucket.views(mean), strict=True)
            if self._state.memory.take_back(name, view)
        ]
        if to_shards is not None:
            to_shards(mean, taken)

    def _bucket(self, dtype: torch.dtype) -> ShardBucket | None:
        """Shards of the trainable parameters, in ``dtype``; None if this rank has none, or their order is unknown."""
        found = self._group.trainable() or {}
        key = (dtype, tuple(found))
        if key not in self._buckets:
            has_elements = any(each.sharded_size.numel() > 0 for each in found.values())
            self._buckets[key] = None
            if has_elements:
                device, layouts = self._group.device, self._model_layouts
                self._buckets[key] = ShardBucket(found, dtype, device, self.replicas, layouts)
        return self._buckets[key]
