"""Compressors: what reduces the tensors of a call site, and keeps what their wire format loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.collectives.call_site import CallSite
from gradwire.comm import Algorithm, Executor, Transport, connections_of
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.comm.transport import wait_for
from gradwire.compress import (
    NOT_CARRIED,
    UNKNOWN,
    Gradients,
    NodeBucket,
    Quantization,
    QuantizedBucket,
    ScatterBucket,
    Stamp,
    cast_all_reduce,
    start_reduce_scatter,
)
from gradwire.exchange.bucket import BucketFacts, BucketWork, OwnBucket, layout_without_memory
from gradwire.exchange.plans import Plans, replayed
from gradwire.exchange.reduction import bucket_kind, quantized, ranks_on_node, reduce_bucket
from gradwire.exchange.settings import HookSettings
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import HEADER_BYTES, WIRE_FORMATS, SegmentTable, is_dense
from gradwire.validation import check_memory_shape

Errors = Mapping[str, Tensor]
Layout = tuple[Sequence[int], Sequence[int]]  # shape and strides


class TensorBucket(OwnBucket):
    """The tensors of a call, of one dtype, as the bucket of a hook, which reads and writes them in place.

    Attributes:
        tensors: those of the current call.
    """

    def __init__(
        self,
        site: CallSite,
        layouts: Sequence[Layout],
        group: dist.ProcessGroup,
        names: Sequence[str],
        has_header: bool,
    ) -> None:
        parameters = [layout_without_memory(*layout, site.dtype, site.device) for layout in layouts]
        facts = BucketFacts(
            parameters=parameters,
            names=list(names),
            plain_names=tuple(names),
            device=site.device,
            dtype=site.dtype,
            process_group=group,
            model_parameters=parameters,
            first=parameters[0],
        )
        super().__init__(facts)
        self.zero_copy = True
        self.scale = site.scale
        self.plans = Plans()
        self._has_header, self._table = has_header, SegmentTable(parameters)
        self.tensors: Sequence[Tensor] = ()
        self._stamp = UNKNOWN

    def begin(self, tensors: Sequence[Tensor], stamp: Stamp) -> None:
        """Take the tensors of a call, and the number that its messages carry."""
        self.tensors = tensors
        self._stamp = stamp
        self.stamp = stamp.number

    def explain_stamps(self, by_rank: Mapping[int, int]) -> str | None:
        """The error if the ranks are in different calls."""
        return self._stamp.explain(by_rank)

    def guarded(self, algorithm: Any, transport: Transport) -> Algorithm[Any]:
        """The algorithm; if its messages have no header, the ranks compare their calls before it, on CPUs only."""
        if self._has_header or self.stamp <= 0 or self.device.type != "cpu":
            return super().guarded(algorithm, transport)
        return _compared(self._stamp, transport, algorithm)

    def buffer(self) -> Tensor:
        """The first tensor: the result of the hook's future."""
        return self.tensors[0]

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The tensors themselves."""
        gradients = Gradients(self.tensors, self._table)
        return BucketWork(gradients, gradients, self.tensors[0])


async def _compared(stamp: Stamp, transport: Transport, algorithm: Any) -> Any:
    """Exchange headers, and then run an algorithm whose messages have none. It takes a round trip more."""
    sent = torch.zeros(1, transport.world_size, HEADER_BYTES, dtype=torch.uint8)
    received = torch.empty_like(sent)
    stamp.write(sent)
    await transport.all_to_all(received, sent)
    stamp.check(received, transport.ranks)
    return await algorithm()


class Compressor:
    """Reduces the tensors of one call site on a process group.

    Args:
        site: the call site.
        group: the ranks.
        options: how blocks are quantized, and the dtype of the errors, which begin with zeros.

    Attributes:
        site, group: as given.
        n_calls: number of calls; the random numbers of rounding depend on it.
        gaps: positions of the tensors that are not dense; `start` takes copies of them in row-major order.
        layouts: the layouts of the tensors that `start` takes.
        in_flight: the exchange of the latest call; None once its handle has been waited for.
    """

    def __init__(self, site: CallSite, group: dist.ProcessGroup, options: Quantization) -> None:
        self.site = site
        self.group = group
        self.n_calls = 0
        self.layouts: list[Layout] = list(site.layouts)
        self.gaps = [i for i, layout in enumerate(site.layouts) if not is_dense(*layout)]
        for i in self.gaps:
            self.layouts[i] = self.layouts[i][0], torch.empty(self.layouts[i][0], device="meta").stride()
        self.in_flight: Future[Any] | None = None
        self._options = options
        self._transport: Transport | None = None  # None: `prepare` is due, and takes these errors
        self._waiting: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors: those of the memory, or numbers."""
        return self.site.names or tuple(map(str, range(len(self.site.layouts))))

    def _ready(self, room: int) -> Executor:
        """The executor, once the earlier call is done; with new connections, the bucket is made anew."""
        if self.in_flight is not None:
            # Its kernels read the addresses of one call, and its errors come first. On a GPU, the current stream waits.
            # Its error is left to its `CompressedWork.wait`; RuntimeError if a rank has left.
            wait_for(self.in_flight.then(lambda _: None), connections_of(self.group).check_peers)
        executor = self.prepare()
        if not isinstance(executor, StreamExecutor):
            executor.transport.make_room(room)
        self.n_calls += 1
        return executor

    def prepare(self) -> Executor:
        """Make what depends on the transport, unless it is as before; the errors stay. Returns the executor."""
        executor = connections_of(self.group).executor(self.site.device)
        if executor.transport is not self._transport:
            errors = self.errors()
            self._transport, self._waiting = executor.transport, {}
            self._make(executor.transport, errors)
        return executor

    def _make(self, transport: Transport, errors: dict[str, Tensor]) -> None:
        """Make what depends on the transport, starting from these errors of this rank."""
        raise NotImplementedError

    @property
    def cell_bytes(self) -> int:
        """Size of the largest cell of its messages on CPUs."""
        raise NotImplementedError

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        errors = [*self._waiting.values()] if self._transport is None else [self._memory_of_errors()]
        return sum(error.nbytes for error in errors if error is not None)

    def _memory_of_errors(self) -> Tensor | None:
        """The flat error memory, once `prepare` was called; None without error feedback."""
        raise NotImplementedError

    # Errors by name: what the results of earlier calls lack, so far.

    def errors(self) -> dict[str, Tensor]:
        """This rank's errors by name: copies in fp32, in the tensors' shapes; those of a reduce-scatter are flat."""
        return self._waiting if self._transport is None else self._held_errors()

    def _held_errors(self) -> dict[str, Tensor]:
        """`errors`, once `prepare` was called."""
        raise NotImplementedError

    @property
    def weight(self) -> float:
        """The result lacks ``weight`` times the sum of the ranks' errors."""
        return 1.0

    def take(self, earlier: Compressor) -> None:
        """Continue with this rank's errors of an earlier compressor."""
        self._keep(earlier.errors(), earlier.n_calls)

    def _keep(self, errors: dict[str, Tensor], n_calls: int) -> None:
        self._waiting = errors
        self._transport = None
        self.n_calls = n_calls

    def load(self, saved: Errors, n_calls: int) -> None:
        """Take this rank's share of checked errors of a checkpoint."""
        share = 1 / (self.weight * self.group.size())
        own = {name: error.to(self.site.device, torch.float32) * share for name, error in saved.items()}
        self._keep(own, n_calls)


