"""Buckets: lists of gradients that are reduced together, with a flat buffer only if a hook asks for one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_not

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compress import Gradients
from gradwire.kernels import Fitting, SegmentTable, flatten, gradient_layout, unflatten
from gradwire.reducer import errors, torch_internals

__all__ = ["BucketBase", "BucketSpec", "DenseBucket", "SparseBucket", "TakeBack"]

# Called with a parameter's name and the part of its reduced gradient that was sent but is not applied.
TakeBack = Callable[[str, Tensor], None]

_grad_of = attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """A bucket's position and parameters.

    Attributes:
        index: position in the order of launch.
        is_last: whether it is the last bucket of a backward.
        members: indices of its parameters in the model.
        parameters: its parameters, in the order of their gradients in the buffer.
        names: parameter names, as in ``module.named_parameters()``.
        model_parameters: all parameters that the reducer averages.
    """

    index: int
    is_last: bool
    members: list[int]
    parameters: list[Tensor]
    names: list[str]
    model_parameters: Sequence[Tensor] = ()


class BucketBase:
    """The base class of dense and sparse buckets.

    Attributes:
        members: indices of the parameters in the model.
        device: device of the gradients.
        process_group: the ranks to average over; set by the reducer.
        model_parameters: all parameters that the reducer averages.
        divisor: divisor of a sum over ranks: the world size, or in `join` the number of ranks with
            inputs left.
        is_last_launched: whether no bucket after it is launched in this backward.
        stand_ins: positions in the bucket of the parameters that this rank has no gradient for in this backward.
    """

    def __init__(self, spec: BucketSpec) -> None:
        self._spec = spec
        self._index = spec.index
        self._parameters = spec.parameters
        self._names = spec.names
        self.members = spec.members
        self.device = spec.parameters[0].device
        self.process_group: dist.ProcessGroup | None = None
        self.hook_has_groups = False
        self.model_parameters = spec.model_parameters
        self.divisor = 1
        self.is_last_launched = spec.is_last
        self.release()

    def index(self) -> int:
        """Position in the order of launch."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket that is launched in this backward."""
        return self.is_last_launched

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients in the buffer."""
        return self._parameters

    def parameter_names(self) -> list[str]:
        """The names of `parameters`, as in ``module.named_parameters()``."""
        return self._names

    def release(self) -> None:
        """Drop all tensors of this backward."""
        self.stand_ins: list[int] = []


class DenseBucket(BucketBase):
    """The gradients of some parameters, with the interface of ``torch.distributed.GradBucket`` and two more methods.

    A hook written for PyTorch asks for `buffer` or `gradients`. The gradients are then flattened into one buffer, which
    is kept until a backward does without it, or with ``frees_buffer`` until the end of this one. gradwire's own hooks
    ask for `source` and `target` instead, and no buffer is allocated, or for `source` and `empty_buffer`. With
    ``as_view`` the buffer always exists, and every ``.grad`` ends up as a view of it. Gradients have the shapes,
    strides and dtype of the tensors ``like``, by default of the parameters.

    Attributes:
        as_view: whether every ``.grad`` becomes a view of the buffer.
        zero_copy: whether hooks may use `source` and `target`; set by the reducer, cleared once the bucket is flat.
    """

    zero_copy: bool
    _grads: Sequence[Tensor]  # read by the reduction and, without `as_view`, written
    _scale: float  # of the result that `finish` has written
    _kept: dict[int, Tensor]  # with `as_view`, by position: copies of the gradients of `stand_ins`
    _replaced: Tensor | None  # the tensor that a hook passed to `set_buffer`

    def __init__(
        self, spec: BucketSpec, as_view: bool, frees_buffer: bool = False, like: Iterable[Tensor] | None = None
    ) -> None:
        self._frees_buffer = frees_buffer and not as_view
        super().__init__(spec)
        layouts = [gradient_layout(tensor) for tensor in like or self._parameters]
        self._table = SegmentTable(layouts)
        self._strides = [layout.stride() for layout in layouts]
        self._buffer: Tensor | None = None
        self._flat_table: SegmentTable | None = None  # of the buffer as one tensor
        self._is_flat = False  # whether the buffer holds this backward's gradients
        self._needs_buffer = False  # whether anything has asked for the buffer since `collect`
        self.as_view = as_view
        if as_view:
            self._allocate()

    def buffer(self) -> Tensor:
        """The gradients as one flat tensor, each in its own memory order; complex ones as real pairs."""
        if self._replaced is not None:
            return self._replaced
        if not self._is_flat:
            buffer = self._allocate()
            if self._unaliased():
                flatten(self._grads, buffer, table=self._table)
            self._is_flat = True
            self.zero_copy = False
        assert self._buffer is not None
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer`, one for each parameter, in its shape and strides."""
        return self._views(self.buffer())

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor that `buffer` and `gradients` return."""
        if buffer.dim() != 1 or buffer.numel() != self._table.numel:
            raise ValueError(
                f"The new buffer has shape {tuple(buffer.shape)}; expected ({self._table.numel},), as the old one."
            )
        self._replaced = buffer
        self.zero_copy = False

    def source(self) -> Gradients:
        """The gradients, where they are in memory (zero-copy)."""
        if self.as_view and not self._unaliased():
            return self._flat()
        return Gradients(self._grads, self._table)

    def target(self) -> Gradients:
        """Where the result goes: the gradients themselves, or the buffer that they will be views of."""
        return self._flat() if self.as_view else Gradients(self._grads, self._table)

    def empty_buffer(self) -> Tensor:
        """The flat buffer, for a hook to write the mean into, in place of `target`; its values are undefined."""
        return self._allocate()

    def scale_into_buffer(self) -> Tensor:
        """Write the gradients, divided by `divisor`, into the buffer; returns the buffer.

        Bitwise equal to PyTorch: gradients that are views of the buffer are divided, all others are
        multiplied by 1 / divisor. Division and multiplication round differently unless the divisor
        is a power of two. Complex gradients are divided as complex numbers, which rounds
        differently again.
        """
        buffer = self._allocate()
        outside = self._outside() if self.as_view else range(len(self._grads))
        if len(outside) == len(self._grads):
            return flatten(self._grads, buffer, table=self._table, scale=1 / self.divisor)
        if not outside and not self._table.is_complex:
            return buffer.div_(self.divisor)
        views = self._views(buffer)
        for i, view in enumerate(views):
            if i in outside:
                torch.mul(self._grads[i], 1 / self.divisor, out=view)
            else:
                view.div_(self.divisor)
        return buffer

    def collect(
        self, zero_copy: bool, unused: Sequence[int] = (), shared: Collection[int] = (), incoming: Tensor | None = None
    ) -> None:
        """Take the parameters' gradients, which are all ready. An undefined gradient becomes zeros.

        A gradient in another layout than its parameter's, as a user may have assigned, is replaced by a copy. With
        ``zero_copy`` the result is written before the backward ends, so a gradient that anything but its parameter's
        ``.grad`` can reach is copied, and its result copied back in `finish`.

        Args:
            zero_copy: whether the hook may use `source` and `target`.
            unused: positions in the bucket of the parameters that this rank has no gradient for in this backward. If no
                other rank has one either, their ``.grad`` must not change: a copy is reduced, or with ``as_view`` kept.
            shared: positions of the parameters that another wrapper reduces, too.
            incoming: see `owns_memory`.

        Raises:
            ValueError: a gradient has another dtype or shape than when the model was wrapped.
        """
        if not self._needs_buffer and not self.as_view:
            self._free_buffer()  # hooks may need it in their first steps only
        self._needs_buffer = False
        grads: list[Tensor] = []
        dtype, shapes = self._table.source_dtype, self._table.shapes
        for i, (parameter, stride) in enumerate(zip(self._parameters, self._strides, strict=True)):
            grad = parameter.grad
            if grad is not None and (grad.dtype != dtype or grad.shape != shapes[i]):
                raise ValueError(errors.gradient_misfit(self._names[i], grad, dtype, shapes[i]))
            if grad is None or grad.stride() != stride or grad.is_conj() or grad.is_neg():
                grad = self._in_layout(i, grad)
                if i not in unused:
                    parameter.grad = grad
            elif not self.as_view and (
                i in unused or (zero_copy and (i in shared or not torch_internals.owns_memory(grad, incoming)))
            ):
                grad = grad.clone()
            grads.append(grad.detach() if grad.requires_grad else grad)
        self.stand_ins, self._scale = list(unused), 1.0
        self._kept = {i: grads[i].clone() for i in unused} if self.as_view else {}
        self._grads = Fitting(grads, self._table)
        self._is_flat = False
        self._replaced = None
        self.zero_copy = zero_copy

    def _in_layout(self, i: int, grad: Tensor | None) -> Tensor:
        """A copy of a gradient in its parameter's layout; zeros for an undefined gradient."""
        parameter = self._parameters[i]
        copy = parameter.detach().new_empty_strided(parameter.shape, self._strides[i])
        if grad is None:
            return copy.zero_()
        warnings.warn(errors.gradient_strides(self._names[i], grad, self._strides[i]), stacklevel=2)
        return copy.copy_(grad)

    def of_zeros(self, zero_copy: bool) -> DenseBucket:
        """A copy of this bucket whose gradients are zeros, separate from the parameters' gradients."""
        bucket = DenseBucket(self._spec, as_view=False)
        layouts = zip(self._parameters, self._strides, strict=True)
        zeros = [p.new_empty_strided(p.shape, stride).zero_() for p, stride in layouts]
        bucket._grads = Fitting(zeros, bucket._table)
        bucket.zero_copy = zero_copy
        return bucket

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Write a hook's result into the gradients.

        Args:
            result: flat, of the bucket's number of elements; or the first tensor of `target`, if that has the result.
            scale: multiplies the result.
            used: whether any rank has a gradient, for each of `stand_ins`.
            take_back: called for the stand-ins that no rank has a gradient for.

        Raises:
            ValueError: the result has another number of elements than the bucket.
        """
        target = self.target()
        if not self._is_in_target(result):
            if result.numel() != self._table.numel:
                raise ValueError(errors.result_misfit(self._index, result.numel(), self._table.numel))
            unflatten(result.reshape(-1), target.tensors, table=target.table)
        if scale != 1:
            torch._foreach_mul_(list(target.tensors), scale)
            self._scale = scale
        dropped = {i for i in self.stand_ins if not used[i]}
        for i in dropped:
            self._drop_stand_in(i, scale, take_back)
        self._hand_over(dropped)

    def _hand_over(self, dropped: Collection[int]) -> None:
        """Make the results the parameters' gradients, whatever a hook has assigned to ``.grad`` since `collect`."""
        if self.as_view:
            self.point_gradients_at_buffer(dropped)
            return
        grads = list(map(_grad_of, self._parameters))
        for i in compress(range(len(grads)), map(is_not, grads, self._grads)):  # usually none
            grad, result = grads[i], self._grads[i]
            if i in dropped:
                continue
            if grad is None:
                self._parameters[i].grad = result
            elif grad.data_ptr() != result.data_ptr():
                grad.copy_(result)

    def _drop_stand_in(self, i: int, scale: float, take_back: TakeBack | None) -> None:
        """Leave ``.grad`` of a stand-in as it was: no rank has a gradient for it."""
        before, result = self._parameters[i].grad, self._grads[i]
        if self.as_view:
            assert self._buffer is not None
            before, result = self._kept[i], self._views(self._buffer)[i]
        if take_back is not None:
            unscaled = result / scale
            take_back(self._names[i], unscaled if before is None else unscaled - before)
            self._taken_back.add(i)
        if self.as_view and self._parameters[i].grad is not None:
            result.copy_(self._kept[i])

    def _is_in_target(self, result: Tensor) -> bool:
        first = self.target().tensors[0]
        return result.data_ptr() == first.data_ptr() and result.numel() == first.numel()

    def give_back(self, result: Tensor, take_back: TakeBack) -> None:
        """Call ``take_back`` with every finite gradient of a result: the step will not be applied.

        Args:
            result: as in `finish`, which may have written it.
            take_back: called with a parameter's name and its reduced gradient.
        """
        is_in_target = self._is_in_target(result)
        scale = self._scale if is_in_target else 1.0
        results = self._grads if is_in_target and not self.as_view else self._views(result.reshape(-1))
        for i, (name, result) in enumerate(zip(self._names, results, strict=True)):
            if i not in self._taken_back and result.isfinite().all():
                take_back(name, result / scale)

    def release(self) -> None:
        """Drop all tensors of this backward, and the buffer if it is to be freed."""
        super().release()
        self._grads = ()
        self._kept, self._scale = {}, 1.0
        self._taken_back: set[int] = set()
        if self._frees_buffer:
            self._free_buffer()
        self._replaced = None
        self.zero_copy = False

    def _free_buffer(self) -> None:
        self._buffer, self._flat_table = None, None

    def point_gradients_at_buffer(self, optional: Collection[int]) -> None:
        """Make every ``.grad`` a view of the buffer, which holds its values.

        Args:
            optional: positions of the parameters whose ``.grad``, if undefined, stays so.
        """
        assert self._buffer is not None
        for i, (parameter, view) in enumerate(zip(self._parameters, self._views(self._buffer), strict=True)):
            grad = parameter.grad
            if i not in optional if grad is None else grad.data_ptr() != view.data_ptr():
                parameter.grad = view

    def adopt_gradients(self) -> None:
        """Copy existing gradients into a new buffer, and make them views of it."""
        buffer = self._allocate()
        for parameter, view in zip(self._parameters, self._views(buffer), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        self.point_gradients_at_buffer(range(len(self._parameters)))

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shapes, strides and dtype of the gradients."""
        views = self._table.views(buffer)
        return [torch.view_as_complex(view) for view in views] if self._table.is_complex else list(views)

    def _allocate(self) -> Tensor:
        self._needs_buffer = True
        if self._buffer is None:
            self._buffer = torch.zeros(self._table.numel, dtype=self._table.dtype, device=self.device)
            self._flat_table = SegmentTable([self._buffer])
        return self._buffer

    def _flat(self) -> Gradients:
        assert self._buffer is not None and self._flat_table is not None
        return Gradients([self._buffer], self._flat_table, self._table)

    def _outside(self) -> list[int]:
        """Indices of the gradients that are not views of the buffer."""
        assert self._buffer is not None
        views = self._views(self._buffer)
        return [i for i, view in enumerate(views) if self._grads[i].data_ptr() != view.data_ptr()]

    def _unaliased(self) -> bool:
        """Whether no gradient is a view of the buffer. If some are, the others are copied into it first."""
        if not self.as_view:
            return True
        outside = self._outside()
        if len(outside) == len(self._grads):
            return True
        if outside:
            assert self._buffer is not None
            views = self._views(self._buffer)
            torch._foreach_copy_([views[i] for i in outside], [self._grads[i] for i in outside])
        return False


class SparseBucket(BucketBase):
    """The sparse gradient of one parameter, with the interface of ``torch.distributed.GradBucket``."""

    _gradient: Tensor | None

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(spec)
        (self._parameter,) = spec.parameters

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
        self, zero_copy: bool, unused: Sequence[int] = (), shared: Collection[int] = (), incoming: Tensor | None = None
    ) -> None:
        """Copy the gradient; an undefined gradient becomes a sparse tensor without entries.

        Raises:
            RuntimeError: the gradient is dense.
        """
        gradient = self._parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise RuntimeError(errors.dense_gradient(self._names[0]))
        self._gradient = self._empty() if gradient is None else gradient.detach().clone()
        self.stand_ins = list(unused)

    def of_zeros(self, zero_copy: bool) -> SparseBucket:
        """A copy of this bucket whose gradient has no entries."""
        bucket = SparseBucket(self._spec)
        bucket._gradient = bucket._empty()
        return bucket

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Make the hook's result the gradient. See `DenseBucket.finish`."""
        if used.get(0, True):
            result = result * scale if scale != 1 else result
            self._parameter.grad = result.to(self._parameter.dtype)

    def release(self) -> None:
        """Drop all tensors of this backward."""
        super().release()
        self._gradient = None

    def _empty(self) -> Tensor:
        # Sparse in the first dimension only, like an embedding's gradient: equal on all ranks.
        shape = self._parameter.shape
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *shape[1:], dtype=self._parameter.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
