"""`LowRankBucket`: the gradients of one bucket as PowerSGD's matrices, with their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.workspace import Workspace
from gradwire.compress.policy import MatrixShape
from gradwire.compress.powersgd_memory import PowerSGDMemory
from gradwire.kernels import SegmentTable, flatten, unflatten
from gradwire.kernels.counter_random import random_key
from gradwire.kernels.flattening import compute_dtype
from gradwire.kernels.lowrank import can_keep
from gradwire.kernels.matrices import ALIGNMENT, Factor, Matrix, MatrixTable, Operands
from gradwire.kernels.segments import is_capturing, memory_order
from gradwire.kernels.warm_start import draw


class Step(NamedTuple):
    """The tensors of one step of a bucket.

    The buffers are in the workspace, and valid until it is used again. A buffer of factors holds those of all matrices.

    Attributes:
        matrices: gradients, results and errors of the compressed parameters, where they lie.
        messages: what the first all-reduce takes: ``sent`` and ``uncompressed``, as one tensor if they have one dtype.
        sent: the factors in ``messages``.
        uncompressed: the other gradients in ``messages``.
        basis: factors with orthonormal columns, in the dtype of the arithmetic.
        answer: the factors of the second all-reduce; empty in a step with one.
    """

    matrices: Operands
    messages: list[Tensor]
    sent: Tensor
    uncompressed: Tensor
    basis: Tensor
    answer: Tensor


class LowRankBucket:
    """The gradients of a bucket: some are matrices to compress, the others are sent as they are.

    A bucket serves every step until its parameters, their dtype or the options change. Its successor takes over
    ``memory``.

    Args:
        layouts: real dense tensors with the shapes, strides, dtype and device of the gradients, such as the gradients.
        shapes: how each is compressed, or None; see `LowRankPolicy.matrix_shapes`. Not all None.
        names: of the parameters, for ``memory`` and the random columns; by default "0", "1", ...
        memory: what is remembered, by name. Not modified.
        error_feedback: whether to remember what compression leaves out, and add it to the next gradient.
        factor_dtype: of the factors on the wire; None for the gradients' own, or bf16 for fp16 gradients, because
            factors have the range of gradients.
        seed: of the random columns, equal on all ranks.
        iteration: the step, for the random columns of factors that are not remembered.
        alternating: whether to remember both sides, as `alternating_all_reduce` needs.

    Attributes:
        layout: where each gradient is in a flat buffer of the bucket.
        table: the sizes of the matrices, and where their factors are in a packed buffer.
        memory: of the compressed parameters, by name.
        q: the remembered Q of all matrices, packed as ``table.q``; unit columns, equal on all ranks.
        p: the same of P, if ``alternating``.
        counter: the step of the random columns, in device memory: int64, one element.
        finite: scratch of one step: whether each matrix is finite on all ranks.
    """

    def __init__(
        self,
        layouts: Sequence[Tensor],
        shapes: Sequence[MatrixShape | None],
        *,
        names: Sequence[str] | None = None,
        memory: Mapping[str, PowerSGDMemory] | None = None,
        error_feedback: bool = True,
        factor_dtype: torch.dtype | None = None,
        seed: int = 0,
        iteration: int = 0,
        alternating: bool = False,
    ) -> None:
        dtype, device = layouts[0].dtype, layouts[0].device
        names = names if names is not None else [str(i) for i in range(len(layouts))]
        memory = memory if memory is not None else {}
        self._compressed = [(i, shape) for i, shape in enumerate(shapes) if shape is not None]
        self._others = [i for i, shape in enumerate(shapes) if shape is None]
        self._others_table = SegmentTable([layouts[i] for i in self._others]) if self._others else None
        self._factor_dtype = factor_dtype or (torch.bfloat16 if dtype == torch.float16 else dtype)
        self.layout = SegmentTable(layouts)
        matrices = [
            Matrix(shape.rows, shape.columns, shape.rank, random_key(seed, f"{names[i]}/{k}"))
            for i, shape in self._compressed
            for k in range(shape.matrices)
        ]
        self.table = MatrixTable(matrices, dtype, device)
        self.finite = torch.ones(len(matrices), dtype=torch.int32, device=device)
        self.counter = torch.full((1,), iteration, dtype=torch.int64, device=device)

        compressed = [names[i] for i, _ in self._compressed]
        known = [memory.get(name, PowerSGDMemory()) for name in compressed]
        self._errors: list[Tensor] | None = None
        if error_feedback:
            of = [layouts[i] for i, _ in self._compressed]
            errors = [
                each.error_like(layout, self.table.compute, name)
                for each, layout, name in zip(known, of, compressed, strict=True)
            ]
            known = [replace(each, error=error) for each, error in zip(known, errors, strict=True)]
            self._errors = self._matrices(errors)
        self.q, views = self._packed(self.table.q, [each.q for each in known])
        known = [replace(each, q=q) for each, q in zip(known, views, strict=True)]
        self.p: Tensor | None = None
        if alternating:
            self.p, views = self._packed(self.table.p, [each.p for each in known])
            known = [replace(each, p=p) for each, p in zip(known, views, strict=True)]
        self.memory = dict(zip(compressed, known, strict=True))

    def sent_numel(self, iteration: int) -> int:
        """Real elements that a step hands to collectives."""
        p, q = sum(self.table.p.sizes), sum(self.table.q.sizes)
        factors = p + q if self.p is None else (p, q)[iteration % 2]
        return factors + self._others_numel

    def start_step(
        self,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        iteration: int,
        workspace: Workspace,
        *,
        sent: Factor,
        basis: Factor,
        answer: Factor | None = None,
    ) -> Step:
        """Set ``counter``, and find the tensors of a step.

        Args:
            source: the gradients, real.
            target: where the result goes; may be the same memory.
            iteration: the number of the step. A step that a CUDA graph records ignores it, because every replay would
                set the same number: there ``counter`` is what the step before has left, one more.
            workspace: where the buffers come from.
            sent: the factors of the first all-reduce: ``table.p`` or ``table.q``.
            basis: the factors to orthogonalise.
            answer: the factors of the second all-reduce; None in a step with one.
        """
        if not is_capturing(self.counter.device):
            self.counter.fill_(iteration)
        gradients, results = (self._matrices([tensors[i] for i, _ in self._compressed]) for tensors in (source, target))
        reads_twice = answer is not None  # M, which `project` then leaves in the target
        keep = reads_twice and self._errors is not None and can_keep(self.table)
        matrices = Operands(self.table, gradients, results, self._errors, keep)

        dtype, compute, on_wire = self.table.dtype, self.table.compute, self._factor_dtype
        sizes = [(basis.numel, compute), (answer.numel if answer is not None else 0, on_wire)]
        if on_wire == dtype:  # then one tensor takes both
            message, *buffers = workspace.wires((sent.numel + self._others_numel, dtype), *sizes)
            first, others = message.split([sent.numel, self._others_numel])
            messages = [message]
        else:
            first, others, *buffers = workspace.wires((sent.numel, on_wire), (self._others_numel, dtype), *sizes)
            messages = [first, others] if self._others else [first]
        step = Step(matrices, messages, first, others, *buffers)
        for factors, buffer in ((sent, step.sent), (basis, step.basis), (answer, step.answer)):
            if factors is not None and factors.has_gaps:
                buffer.zero_()
        return step

    def pack_uncompressed(self, source: Sequence[Tensor], wire: Tensor, scale: float) -> None:
        """Write the gradients that are not compressed, times ``scale``, into ``wire``."""
        if self._others_table is not None:
            flatten([source[i] for i in self._others], wire, table=self._others_table, scale=scale)

    def unpack_uncompressed(self, wire: Tensor, target: Sequence[Tensor]) -> None:
        """Write ``wire`` into the gradients that are not compressed."""
        if self._others_table is not None:
            unflatten(wire, [target[i] for i in self._others], table=self._others_table)

    @property
    def _others_numel(self) -> int:
        return self._others_table.numel if self._others_table is not None else 0

    def _matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The matrices of the compressed parameters, as they are in memory: n x m each, in order."""
        return [
            matrix
            for (_, shape), tensor in zip(self._compressed, tensors, strict=True)
            for matrix in memory_order(tensor).view(shape.matrices, shape.rows, shape.columns)
        ]

    def _packed(self, factors: Factor, known: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """The factors of one side in one buffer, and the view of each parameter's: as known, or else random.

        Factors of another rank begin anew, as when the rank changes in training.
        """
        buffer = torch.zeros(factors.numel, dtype=self.table.compute, device=self.table.device)
        draw(factors, self.table.keys, self.counter, buffer)
        views, first = [], 0
        for (_, shape), remembered in zip(self._compressed, known, strict=True):
            length = factors.lengths[first]
            distance = -(-factors.sizes[first] // ALIGNMENT) * ALIGNMENT
            size, stride = (shape.matrices, shape.rank, length), (distance, length, 1)
            views.append(buffer.as_strided(size, stride, factors.offsets[first]))
            if remembered is not None and remembered.shape == views[-1].shape:
                views[-1].copy_(remembered)
            first += shape.matrices
        return buffer, views


def flat_low_rank_bucket(
    layouts: Sequence[Tensor],
    rank: int,
    *,
    names: Sequence[str],
    memory: Mapping[str, PowerSGDMemory],
    error_feedback: bool = True,
    **options: Any,
) -> LowRankBucket | None:
    """The flat bucket as one matrix, as nearly square as possible; the few elements that remain are not compressed.

    Errors are remembered by parameter, and views of one flat tensor. The factors belong to the bucket: their name is
    made of the first and the last parameter's.

    Args:
        layouts: real dense tensors with the shapes, strides, dtype and device of the gradients.
        rank: r, clamped to min(n, m).
        names: of the parameters.
        memory: what is remembered, by name. Not modified.
        error_feedback: whether to remember what compression leaves out, and add it to the next gradient.
        options: further ones of `LowRankBucket`.

    Returns:
        The bucket, whose gradients are the matrix and the remainder; None if it would not shrink.
    """
    table = SegmentTable(layouts)
    columns = max(1, math.isqrt(max(table.numel - 1, 0)) + 1)  # the square root, rounded up
    rows = table.numel // columns
    rank = min(rank, rows, columns)
    if (rows + columns) * rank >= rows * columns:
        return None
    flat = torch.empty(table.numel, dtype=table.dtype, device=table.device)
    parts = flat.split([rows * columns, table.numel - rows * columns])
    name = f"{names[0]} ... {names[-1]}, {len(names)} parameters"
    known, errors = memory.get(name, PowerSGDMemory()), {}
    if error_feedback:
        error = torch.zeros_like(flat, dtype=compute_dtype(table.dtype))
        known = replace(known, error=error[: rows * columns])
        for of, view in zip(names, table.views(error), strict=True):
            remembered = memory.get(of, PowerSGDMemory())
            if remembered.error is not None:
                view.copy_(remembered.error_like(view, error.dtype, of))
            errors[of] = replace(remembered, error=view)
    bucket = LowRankBucket(
        parts,
        [MatrixShape(1, rows, columns, rank), None],
        names=[name, "remainder"],
        memory={name: known},
        error_feedback=error_feedback,
        **options,
    )
    bucket.memory = {**errors, name: replace(bucket.memory[name], error=None)}
    return bucket
