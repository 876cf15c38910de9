"""Cases of the kernel benchmarks: every kernel on a bucket of a model, with a check, compared with plain PyTorch.

The GPU lane times all of `CASES`, and `gradwire bench kernels` those named in `COMPARED`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize as torch_orthogonalize

from gradwire import kernels
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_bytes import (
    BLOCK_SIZE,
    copy_bytes,
    dequantize_bytes,
    lowrank_bytes,
    quantize_bytes,
    reduce_quantized_bytes,
    renew_bytes,
)
from gradwire.bench.shapes import Shape
from gradwire.bench.timing import Timing, timed, turns
from gradwire.compress import LowRankPolicy

RANKS = 2  # the gradients are divided by it
COMPILED, EAGER = "torch.compile", "eager PyTorch"
UNTIMED_ROUNDS = 2  # rounds
FP16, FP32 = torch.float16, torch.float32
Call = Callable[[], object]


@dataclass(frozen=True)
class KernelCase:
    """A kernel on one bucket. Outputs hold NaN at first, because fresh memory may hold another case's right result."""

    kernel: str  # name and options of the kernel
    nbytes: float  # bytes that gradwire's kernel reads and writes
    implementations: dict[str, Callable[[], object]]  # calls by name, gradwire's first
    check: Callable[[], None]  # raises AssertionError if gradwire's result is wrong; call it after a run


Maker = Callable[[Sequence[Shape], torch.device], KernelCase]


def copy_bandwidth(device: torch.device, numel: int = 16 << 20) -> float:
    """GB/s of ``copy_``, reads and writes counted, of ``numel`` fp32 elements that no cache holds."""
    pairs = [torch.ones(2, numel, device=device) for _ in range(4)]
    seconds = [timed(partial(pair[1].copy_, pair[0]), device).seconds for _ in range(5) for pair in pairs]
    return 1e-9 * pairs[0].nbytes / median(seconds[len(pairs) :])


def check(case: KernelCase, model: str) -> None:
    """Run gradwire's implementation. Raises RuntimeError if its result is wrong."""
    case.implementations[GRADWIRE]()
    try:
        case.check()
    except AssertionError as error:
        raise RuntimeError(f"{case.kernel} of {model} is wrong; nothing is timed.") from error


def time_cases(cases: Sequence[KernelCase], rounds: int, device: torch.device) -> dict[str, list[Timing]]:
    """Timings by implementation: for each round, the mean over the buckets, which differ in size."""
    timings: dict[str, list[Timing]] = {name: [] for name in cases[0].implementations}
    for turn, name in turns(range(UNTIMED_ROUNDS + rounds), list(timings)):
        round_timings = [timed(case.implementations[name], device) for case in cases]
        if turn >= UNTIMED_ROUNDS:
            timings[name].append(_mean(round_timings))
    return timings


def _mean(timings: Sequence[Timing]) -> Timing:
    host = [timing.host_seconds for timing in timings if timing.host_seconds is not None]
    return Timing(
        mean(timing.seconds for timing in timings),
        mean(host) if host else None,
        any(timing.includes_host for timing in timings),
    )


def _compiled(work: Callable[..., object], *operands: object) -> dict[str, Call]:
    """``work(*operands)`` under torch.compile, compiled at its first call; empty without a C++ compiler."""
    if not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None:
        return {}

    @cache
    def compiled() -> Callable[..., object]:
        return torch.compile(work, dynamic=False)

    return {COMPILED: lambda: compiled()(*operands)}


def _case(
    kernel: str,
    nbytes: float,
    outputs: Sequence[Tensor],
    ours: Callable[..., object],
    reference: Callable[..., object],
    others: dict[str, Call],
) -> KernelCase:
    """A case whose ``outputs`` equal the reference's to the bit; both functions take the tensors to write to."""

    def check() -> None:
        expected = [torch.zeros_like(output) for output in outputs]
        reference(*expected)
        torch.testing.assert_close(list(outputs), expected, rtol=0, atol=0)

    return KernelCase(kernel, nbytes, {GRADWIRE: lambda: ours(*outputs), **others}, check)


