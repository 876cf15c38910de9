"""`Bucket`, a bucket of either DDP as gradwire's hooks see it.

PyTorch's DDP passes one flat buffer per bucket; gradwire's passes a list of gradients. A hook marked with `zero_copy`
reads and writes these gradients directly if the reducer calls it; if a wrapper calls it, it gets the flat buffer and
returns it, as PyTorch's hooks do. Either way, `Gradients` has one tensor per parameter.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm import Algorithm, Transport
from gradwire.comm.rank_differences import out_of_step
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward
from gradwire.compress import Gradients
from gradwire.kernels import SegmentTable, as_real, gradient_layout, layout_in_dtype

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket

else:  # PyTorch compares the annotation of a hook with this class
    from torch.distributed import GradBucket

# Layouts of buckets, by transport and first parameter.
_layouts_of: weakref.WeakKeyDictionary[Transport, WeakIdKeyDictionary] = weakref.WeakKeyDictionary()


class BucketWork(NamedTuple):
    """The tensors of a bucket that an algorithm reads and writes."""

    source: Gradients  # the gradients
    target: Gradients  # the tensors that receive the mean; may be ``source``
    result: torch.Tensor  # the value of the hook's future: the flat buffer, or the first tensor of ``target``


def tensor_in(value: Any) -> torch.Tensor:
    """The tensor in a future's value: a collective's future holds a list with one tensor."""
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return tensor


def layout_without_memory(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor that stands for a parameter, with an identity and a layout but no memory."""
    layout = torch.empty_strided(size, stride, dtype=dtype, device=device)
    layout.untyped_storage().resize_(0)
    return layout


