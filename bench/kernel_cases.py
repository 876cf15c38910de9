"""Cases of `gradwire bench kernels`: every kernel on buckets of a model, beside plain PyTorch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize as torch_orthogonalize

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import RANKS, Call, Case, random_gradients
from gradwire.bench.quantization_cases import dequantize_case, quantize_case, reduce_case
from gradwire.bench.shapes import Shape
from gradwire.compress import LowRankPolicy
from gradwire.kernels import (
    FactorLayout,
    Matrix,
    MatrixTable,
    Operands,
    SegmentTable,
    backproject,
    flatten,
    flatten_bytes,
    flatten_reference,
    lowrank_bytes,
    orthogonalize,
    orthogonalize_bytes,
    project,
    reconstruct,
    renew,
    renew_bytes,
    unflatten,
    unflatten_bytes,
)
from gradwire.kernels.lowrank_triton import dot_precision

RANK = 4  # of PowerSGD
COMPILED = "torch.compile"


def _compiled(work: Callable[..., object], operands: Callable[[int], tuple[object, ...]]) -> dict[str, Call]:
    """``work(*operands(i))`` under torch.compile, compiled at the first call for each bucket; empty without C++."""
    if not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None:
        return {}

    @cache
    def compiled() -> Callable[..., object]:
        torch._dynamo.reset()  # it stops compiling a function after a number of shapes
        return torch.compile(work, dynamic=False)

    return {COMPILED: lambda i: compiled()(*operands(i))}


def flatten_case(shapes: Sequence[Sequence[Shape]], device: torch.device, dtype: torch.dtype) -> Case:
    """Gradients into a wire, with a division by the world size."""
    lists = random_gradients(shapes, device)
    tables = [SegmentTable(tensors) for tensors in lists]
    wires = [torch.full((table.numel,), torch.nan, dtype=dtype, device=device) for table in tables]
    flats = [torch.empty(table.numel, device=device) for table in tables]
    flat_views = [table.views(flat) for table, flat in zip(tables, flats, strict=True)]
    wire_views = [table.views(wire) for table, wire in zip(tables, wires, strict=True)]

    def ddp_and_hook(i: int) -> Tensor:
        torch._foreach_copy_(flat_views[i], lists[i])
        return flats[i].to(dtype).div_(RANKS)

    def cat_to_div(*tensors: Tensor) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype).div_(RANKS)

    def check() -> None:
        expected = torch.empty_like(wires[0])
        flatten_reference(lists[0], tables[0], expected, 1 / RANKS, torch.finfo(dtype).max, None)
        torch.testing.assert_close(wires[0], expected, rtol=0, atol=0)

    return Case(
        f"flatten to {str(dtype).removeprefix('torch.')}",
        [flatten_bytes(table.numel, torch.float32, dtype) for table in tables],
        {
            GRADWIRE: lambda i: flatten(lists[i], wires[i], table=tables[i], scale=1 / RANKS),
            "DDP and hook of PyTorch": ddp_and_hook,
            "cat, to, div": lambda i: cat_to_div(*lists[i]),
            **_compiled(cat_to_div, lambda i: tuple(lists[i])),
            "foreach copy": lambda i: torch._foreach_copy_(wire_views[i], lists[i]),
        },
        check,
    )


def unflatten_case(shapes: Sequence[Sequence[Shape]], device: torch.device) -> Case:
    """A wire of fp16 into gradients."""
    lists = random_gradients(shapes, device)
    tables = [SegmentTable(tensors) for tensors in lists]
    wires = [torch.randn(table.numel, device=device).half() for table in tables]
    flats = [torch.empty(table.numel, device=device) for table in tables]
    flat_views = [table.views(flat) for table, flat in zip(tables, flats, strict=True)]
    wire_views = [table.views(wire) for table, wire in zip(tables, wires, strict=True)]

    def hook_and_ddp(i: int) -> None:
        flats[i].copy_(wires[i])
        torch._foreach_copy_(lists[i], flat_views[i])

    def copies(wire: Tensor, *tensors: Tensor) -> None:
        for tensor, view in zip(tensors, wire.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(view.view_as(tensor))

    def check() -> None:
        expected = wires[0].float()
        torch.testing.assert_close(torch.cat([t.reshape(-1) for t in lists[0]]), expected, rtol=0, atol=0)

    return Case(
        "unflatten from float16",
        [unflatten_bytes(table.numel, torch.float16, torch.float32) for table in tables],
        {
            GRADWIRE: lambda i: unflatten(wires[i], lists[i], table=tables[i]),
            "DDP and hook of PyTorch": hook_and_ddp,
            "foreach copy": lambda i: torch._foreach_copy_(lists[i], wire_views[i]),
            **_compiled(copies, lambda i: (wires[i], *lists[i])),
        },
        check,
    )


def _matrices(
    shapes: Sequence[Sequence[Shape]], device: torch.device, rank: int
) -> tuple[list[MatrixTable], list[list[Tensor]]]:
    """The matrices of each bucket that PowerSGD compresses at its default policy, and gradients of their shapes."""
    policy = LowRankPolicy(rank=rank)
    tables, gradients = [], []
    for of_bucket in shapes:
        found = [
            Matrix(shape.rows, shape.columns, shape.rank, key)
            for key, parameter in enumerate(of_bucket)
            for shape in [policy.matrix_shape("", torch.empty(parameter, device="meta"))]
            if shape is not None
            for _ in range(shape.matrices)
        ]
        tables.append(MatrixTable(found, torch.float32, device))
        gradients.append([torch.randn(m.rows, m.columns, device=device) for m in found])
    return tables, gradients


def _packed(
    tables: Sequence[MatrixTable], sides: Sequence[FactorLayout]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Random factors of one side of each bucket, where their results go, their flags, and views of each factor."""
    device = tables[0].device
    wires = [torch.randn(side.numel, device=device) for side in sides]
    outs = [torch.full_like(wire, torch.nan) for wire in wires]
    finite = [torch.ones(len(table), dtype=torch.int32, device=device) for table in tables]
    return wires, outs, finite, [side.views(wire) for side, wire in zip(sides, wires, strict=True)]