def _bucket(
    shapes: Sequence[Shape], device: torch.device
) -> tuple[list[Tensor], kernels.SegmentTable, Tensor, list[Tensor]]:
    """Random gradients, their table, and a flat buffer, as PyTorch's DDP keeps it, with its views."""
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    table = kernels.SegmentTable(gradients)
    flat = torch.empty(table.numel, device=device)
    return gradients, table, flat, table.views(flat)


def flatten_case(shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype) -> KernelCase:
    """Gradients into a wire, with a division by the world size."""
    gradients, table, flat, flat_views = _bucket(shapes, device)
    wire = torch.full((table.numel,), torch.nan, dtype=dtype, device=device)
    wire_views, scale = table.views(wire), 1 / RANKS

    def ddp_and_hook() -> Tensor:
        torch._foreach_copy_(flat_views, gradients)
        return flat.to(dtype).div_(RANKS)

    def cat_to_div(*tensors: Tensor) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype).div_(RANKS)

    return _case(
        f"flatten to {str(dtype).removeprefix('torch.')}",
        copy_bytes(table.numel, FP32, dtype),
        [wire],
        lambda wire: kernels.flatten_kernels(table).flatten(gradients, table, wire, scale),
        lambda wire: kernels.flatten_reference(gradients, table, wire, scale),
        {
            "DDP and hook of PyTorch": ddp_and_hook,
            "cat, to, div": lambda: cat_to_div(*gradients),
            **_compiled(cat_to_div, *gradients),
            "foreach copy": lambda: torch._foreach_copy_(wire_views, gradients),
        },
    )


def unflatten_case(shapes: Sequence[Shape], device: torch.device) -> KernelCase:
    """A wire of fp16 into gradients."""
    gradients, table, flat, flat_views = _bucket(shapes, device)
    wire = torch.randn(table.numel, device=device).half()
    wire_views = table.views(wire)

    def hook_and_ddp() -> None:
        flat.copy_(wire)
        torch._foreach_copy_(gradients, flat_views)

    def copies(wire: Tensor, *tensors: Tensor) -> None:
        for tensor, view in zip(tensors, wire.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(view.view_as(tensor))

    return _case(
        "unflatten from float16",
        copy_bytes(table.numel, FP16, FP32),
        gradients,
        lambda *_: kernels.flatten_kernels(table).unflatten(wire, gradients, table),
        lambda *targets: copies(wire, *targets),
        {
            "DDP and hook of PyTorch": hook_and_ddp,
            "foreach copy": lambda: torch._foreach_copy_(gradients, wire_views),
            **_compiled(copies, wire, *gradients),
        },
    )


def scaled_flatten_case(shapes: Sequence[Shape], device: torch.device) -> KernelCase:
    """Gradients into a wire of fp16, scaled and clamped; elements that saturate or are not finite are counted."""
    gradients, table, flat, views = _bucket(shapes, device)
    wire = torch.full((table.numel,), torch.nan, dtype=FP16, device=device)
    scale, limit = torch.tensor([1024.0 / RANKS], device=device)[0], torch.finfo(FP16).max / 4
    counters, eager_counters = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))

    def eager() -> Tensor:
        torch._foreach_copy_(views, gradients)
        scaled = flat * scale
        eager_counters[0] += (~scaled.isfinite()).sum()
        eager_counters[1] += (scaled.abs() > limit).sum()
        return scaled.clamp_(-limit, limit).to(FP16)

    return _case(
        "scaled cast to float16",
        copy_bytes(table.numel, FP32, FP16),
        [wire, counters],
        lambda wire, counters: kernels.flatten_kernels(table).flatten(gradients, table, wire, scale, limit, counters),
        lambda wire, counters: kernels.flatten_reference(gradients, table, wire, scale, limit, counters),
        {EAGER: eager},
    )


