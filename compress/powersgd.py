"""PowerSGD: all-reduce of matrices as low-rank factors, with error feedback and a warm start.

For each matrix M of n x m, with Q (m x r) from the step before:

    M = G + E                                   error feedback
    P = all-reduce(M Q),  P = orthogonalize(P)  one step of power iteration; P: n x r
    Q = all-reduce(M^T P)
    G = P Q^T,            E = M - P Q_own^T     Q_own = M^T P: this rank's own, before the all-reduce

Each matrix sends r (n + m) elements instead of n m. Gradients that are not compressed are sent together with P. In
memory, factors are transposed, P as r x n and Q as r x m: each column is contiguous.

The paper's code, like PyTorch's, keeps E = M - P Q^T of the mean Q. The mean of E over the ranks, on which alone the
results depend, is the same: the ranks' Q_own add up to Q. But there, each rank's E also adds up the difference of its
gradient from the mean, in every step, and grows as sqrt(steps); here it stays of the size of what rank r leaves out.

Factors may also take two-shot all-reduces, which quantize them: `compress.quantization`. P and Q are then the
factors as received, from the same bytes on every rank, and Q_own is what this rank's codes add to Q. So E includes the
loss of quantization, which needs no error memory of its own.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.compress.memory import BucketMemory, MemoryByName, error_like, names_or_numbers
from gradwire.compress.policy import MatrixShape
from gradwire.compress.quantization import FACTOR_BLOCK_SIZE, QuantizedFactors, QuantizedStep, two_shot_all_reduce
from gradwire.compress.step import Step, is_in_place, set_counter
from gradwire.kernels import (
    ALIGN_NUMEL,
    FactorLayout,
    Matrix,
    MatrixTable,
    Operands,
    OwnFactor,
    Renewal,
    SegmentTable,
    Uncompressed,
    WireFormat,
    bound_low_rank,
    compute_dtype,
    is_capturing,
    is_recording,
    random_key,
)


async def powersgd_all_reduce(step: Step, *, warm_start: bool = True) -> None:
    """Write the mean of the gradients over all ranks into the results, with each matrix approximated to rank r.

    A matrix with an inf or NaN on any rank becomes NaN on all ranks; its error and factors stay as they were.

    Args:
        step: its memory is a `LowRankBucket`, which is modified.
        warm_start: whether to start from Q of the last step; otherwise from a random Q.

    Example: without a process group, on a list of tensors. The same gradient is compressed in 20 steps; error feedback
    sends in later steps what earlier ones left out, so the mean of the results is closer to it than any one of them::

        >>> import torch
        >>> from gradwire.comm import LocalTransport, Workspace, run_algorithm
        >>> from gradwire.compress import LowRankBucket, LowRankPolicy, Step, powersgd_all_reduce
        >>> gradients = [torch.randn(256, 128), torch.randn(256)]
        >>> bucket = LowRankBucket(gradients, LowRankPolicy(rank=8).matrix_shapes(gradients))
        >>> transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
        >>> results, applied = [torch.empty_like(g) for g in gradients], torch.zeros(256, 128)
        >>> for i in range(20):
        ...     step = Step.of(bucket, gradients, results, i, transport, workspace)
        ...     run_algorithm(powersgd_all_reduce(step), transport)
        ...     applied += results[0] / 20
        >>> transport.payload_bytes // 20, sum(g.nbytes for g in gradients)
        (13312, 132096)
        >>> bool((applied - gradients[0]).norm() < (results[0] - gradients[0]).norm())
        True
    """
    bucket, transport = step.memory, step.transport
    table, kernels, scale = bucket.table, bucket.kernels, 1 / transport.world_size
    tensors = bucket.start_step(step, sends=(table.p, table.q), basis=table.p)
    m, (p_wire, q_wire), p = tensors.matrices, tensors.wires, tensors.basis
    # Warm start (section 3): gradients of successive steps are similar, so Q is already close to their right singular
    # vectors, and one power iteration per step suffices.
    if not warm_start:
        kernels.draw(table.q, table.keys, set_counter(bucket.counter, step.iteration), bucket.q)

    # M Q is linear in M = G + E: the mean of the ranks' products is the product of their mean, with one Q for all.
    kernels.project(m, bucket.q, p_wire, scale)
    await exchange(tensors.messages[0], step)
    # After the all-reduce, so that all ranks orthogonalize the same P. Orthonormal columns make P P^T a projection:
    # the result P Q^T = P P^T M is the best approximation of M in the column space of P.
    kernels.orthogonalize(p_wire, table.p, p, bucket.finite)
    kernels.backproject(m, p, q_wire, scale)
    await exchange(tensors.messages[1], step)
    # Each rank keeps what its own factors leave out of M (algorithm 2), and all keep Q with columns of unit length.
    kernels.reconstruct(m, p, q_wire, bucket.finite)


async def alternating_all_reduce(step: Step) -> None:
    """PowerSGD that sends one factor per step, P or Q: one all-reduce and about half the bytes.

        even steps:  Q = orthogonalize(Q of the last step),  P = all-reduce(M Q),    G = P Q^T,  E = M - P_own Q^T
        odd steps:   P = orthogonalize(P of the last step),  Q = all-reduce(M^T P),  G = P Q^T,  E = M - P Q_own^T

    The other factor is one step old, so each approximation is slightly worse.

    Source: Zhang, Zhang, Shi, Chu, Li, "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning" (ACP-SGD), ICDCS 2023, algorithm 2.

    Args:
        step: its memory is a `LowRankBucket` made with ``alternating=True``, which is modified. Even steps send P, odd
            ones Q.
    """
    bucket, transport = step.memory, step.transport
    table, kernels, scale = bucket.table, bucket.kernels, 1 / transport.world_size
    assert bucket.p is not None, "the bucket was made for powersgd_all_reduce"
    # The factor that is not sent must have orthonormal columns: only then is the other one a least-squares fit of M. It
    # is orthogonalized where it is used, from factors that are equal on all ranks.
    if step.iteration % 2 == 0:
        tensors = bucket.start_step(step, sends=(table.p,), basis=table.q)
        m, (p,), q = tensors.matrices, tensors.wires, tensors.basis
        kernels.orthogonalize(bucket.q, table.q, q, bucket.finite)
        kernels.project(m, q, p, scale)
        await exchange(tensors.messages[0], step)
    else:
        tensors = bucket.start_step(step, sends=(table.q,), basis=table.p)
        m, (q,), p = tensors.matrices, tensors.wires, tensors.basis
        kernels.orthogonalize(bucket.p, table.p, p, bucket.finite)
        kernels.backproject(m, p, q, scale)
        await exchange(tensors.messages[0], step)
    kernels.reconstruct(m, p, q, bucket.finite)


# Tensors that are added up in place, each in its own dtype, or quantized.
Message = Sequence[Tensor] | QuantizedStep


async def exchange(message: Message, step: Step) -> None:
    """Replace factors, and the gradients that are sent with them, by their sums over all ranks."""
    if isinstance(message, QuantizedStep):
        await two_shot_all_reduce(message, step.transport, 1.0, step.stamp)
    else:
        await step.transport.all_reduce(*message)


class LaidOut(NamedTuple):
    """Where the factors of one step lie. All but quantized factors is in the workspace, valid until its next use."""

    messages: list[Message]  # one for each exchange; the first includes the gradients that are not compressed
    wires: list[Tensor]  # the factors of each exchange
    others: Tensor  # the gradients that are not compressed, packed
    basis: Tensor  # factors with orthonormal columns, in the dtype of the arithmetic


class AllReducedFactors:
    """Factors that all-reduces add up.

    Args:
        table: the matrices.
        dtype: wire dtype of the factors; None for the gradients' own, or bf16 for fp16 gradients. The other gradients
            keep their own.
        others_numel: elements of the gradients that are sent with the first factors.
    """

    def __init__(self, table: MatrixTable, dtype: torch.dtype | None, others_numel: int) -> None:
        self.dtype = dtype or (torch.bfloat16 if table.dtype == torch.float16 else table.dtype)
        self._table, self._others_numel = table, others_numel

    def lay_out(
        self, sends: Sequence[FactorLayout], basis: FactorLayout, transport: Transport, workspace: Workspace
    ) -> LaidOut:
        """The tensors of a step; see `LowRankBucket.start_step`."""
        dtype, first_numel, later_sides = self._table.dtype, sends[0].numel, sends[1:]
        sizes = [(basis.numel, self._table.compute), *((side.numel, self.dtype) for side in later_sides)]
        if self.dtype == dtype:  # one tensor holds both parts
            both, orthonormal, *later = workspace.wires((first_numel + self._others_numel, dtype), *sizes)
            first, others = both.split([first_numel, self._others_numel])
            message = [both]
        else:
            parts = (first_numel, self.dtype), (self._others_numel, dtype)
            first, others, orthonormal, *later = workspace.wires(*parts, *sizes)
            message = [first, others] if self._others_numel else [first]
        return LaidOut([message, *([each] for each in later)], [first, *later], others, orthonormal)

    def residual(self, side: FactorLayout) -> None:
        """An all-reduce loses nothing that a later step could send."""


class TwoShotFactors:
    """Factors that two-shot all-reduces quantize; see `QuantizedFactors`, of which each side has one.

    Args:
        table: the matrices.
        wire: wire format of the factors.
        others_numel: elements of the gradients that are sent with P, and with Q if steps alternate.
        error_feedback: whether the error memory takes what the exchange of the last factors loses.
        alternating: whether each step sends one side.
    """

    def __init__(
        self, table: MatrixTable, wire: WireFormat, others_numel: int, error_feedback: bool, alternating: bool
    ) -> None:
        self.dtype = table.compute
        self._table = table
        self._wire = wire
        self._others_numel = others_numel
        self._error_feedback = error_feedback
        self._alternating = alternating
        self._sides: dict[FactorLayout, QuantizedFactors] = {}  # from the first step of each on

    def lay_out(
        self, sends: Sequence[FactorLayout], basis: FactorLayout, transport: Transport, workspace: Workspace
    ) -> LaidOut:
        """The tensors of a step; see `LowRankBucket.start_step`."""
        sides = [self._side(side, transport) for side in sends]
        sizes = [(basis.numel, self._table.compute), *(size for side in sides for size in side.wires)]
        orthonormal, *buffers = workspace.wires(*sizes)
        messages: list[Message] = []
        for side in sides:
            used, buffers = buffers[: len(side.wires)], buffers[len(side.wires) :]
            messages.append(side.start_exchange(used))
        return LaidOut(messages, [side.factors for side in sides], sides[0].others, orthonormal)

    def residual(self, side: FactorLayout) -> Tensor | None:
        """Loss of this rank's factors in the last exchange; None if the error memory does not take it."""
        residual = self._sides[side].residual
        return None if residual is None else residual[: side.numel]

    def _side(self, side: FactorLayout, transport: Transport) -> QuantizedFactors:
        if side not in self._sides:
            table = self._table
            numel = self._others_numel if side is table.p or self._alternating else 0
            others = torch.empty(numel, dtype=table.dtype, device=table.device)
            has_residual = self._error_feedback and (side is table.q or self._alternating)
            self._sides[side] = QuantizedFactors(side, self.dtype, self._wire, others, transport, has_residual)
        return self._sides[side]


