"""Buckets: lists of gradients that are reduced together, with a flat buffer only if a hook asks for one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Transport
from gradwire.comm.stream_executor import Handle
from gradwire.compress import Gradients, Step, cast_all_reduce, repeatable
from gradwire.exchange.bucket import BucketFacts, BucketWork, OwnBucket
from gradwire.exchange.handshake import stepped_early
from gradwire.exchange.names import plain_name
from gradwire.exchange.plans import Plans
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import settings_of
from gradwire.kernels import SegmentTable, flatten_kernels, gradient_layout, layout_guard
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.exchange import Exchange

# Arguments: parameter name, and the part of its reduced gradient that was sent but is not applied.
TakeBack = Callable[[str, Tensor], object]

_grad_of = attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """A bucket's position and parameters."""

    index: int  # position in the order of launch
    is_last: bool
    members: Sequence[int] = ()  # indices of its parameters in the model, for the reducer
    parameters: list[Tensor]  # in the order of their gradients in the buffer
    names: list[str]  # parameter names, as in ``module.named_parameters()``
    model_parameters: Sequence[Tensor] = ()  # all parameters that the reducer averages


class BucketHook(NamedTuple):
    """Reduces a bucket: a registered communication hook with its state, or `default_reduction` with the exchange."""

    function: Callable[[Any, Any], Future[Tensor]]
    state: Any
    is_zero_copy: bool
    is_registered: bool = False
    has_groups: bool = False  # whether it may have process groups of its own
    can_replay: bool = True  # whether recorded steps replace its calls
    take_back: TakeBack | None = None  # adds a sent but unapplied gradient to the error memory


class BucketBase(OwnBucket):
    """What dense and sparse buckets have in common."""

    def __init__(self, spec: BucketSpec, table: SegmentTable | None = None) -> None:
        """``table`` has the layouts and dtype of the gradients; None: those of the parameters."""
        first = spec.parameters[0]
        facts = BucketFacts(
            parameters=spec.parameters,
            names=spec.names,
            plain_names=tuple(map(plain_name, spec.names)),
            layouts=None if table is None else list(zip(table.shapes, table.strides, strict=True)),
            device=first.device,
            dtype=first.dtype.to_real() if table is None else table.dtype,
            model_parameters=spec.model_parameters,
            first=first,
        )
        super().__init__(facts)
        self._spec, self.members = spec, spec.members
        self.position = spec.index
        self.is_first = spec.index == 0
        self.is_final = spec.is_last
        self.divisor = 1  # of the default reduction's sums, until `launch` knows it
        self.launch_range = f"gradwire::launch bucket {spec.index}"  # name of a profiler range
        self.stand_ins: list[int] = []  # positions of the parameters without a gradient on this rank in this backward

    def collect(
        self,
        zero_copy: bool,
        unused: Sequence[int],
        shared: Collection[int] = (),
        incoming: Tensor | None = None,
        undefined: Collection[int] = (),
    ) -> None:
        """Take the parameters' gradients, which are all ready."""
        raise NotImplementedError

    def _raise_removed(self, i: int) -> NoReturn:
        """Raise RuntimeError for a gradient, by position, that a hook has removed."""
        raise RuntimeError(stepped_early(f"The gradient of {self._names[i]} was removed"))

    def in_flight(self) -> list[Tensor]:
        """The tensors of this backward that its reduction may read and write."""
        raise NotImplementedError

    def launch(
        self,
        hook: BucketHook,
        exchange: Exchange,
        divisor: int,
        unused: Sequence[int] | None = None,
        shared: Collection[int] = (),
        incoming: Tensor | None = None,
        undefined: Collection[int] = (),
    ) -> Future[Tensor] | Handle:
        """Take the gradients, as `DenseBucket.collect` says, and start to reduce them; the future has the result.

        ``unused=None``: this is a joined rank's bucket of zeros.
        """
        self.divisor = divisor
        if unused is not None:
            self.collect(hook.is_zero_copy, unused, shared, incoming, undefined)
            self.stamp = exchange.n_passes
        if hook.can_replay and self.plans is not None and self.plans.settings is not None:
            flight: Handle | None = self.plans.replay(self, exchange.connections)
            if flight is not None:
                return flight
        self.process_group, self.model_number = exchange.process_group, exchange.number
        self.note_use = exchange.note_use if hook.has_groups else None
        return hook.function(hook.state, self)