def scaled_unflatten_case(shapes: Sequence[Shape], device: torch.device) -> KernelCase:
    """A wire of fp16 into gradients, scaled back, with the largest magnitude."""
    gradients, table, flat, views = _bucket(shapes, device)
    wire = torch.randn(table.numel, device=device).to(FP16)
    scale, absmax = torch.tensor([1 / 1024], device=device)[0], torch.zeros(1, device=device)

    def eager() -> Tensor:
        torch.mul(wire, scale, out=flat)
        torch._foreach_copy_(gradients, views)
        return flat.abs().max()

    return _case(
        "scaled cast from float16",
        copy_bytes(table.numel, FP16, FP32),
        [*gradients, absmax],
        lambda *_: kernels.flatten_kernels(table).unflatten(wire, gradients, table, scale, absmax),
        lambda *targets: kernels.unflatten_reference(wire, targets[:-1], table, scale, targets[-1]),
        {EAGER: eager},
    )


def _matrices(shapes: Sequence[Shape], device: torch.device, rank: int) -> tuple[kernels.MatrixTable, list[Tensor]]:
    """The matrices that PowerSGD compresses at its default policy, and gradients of their shapes."""
    policy = LowRankPolicy(rank=rank)
    found = [
        kernels.Matrix(shape.rows, shape.columns, shape.rank, key)
        for key, parameter in enumerate(shapes)
        for shape in [policy.matrix_shape("", torch.empty(parameter, device="meta"))]
        if shape is not None
        for _ in range(shape.matrices)
    ]
    return kernels.MatrixTable(found, FP32, device), [torch.randn(m.rows, m.columns, device=device) for m in found]