class OtherGradients:
    """The gradients of a bucket that are not compressed: those of ``layouts`` with these ``indices``."""

    def __init__(self, layouts: Sequence[Tensor], indices: Sequence[int]) -> None:
        self._indices = indices
        self._table = SegmentTable([layouts[i] for i in indices]) if indices else None
        self.numel = 0 if self._table is None else self._table.numel

    def operands(
        self, source: Sequence[Tensor], target: Sequence[Tensor], packed: Tensor, sent_with: FactorLayout
    ) -> Uncompressed | None:
        """The gradients and results among those of the bucket, which ``packed`` carries; None if there are none."""
        if self._table is None:
            return None
        gradients = results = list(map(source.__getitem__, self._indices))
        if target is not source:
            results = list(map(target.__getitem__, self._indices))
        return Uncompressed(self._table, gradients, results, packed, sent_with)

    def refresh(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        """Replace the addresses of gradients and results in device memory."""
        if self._table is not None:
            self._table.packed([source[i] for i in self._indices])
            if not is_in_place(source, target):
                self._table.for_results.packed([target[i] for i in self._indices])


class LowRankStep(NamedTuple):
    """The tensors of one bucket in one step. Each buffer of factors holds one side, P or Q, of all its matrices.

    All but ``matrices`` and quantized factors are in the workspace, valid until its next use.
    """

    # Gradients, results and errors of the compressed parameters, zero-copy. Kernels that work on them also move the
    # other gradients, and renew the factors of the last all-reduce for the next step.
    matrices: Operands
    messages: list[Message]  # one for each exchange; the first includes the gradients that are not compressed
    wires: list[Tensor]  # the factors of each exchange
    basis: Tensor  # factors with orthonormal columns, in the dtype of the arithmetic


class LowRankBucket(BucketMemory):
    """One bucket: matrices that are compressed, other gradients that are not, and the memory of the matrices.

    It serves every step until its parameters, their dtype or the options change; the next bucket of these parameters
    starts from its ``memory``. An algorithm calls `start_step`, then works on the tensors of the `LowRankStep`.

    Args:
        layouts: real dense tensors with the shapes, strides, dtype and device of the gradients, or the gradients.
        shapes: matrices of each gradient (`LowRankPolicy.matrix_shapes`); None sends it uncompressed. Not all None.
        names: parameter names, keys of ``memory`` and of the random columns; by default "0", "1", ...
        memory: memory of earlier buckets. Not modified.
        error_feedback: whether to add the residual of compression to the next gradient.
        factor_dtype: wire dtype of the factors; None for the gradients' own, or bf16 for fp16
            gradients: an element of P sums over a row of M and may exceed the range of fp16.
        factor_wire: wire format of the factors in a two-shot all-reduce, instead of an all-reduce in ``factor_dtype``.
        seed: seed of the random columns, equal on all ranks.
        iteration: number of the current step, for the random columns of new factors.
        alternating: whether `alternating_all_reduce` will be used, which needs P and Q from step to step.
        precision: precision of the products M Q and M^T P, "tf32" or "fp32"; see `MatrixTable`.

    Attributes:
        layout: position of each gradient in a flat buffer of the bucket.
        table: sizes of the matrices, and positions of their factors in packed buffers.
        kernels: the operations on the matrices, chosen when the bucket is made.
        memory: memory of the compressed parameters. "errors": E, the residual of this rank, in the shape and strides of
            the gradient, in fp32, or fp64 for fp64 gradients. "q": unit columns of Q, [matrices, r, m], equal on all
            ranks. "p": unit columns of P, [matrices, r, n], likewise; only `alternating_all_reduce` needs it. Nothing
            is lost: over all ranks and steps, gradients = results + remaining error.
        q: Q of all matrices from the last step, packed as ``table.q``; unit columns, equal on all ranks.
        p: P of all matrices from the last step, packed as ``table.p``, if ``alternating``.
        counter: int64 [1], in device memory: number of the next step, for the random columns.
        finite: int32 [matrices], scratch of one step: whether each matrix is finite on all ranks.
        sent_numels: payload of an even and of an odd step, in real elements.
    """

    def __init__(
        self,
        layouts: Sequence[Tensor],
        shapes: Sequence[MatrixShape | None],
        *,
        names: Sequence[str] | None = None,
        memory: MemoryByName | None = None,
        error_feedback: bool = True,
        factor_dtype: torch.dtype | None = None,
        factor_wire: WireFormat | None = None,
        seed: int = 0,
        iteration: int = 0,
        alternating: bool = False,
        precision: str = "tf32",
    ) -> None:
        dtype, device = layouts[0].dtype, layouts[0].device
        names = names_or_numbers(names, layouts)
        earlier = memory if memory is not None else {}
        compressed = {i: shape for i, shape in enumerate(shapes) if shape is not None}
        self._shapes = list(compressed.values())
        # Of each matrix: index of its gradient, and there the first element; rows and columns.
        self._positions = [
            (i, k * shape.rows * shape.columns, shape.rows, shape.columns)
            for i, shape in compressed.items()
            for k in range(shape.matrices)
        ]
        super().__init__(SegmentTable(layouts), {"errors": {}, "q": {}, "p": {}})
        matrices = [
            Matrix(shape.rows, shape.columns, shape.rank, random_key(seed, f"{names[i]}/{k}"))
            for i, shape in compressed.items()
            for k in range(shape.matrices)
        ]
        align = ALIGN_NUMEL if factor_wire is None else FACTOR_BLOCK_SIZE
        self.table = MatrixTable(matrices, dtype, device, precision, align)
        self.kernels = bound_low_rank(self.table)
        self.finite = torch.ones(len(matrices), dtype=torch.int32, device=device)
        self.counter = torch.full((1,), iteration, dtype=torch.int64, device=device)
        self._is_captured = False  # whether a user has captured a step in a CUDA graph
        self._counted = iteration  # value of ``counter`` after the latest step

        self._others = OtherGradients(layouts, [i for i, shape in enumerate(shapes) if shape is None])
        self._factors: AllReducedFactors | TwoShotFactors
        if factor_wire is None:
            self._factors = AllReducedFactors(self.table, factor_dtype, self._others.numel)
        else:
            self._factors = TwoShotFactors(self.table, factor_wire, self._others.numel, error_feedback, alternating)
        self._own_sent: dict[FactorLayout, Tensor] = {}  # by side, from its first step on: `OwnFactor.sent`
        by_name = {names[i]: layouts[i] for i in compressed}
        self._errors: list[Tensor] | None = None
        if error_feedback:
            self.memory["errors"] = self._new_errors(by_name, earlier.get("errors", {}))
            self._errors = self._matrices(dict(zip(compressed, self.memory["errors"].values(), strict=True)))
        # A step that reads M twice may leave it in the target.
        self._keeps = error_feedback and self.table.can_keep()
        self.q, self.memory["q"] = self._packed(self.table.q, by_name, earlier.get("q", {}))
        self.p: Tensor | None = None
        if alternating:
            self.p, self.memory["p"] = self._packed(self.table.p, by_name, earlier.get("p", {}))
        p, q, others = sum(self.table.p.sizes), sum(self.table.q.sizes), self._others.numel
        self.sent_numels = (p + others, q + others) if alternating else (p + q + others, p + q + others)

    def start_step(self, step: Step, *, sends: Sequence[FactorLayout], basis: FactorLayout) -> LowRankStep:
        """Lay out the tensors of a step, which must fit ``layout``.

        ``sends`` are the layouts of the factors of each exchange, ``table.p`` or ``table.q``; ``basis`` is that of the
        factors to orthogonalize.
        """
        source, target = step.gradients, step.results
        self.layout.check_tensors(source)
        gradients = results = self._matrices(source)
        overwrites = is_in_place(source, target)
        if not overwrites:
            self.layout.check_tensors(target)
            results = self._matrices(target)
        laid_out = self._factors.lay_out(sends, basis, step.transport, step.workspace)
        uncompressed = self._others.operands(source, source if overwrites else target, laid_out.others, sends[0])
        # A user's CUDA graph counts without the host's knowledge.
        is_repeated = is_capturing(self.counter.device)
        self._is_captured |= is_repeated and not is_recording()
        self._counted = step.iteration + 1
        # Every replay of a CUDA graph would set the same number, so a captured step increments the counter instead.
        advance_to = None if is_repeated else self._counted
        kept = self.q if sends[-1] is self.table.q else self.p
        assert kept is not None, "P is kept only by a bucket made with alternating=True"
        renewal = Renewal(sends[-1], kept, self.counter, advance_to)
        keep = self._keeps and len(sends) == 2
        own = self._own_factor(sends[-1], step.transport.world_size)
        matrices = Operands(self.table, gradients, results, self._errors, keep, uncompressed, renewal, own)
        return LowRankStep(matrices, laid_out.messages, laid_out.wires, laid_out.basis)

    def _own_factor(self, side: FactorLayout, world_size: int) -> OwnFactor | None:
        """Where this rank's own factor is kept, which the error memory needs unless it is the only one."""
        if self._errors is None or world_size == 1:
            return None
        if side not in self._own_sent:
            self._own_sent[side] = torch.empty(side.numel, dtype=self._factors.dtype, device=self.table.device)
        return OwnFactor(side, self._own_sent[side], self._factors.residual(side), world_size)

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        """Whether kernels read addresses and the number of the step on the device; see `BucketMemory`."""
        return self.table.can_use_triton()

    def refresh(self, source: Sequence[Tensor], target: Sequence[Tensor], iteration: int) -> None:
        """Replace ``counter`` and the addresses of gradients and results; see `BucketMemory.refresh`."""
        if iteration != self._counted or self._is_captured:
            set_counter(self.counter, iteration)
        self._counted = iteration + 1
        targets = self._addresses(target)
        errors = [error.data_ptr() for error in self._errors] if self._errors is not None else targets
        self.table.on_device_addresses([*self._addresses(source), *targets, *errors])
        self._others.refresh(source, target)

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """The addresses of `_matrices`."""
        nbytes = self.table.dtype.itemsize
        return [tensors[i].data_ptr() + start * nbytes for i, start, _, _ in self._positions]

    def _matrices(self, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> list[Tensor]:
        """The matrices of the compressed parameters as views in memory order, n x m each."""
        matrices = []
        for i, start, rows, columns in self._positions:
            tensor = tensors[i]
            matrices.append(tensor.as_strided((rows, columns), (columns, 1), tensor.storage_offset() + start))
        return matrices

    def _new_errors(self, layouts: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The error memory by parameter name, continued from ``earlier``."""
        dtype = self.table.compute
        return {name: error_like(earlier.get(name), layout, dtype, name) for name, layout in layouts.items()}

    def _packed(
        self, factors: FactorLayout, names: Iterable[str], earlier: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One buffer with P or Q of all matrices, and the view of each parameter, which holds the ``earlier`` factors.

        Random columns if those have another shape, as when r has changed.
        """
        buffer = torch.zeros(factors.numel, dtype=self.table.compute, device=self.table.device)
        self.kernels.draw(factors, self.table.keys, self.counter, buffer)
        views, first = {}, 0
        for shape, name in zip(self._shapes, names, strict=True):
            length = factors.lengths[first]
            distance = -(-factors.sizes[first] // factors.align) * factors.align
            size, stride = (shape.matrices, shape.rank, length), (distance, length, 1)
            view = views[name] = buffer.as_strided(size, stride, factors.offsets[first])
            if name in earlier and earlier[name].shape == view.shape:
                view.copy_(earlier[name])
            first += shape.matrices
        return buffer, views


def flat_low_rank_bucket(
    layouts: Sequence[Tensor],
    rank: int,
    *,
    names: Sequence[str],
    memory: MemoryByName,
    error_feedback: bool = True,
    **options: Any,
) -> LowRankBucket | None:
    """A `LowRankBucket` of the flat bucket as one nearly square matrix; the remaining elements are not compressed.

    Errors belong to parameters and are views of one flat tensor. Factors belong to the bucket, and are named after its
    first and last parameter. The arguments are those of `LowRankBucket`; ``rank`` is clamped to min(n, m). Returns None
    if the matrix would not shrink.
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
    earlier, errors = dict(memory), {}
    if error_feedback:
        error = torch.zeros_like(flat, dtype=compute_dtype(table.dtype))
        earlier["errors"] = {name: error[: rows * columns]}
        for parameter, view in zip(names, table.views(error), strict=True):
            if (known := memory.get("errors", {}).get(parameter)) is not None:
                view.copy_(error_like(known, view, error.dtype, parameter))
            errors[parameter] = view
    bucket = LowRankBucket(
        parts,
        [MatrixShape(1, rows, columns, rank), None],
        names=[name, "remainder"],
        memory=earlier,
        error_feedback=error_feedback,
        **options,
    )
    bucket.memory["errors"] = errors
    return bucket


def check_factors(name: str, q: Mapping[str, Tensor], p: Mapping[str, Tensor], shape: MatrixShape) -> None:
    """Raise ValueError unless the factors of a parameter fit its matrices, at any rank."""
    for side, factors, length in (("q", q, shape.columns), ("p", p, shape.rows)):
        if name in factors:
            matrices, rank, found = factors[name].shape
            highest = min(shape.rows, shape.columns)
            if (matrices, found) != (shape.matrices, length) or not 1 <= rank <= highest:
                raise ValueError(
                    f"{side}[{name!r}] has shape {tuple(factors[name].shape)}; expected ({shape.matrices}, rank, "
                    f"{length}) with a rank of 1 to {highest}. Load the state of this model and its stacks, or leave "
                    "this entry out: its factors then start from scratch."
                )


def check_size_of_factors(name: str, q: Mapping[str, Tensor], p: Mapping[str, Tensor], numel: int, whose: str) -> None:
    """Raise ValueError unless the factors fit matrices of any shape with ``numel`` elements in total."""
    remedy = "Load the state of this model, or leave these factors out: they then start from scratch."
    for side, factors in (("q", q), ("p", p)):
        if name in factors:
            matrices, rank, length = factors[name].shape
            if numel % (matrices * length) != 0 or rank > numel // (matrices * length):
                raise ValueError(
                    f"{side}[{name!r}] has shape {tuple(factors[name].shape)}; expected matrices x rank x length, of "
                    f"matrices with the {numel} elements of {whose}. {remedy}"
                )
    if name in q and name in p:
        sides = [tuple(factors[name].shape) for factors in (q, p)]
        if sides[0][0] != sides[1][0] or sides[0][0] * sides[0][2] * sides[1][2] != numel:
            raise ValueError(
                f"q[{name!r}] and p[{name!r}] have the shapes {sides[0]} and {sides[1]}; expected matrices x rank x "
                f"columns and matrices x rank x rows, of matrices with the {numel} elements of {whose}. {remedy}"
            )
