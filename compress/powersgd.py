"""PowerSGD: gradients as products of low-rank factors, with the rest remembered for the next step.

For each matrix M of n rows and m columns, with Q from the step before:

    M = G + E                                   error feedback
    P = all-reduce(M Q),  P = orthogonalise(P)  one step of power iteration, from a warm start
    Q = all-reduce(M' P)
    G = P Q',             E = M - G

That sends r (n + m) elements in place of n m. What is not compressed travels with P. Source: Vogels, Karimireddy,
Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithms 1, 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.compress.policy import MatrixShape
from gradwire.compress.transport import Transport
from gradwire.compress.workspace import Workspace
from gradwire.kernels import (
    ALIGN_NUMEL,
    FactorLayout,
    Matrix,
    MatrixTable,
    Operands,
    SegmentTable,
    backproject,
    can_keep,
    draw,
    flatten,
    is_capturing,
    memory_order,
    orthogonalize,
    project,
    random_key,
    reconstruct,
    renew,
    unflatten,
)


class Factors:
    """The warm-start factors of every parameter, by name; equal on all ranks.

    Attributes:
        q: unit columns, matrices x r x m.
        p: the same for the other side, matrices x r x n; used only by `alternating_all_reduce`.
    """

    def __init__(self) -> None:
        self.q: dict[str, Tensor] = {}
        self.p: dict[str, Tensor] = {}


class LowRankBucket:
    """The gradients of a bucket, sorted into matrices and the rest, with what is remembered of them.

    It lives as long as the bucket has these parameters; errors and factors live on in their dictionaries.

    Args:
        names: of the bucket's parameters.
        layouts: real dense tensors with the shapes, strides, dtype and device of their gradients.
        shapes: how each is compressed, or None; not all None.
        factor_dtype: of the factors on the wire; None for the gradients' own, or bf16 for fp16 gradients, because
            factors have the range of gradients.
        errors: the error memory of each compressed parameter, in the layout of its gradient and in ``table.compute``;
            None without error feedback.
        factors: the warm-start factors.
        seed: of the random columns.
        iteration: the step, for the random columns of factors that are not known.
        alternating: whether `alternating_all_reduce` will be used, which remembers both sides.

    Attributes:
        table: the layout of the matrices.
        q: warm-start factors, packed as ``table.q``; unit columns, equal on all ranks.
        p: the same for the other side, if ``alternating``.
        step: the step of the random columns, in device memory: int64, one element.
        finite: scratch of one step: whether each matrix is finite on all ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        layouts: Sequence[Tensor],
        shapes: Sequence[MatrixShape | None],
        factor_dtype: torch.dtype | None,
        errors: Sequence[Tensor] | None,
        factors: Factors,
        seed: int,
        iteration: int,
        alternating: bool = False,
    ) -> None:
        dtype, device = layouts[0].dtype, layouts[0].device
        self._raw = [i for i, shape in enumerate(shapes) if shape is None]
        self._compressed = [(i, shape) for i, shape in enumerate(shapes) if shape is not None]
        self._raw_table = SegmentTable([layouts[i] for i in self._raw]) if self._raw else None
        matrices = [
            Matrix(shape.rows, shape.columns, shape.rank, random_key(seed, f"{names[i]}/{k}"))
            for i, shape in self._compressed
            for k in range(shape.matrices)
        ]
        self.table = MatrixTable(matrices, dtype, device)
        self._factor_dtype = factor_dtype or (torch.bfloat16 if dtype == torch.float16 else dtype)
        self._errors = self._cut(errors) if errors is not None else None
        self.finite = torch.ones(len(matrices), dtype=torch.int32, device=device)
        self.step = torch.full((1,), iteration, dtype=torch.int64, device=device)
        self.q = self._remembered(self.table.q, names, factors.q)
        self.p = self._remembered(self.table.p, names, factors.p) if alternating else None

    @property
    def raw_numel(self) -> int:
        """Real elements that are not compressed."""
        return self._raw_table.numel if self._raw_table is not None else 0

    def start_step(self, iteration: int) -> None:
        """Set ``step``, unless a CUDA graph is being captured, which would set it to the same number at every replay.

        There it stands where the step before has left it: one further.
        """
        if not is_capturing(self.step.device):
            self.step.fill_(iteration)

    def operands(self, source: Sequence[Tensor], target: Sequence[Tensor], keep: bool) -> Operands:
        """The matrices of the bucket's gradients, where they lie."""
        matrices = [self._cut([tensors[i] for i, _ in self._compressed]) for tensors in (source, target)]
        keep = keep and self._errors is not None and can_keep(self.table)
        return Operands(self.table, matrices[0], matrices[1], self._errors, keep)

    def wires(self, workspace: Workspace, sent: FactorLayout, *sizes: tuple[FactorLayout, bool]) -> Wires:
        """Memory of one step: the message of ``sent`` and what is not compressed, and more factors.

        Args:
            workspace: where it comes from.
            sent: the factor that travels with the rest.
            sizes: further factors, and whether each is for the wire.
        """
        dtype, compute = self.table.dtype, self.table.compute
        others = [(factor.numel, self._factor_dtype if on_wire else compute) for factor, on_wire in sizes]
        if self._factor_dtype == dtype:  # then one collective takes both
            message, *buffers = workspace.wires((sent.numel + self.raw_numel, dtype), *others)
            wires = Wires([message], message[: sent.numel], message[sent.numel :], buffers)
        else:
            factor, raw, *buffers = workspace.wires((sent.numel, self._factor_dtype), (self.raw_numel, dtype), *others)
            wires = Wires([factor, raw] if self._raw else [factor], factor, raw, buffers)
        for (factor_of, _), buffer in zip(((sent, True), *sizes), (wires.factor, *buffers), strict=True):
            if factor_of.has_gaps:
                buffer.zero_()
        return wires

    def pack(self, source: Sequence[Tensor], wire: Tensor, scale: float) -> None:
        """Write what is not compressed, times ``scale``, into its wire."""
        if self._raw_table is not None:
            flatten([source[i] for i in self._raw], wire, table=self._raw_table, scale=scale)

    def unpack(self, wire: Tensor, target: Sequence[Tensor]) -> None:
        """Write the wire into the gradients that are not compressed."""
        if self._raw_table is not None:
            unflatten(wire, [target[i] for i in self._raw], table=self._raw_table)

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that the compressed parameters consist of, in the order of memory."""
        return [
            matrix
            for (_, shape), tensor in zip(self._compressed, tensors, strict=True)
            for matrix in memory_order(tensor).view(shape.matrices, shape.rows, shape.columns)
        ]

    def _remembered(self, factor: FactorLayout, names: Sequence[str], known: dict[str, Tensor]) -> Tensor:
        """The packed factors of one side, random where ``known`` has none; its entries become views of them."""
        buffer = torch.zeros(factor.numel, dtype=self.table.compute, device=self.table.device)
        draw(factor, self.table.keys, self.step, buffer)
        first = 0
        for i, shape in self._compressed:
            length = factor.lengths[first]
            distance = -(-factor.sizes[first] // ALIGN_NUMEL) * ALIGN_NUMEL
            size, stride = (shape.matrices, shape.rank, length), (distance, length, 1)
            view = buffer.as_strided(size, stride, factor.offsets[first])
            if names[i] in known and known[names[i]].shape == view.shape:
                view.copy_(known[names[i]])
            known[names[i]] = view
            first += shape.matrices
        return buffer


class Wires(NamedTuple):
    """Memory of one step of a bucket.

    Attributes:
        messages: what travels together.
        factor: the part of it that holds the packed factors.
        raw: the part of it that holds what is not compressed.
        buffers: further packed factors.
    """

    messages: list[Tensor]
    factor: Tensor
    raw: Tensor
    buffers: list[Tensor]


async def powersgd_all_reduce(
    bucket: LowRankBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    warm_start: bool,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """Write the mean over all ranks of ``source`` into ``target``: of matrices an approximation of rank r.

    A matrix that is not finite on some rank becomes NaN on all, and leaves its error and its factors as they were.

    Args:
        bucket: errors and factors. Modified.
        source: the gradients, real. Modified if ``target`` is the same memory.
        target: where the result goes.
        iteration: counts the steps, equal on all ranks.
        warm_start: whether Q begins as the last step's; else it is drawn anew.
        transport: sums over the ranks. Two waits.
        workspace: wire memory.
    """
    table, mean = bucket.table, 1 / transport.world_size
    gradients = bucket.operands(source, target, keep=True)
    wires = bucket.wires(workspace, table.p, (table.p, False), (table.q, True))
    p, q = wires.buffers
    bucket.start_step(iteration)
    if not warm_start:
        draw(table.q, table.keys, bucket.step, bucket.q)

    bucket.pack(source, wires.raw, mean)
    project(gradients, bucket.q, wires.factor, scale=mean)
    await transport.all_reduce(*wires.messages)
    orthogonalize(wires.factor, table.p, p, bucket.finite)
    backproject(gradients, p, q, scale=mean)
    await transport.all_reduce(q)
    bucket.step.add_(1)
    renew(q, table.q, table.keys, bucket.step, bucket.q, bucket.finite)
    reconstruct(gradients, p, q, bucket.finite)
    bucket.unpack(wires.raw, target)


async def alternating_all_reduce(
    bucket: LowRankBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """`powersgd_all_reduce` with one side a step, and so one wait on the wire and about half the bytes.

        even steps:  Q = orthogonalise(Q of the last step),  P = all-reduce(M Q),   G = P Q',  E = M - G
        odd steps:   P = orthogonalise(P of the last step),  Q = all-reduce(M' P),  G = P Q',  E = M - G

    The fixed side is a step old, so each result is a little worse. Source: Zhang, Zhang, Shi, Chu, Li, "Evaluation and
    Optimization of Gradient Compression for Distributed Deep Learning" (ACP-SGD), ICDCS 2023, algorithm 2.
    """
    table, mean = bucket.table, 1 / transport.world_size
    gradients = bucket.operands(source, target, keep=False)
    assert bucket.p is not None
    on_p = iteration % 2 == 0
    (fixed, remembered), (sent, following) = (
        ((table.q, bucket.q), (table.p, bucket.p)) if on_p else ((table.p, bucket.p), (table.q, bucket.q))
    )
    wires = bucket.wires(workspace, sent, (fixed, False))
    (basis,) = wires.buffers
    bucket.start_step(iteration)

    bucket.pack(source, wires.raw, mean)
    orthogonalize(remembered, fixed, basis, bucket.finite)
    (project if on_p else backproject)(gradients, basis, wires.factor, scale=mean)
    await transport.all_reduce(*wires.messages)
    bucket.step.add_(1)
    renew(wires.factor, sent, table.keys, bucket.step, following, bucket.finite)
    p, q = (wires.factor, basis) if on_p else (basis, wires.factor)
    reconstruct(gradients, p, q, bucket.finite)
    bucket.unpack(wires.raw, target)