class Upcast:
    """A dense bucket's part in native mixed precision: PyTorch's hook, on ``stream``, makes every ``.grad`` a tensor of
    its own, in the parameter's dtype.

    Args:
        parameters: those of the bucket.
        stream: the stream.
    """

    def __init__(self, parameters: Sequence[Tensor], stream: torch.Stream) -> None:
        self._parameters, self._stream = parameters, stream
        self._absent: Collection[int] = ()  # positions of the parameters that have no gradient in this backward

    @property
    def copies(self) -> list[Tensor]:
        """The parameters' copies, in the dtype of the gradients."""
        return [parameter._mp_param for parameter in self._parameters]  # type: ignore[attr-defined]

    def fill_absent(self, zeros: Mapping[int, Tensor]) -> None:
        """Assign zeros to absent gradients, by position: PyTorch's hook casts every gradient."""
        self._absent = zeros.keys()
        for i, each in zeros.items():
            self._parameters[i].grad = each

    def finish(self, result: Tensor, table: SegmentTable, used: Mapping[int, bool]) -> None:
        """Write a flat mean into the gradients, in the parameters' own dtype."""
        torch.accelerator.current_stream().wait_stream(self._stream)
        reduced = [i for i in range(len(self._parameters)) if used.get(i, True)]
        if reduced:
            # Not ``table.views``, which would keep the result alive until the next step.
            means = [table.view(i, result, table.offsets[i]) for i in reduced]
            torch._foreach_copy_([_grad_of(self._parameters[i]) for i in reduced], means)
        for i in set(self._absent).difference(reduced):
            self._parameters[i].grad = None
        self._absent = ()