def orthogonalize_case(shapes: Sequence[Sequence[Shape]], device: torch.device, rank: int = RANK) -> Case:
    """Bases of the factors P."""
    tables, _ = _matrices(shapes, device, rank)
    wires, outs, finite, factors = _packed(tables, [table.p for table in tables])

    def check() -> None:
        for basis in tables[0].p.views(outs[0]):
            gram = basis.double() @ basis.double().t()
            torch.testing.assert_close(gram, torch.eye(len(gram), dtype=gram.dtype, device=device), rtol=0, atol=1e-5)

    return Case(
        f"orthogonalize, rank {rank}",
        [orthogonalize_bytes(table.p.numel, torch.float32, torch.float32) for table in tables],
        {
            GRADWIRE: lambda i: orthogonalize(wires[i], tables[i].p, outs[i], finite[i]),
            "PyTorch's hook": lambda i: [torch_orthogonalize(f.t().clone()[None]) for f in factors[i]],
            "linalg.qr": lambda i: [torch.linalg.qr(factor.t()) for factor in factors[i]],
        },
        check,
    )


def renew_case(shapes: Sequence[Sequence[Shape]], device: torch.device, rank: int = RANK) -> Case:
    """Unit columns from the factors Q."""
    tables, _ = _matrices(shapes, device, rank)
    wires, outs, finite, factors = _packed(tables, [table.q for table in tables])
    step = torch.ones(1, dtype=torch.int64, device=device)

    def check() -> None:
        for factor, unit in zip(factors[0], tables[0].q.views(outs[0]), strict=True):
            expected = factor.double() / factor.double().norm(dim=1, keepdim=True)
            torch.testing.assert_close(unit.double(), expected, rtol=1e-5, atol=0)

    return Case(
        f"column norms, rank {rank}",
        [renew_bytes(table.q.numel, torch.float32, torch.float32) for table in tables],
        {
            GRADWIRE: lambda i: renew(wires[i], tables[i].q, tables[i].keys, step, outs[i], finite[i]),
            "norm, div": lambda i: [f / f.norm(dim=1, keepdim=True) for f in factors[i]],
        },
        check,
    )