def _packed(table: kernels.MatrixTable, side: kernels.FactorLayout) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Random factors of one side, the tensor for their results, their flags, and a view of each factor."""
    wire = torch.randn(side.numel, device=table.device)
    finite = torch.ones(len(table), dtype=torch.int32, device=table.device)
    return wire, torch.full_like(wire, torch.nan), finite, side.views(wire)


def orthogonalize_case(shapes: Sequence[Shape], device: torch.device, rank: int) -> KernelCase:
    """Bases of the factors P."""
    table, _ = _matrices(shapes, device, rank)
    wire, out, finite, factors = _packed(table, table.p)
    orthogonalize = kernels.bound_low_rank(table).orthogonalize

    def check() -> None:
        for basis in table.p.views(out):
            gram = basis.double() @ basis.double().t()
            torch.testing.assert_close(gram, torch.eye(len(gram), dtype=gram.dtype, device=device), rtol=0, atol=1e-5)

    return KernelCase(
        f"orthogonalize, rank {rank}",
        copy_bytes(table.p.numel, FP32, FP32),
        {
            GRADWIRE: lambda: orthogonalize(wire, table.p, out, finite),
            "PyTorch's hook": lambda: [torch_orthogonalize(f.t().clone()[None]) for f in factors],
            "linalg.qr": lambda: [torch.linalg.qr(factor.t()) for factor in factors],
        },
        check,
    )


def renew_case(shapes: Sequence[Shape], device: torch.device, rank: int) -> KernelCase:
    """Unit columns from the factors Q."""
    table, _ = _matrices(shapes, device, rank)
    wire, out, finite, factors = _packed(table, table.q)
    step, renew = torch.ones(1, dtype=torch.int64, device=device), kernels.bound_renew(device, FP32)

    def check() -> None:
        for factor, unit in zip(factors, table.q.views(out), strict=True):
            expected = factor.double() / factor.double().norm(dim=1, keepdim=True)
            torch.testing.assert_close(unit.double(), expected, rtol=1e-5, atol=0)

    return KernelCase(
        f"column norms, rank {rank}",
        renew_bytes(table.q.numel, FP32, FP32),
        {
            GRADWIRE: lambda: renew(wire, table.q, table.keys, step, out, finite),
            "norm, div": lambda: [f / f.norm(dim=1, keepdim=True) for f in factors],
        },
        check,
    )


def lowrank_case(shapes: Sequence[Shape], device: torch.device, rank: int) -> KernelCase:
    """The three passes over the matrices."""
    table, gradients = _matrices(shapes, device, rank)
    errors = [torch.zeros_like(g) for g in gradients]
    targets = [torch.full_like(g, torch.nan) for g in gradients]
    p, q = (0.01 * torch.randn(side.numel, device=device) for side in (table.p, table.q))
    p_out, q_out = (torch.full_like(factor, torch.nan) for factor in (p, q))
    ps, p_outs = (table.p.views(buffer) for buffer in (p, p_out))
    qs, q_outs = (table.q.views(buffer) for buffer in (q, q_out))
    finite = torch.ones(len(table), dtype=torch.int32, device=device)
    bound = kernels.bound_low_rank(table)
    own = kernels.OwnFactor(table.q, torch.empty_like(q), None, RANKS)

    # The factors of a step come from the wire; here they stay the same, and products go elsewhere.
    def passes() -> None:
        operands = kernels.Operands(table, gradients, targets, errors, keep=True, own=own)
        bound.project(operands, q, p_out, 1 / RANKS)
        bound.backproject(operands, p, q_out, 1 / RANKS)
        bound.reconstruct(operands, p, q, finite)

    # Three passes here too: between them, all factors of the bucket are exchanged.
    def eager(*operands: Sequence[Tensor]) -> None:
        gradients, errors, targets, ps, qs, p_outs, q_outs = operands
        ms = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        for m, q, p_out in zip(ms, qs, p_outs, strict=True):
            torch.mm(q, m.t(), out=p_out).div_(RANKS)
        for m, p, q_out in zip(ms, ps, q_outs, strict=True):
            torch.mm(p, m, out=q_out).div_(RANKS)
        for m, error, target, p, q, own_q in zip(ms, errors, targets, ps, qs, q_outs, strict=True):
            torch.mm(p.t(), q, out=target)
            torch.addmm(m, p.t(), own_q, alpha=-RANKS, out=error)

    def check() -> None:
        """After one call, whose errors were zero: M = G."""
        rounding = 0.0
        if device.type == "cuda":
            from gradwire.kernels.lowrank_triton import dot_precision

            # Tensor cores cut the inputs of a product off after 10 bits: (1 + 2^-10)^2 - 1 at most, relative to it.
            rounding = 2**-9 + 2**-20 if dot_precision(table) == "tf32" else 0.0
        for k, (p, q, p_made, q_made) in enumerate(zip(ps, qs, p_outs, q_outs, strict=True)):
            m, result = gradients[k].double(), p.double().t() @ q.double()
            for actual, left, right in ((p_made, q.double(), m.t()), (q_made, p.double(), m)):
                expected = left @ right / RANKS
                cut_off = rounding * float((left.abs() @ right.abs()).max()) / RANKS
                bound = 1e-5 * float(1 + expected.abs().max()) + cut_off
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
            left_out = m - RANKS * p.double().t() @ q_made.double()
            for actual, expected in ((targets[k], result), (errors[k], left_out)):
                bound = 1e-5 * float(1 + expected.abs().max())
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)

    operands = (gradients, errors, targets, ps, qs, p_outs, q_outs)
    return KernelCase(
        f"PowerSGD's three passes, rank {rank}",
        lowrank_bytes(sum(m.rows * m.columns for m in table.matrices), FP32),
        {GRADWIRE: passes, EAGER: lambda: eager(*operands), **_compiled(eager, *operands)},
        check,
    )


class _Quantized:
    """Gradients of a bucket, their codes in a wire format, and error memory."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device, wire: str) -> None:
        self.gradients = [torch.randn(shape, device=device) for shape in shapes]
        table = kernels.BlockTable(self.gradients, BLOCK_SIZE, [0] * len(self.gradients))
        self.format, self.numel = kernels.WIRE_FORMATS[wire], table.numel
        self.layout = kernels.MessageLayout([(self.format, table)], RANKS)
        (self.section,) = self.layout.sections
        self.errors = torch.zeros(table.numel, device=device)
        for view in table.error_views(self.errors):  # blocks may lack elements, which have no errors
            view.normal_(std=0.01)
        self.message = torch.zeros(self.layout.message_shape, dtype=torch.uint8, device=device)
        self.kernels = kernels.bound_quantization(device)
        self.kernels.quantize(self.gradients, self.section, self.message, 1 / RANKS)