class DenseBucket(BucketBase):
    """The gradients of some parameters, with the interface of ``torch.distributed.GradBucket``, and `work`.

    A hook written for PyTorch asks for `buffer` or `gradients`: the gradients are then flattened into one buffer, which
    is kept until a backward does without it, or with ``frees_buffer`` until the end of this one. gradwire's own hooks
    ask for `work` instead, or also for `empty_buffer`. With ``as_view`` the buffer always exists, and every ``.grad``
    ends up as a view of it. With mixed precision, gradients have the layouts and dtype of the parameters' copies; see
    `Upcast`.

    Attributes:
        as_view: whether every ``.grad`` becomes a view of the buffer.
        zero_copy: whether `work` may return the gradients themselves; set by `collect`, cleared once it is flat.
    """

    def __init__(
        self, spec: BucketSpec, as_view: bool, frees_buffer: bool = False, upcast: Upcast | None = None
    ) -> None:
        holders = spec.parameters if upcast is None else upcast.copies
        self._table = SegmentTable([gradient_layout(each) for each in holders])
        super().__init__(spec, self._table)
        self.plans = Plans()
        self._upcast = upcast
        self._guard: Callable[..., bool] | None = None  # whether gradients have the layouts of their parameters
        self._frees_buffer = frees_buffer and not as_view
        self._buffer: Tensor | None = None
        self._needs_buffer = False  # whether anything has asked for the buffer since `collect`
        self._is_flat = False  # whether the buffer holds this backward's gradients
        self.as_view = as_view
        if as_view:
            buffer = self.empty_buffer()
            self._flat = Gradients([buffer], SegmentTable([buffer]), self._table)
            self._buffer_views = self._views(buffer)
            for parameter, view in zip(spec.parameters, self._buffer_views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view
        self.release()

    def release(self) -> None:
        """Drop all tensors of this backward, and the buffer if it is to be freed."""
        self._grads: Sequence[Tensor] = ()  # read by the reduction and, without `as_view`, written
        self.stand_ins = []
        self._outside: Sequence[int] = ()  # with `as_view`: positions of the gradients that are not views of the buffer
        self._kept: dict[int, Tensor] = {}  # with `as_view`: copies of the gradients of `stand_ins`
        self._scale = 1.0  # multiplier of the result that `finish` has written
        self._taken_back: Collection[int] = ()  # positions of the gradients that `finish` has handed to `take_back`
        self._replaced: Tensor | None = None  # the tensor that a hook passed to `set_buffer`
        self.zero_copy = False
        if self._frees_buffer:
            self._buffer = None

    def in_flight(self) -> list[Tensor]:
        """The tensors of this backward that its reduction may read and write."""
        return [*self._grads, *(each for each in (self._buffer, self._replaced) if each is not None)]

    def buffer(self) -> Tensor:
        """The gradients as one flat tensor, each in its own memory order; complex ones as real pairs."""
        if self._replaced is not None:
            return self._replaced
        buffer = self.empty_buffer()
        if not self._is_flat:
            if not self._gather_in_buffer():
                flatten_kernels(self._table).flatten(self._grads, self._table, buffer)
            self._is_flat, self.zero_copy = True, False
        return buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer`, one for each parameter, in its shape and strides."""
        return self._views(self.buffer())

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor that `buffer` and `gradients` return."""
        if buffer.dim() != 1 or buffer.numel() != self._table.numel or buffer.device != self.device:
            raise ValueError(
                f"The new buffer has shape {tuple(buffer.shape)} on {buffer.device}; expected ({self._table.numel},) "
                f"on {self.device}, as the old one."
            )
        self._replaced, self.dtype = buffer, buffer.dtype
        self.zero_copy = False

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The gradients and the destination of the result, as hooks use them; see `gradwire.exchange.bucket.Bucket`.

        With zero-copy, these are the gradients themselves, or the buffer that they will be views of.
        """
        if not self.zero_copy:
            return super().work(transport, layout)
        source = target = Gradients(self._grads, self._table)
        if self.as_view:
            target = self._flat
            source = target if self._gather_in_buffer() else source
        return BucketWork(source, target, target.tensors[0])

    def empty_buffer(self) -> Tensor:
        """The flat buffer, uninitialized, for a hook to write the mean into, in place of the target of `work`."""
        self._needs_buffer = True
        if self._buffer is None:
            self._buffer = torch.zeros(self._table.numel, dtype=self._table.dtype, device=self.device)
        return self._buffer

    def _gather_in_buffer(self) -> bool:
        """If some gradients are views of the buffer, copy the others into it; returns whether all are in it now."""
        if not self.as_view or len(self._outside) == len(self._grads):
            return False
        if self._outside:
            outside = self._outside
            torch._foreach_copy_([self._buffer_views[i] for i in outside], [self._grads[i] for i in outside])
        return True

    def scale_into_buffer(self) -> Tensor:
        """Write the gradients, divided by `divisor`, into the buffer, with PyTorch's bits; returns the buffer.

        Like PyTorch, divide gradients that are views of the buffer, and multiply the others by 1 / divisor, which
        rounds differently unless the divisor is a power of two. Division of complex numbers rounds differently again.
        """
        buffer = self.empty_buffer()
        if not self.as_view or len(self._outside) == len(self._grads):
            flatten_kernels(self._table).flatten(self._grads, self._table, buffer, 1 / self.divisor)
            return buffer
        if not self._outside and not self._table.is_complex:
            return buffer.div_(self.divisor)
        for i, view in enumerate(self._buffer_views):
            if i in self._outside:
                torch.mul(self._grads[i], 1 / self.divisor, out=view)
            else:
                view.div_(self.divisor)
        return buffer

    def collect(
        self,
        zero_copy: bool,
        unused: Sequence[int] = (),
        shared: Collection[int] = (),
        incoming: Tensor | None = None,
        undefined: Collection[int] = (),
    ) -> None:
        """Take the parameters' gradients, which are all ready. One that autograd left ``undefined`` becomes zeros.

        A gradient is copied if it is

        - in another layout than its parameter's: the copy becomes ``.grad``;
        - in another wrapper, too (``shared``, by position), or aliased (see `aliased`, also for ``incoming``): with
          ``zero_copy``, results are written before the backward ends. `finish` copies the result back;
        - ``unused`` on this rank: if no rank has a gradient, ``.grad`` must not change. The copy is reduced, or with
          ``as_view`` kept.

        Raises ValueError if a gradient has another dtype or shape than when the model was wrapped, RuntimeError if it
        is gone.
        """
        if not self._needs_buffer and not self.as_view:
            self._buffer = None  # hooks may need it in their first steps only
        self._needs_buffer = False
        found = list(map(_grad_of, self._parameters))
        copied: set[int] = set() if self.as_view else set(unused)
        if zero_copy and not self.as_view:
            copied.update(shared, torch_internals.aliased(found, incoming))
        if unused or self._guard is None or not self._guard(*found):  # 0.1 us a parameter instead of 0.5
            grads = self._collect_each(found, unused, copied, undefined)
        else:
            grads = found
            for i in copied:
                grads[i] = grads[i].clone()
        self.stand_ins, self._scale = list(unused), 1.0
        self._grads = grads
        self._is_flat = False
        self._replaced = None
        self.zero_copy = zero_copy
        self.dtype = self._table.dtype
        if self.as_view:
            self._kept = {i: grads[i].clone() for i in unused}
            views = self._buffer_views
            self._outside = [i for i, grad in enumerate(grads) if grad.data_ptr() != views[i].data_ptr()]
        if self._upcast is not None:
            self._upcast.fill_absent({i: grads[i] for i in unused if found[i] is None})

    def _collect_each(
        self,
        found: Sequence[Tensor | None],
        unused: Collection[int],
        copied: Collection[int],
        undefined: Collection[int],
    ) -> list[Tensor]:
        """The gradients, or copies, in the layouts of their parameters; raises as `collect` does."""
        grads: list[Tensor] = []
        dtype = self._table.source_dtype
        for i, (grad, (shape, stride)) in enumerate(zip(found, self.layouts, strict=True)):
            if grad is not None and (grad.dtype != dtype or grad.shape != shape):
                raise ValueError(errors.gradient_misfit(self._names[i], grad, dtype, shape))
            if grad is None and i not in unused and i not in undefined:
                self._raise_removed(i)
            if grad is None or grad.stride() != stride or grad.is_conj() or grad.is_neg():
                grad = self._in_layout(i, grad)
                if i not in unused:
                    self._parameters[i].grad = grad
            elif i in copied:
                grad = grad.clone()
            grads.append(grad.detach() if grad.requires_grad else grad)
        self._guard = self._guard or layout_guard(grads)
        return grads

    def _in_layout(self, i: int, grad: Tensor | None) -> Tensor:
        """A copy of a gradient in its parameter's layout; zeros for an undefined gradient."""
        copy = self._parameters[i].detach().new_empty_strided(*self.layouts[i])
        if grad is None:
            return copy.zero_()
        sizes, strides, expected = list(grad.shape), list(grad.stride()), list(self._table.strides[i])
        text = errors.GRADIENT_STRIDES.format(name=self._names[i], sizes=sizes, strides=strides, expected=expected)
        warnings.warn(text, stacklevel=2)
        return copy.copy_(grad)

    def with_zeros(self, zero_copy: bool) -> DenseBucket:
        """A copy of this bucket whose gradients are zeros, separate from the parameters' gradients."""
        bucket = DenseBucket(self._spec, as_view=False)
        pairs = zip(self._parameters, self.layouts, strict=True)
        bucket._grads = [parameter.new_empty_strided(*layout).zero_() for parameter, layout in pairs]
        bucket.zero_copy = zero_copy
        return bucket

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Write a hook's result, times ``scale``, into the gradients.

        The result is flat, of the bucket's number of elements, or the first tensor of the target of `work`, which then
        has it; ValueError otherwise. ``used`` says for each of `stand_ins` whether any rank has a gradient; if not,
        ``take_back`` is called.
        """
        if self._upcast is not None:
            self._upcast.finish(result, self._table, used)
            return
        target, table = (self._flat.tensors, self._flat.table) if self.as_view else (self._grads, self._table)
        if result.data_ptr() != target[0].data_ptr() or result.numel() != target[0].numel():
            if result.numel() != self._table.numel:
                raise ValueError(
                    f"The communication hook returned {result.numel()} elements for bucket {self.position}, which has "
                    f"{self._table.numel}. Return a tensor of the size of bucket.buffer()."
                )
            Gradients(target, table).unflatten(result.reshape(-1))
        if scale != 1:
            torch._foreach_mul_(list(target), scale)
            self._scale = scale
        dropped = [i for i in self.stand_ins if not used[i]] if self.stand_ins else []
        for i in dropped:
            self._drop_stand_in(i, scale, take_back)
        if self.as_view:
            self._assign_views(dropped)
        else:
            self._restore_assigned(dropped)

    def _assign_views(self, dropped: Sequence[int]) -> None:
        """Let the parameters' gradients be views of the buffer, except stand-ins that are dropped."""
        for i, (parameter, view) in enumerate(zip(self._parameters, self._buffer_views, strict=True)):
            grad = parameter.grad
            if grad is None and i not in self.stand_ins:
                self._raise_removed(i)
            stays = i in dropped if grad is None else grad.data_ptr() == view.data_ptr()
            if not stays:
                parameter.grad = view

    def _restore_assigned(self, dropped: Sequence[int]) -> None:
        """Copy the means of gradients to which a hook has assigned since `collect`."""
        grads = list(map(_grad_of, self._parameters))
        for i in compress(range(len(grads)), map(is_not, grads, self._grads)):  # usually none
            grad, mean = grads[i], self._grads[i]
            if i in dropped:
                continue
            if grad is None:
                if i not in self.stand_ins:
                    self._raise_removed(i)
                self._parameters[i].grad = mean
            elif grad.data_ptr() != mean.data_ptr():
                grad.copy_(mean)

    def _drop_stand_in(self, i: int, scale: float, take_back: TakeBack | None) -> None:
        """Leave ``.grad`` of a stand-in as it was: no rank has a gradient for it."""
        before, result = self._parameters[i].grad, self._grads[i]
        if self.as_view:
            before, result = self._kept[i], self._buffer_views[i]
        if take_back is not None:
            unscaled = result / scale
            take_back(self._names[i], unscaled if before is None else unscaled - before)
            self._taken_back = {*self._taken_back, i}
        if self.as_view and self._parameters[i].grad is not None:
            result.copy_(self._kept[i])

    def discard(self, result: Tensor, take_back: TakeBack) -> None:
        """Call ``take_back`` with the finite gradients of a discarded result, which `finish` may have written."""
        first = self._flat.tensors[0] if self.as_view else self._grads[0]
        is_in_target = result.data_ptr() == first.data_ptr() and result.numel() == first.numel()
        scale = self._scale if is_in_target else 1.0
        parts = self._grads if is_in_target and not self.as_view else self._views(result.reshape(-1))
        for i, (name, part) in enumerate(zip(self._names, parts, strict=True)):
            if i not in self._taken_back and part.isfinite().all():
                take_back(name, part / scale)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shapes, strides and dtype of the gradients."""
        views = self._table.views(buffer)
        return [torch.view_as_complex(view) for view in views] if self._table.is_complex else list(views)


class SparseBucket(BucketBase):
    """The sparse gradient of one parameter, with the interface of ``torch.distributed.GradBucket``."""

    is_sparse = True

    def __init__(self, spec: BucketSpec, sets_gradient: bool = False) -> None:
        super().__init__(spec)
        (self._parameter,) = spec.parameters
        self._sets_gradient = sets_gradient  # with mixed precision: PyTorch's hook casts every ``.grad``
        self._is_absent = False  # whether this rank has no gradient at all
        self._gradient: Tensor | None = None

    def in_flight(self) -> list[Tensor]:
        """The tensors of this backward that its reduction may read and write."""
        return [] if self._gradient is None else [self._gradient._indices(), self._gradient._values()]

    def buffer(self) -> Tensor:
        """The gradient: sparse, in the parameter's shape."""
        assert self._gradient is not None
        return self._gradient

    def gradients(self) -> list[Tensor]:
        """A list whose only element is `buffer`."""
        return [self.buffer()]

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that `buffer` returns."""
        self._gradient = buffer

    def collect(
        self,
        zero_copy: bool,
        unused: Sequence[int] = (),
        shared: Collection[int] = (),
        incoming: Tensor | None = None,
        undefined: Collection[int] = (),
    ) -> None:
        """Copy the gradient; an ``undefined`` one becomes a tensor without entries.

        Raises RuntimeError if it is dense or gone.
        """
        gradient = self._parameter.grad
        if gradient is None and not unused and not undefined:
            self._raise_removed(0)
        if gradient is not None and not gradient.is_sparse:
            raise RuntimeError(errors.DENSE_GRADIENT.format(name=self._names[0]))
        self._gradient = self._empty() if gradient is None else gradient.detach().clone()
        self._is_absent = gradient is None
        if self._is_absent and self._sets_gradient:
            self._parameter.grad = self._empty()
        self.stand_ins = list(unused)

    def with_zeros(self, zero_copy: bool) -> SparseBucket:
        """A copy of this bucket whose gradient has no entries."""
        bucket = SparseBucket(self._spec)
        bucket._gradient = bucket._empty()
        return bucket

    def discard(self, result: Tensor, take_back: TakeBack) -> None:
        """Do nothing: sparse gradients have no error memory."""

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Make the hook's result the gradient. See `DenseBucket.finish`."""
        if used.get(0, True):
            result = result * scale if scale != 1 else result
            self._parameter.grad = result.to(self._parameter.dtype)
        elif self._is_absent:
            self._parameter.grad = None

    def release(self) -> None:
        """Drop all tensors of this backward."""
        self._gradient, self.stand_ins = None, []

    def _empty(self) -> Tensor:
        # Sparse in the first dimension only, like an embedding's gradient: equal on all ranks.
        shape = self._parameter.shape
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *shape[1:], dtype=self._parameter.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


ReducerBucket = DenseBucket | SparseBucket


def default_reduction(exchange: Exchange, bucket: ReducerBucket) -> Future[Tensor]:
    """Start to average a bucket's gradients, bitwise equal to PyTorch's DDP. The future has the result.

    gloo's threads sum dense gradients on a CPU, several buckets at once; all others are reduced in the executor.
    """
    if isinstance(bucket, DenseBucket) and not exchange.has_streams:
        return exchange.transport.start_all_reduce(bucket.scale_into_buffer())

    @repeatable
    async def algorithm(step: Step) -> None:
        assert isinstance(bucket, DenseBucket)
        if bucket.as_view:
            await step.transport.all_reduce(bucket.scale_into_buffer())
        else:
            await cast_all_reduce(step, divisor=bucket.divisor)

    return reduce_bucket(exchange.connections, bucket, algorithm, settings_of("all-reduce"), divisor=bucket.divisor)


class DelayedGradients:
    """The gradients of the parameters that no bucket has, in one flat buffer.

    ``buffer``: as many elements as the parameters have, in their dtype and on their device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffer: Tensor) -> None:
        self.parameters, self.buffer = parameters, buffer
        parts = buffer.split([parameter.numel() for parameter in parameters])
        self._views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    def collect(self) -> Tensor:
        """Return the buffer, after gradients that were cleared or replaced since the forward have become its views."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view.copy_(parameter.grad.to_dense())
        return self.buffer
