"""A bucket: a list of gradients that travels as one, with a flat buffer only where somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.compress import Gradients
from gradwire.kernels import SegmentTable, flatten, unflatten
from gradwire.kernels.segments import gradient_layout


class GradBucket:
    """The gradients of some parameters, with the interface of ``torch.distributed.GradBucket`` and two more methods.

    A hook written for PyTorch asks for `buffer` or `gradients`, and the gradients are then copied into one flat
    buffer, which lives as long as the bucket. gradwire's own hooks ask for `source` and `target` instead, and no
    buffer is ever made. With ``as_view`` the buffer always exists and every ``.grad`` ends up as a view of it.

    Attributes:
        device: where the gradients are.
        as_view: whether every ``.grad`` becomes a view of the buffer.
        in_place: whether `source` and `target` may be used; set by the reducer, cleared once the bucket is flat.
        pending: parameters whose gradient is not ready in this backward.
        future: the result of the hook, from launch to finalisation.
    """

    def __init__(
        self, index: int, is_last: bool, parameters: Sequence[Tensor], names: Sequence[str], as_view: bool
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._parameters = list(parameters)
        self._names = list(names)
        layouts = [gradient_layout(parameter) for parameter in parameters]
        self._table = SegmentTable(layouts)
        self._strides = [layout.stride() for layout in layouts]
        self.device = self._table.device
        self._buffer: Tensor | None = None
        self._flat_table: SegmentTable | None = None
        self.as_view = as_view
        if as_view:
            self._allocate()
        self._grads: list[Tensor] = []
        self._is_flat = False
        self._replaced: Tensor | None = None
        self.in_place = False
        self.pending = len(self._parameters)
        self.future: Future[Tensor] | None = None

    def index(self) -> int:
        """Position of the bucket in the order of communication."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of a backward."""
        return self._is_last

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients in the buffer."""
        return self._parameters

    def parameter_names(self) -> list[str]:
        """The names of `parameters`, as in ``module.named_parameters()``."""
        return self._names

    def buffer(self) -> Tensor:
        """The gradients as one flat tensor, each in its own memory order; complex ones as real pairs."""
        if self._replaced is not None:
            return self._replaced
        if not self._is_flat:
            buffer = self._allocate()
            if self._unaliased():
                flatten(self._grads, buffer, table=self._table)
            self._is_flat = True
            self.in_place = False
        assert self._buffer is not None
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer`, one for each parameter, in its shape and strides."""
        return self._views(self.buffer())

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` and `gradients` stand for another flat tensor from now on."""
        if buffer.dim() != 1 or buffer.numel() != self._table.numel:
            raise ValueError(
                f"The new buffer has shape {tuple(buffer.shape)}; expected ({self._table.numel},), as the old one."
            )
        self._replaced = buffer
        self.in_place = False

    def source(self) -> Gradients:
        """The gradients where they lie now."""
        if self.as_view and not self._unaliased():
            return self._flat()
        return Gradients(self._grads, self._table)

    def target(self) -> Gradients:
        """Where the result goes: the gradients themselves, or the buffer that they will be views of."""
        return self._flat() if self.as_view else Gradients(self._grads, self._table)

    def scale_into_buffer(self, divisor: int) -> Tensor:
        """Divide gradients that are views of the buffer, copy the others there times 1 / divisor; returns the buffer.

        The two round differently unless the divisor is a power of two, and so does complex division. PyTorch does the
        same, one gradient at a time.
        """
        buffer = self._allocate()
        outside = self._outside()
        if len(outside) == len(self._grads):
            return flatten(self._grads, buffer, table=self._table, scale=1 / divisor)
        if not outside and not self._table.is_complex:
            return buffer.div_(divisor)
        views = self._views(buffer)
        for i, view in enumerate(views):
            if i in outside:
                torch.mul(self._grads[i], 1 / divisor, out=view)
            else:
                view.div_(divisor)
        return buffer

    def collect(self, in_place: bool) -> None:
        """Take the parameters' gradients, which are all ready. An undefined one becomes zero.

        A gradient in another layout than its parameter's, as a user may have assigned, is replaced by a copy.
        """
        grads = []
        for parameter, stride in zip(self._parameters, self._strides, strict=True):
            grad = parameter.grad
            if grad is None:
                grad = parameter.grad = parameter.new_empty_strided(parameter.shape, stride).zero_()
            elif grad.stride() != stride or grad.is_conj() or grad.is_neg():
                grad = parameter.grad = parameter.new_empty_strided(parameter.shape, stride).copy_(grad)
            grads.append(grad.detach() if grad.requires_grad else grad)
        self._grads = grads
        self._is_flat = False
        self._replaced = None
        self.in_place = in_place

    def finish(self, result: Tensor | None) -> None:
        """Put a hook's flat result into the gradients, None if it is there already, and let go of them.

        Raises:
            ValueError: the result has another number of elements than the bucket.
        """
        if result is not None:
            if result.numel() != self._table.numel:
                raise ValueError(
                    f"The communication hook returned {result.numel()} elements for bucket {self._index}, "
                    f"which has {self._table.numel}. Return a tensor of the size of bucket.buffer()."
                )
            target = self.target()
            if result.data_ptr() != target.tensors[0].data_ptr():
                unflatten(result.reshape(-1), target.tensors, table=target.table)
        if self.as_view:
            self.point_gradients_at_buffer()
        self.release()

    def release(self) -> None:
        """Let go of this backward's gradients and of a replaced buffer."""
        self._grads = []
        self._replaced = None
        self.in_place = False
        self.future = None
        self.pending = len(self._parameters)

    def point_gradients_at_buffer(self) -> None:
        """Make every defined ``.grad`` a view of the buffer, which must hold its values already."""
        assert self._buffer is not None
        for parameter, view in zip(self._parameters, self._views(self._buffer), strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view

    def adopt_gradients(self) -> None:
        """Copy the gradients that there are already into a new buffer, and make them views of it."""
        buffer = self._allocate()
        for parameter, view in zip(self._parameters, self._views(buffer), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        self.point_gradients_at_buffer()

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shape, strides and dtype of each parameter."""
        views = self._table.views(buffer)
        return [torch.view_as_complex(view) for view in views] if self._table.is_complex else list(views)

    def _allocate(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.zeros(self._table.numel, dtype=self._table.dtype, device=self.device)
            self._flat_table = SegmentTable([self._buffer])
        return self._buffer

    def _flat(self) -> Gradients:
        assert self._buffer is not None and self._flat_table is not None
        return Gradients([self._buffer], self._flat_table)

    def _outside(self) -> list[int]:
        """Indices of the gradients that are not views of the buffer."""
        assert self._buffer is not None
        views = self._views(self._buffer)
        return [i for i, view in enumerate(views) if self._grads[i].data_ptr() != view.data_ptr()]

    def _unaliased(self) -> bool:
        """Whether the gradients lie outside the buffer; if only some do, those are copied into it first."""
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