def _quantized_case(
    kernel: str, nbytes: float, outputs: Sequence[Tensor], call: Callable[..., object], ours: Any, reference: Any
) -> KernelCase:
    """A case of ``call(function, *outputs)``, compared with the reference in plain PyTorch."""
    theirs = partial(call, reference)
    return _case(kernel, nbytes, outputs, partial(call, ours), theirs, {EAGER: partial(theirs, *outputs)})


def quantize_case(shapes: Sequence[Shape], device: torch.device, wire: str) -> KernelCase:
    """Gradients and errors into a message."""
    bucket = _Quantized(shapes, device, wire)

    def call(function: Any, message: Tensor, pending: Tensor) -> None:
        options = {"scale": 1 / RANKS, "errors": bucket.errors, "pending": pending, "rounding": None}
        function(bucket.gradients, bucket.section, message, **options)

    nbytes = round(quantize_bytes(bucket.numel, FP32, bucket.format, FP32))
    outputs = [torch.zeros_like(bucket.message), torch.full_like(bucket.errors, torch.nan)]
    functions = (bucket.kernels.quantize, kernels.quantize_reference)
    return _quantized_case(f"quantize to {wire}", nbytes, outputs, call, *functions)


def reduce_case(shapes: Sequence[Shape], device: torch.device, wire: str) -> KernelCase:
    """The first rank's shards of all ranks' messages into their sum."""
    bucket = _Quantized(shapes, device, wire)
    numel = bucket.layout.shard_numel(bucket.section)
    errors = 0.01 * torch.randn(numel, device=device)

    def call(function: Any, result: Tensor, pending: Tensor) -> None:
        options = {"rank": 0, "errors": errors, "pending": pending, "rounding": None}
        function(bucket.message, bucket.section, result, **options)

    nbytes = round(reduce_quantized_bytes(numel, RANKS, bucket.format, FP32))
    result = torch.zeros(bucket.layout.result_shape, dtype=torch.uint8, device=device)
    outputs = [result, torch.full_like(errors, torch.nan)]
    functions = (bucket.kernels.reduce_quantized, kernels.reduce_quantized_reference)
    return _quantized_case(f"sum of {RANKS} ranks in {wire}", nbytes, outputs, call, *functions)


def dequantize_case(shapes: Sequence[Shape], device: torch.device, wire: str) -> KernelCase:
    """A message into gradients, and the errors of the step into the error memory."""
    bucket = _Quantized(shapes, device, wire)
    pending = torch.randn_like(bucket.errors)

    def call(functions: Any, *outputs: Tensor) -> None:
        decode, commit = functions
        *targets, errors = outputs
        decode(bucket.message, bucket.section, targets)
        commit(bucket.message, pending, errors)

    nbytes = round(dequantize_bytes(bucket.numel, bucket.format, FP32))
    nbytes += copy_bytes(bucket.numel, FP32, FP32)
    outputs = [*(torch.full_like(g, torch.nan) for g in bucket.gradients), bucket.errors]
    functions = (
        (bucket.kernels.dequantize, bucket.kernels.commit_errors),
        (kernels.dequantize_reference, kernels.commit_errors_reference),
    )
    return _quantized_case(f"dequantize from {wire}, commit errors", nbytes, outputs, call, *functions)


CASES: dict[str, Maker] = {
    **{
        f"flatten to {name}": partial(flatten_case, dtype=dtype)
        for name, dtype in (("float16", FP16), ("bfloat16", torch.bfloat16), ("float32", FP32))
    },
    "unflatten from float16": unflatten_case,
    "scaled cast to float16": scaled_flatten_case,
    "scaled cast from float16": scaled_unflatten_case,
    **{
        f"{name}, rank {rank}": partial(case, rank=rank)
        for rank in (4, 32)
        for name, case in (
            ("low-rank passes", lowrank_case),
            ("orthogonalize", orthogonalize_case),
            ("column norms", renew_case),
        )
    },
    **{
        f"{name} {wire}": partial(case, wire=wire)
        for wire in ("int8", "int4")
        for name, case in (
            ("quantize to", quantize_case),
            ("reduce", reduce_case),
            ("dequantize and commit", dequantize_case),
        )
    },
}
COMPARED = tuple(
    name for name in CASES if not (name.startswith(("flatten to bfloat16", "scaled")) or name.endswith("rank 32"))
)
