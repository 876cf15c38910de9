"""Cases of the GPU lane: every kernel against its reference, twice, with equal bits.

Shapes are fixed: aligned, one element past an aligned address, odd, empty, and one tensor of more than 2^31 elements.
Elementwise kernels equal their references to the bit. Products are held to the rounding of their sums: k products, in
any order, are within k u / (1 - k u) of the sum of their magnitudes (Higham, "Accuracy and Stability of Numerical
Algorithms", lemma 3.1), and each cast adds one rounding more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.bench.gpu.case import (
    LaneCase,
    Skipped,
    at_offset,
    large_numel,
    name_of,
    require,
    same,
    same_twice,
    skip_if_rehearsed,
    within,
)
from gradwire.bench.gpu.quantization_checks import QUANTIZATION_CHECKS
from gradwire.kernels.lowrank_triton import dot_precision
from gradwire.kernels.matrix_table import ELEMENTWISE_RANK, MAX_STRIPS

SOURCES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
LOW_RANKS = (1, 4, 7, 16, 32, 64)
# Neighbors of a program's chunk of 4096 elements, odd sizes, a scalar and an empty tensor.
SIZES = {
    "aligned": ((4096,), (64, 128), (3, 4096)),
    "off by one": ((4096,), (4097,), (61, 67)),
    "odd": ((1,), (), (7, 3), (0, 5), (12289,), (2047,)),
}
ORTHONORMAL = 1e-5  # guaranteed by `orthogonalize`


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, offset: int, seed: int) -> Tensor:
    """Normal elements with a few special ones, ``offset`` elements past an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(torch.Size(shape).numel())
    values = torch.randn(numel, 2 if dtype.is_complex else 1, dtype=torch.float64, generator=generator)
    values[:: max(1, numel // 3)] *= 1e5
    if numel > 5:
        values[3], values[4], values[5] = torch.nan, torch.inf, -0.0
    values = torch.view_as_complex(values) if dtype.is_complex else values[:, 0]
    return at_offset(values.to(dtype).to(device).view(shape), offset)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, offset: int) -> Tensor:
    """A tensor of NaN, ``offset`` elements past an aligned address."""
    return at_offset(torch.full(tuple(shape), torch.nan, dtype=dtype, device=device), offset)


def flattening(source: torch.dtype, layout: str, device: torch.device) -> None:
    """Flatten and unflatten tensors of one dtype with every wire dtype, scale and limit."""
    offset = 1 if layout == "off by one" else 0
    tensors = [_random(shape, source, device, offset, seed) for seed, shape in enumerate(SIZES[layout])]
    table = kernels.SegmentTable(tensors)
    on_device = torch.tensor([torch.nan, 1 / 3], device=device)[1]

    def flattened(dtype: torch.dtype, scale: Any, limit: float, counted: bool, flatten: Any) -> list[Tensor]:
        wire = _empty((table.numel,), dtype, device, offset)
        counters = [torch.zeros(2, dtype=torch.int64, device=device)] if counted else []
        flatten(tensors, table, wire, scale, limit, *counters)
        return [wire, *counters]

    def unflattened(wire: Tensor, scale: Any, counted: bool, unflatten: Any) -> list[Tensor]:
        targets = [_empty(shape, source, device, offset) for shape in SIZES[layout]]
        absmax = [torch.zeros(1, device=device)] if counted else []
        unflatten(wire, targets, table, scale, *absmax)
        return [*targets, *absmax]

    for wire_dtype in kernels.WIRE_DTYPES:
        for scale, limit, counted in ((0.5, torch.inf, False), (3.0, 1.0, True), (on_device, torch.inf, True)):
            what = f"{name_of(wire_dtype)}, scale {float(scale):.3g}, limit {limit}"
            flatten = partial(flattened, wire_dtype, scale, limit, counted)
            same_twice(flatten, kernels.flatten_kernels(table).flatten, kernels.flatten_reference, f"flatten to {what}")
            wire = flatten(kernels.flatten_reference)[0].clone()  # aligned
            unflatten = partial(unflattened, wire, scale, counted)
            ours, reference = kernels.flatten_kernels(table).unflatten, kernels.unflatten_reference
            same_twice(unflatten, ours, reference, f"unflatten from {what}")


def scaling(device: torch.device) -> None:
    """The next scale, after gradients of every magnitude."""

    def scaled(absmax: float, exponent: tuple[int, int], is_last: bool, update_scale: Any) -> list[Tensor]:
        state = [
            torch.tensor(exponent, dtype=torch.int32, device=device),
            torch.full((2,), torch.nan, device=device),
            torch.tensor([absmax], device=device),
            torch.tensor([3, 5, 7, 0], device=device),
        ]
        update_scale(*state, top=14, margin=4, growth=1, backoff=4, inverse_world=1 / 3, is_last=is_last)
        return state

    magnitudes = (0.0, 1e-40, 1e-6, 0.3, 1.0, 3e4, 1e30, torch.inf, torch.nan)
    exponents = ((0, 0), (7, 1), (-20, 1), (99, 1))
    ours, reference = kernels.bound_update_scale(device), kernels.update_scale_reference
    for absmax, exponent, is_last in product(magnitudes, exponents, (False, True)):
        same_twice(partial(scaled, absmax, exponent, is_last), ours, reference, f"{absmax}, {exponent}")


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _stored(expected: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """The error bound of a value known to within ``error`` and then stored in ``dtype``."""
    info = torch.finfo(dtype)
    return error + (expected.abs() + error) * _unit(dtype) + info.tiny * info.eps


def _product_bound(left: Tensor, right: Tensor, compute: torch.dtype, *, is_tf32: bool = False) -> Tensor:
    """The bound of ``left @ right``, factors of fp64 that hold numbers of ``compute``.

    Tensor cores cut inputs off after TF32's 10 bits, a relative error of (1 + 2^-10)^2 - 1 in each product, and cut off
    sums, where others round.
    """
    k = (left.shape[1] + 3) * _unit(compute) * (2 if is_tf32 else 1)
    return (k / (1 - k) + (2**-9 + 2**-20 if is_tf32 else 0)) * (left.abs() @ right.abs())


def _matrices(rank: int, offset: int) -> list[kernels.Matrix]:
    """Matrices of one tile, several tiles, several strips and the most strips; with an ``offset``, sides are odd."""
    odd = 1 if offset else 0
    sizes = ((64, 64), (128, 96 + odd), (576 + odd, 80), (80, 1056 + odd), (MAX_STRIPS * 160 + odd, 64))
    return [kernels.Matrix(rows, columns, rank) for rows, columns in sizes]


def lowrank(dtype: torch.dtype, rank: int, offset: int, precision: str, device: torch.device) -> None:
    """The three passes of PowerSGD over a bucket, with M kept where that is possible, added up again, and without E."""
    table = kernels.MatrixTable(_matrices(rank, offset), dtype, device, precision)
    passes = kernels.bound_low_rank(table)
    is_tf32 = device.type == "cuda" and dot_precision(table) == "tf32"
    compute, scale = table.compute, 0.5
    wire_dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    generator = torch.Generator().manual_seed(rank)

    def matrices(matrix_dtype: torch.dtype) -> list[Tensor]:
        made = [torch.randn(m.rows, m.columns, generator=generator) for m in table.matrices]
        return [at_offset(matrix.to(matrix_dtype).to(device), offset) for matrix in made]

    def factor(side: kernels.FactorLayout, matrix_dtype: torch.dtype) -> Tensor:
        return torch.randn(side.numel, generator=generator).to(matrix_dtype).to(device)

    gradients, errors = matrices(dtype), matrices(compute)
    q_in, p_in = factor(table.q, compute), factor(table.p, compute) / rank
    finite = torch.ones(len(table), dtype=torch.int32, device=device)
    finite[1] = 0
    kept = [False, True] if dtype == compute else [False]
    cases = [(False, False, None), *((True, keep, own) for keep in kept for own in (None, table.p, table.q))]
    for has_error, keep, own_side in cases:
        what = f"with{'' if has_error else 'out'} error memory{', M kept' if keep else ''}"
        what += "" if own_side is None else f", own {'P' if own_side is table.p else 'Q'}"
        own: kernels.OwnFactor | None = None
        runs: list[tuple[Tensor, Tensor, list[Tensor], list[Tensor] | None, Tensor]] = []
        for _ in range(2):
            target = matrices(dtype) if offset else [g.clone() for g in gradients]
            source = gradients if offset else target
            error = [e.clone() for e in errors] if has_error else None
            if own_side is not None:
                own = kernels.OwnFactor(own_side, _empty((own_side.numel,), wire_dtype, device, 0), None, 2)
            operands = kernels.Operands(table, source, target, error, keep, own=own)
            p, q = _empty((table.p.numel,), wire_dtype, device, 0), _empty((table.q.numel,), wire_dtype, device, 0)
            passes.project(operands, q_in, p, scale)
            passes.backproject(operands, p_in, q, scale)
            q_sent = factor(table.q, wire_dtype) if not runs else runs[0][-1]
            passes.reconstruct(operands, p_in, q_sent, finite)
            runs.append((p, q, target, error, q_sent))
        (p, q, target, error, q_sent), again = runs
        for first, second in ((p, again[0]), (q, again[1]), *zip(target, again[2], strict=True)):
            same(first, second, f"{what}, run twice")
        if own is not None:
            same(own.sent, p if own.layout is table.p else q, f"own factor, {what}")
        views = [side.views(buffer) for side, buffer in ((table.p, p), (table.q, q))]
        inputs = [side.views(b.double()) for side, b in ((table.p, p_in), (table.q, q_in), (table.q, q_sent))]
        for i in range(len(table)):
            e = errors[i].double() if has_error else torch.zeros((), dtype=torch.float64, device=device)
            m = gradients[i].double() + e
            rounded = _unit(compute) * m.abs()  # rounding of the sum G + E
            p_i, q_i, sent = (views_of[i] for views_of in inputs)
            expected = scale * (q_i @ m.t())
            bound = scale * (_product_bound(q_i, m.t(), compute, is_tf32=is_tf32) + q_i.abs() @ rounded.t())
            within(views[0][i], expected, _stored(expected, bound, wire_dtype), f"project, {what}, matrix {i}")
            expected = scale * (p_i @ m)
            bound = scale * (_product_bound(p_i, m, compute, is_tf32=is_tf32) + p_i.abs() @ rounded)
            within(views[1][i], expected, _stored(expected, bound, wire_dtype), f"backproject, {what}, matrix {i}")
            if finite[i] == 0:
                same(target[i], torch.full_like(target[i], torch.nan), f"reconstruct, {what}, matrix {i}")
                if error is not None:
                    same(error[i], errors[i], f"error of a matrix that is not finite, {what}")
                continue
            expected = p_i.t() @ sent
            bound = _stored(expected, _product_bound(p_i.t(), sent, compute), dtype)
            within(target[i], expected, bound, f"reconstruct, {what}, matrix {i}")
            if error is not None:
                left = m - target[i].double()
                bound = rounded + _unit(compute) * left.abs() * 2
                if own is not None:
                    mine = 2 * own.layout.views(own.sent.double())[i]
                    difference = (mine - p_i, sent) if own.layout is table.p else (p_i, mine - sent)
                    left = left - difference[0].t() @ difference[1]
                    bound = 4 * (bound + _product_bound(difference[0].t(), difference[1], compute))
                within(error[i], left, bound, f"error, {what}, matrix {i}")


def lowrank_at_any_address(rank: int, device: torch.device) -> None:
    """The results have the same bits where the matrices are aligned, as on one rank, and where not, as on another."""
    table = kernels.MatrixTable(
        [kernels.Matrix(96, 1056, rank), kernels.Matrix(33, 40, min(rank, 33))], torch.float32, device
    )
    passes = kernels.bound_low_rank(table)
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(m.rows, m.columns, generator=generator).to(device) for m in table.matrices]
    p_in, q_in = (torch.randn(side.numel, generator=generator).to(device) for side in (table.p, table.q))
    finite = torch.ones(2, dtype=torch.int32, device=device)
    results = []
    for offset in (0, 1):
        target = [_empty((m.rows, m.columns), torch.float32, device, offset) for m in table.matrices]
        torch._foreach_copy_(target, gradients)
        operands = kernels.Operands(table, target, target, None, False)
        p, q = (_empty((side.numel,), torch.float32, device, 0) for side in (table.p, table.q))
        passes.project(operands, q_in, p, 0.5)
        passes.backproject(operands, p_in, q, 0.5)
        passes.reconstruct(operands, p_in, q_in, finite)
        results.append((p, q, *target))
    if device.type != "cuda":
        raise Skipped("on CPUs the bits may depend on the alignment")
    for what, aligned, unaligned in zip(("P", "Q", "matrix 0", "matrix 1"), *results, strict=True):
        same(unaligned, aligned, f"{what}, unaligned")


def orthogonalization(rank: int, device: torch.device) -> None:
    """Factors in the registers of one program, and long ones; dependent rows, and one that is not finite."""
    lengths = [length for length in (64, 65, 768, 3072, 50257) if length >= rank]
    generator = torch.Generator().manual_seed(rank)
    for wire_dtype in (torch.float32, torch.bfloat16):
        orthogonalize = kernels.bound_orthogonalize(device, wire_dtype, torch.float32, rank)
        factor = kernels.FactorLayout([rank] * (len(lengths) + 2), [*lengths, 769, 4099])
        wire = torch.randn(factor.numel, generator=generator).to(wire_dtype).to(device)
        views = factor.views(wire)
        if rank > 1:
            views[0][1] = views[0][0]
            views[len(lengths)][rank - 1] = 0
        views[-1][0, 7] = torch.nan
        runs = []
        for _ in range(2):
            out = _empty((factor.numel,), torch.float32, device, 0)
            finite = torch.full((len(views),), 7, dtype=torch.int32, device=device)
            orthogonalize(wire, factor, out, finite)
            runs.append((out, finite))
        (out, finite), again = runs
        expected = [1] * (len(views) - 1) + [0]
        require(finite.tolist() == expected, f"flags {finite.tolist()}, expected 0 for the last factor alone")
        for i, (w, p) in enumerate(zip(views, factor.views(out), strict=True)):
            what = f"{name_of(wire_dtype)}, {rank} x {w.shape[1]}"
            same(p, factor.views(again[0])[i], f"{what}, run twice")
            if finite[i] == 0:
                same(p, torch.full_like(p, torch.nan), f"{what}, with a NaN")
                continue
            w, p = w.double(), p.double()
            is_kept = p.abs().sum(1) > 0
            dropped = {0: [1], len(lengths): [rank - 1]}.get(i, []) if rank > 1 else []
            is_right = (~is_kept).nonzero()[:, 0].tolist() == dropped
            require(is_right, f"{what}: rows kept {is_kept.tolist()}, expected all but {dropped}")
            gram, identity = p @ p.t(), torch.diag(is_kept.double())
            within(gram, identity, torch.full_like(gram, ORTHONORMAL), f"{what}, products of the rows")
            # A row of W lies in the span of P up to rounding: rank steps with sums of n terms (see the kernel's tests).
            outside = (w - (w @ p.t()) @ p).norm(dim=1) / w.norm(dim=1).clamp(min=1)
            allowed = torch.full_like(outside, rank**1.5 * w.shape[1] ** 0.5 * 2**-23 + 64 * 2**-23)
            within(outside, torch.zeros_like(outside), allowed, f"{what}, what the basis leaves out")


def warm_start(rank: int, device: torch.device) -> None:
    """The next step's factors: unit rows, random ones for zero rows, and none for a factor that is not finite."""
    lengths = (rank, 65, 3072, 50257)
    generator = torch.Generator().manual_seed(rank)
    factor = kernels.FactorLayout([rank] * len(lengths), lengths)
    keys = [kernels.random_key(0, str(i)) for i in range(len(lengths))]
    step, renew = torch.full((1,), 16, device=device), kernels.bound_renew(device, torch.float32)
    for wire_dtype in (torch.float32, torch.bfloat16):
        wire = torch.randn(factor.numel, generator=generator).to(wire_dtype).to(device)
        factor.views(wire)[1][0] = 0
        factor.views(wire)[2][rank - 1, 5] = torch.inf
        results = []
        for function in (renew, renew, kernels.renew_reference):
            following = torch.full((factor.numel,), 776.0, device=device)
            finite = torch.ones(len(lengths), dtype=torch.int32, device=device)
            function(wire, factor, keys, step, following, finite)
            results.append((factor.views(following), finite))
        (first, finite), (second, _), (reference, _) = results
        expected_flags = [i != 2 for i in range(len(lengths))]
        require(finite.tolist() == expected_flags, f"flags {finite.tolist()}, expected 0 for factor 2 alone")
        for i, (mine, again, expected) in enumerate(zip(first, second, reference, strict=True)):
            what = f"{name_of(wire_dtype)}, {rank} x {lengths[i]}"
            same(mine, again, f"{what}, run twice")
            bound = (lengths[i] + 4) * 2**-23 * expected.double().abs()
            within(mine, expected.double(), bound, what)
    drawn, again = (torch.empty(factor.numel, device=device) for _ in range(2))
    kernels.draw(renew, factor, keys, step, drawn)
    kernels.draw(renew, factor, keys, step, again)
    for one, other in zip(factor.views(drawn), factor.views(again), strict=True):
        same(one, other, "draw, run twice")
        within(one.double().norm(dim=1), torch.ones_like(one[:, 0]).double(), torch.full_like(one[:, 0], 1e-5), "draw")


def flattening_beyond_int32(device: torch.device) -> None:
    """A tensor of more than 2^31 elements, and an unaligned one after it in the wire."""
    numel = large_numel(device, 2 + 2 + 2)
    step = min(numel, 1 << 26)
    tensors = [torch.empty(size, dtype=torch.float16, device=device) for size in (numel, 4099)]
    for tensor in tensors:
        for part in tensor.split(step):
            part.normal_()
    table = kernels.SegmentTable(tensors)
    wire = torch.full((table.numel,), torch.nan, dtype=torch.bfloat16, device=device)
    kernels.flatten_kernels(table).flatten(tensors, table, wire, 0.5)
    results = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    absmax = torch.zeros(1, device=device)
    kernels.flatten_kernels(table).unflatten(wire, results, table, 2.0, absmax)
    largest = torch.zeros((), device=device)
    for i, (tensor, segment) in enumerate(zip(tensors, table.views(wire), strict=True)):
        parts = zip(tensor.split(step), segment.split(step), results[i].split(step), strict=True)
        for k, (part, sent, result) in enumerate(parts):
            same(sent, (part.float() * 0.5).bfloat16(), f"flatten, tensor {i}, part {k}")
            same(result, (sent.float() * 2.0).half(), f"unflatten, tensor {i}, part {k}")
            largest = torch.maximum(largest, result.abs().max().float())
    same(absmax[0], largest, "the largest magnitude")
    skip_if_rehearsed(numel)


def lowrank_beyond_int32(device: torch.device) -> None:
    """A matrix of more than 2^31 elements; its first and last rows, and those around element 2^31, are checked."""
    numel = large_numel(device, 2 + 4)
    columns = 32_768 if numel > 1 << 31 else 256
    rows = numel // columns + 1
    rank, scale = 4, 1.0
    table = kernels.MatrixTable([kernels.Matrix(rows, columns, rank)], torch.float16, device)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.empty(rows, columns, dtype=torch.float16, device=device)
    error = torch.empty(rows, columns, device=device)
    for tensor in (gradient, error):
        for part in tensor.split(1024):
            part.normal_()
    p_in = torch.randn(rank, rows, generator=generator).to(device).div_(rows**0.5)
    q_in = torch.randn(rank, columns, generator=generator).to(device)
    total = torch.zeros(rank, columns, dtype=torch.float64, device=device)
    magnitude = torch.zeros_like(total)
    for block, g, e in zip(p_in.split(1024, 1), gradient.split(1024), error.split(1024), strict=True):
        m = g.double() + e.double()
        total += block.double() @ m
        magnitude += block.double().abs() @ m.abs()
    ends = [slice(0, 8), slice(rows - 8, rows), slice((1 << 31) // columns - 4, (1 << 31) // columns + 4)]
    checked = [rows_of for rows_of in ends if rows_of.stop <= rows]
    before = [(gradient[r].double(), error[r].double()) for r in checked]
    operands = kernels.Operands(table, [gradient], [gradient], [error], False)
    p, q = _empty((table.p.numel,), torch.float32, device, 0), _empty((table.q.numel,), torch.float32, device, 0)
    p_packed, q_packed = torch.zeros_like(p), torch.zeros_like(q)
    table.p.views(p_packed)[0].copy_(p_in)
    table.q.views(q_packed)[0].copy_(q_in)
    passes = kernels.bound_low_rank(table)
    passes.project(operands, q_packed, p, scale)
    passes.backproject(operands, p_packed, q, scale)
    passes.reconstruct(operands, p_packed, q_packed, torch.ones(1, dtype=torch.int32, device=device))
    k = (rows + 4) * 2**-24
    within(table.q.views(q)[0], total, k / (1 - k) * magnitude, "backproject")
    for r, (g, e) in zip(checked, before, strict=True):
        m = g + e
        expected = q_in.double() @ m.t()
        bound = _product_bound(q_in.double(), m.t(), torch.float32) * 2
        within(table.p.views(p)[0][:, r], expected, bound, f"project, rows {r.start} to {r.stop}")
        expected = p_in[:, r].double().t() @ q_in.double()
        bound = _stored(expected, _product_bound(p_in[:, r].double().t(), q_in.double(), torch.float32), torch.float16)
        within(gradient[r], expected, bound, f"reconstruct, rows {r.start} to {r.stop}")
        left = m - gradient[r].double()
        within(error[r], left, 2**-22 * (m.abs() + left.abs()), f"error, rows {r.start} to {r.stop}")
    skip_if_rehearsed(numel)


KERNEL_CHECKS: dict[str, LaneCase] = {
    **{
        f"flatten and unflatten {name_of(dtype)}, {layout}": partial(flattening, dtype, layout)
        for dtype in SOURCES
        for layout in SIZES
    },
    "delayed scaling": scaling,
    **{
        f"low-rank passes, {name_of(dtype)}, rank {rank}, {'unaligned' if offset else 'aligned'}": partial(
            lowrank, dtype, rank, offset, "tf32"
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for rank in LOW_RANKS
        for offset in (0, 1)
    },
    **{
        f"low-rank passes without TF32, {name_of(dtype)}, rank {rank}": partial(lowrank, dtype, rank, 0, "fp32")
        for dtype in (torch.float32, torch.bfloat16)
        for rank in LOW_RANKS
        if rank > ELEMENTWISE_RANK
    },
    **{f"low-rank passes at any address, rank {rank}": partial(lowrank_at_any_address, rank) for rank in LOW_RANKS},
    **{f"orthogonalize, rank {rank}": partial(orthogonalization, rank) for rank in LOW_RANKS},
    **{f"warm start, rank {rank}": partial(warm_start, rank) for rank in LOW_RANKS},
    "flatten and unflatten more than 2^31 elements": flattening_beyond_int32,
    "low-rank passes over more than 2^31 elements": lowrank_beyond_int32,
    **QUANTIZATION_CHECKS,
}