class Bucket:
    """A bucket as gradwire's hooks see it.

    gradwire's own buckets derive from it, and keep the attributes up to date. `Bucket.of` adapts those of PyTorch's DDP
    and of other callers.

    Attributes:
        position: position in the order of launch.
        is_first, is_final: whether no bucket before it, or after it, is launched in this backward.
        device: device of the gradients.
        dtype: real dtype of the gradients, or of the buffer that a wrapper has set instead.
        is_sparse: whether the bucket is one sparse gradient, which `reduce_bucket` averages uncompressed.
        zero_copy: whether `work` may return the gradients themselves; else they are in a flat buffer.
        first: the first parameter, by which a handshake knows the model.
        layouts: shape and strides of each gradient.
        names: plain names of the parameters; None if the bucket does not know them.
        process_group: the ranks to average over; None if they are not known.
        note_use: set if the model has a user's hook. Each of gradwire's hooks that the user's hook calls passes its
            settings and process group.
        model_number: number of the model's exchange on the process group, equal on all ranks.
        stamp: a number that must be equal on all ranks, that of the model's synchronized forwards; 0 if it must not be
            compared.
        scale: multiplies the sum over the ranks; 0: by 1 / world size, for the mean.
        model_parameters: all parameters of the model that are averaged; None on PyTorch's DDP.
        divisor: number of ranks with inputs left, by which the default reduction divides; 0 if it is not known.
        ends_late: whether the bucket is one of several that PyTorch's DDP launches in one callback at the end of the
            backward, none of them as the last one; see `BucketOrder`.
        plans: the bucket's recorded steps, `gradwire.exchange.plans.Plans`; None if the hook's settings keep them.
    """

    position: int
    is_first: bool
    is_final: bool
    device: torch.device
    dtype: torch.dtype
    first: torch.Tensor
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]]
    is_sparse = False
    zero_copy = False
    names: tuple[str, ...] | None = None
    process_group: dist.ProcessGroup | None = None
    note_use: Callable[[Any, dist.ProcessGroup], None] | None = None
    model_number = 0
    stamp = 0
    scale = 0.0
    model_parameters: Sequence[torch.Tensor] | None = None
    divisor = 0
    ends_late = False
    plans: Any = None

    def explain_stamps(self, by_rank: Mapping[int, int]) -> str | None:
        """The error if the stamps of the ranks differ; None if they may."""
        return out_of_step([by_rank.get(rank, 0) for rank in range(1 + max(by_rank))])

    def guarded(self, algorithm: Callable[[], Algorithm[Any]], transport: Transport) -> Algorithm[Any]:
        """The algorithm of a step, after whatever the ranks must compare before it."""
        return algorithm()

    @staticmethod
    def of(bucket: Any, order: "BucketOrder | None" = None) -> "Bucket":
        """The bucket itself if it is gradwire's, else a `TorchBucket`, whose position ``order`` may correct."""
        if isinstance(bucket, Bucket):
            return bucket
        adapted = TorchBucket(bucket)
        if order is not None:
            order.correct(adapted)
        return adapted

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        raise NotImplementedError

    def buffer(self) -> torch.Tensor:
        """The gradients as one flat tensor; complex ones as real pairs. Or the sparse gradient."""
        raise NotImplementedError

    def empty_buffer(self) -> torch.Tensor:
        """A flat tensor for the mean of the gradients, as the value of the hook's future instead of the target."""
        return self.buffer()

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The tensors of a dense bucket: the gradients if it is zero-copy, else the flat buffer.

        ``transport`` keeps the layout of the flat buffer; None: it is made anew. ``layout`` is that of the gradients in
        the buffer, if it must be taken apart.
        """
        buffer = self.buffer()
        if layout is not None and layout.numel != buffer.numel():
            raise ValueError(
                f"The bucket has {buffer.numel()} elements, its memory is for {layout.numel}. A state serves one model "
                "only: create a new state for each model."
            )
        tables = {} if transport is None else self.kept_layouts(transport)
        key = (self.position, buffer.numel(), buffer.stride(), buffer.dtype, buffer.device)
        if key not in tables:
            tables[key] = SegmentTable([buffer])
        flat = Gradients([buffer], tables[key], layout)
        return BucketWork(flat, flat, buffer)

    def kept_layouts(self, transport: Transport) -> dict[object, Any]:
        """Layouts of this bucket alone, kept from step to step: their addresses serve one bucket in flight."""
        by_parameter = _layouts_of.get(transport)
        if by_parameter is None:
            by_parameter = _layouts_of[transport] = WeakIdKeyDictionary()
        kept: dict[object, Any] = by_parameter.setdefault(self.first, {})
        return kept

    def real_layouts(self) -> list[torch.Tensor]:
        """Real tensors with the shapes, strides, dtype and device of the gradients."""
        return [layout_in_dtype(as_real(gradient_layout(each)), self.dtype) for each in self.parameters()]


class BucketOrder:
    """The order of the buckets of PyTorch's DDP that call one hook with one state.

    In its first step with ``static_graph``, the DDP launches all buckets, one for each dtype, in a callback at the end
    of the backward. All have index 0, and of several, none is the last one.
    """

    def __init__(self) -> None:
        self._backward = NO_BACKWARD  # in which the latest bucket with index 0 was launched
        self._first: Callable[[], torch.Tensor | None] = lambda: None  # the first parameter of that bucket
        self._n_later = 0  # buckets with index 0 after it

    def correct(self, bucket: "TorchBucket") -> None:
        """Give a bucket with index 0 the next position if it is not the first one in this backward."""
        if bucket.position > 0 or bucket.is_final:
            return
        backward = current_backward()
        if backward == NO_BACKWARD or backward != self._backward or self._first() is bucket.first:
            self._backward = backward
            self._first = weakref.ref(bucket.first)
            self._n_later = 0
            return
        self._n_later += 1
        bucket.position, bucket.is_first, bucket.ends_late = self._n_later, False, True


@dataclass(frozen=True, kw_only=True)
class BucketFacts:
    """The part of a bucket of gradwire's that no step changes. Its owner makes it once.

    Attributes:
        parameters: the parameters in the order of their gradients, or tensors in the layouts of their shards.
        names: their names, as in ``module.named_parameters()``.
        plain_names: their names without the components that module wrappers add.
        layouts: shape and strides of each gradient; None: those of the parameters.
        device: device of the gradients.
        dtype: real dtype of the gradients.
        process_group: the ranks to average over; None if each launch sets them.
        model_parameters: all parameters of the model that are averaged.
        first: the parameter by which a handshake knows the model.
    """

    parameters: list[torch.Tensor]
    names: list[str]
    plain_names: tuple[str, ...]
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]] | None = None
    device: torch.device
    dtype: torch.dtype
    process_group: dist.ProcessGroup | None = None
    model_parameters: Sequence[torch.Tensor]
    first: torch.Tensor


class OwnBucket(Bucket):
    """A bucket of gradwire's, with the part of ``torch.distributed.GradBucket`` that needs no gradients."""

    def __init__(self, facts: BucketFacts) -> None:
        self._parameters = facts.parameters
        self._names = facts.names
        self.names = facts.plain_names
        self.layouts = facts.layouts or [(each.shape, each.stride()) for each in facts.parameters]
        self.device = facts.device
        self.dtype = facts.dtype
        self.process_group = facts.process_group
        self.first, self.model_parameters = facts.first, facts.model_parameters
        self.position = 0
        self.is_first = True
        self.is_final = True

    def index(self) -> int:
        """Position in the order of launch."""
        return self.position

    def is_last(self) -> bool:
        """Whether this is the last bucket that is launched in this backward."""
        return self.is_final

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients; of a sharded model, tensors in the layouts of its shards."""
        return self._parameters

    def parameter_names(self) -> list[str]:
        """The names of `parameters`, as in ``module.named_parameters()``."""
        return self._names


class TorchBucket(Bucket):
    """A bucket of PyTorch's DDP, in one backward."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer()
        self._parameters = bucket.parameters()
        self.position = bucket.index()
        self.is_final = bucket.is_last()
        self.first = self._parameters[0]
        self.is_first = self.position == 0
        self.device = self._buffer.device
        self.dtype = self._buffer.dtype
        self.is_sparse = self._buffer.is_sparse

    @functools.cached_property
    def layouts(self) -> Sequence[tuple[torch.Size, tuple[int, ...]]]:  # type: ignore[override]
        """Shape and strides of each gradient; made only for a state with memory."""
        return [(parameter.shape, parameter.stride()) for parameter in self._parameters]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of the buffer."""
        return self._parameters

    def buffer(self) -> torch.Tensor:
        """PyTorch's flat buffer of gradients."""
        return self._buffer
