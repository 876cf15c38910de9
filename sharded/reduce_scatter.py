"""The reduce-scatter within a replica, quantized: `QuantizedReduceScatter` in place of FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, connections_of
from gradwire.comm.transport import wait_for
from gradwire.compress import ScatterBucket, WirePolicy, start_reduce_scatter
from gradwire.compress.policy import exempt_format
from gradwire.kernels import WIRE_FORMATS
from gradwire.sharded.exchange import ShardedExchange
from gradwire.sharded.torch_internals import ParameterGroup


@dataclass(frozen=True, kw_only=True)
class ReduceScatterOptions(WirePolicy):
    """How `attach` quantizes the reduce-scatter of FSDP2 with ``within``.

    Args:
        wire, block_size, exempt, wires, seed: as in `QuantizationState`.
        use_error_feedback: whether to add the rounding error to the next gradient. The errors take one value of
            ``error_dtype`` per element of the *unsharded* model on every rank: with bf16 and n shards, n / 2 times the
            memory of a shard of fp32 parameters. None: as in `QuantizationState`.
        error_dtype: torch.bfloat16, which is rounded stochastically, without bias, or torch.float32.

    Raises:
        ValueError: an option is of another type or out of range.
    """

    error_dtype: torch.dtype = torch.bfloat16


class QuantizedReduceScatter:
    """A reduce-scatter that sends quantized gradients, and sums them in fp32.

    Every rank quantizes its gradients, and sends each rank the shard that this one keeps. NCCL and gloo sum in the
    dtype of the tensor instead, and round each sum.

    If a trainable parameter has no gradient, or the order of parameters in the flat tensor is unknown, all elements are
    sent in 16 bits, and the errors are kept.

    Args:
        group: the parameter group.
        options: wire formats and error memory.
        exchange: shared by all parameter groups of a model.
    """

    def __init__(self, group: ParameterGroup, options: ReduceScatterOptions, exchange: ShardedExchange) -> None:
        self.native = group.reduce_scatter
        self.allocate = self.native.allocate  # FSDP2 calls it for the tensors of a reduce-scatter
        self._group = group
        self._options = options
        self._exchange = exchange
        self.has_errors = options.keeps_errors  # kept from step to step
        self.take_back: Callable[..., None] | None = None  # `_take_back` of the result of the latest call
        # By size and dtype of the flat tensor, and parameter names; without names: of any parameters.
        self._buckets: dict[tuple[int, torch.dtype, tuple[str, ...]], ScatterBucket] = {}
        self._errors: dict[str, Tensor] = {}  # by parameter name, [n, elements in a shard]: views of a bucket's
        self._loaded: dict[str, Tensor] = {}  # errors of this rank's shard, which no step has used yet
        self.n_calls = 0
        self.gradient_bytes = self.sent_bytes = 0  # of the latest call

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's shard of the reduced ``input_tensor``, one shard after the other, into ``output_tensor``.

        Both are 1-D. ``op`` is AVG, SUM or PREMUL_SUM. ``async_op`` is ignored: the result is there, or follows on the
        current stream.
        """
        scale = _scale(op, group.size())
        self._exchange.begin()
        if self._exchange.is_in_flight(self._group):  # reduced before in this backward
            self._exchange.wait()
        if scale is None or input_tensor.is_complex() or self._exchange.is_plain:
            return self.native(output_tensor, input_tensor, group, op, async_op)  # type: ignore[no-any-return]
        name = f"reduce-scatter of {self._group} in {self._options.wire}"
        if not self._exchange.attempt(group, name, lambda: self._reduce(output_tensor, input_tensor, group, scale)):
            output_tensor.fill_(torch.nan)  # PyTorch still averages it with the other replicas
        return None

    def _reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        connections = connections_of(group)
        executor = connections.executor(gradients.device)
        bucket = self._bucket(gradients, executor.transport)
        self.n_calls += 1
        self.gradient_bytes, self.sent_bytes = gradients.nbytes, bucket.message_bytes
        future = start_reduce_scatter(bucket, gradients, output, scale, self.n_calls, executor)
        connections.finish()
        try:
            wait_for(future, connections.check_peers)
        except BaseException:
            connections.keep([gradients, output])  # FSDP2 frees them
            raise
        self.take_back = partial(self._take_back, group.rank(), scale)
        if bucket.errors is not None:
            # FSDP2 overwrites the result: all-reduces it, and divides sums.
            self._exchange.keep_result(self._group, partial(self.take_back, output.clone()))

    def _take_back(self, rank: int, scale: float, shard: Tensor, excluded: Collection[str] = ()) -> None:
        """Add an unapplied shard of a result to the errors of ``rank``, except for ``excluded`` parameters."""
        sizes = self._group.flat_order()
        parts = shard.split([size.numel() for size in sizes.values()])
        for name, part in zip(sizes, parts, strict=True):
            if name in self._errors and name not in excluded and part.isfinite().all():
                self._errors[name][rank] += part / scale

    def _bucket(self, gradients: Tensor, transport: Transport) -> ScatterBucket:
        """The bucket of a flat tensor: one part per parameter, or a single one if they are not known or needed."""
        options, n = self._options, transport.world_size
        by_name = self.has_errors or bool(options.wires) or WIRE_FORMATS[options.wire].is_scaled
        sizes = self._group.flat_order() if by_name else {}
        if sizes and n * sum(map(torch.Size.numel, sizes.values())) != gradients.numel():
            sizes = {}
        key = (gradients.numel(), gradients.dtype, tuple(sizes))
        if key not in self._buckets:
            quantization, dtype, device = options.quantization(), gradients.dtype, gradients.device
            if not sizes:
                wire = WIRE_FORMATS[exempt_format(options.wire, dtype)]
                quantization = replace(quantization, error_dtype=None)
                names, lengths, formats = list(self._group.parameters)[:1], [gradients.numel() // n], [wire]
            else:
                self._buckets = {kept: bucket for kept, bucket in self._buckets.items() if not kept[2]}
                names, lengths = list(sizes), list(map(torch.Size.numel, sizes.values()))
                layouts = [torch.empty(size, dtype=dtype, device="meta") for size in sizes.values()]
                formats = options.wire_formats(layouts, names)
            bucket = ScatterBucket(lengths, formats, names, dtype, device, transport, quantization)
            self._take_over(bucket, transport.rank)
            self._buckets[key] = bucket
        return self._buckets[key]

    def _take_over(self, bucket: ScatterBucket, rank: int) -> None:
        """Start a bucket from the errors of earlier ones, or of a checkpoint."""
        for name, errors in bucket.errors_by_name().items():
            if name in self._loaded:
                errors[rank].copy_(self._loaded.pop(name))
            elif name in self._errors:
                errors.copy_(self._errors[name])
            self._errors[name] = errors

    # Checkpoints. A checkpoint has what the mean gradients of earlier steps lack, in the shapes of the shards.

    @property
    def error_bytes(self) -> int:
        """Bytes of the error memory on this rank, once every parameter had a gradient."""
        return sum(errors.nbytes for errors in self._errors.values())

    def saved_errors(self) -> dict[str, Tensor]:
        """This rank's shard of the errors of all ranks, by name, in fp32. A collective call."""
        saved, weight, shards = {}, self._group.mean_weight(), self._group.shards
        assert shards is not None
        for name, size in self._group.flat_order().items():
            own = torch.zeros(size.numel(), device=self._group.device)
            # After a failed step, a part of the ranks may have taken over what they have loaded.
            errors = torch.zeros(shards.size(), size.numel(), device=self._group.device)
            if name in self._loaded:
                errors[shards.rank()] = self._loaded[name]
            elif name in self._errors:
                errors.copy_(self._errors[name])
            self.native(own, errors.view(-1), shards, dist.ReduceOp.SUM)
            if self._group.replicas is not None:
                dist.all_reduce(own, group=self._group.replicas)
            saved[name] = own.mul_(weight).view(size)
        return saved

    def load_errors(self, saved: Mapping[str, Tensor]) -> None:
        """Start from `saved_errors`, of the same parameters."""
        replicas = 1 if self._group.replicas is None else self._group.replicas.size()
        self._loaded = {}
        self._errors = {}
        self._buckets = {}
        for name, size in self._group.flat_order().items():
            padded = torch.zeros(size, device=self._group.device)
            padded[tuple(map(slice, saved[name].shape))] = saved[name]
            self._loaded[name] = padded.view(-1) / (self._group.mean_weight() * replicas)


def _scale(op: Any, size: int) -> float | None:
    if op == dist.ReduceOp.AVG:
        return 1 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    return float(op.factor) if getattr(op, "op", None) == dist.ReduceOp.PREMUL_SUM else None