def lowrank_case(shapes: Sequence[Sequence[Shape]], device: torch.device, rank: int = RANK) -> Case:
    """The three passes over the matrices."""
    tables, gradients = _matrices(shapes, device, rank)
    errors = [[torch.zeros_like(g) for g in of_bucket] for of_bucket in gradients]
    targets = [[torch.full_like(g, torch.nan) for g in of_bucket] for of_bucket in gradients]
    ps = [0.01 * torch.randn(table.p.numel, device=device) for table in tables]
    qs = [0.01 * torch.randn(table.q.numel, device=device) for table in tables]
    products = [tuple(torch.full_like(x, torch.nan) for x in pair) for pair in zip(ps, qs, strict=True)]
    finite = [torch.ones(len(table), dtype=torch.int32, device=device) for table in tables]

    # The factors of a step come from the wire; here they stay the same, and products go elsewhere.
    def passes(i: int) -> None:
        operands = Operands(tables[i], gradients[i], targets[i], errors[i], keep=True)
        project(operands, qs[i], products[i][0], scale=1 / RANKS)
        backproject(operands, ps[i], products[i][1], scale=1 / RANKS)
        reconstruct(operands, ps[i], qs[i], finite[i])

    # Three passes here too: between them, all factors of the bucket are exchanged.
    def eager(*operands: Sequence[Tensor]) -> None:
        gradients, errors, targets, ps, qs, p_outs, q_outs = operands
        ms = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        for m, q, p_out in zip(ms, qs, p_outs, strict=True):
            torch.mm(q, m.t(), out=p_out).div_(RANKS)
        for m, p, q_out in zip(ms, ps, q_outs, strict=True):
            torch.mm(p, m, out=q_out).div_(RANKS)
        for m, error, target, p, q in zip(ms, errors, targets, ps, qs, strict=True):
            torch.mm(p.t(), q, out=target)
            torch.sub(m, target, out=error)

    def operands_of(i: int) -> tuple[Sequence[Tensor], ...]:
        p, q = tables[i].p, tables[i].q
        factors = (p.views(ps[i]), q.views(qs[i]), p.views(products[i][0]), q.views(products[i][1]))
        return gradients[i], errors[i], targets[i], *factors

    def check() -> None:
        """After one call, whose errors were zero: M = G."""
        # Tensor cores cut the inputs of a product off after 10 bits: (1 + 2^-10)^2 - 1 at most, relative to its size.
        rounding = 2**-9 + 2**-20 if device.type == "cuda" and dot_precision(tables[0]) == "tf32" else 0.0
        factors = zip(tables[0].p.views(ps[0]), tables[0].q.views(qs[0]), strict=True)
        made = zip(tables[0].p.views(products[0][0]), tables[0].q.views(products[0][1]), strict=True)
        for k, ((p, q), (p_made, q_made)) in enumerate(zip(factors, made, strict=True)):
            m, result = gradients[0][k].double(), p.double().t() @ q.double()
            for actual, left, right in ((p_made, q.double(), m.t()), (q_made, p.double(), m)):
                expected = left @ right / RANKS
                bound = (
                    1e-5 * float(1 + expected.abs().max()) + rounding * float((left.abs() @ right.abs()).max()) / RANKS
                )
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
            for actual, expected in ((targets[0][k], result), (errors[0][k], m - result)):
                bound = 1e-5 * float(1 + expected.abs().max())
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)

    return Case(
        f"PowerSGD's three passes, rank {rank}",
        [lowrank_bytes(sum(m.rows * m.columns for m in table.matrices), torch.float32) for table in tables],
        {
            GRADWIRE: passes,
            "eager PyTorch": lambda i: eager(*operands_of(i)),
            **_compiled(eager, operands_of),
        },
        check,
    )


MAKERS: tuple[Callable[[Sequence[Sequence[Shape]], torch.device], Case], ...] = (
    lambda shapes, device: flatten_case(shapes, device, torch.float16),
    lambda shapes, device: flatten_case(shapes, device, torch.float32),
    unflatten_case,
    orthogonalize_case,
    renew_case,
    lowrank_case,
    *(partial(case, wire=wire) for wire in ("int8", "int4") for case in (quantize_case, reduce_case, dequantize_case)),
)