class AverageCompressor(Compressor):
    """All-reduces tensors: in two shots, or in one plain all-reduce for the wires "fp32" and "fp16"."""

    def _make(self, transport: Transport, errors: dict[str, Tensor]) -> None:
        site = self.site
        self._settings = HookSettings("gradwire.collectives", self.group)
        self._scaled = ScaledCastState(self.group) if site.wire == "fp16" else None
        has_header = site.wire not in ("fp32", "fp16")
        self._bucket = TensorBucket(site, self.layouts, self.group, self.names, has_header)
        self._memory: QuantizedBucket | NodeBucket | None = None
        if self._scaled is not None:
            self._scaled.names.bind_layouts(dict(zip(self.names, self._bucket.parameters(), strict=True)))
        elif site.wire != "fp32":
            local_size = ranks_on_node("auto", transport)
            options = Quantization(
                block_size=self._options.block_size,
                error_dtype=self._options.error_dtype,
                seed=self._options.seed,
                local_size=local_size,
            )
            self._memory = bucket_kind(options)(
                self._bucket.real_layouts(),
                [WIRE_FORMATS[site.wire]] * len(site.layouts),
                transport,
                options,
                names=self.names,
                memory={"errors": errors},
                iteration=self.n_calls,
            )

    def start(self, tensors: Sequence[Tensor], stamp: Stamp, room: int) -> Future[Any]:
        """Start to replace dense tensors by their mean or sum over the ranks."""
        executor, bucket = self._ready(room), self._bucket
        bucket.begin(tensors, stamp)
        try:
            self.in_flight = self._reduce(bucket)
        finally:
            bucket.tensors = ()
        executor.keep(tensors)
        return self.in_flight

    def _reduce(self, bucket: TensorBucket) -> Future[Any]:
        if self._scaled is not None:
            return scaled_cast_hook(self._scaled, bucket)  # type: ignore[arg-type]
        divisor = 1 if bucket.scale else None
        algorithm = partial(cast_all_reduce, divisor=divisor) if self._memory is None else quantized
        connections, number = connections_of(self.group), self.n_calls
        future = replayed(self._settings, bucket, connections, algorithm, number)
        if future is not None:
            return future
        return reduce_bucket(
            connections, bucket, algorithm, self._settings, memory=self._memory, iteration=number, names=self.names
        )

    @property
    def cell_bytes(self) -> int:  # noqa: D102
        if self._memory is None:
            return HEADER_BYTES
        inside = self._memory.inside.cell_bytes if isinstance(self._memory, NodeBucket) else 0
        return max(inside, self._memory.message_layout.cell_bytes)

    def _memory_of_errors(self) -> Tensor | None:
        return None if self._memory is None else self._memory.errors

    def _held_errors(self) -> dict[str, Tensor]:
        return {} if self._memory is None else self._memory.folded()["errors"]


class ScatterCompressor(Compressor):
    """Reduce-scatters one contiguous tensor."""

    def _make(self, transport: Transport, errors: dict[str, Tensor]) -> None:
        ((shape, _),) = self.site.layouts
        lengths, formats = [shape.numel() // self.group.size()], [WIRE_FORMATS[self.site.wire]]
        self._bucket = ScatterBucket(
            lengths, formats, self.names, self.site.dtype, self.site.device, transport, self._options
        )
        for name, error in errors.items():
            own = self._bucket.errors_by_name()[name]
            own.copy_(_padded(error.flatten(), own.numel()).view_as(own))

    def start(self, source: Tensor, output: Tensor, stamp: Stamp, room: int) -> Future[Any]:
        """Start to write this rank's part of the mean or sum of ``source`` over the ranks into ``output``, both 1-D."""
        executor = self._ready(room)
        scale = self.site.scale or 1 / self.group.size()
        if isinstance(executor, StreamExecutor):
            stamp = NOT_CARRIED
        self.in_flight = start_reduce_scatter(self._bucket, source, output, scale, self.n_calls, executor, stamp)
        executor.keep([source, output])
        return self.in_flight

    @property
    def cell_bytes(self) -> int:  # noqa: D102
        return self._bucket.message_layout.cell_bytes

    def _memory_of_errors(self) -> Tensor | None:
        return self._bucket.errors

    def _held_errors(self) -> dict[str, Tensor]:
        return {name: error.flatten().float() for name, error in self._bucket.errors_by_name().items()}

    @property
    def weight(self) -> float:
        """A mean lacks the mean of the ranks' errors, a sum their sum."""
        return self.site.scale or 1 / self.group.size()


def check_errors(site: CallSite, errors: Errors) -> None:
    """Raise ValueError unless errors, by name, have the shapes of a call site's tensors.

    Those of a reduce-scatter are flat; padding at the end of the input, of zeros, may differ.
    """
    for name, (shape, _) in zip(site.names, site.layouts, strict=True):
        if site.collective == "all_reduce":
            check_memory_shape("errors", name, errors[name], shape)
        elif errors[name].flatten()[shape.numel() :].any():
            raise ValueError(
                f"errors[{name!r}] has {errors[name].numel()} elements; expected {shape.numel()}, or only zeros after "
                "them."
            )


def _padded(flat: Tensor, numel: int) -> Tensor:
    """A flat tensor with zeros at its end, or without some of them."""
    padded = flat.new_zeros(numel)
    n_kept = min(flat.numel(), numel)
    padded[:n_kept] = flat[:n_kept]
    return padded
