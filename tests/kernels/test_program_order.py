"""No kernel depends on the order of its programs; those that do not update in place may also run twice.

A GPU runs programs in any order. Triton's interpreter runs them one after another by their numbers, which would hide a
program that needs the result of another. Here every family runs in that order, then in random orders, to equal bits.
"""

import random
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from gradwire.kernels import (
    WIRE_FORMATS,
    BlockTable,
    FactorLayout,
    Matrix,
    MatrixTable,
    MessageLayout,
    Operands,
    Renewal,
    Rounding,
    SegmentTable,
    Uncompressed,
    bound_update_scale,
)
from tests.kernels.support.calls import (
    backproject,
    commit_errors,
    dequantize,
    flatten,
    orthogonalize,
    project,
    quantize,
    reconstruct,
    reduce_quantized,
    renew,
    sum_quantized,
    unflatten,
)
from tests.kernels.support.cases import INTERPRETED
from tests.kernels.support.exact import assert_same_bits

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, set before Triton is imported")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LENGTHS = (4096, 9001, 3, 8192)  # whole chunks of the kernels, parts of them, and unaligned ones
SHAPES = ((70, 96), (33, 600), (530, 17))  # several tiles; more than one strip of columns, then of rows


@contextmanager
def shuffled(seed, repeats=1):
    """Run every launch ``repeats`` times, each time in a new random order. Yields the orders: lists of numbers."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    set_grid_dim, set_grid_idx, launch = (
        InterpreterBuilder.set_grid_dim,
        InterpreterBuilder.set_grid_idx,
        GridExecutor.__call__,
    )
    generator, orders, programs = random.Random(seed), [], {}

    def shuffle(builder, *dimensions):
        set_grid_dim(builder, *dimensions)
        numbers = list(product(*map(range, dimensions)))
        order = generator.sample(numbers, len(numbers))
        programs.clear()
        programs.update(zip(numbers, order, strict=True))
        orders.append([number[0] for number in order])

    def repeat(executor, *arguments, **options):
        for _ in range(repeats):
            launch(executor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_dim", shuffle)
        patch.setattr(InterpreterBuilder, "set_grid_idx", lambda builder, *at: set_grid_idx(builder, *programs[at]))
        patch.setattr(GridExecutor, "__call__", repeat)
        yield orders


def nan(*shape, dtype=FP32):
    return torch.full(shape, torch.nan, dtype=dtype)


def gradients(dtype=FP32):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(length, generator=generator) for length in LENGTHS]
    tensors[1][5], tensors[3][8000] = torch.inf, 1e9
    return [tensor.to(dtype) for tensor in tensors]


def flattened(counts):
    tensors, counters = gradients(), torch.zeros(2, dtype=torch.int64)
    wire = nan(sum(LENGTHS), dtype=FP16)
    flatten(tensors, wire, scale=0.5, counters=counters if counts else None)
    return [wire, counters]


def unflattened():
    targets, absmax = [nan(length) for length in LENGTHS], torch.zeros(1)
    unflatten(torch.cat(gradients(BF16)), targets, scale=2.0, absmax=absmax)
    return [*targets, absmax]


def scaled():
    exponent, scales = torch.tensor([3, 1], dtype=torch.int32), torch.ones(2)
    absmax, counters = torch.tensor([7.5]), torch.tensor([0, 0, 2, 1])
    rule = {"top": 13, "margin": 4, "growth": 1, "backoff": 4, "inverse_world": 0.5}
    bound_update_scale(exponent.device)(exponent, scales, absmax, counters, **rule, is_last=True)
    return [exponent, scales, absmax, counters]


def passes(step, dtype=FP32, error=True, keep=False, in_place=False, rank=3, renews=False):
    """The results of one of PowerSGD's passes over a bucket."""
    table = MatrixTable([Matrix(*shape, rank, 11 + i) for i, shape in enumerate(SHAPES)], dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    source = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    errors = [torch.randn(shape, generator=generator) for shape in SHAPES] if error else None
    target = source if in_place else [nan(*shape, dtype=dtype) for shape in SHAPES]
    p, q = (torch.randn(side.numel, generator=generator) for side in (table.p, table.q))
    if keep and step is not project:
        torch._foreach_copy_(target, [torch.randn(shape, generator=generator) for shape in SHAPES])
    out = torch.zeros(max(table.p.numel, table.q.numel))
    others = [torch.randn(length, generator=generator).to(dtype) for length in LENGTHS]
    results, wire = [nan(length, dtype=dtype) for length in LENGTHS], nan(sum(LENGTHS), dtype=dtype)
    uncompressed = Uncompressed(SegmentTable(others), others, results, wire, table.p)
    finite, number = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([5])
    renewal = Renewal(table.q, out[: table.q.numel], number, None) if renews else None
    operands = Operands(table, source, target, errors, keep, uncompressed, renewal)
    if step is project:
        project(operands, q, out[: table.p.numel], scale=0.5)
    elif step is backproject:
        backproject(operands, p, out[: table.q.numel], scale=0.5)
    else:
        wire.copy_(torch.cat(others))
        table.q.views(q)[2][1] = 0
        reconstruct(operands, p, q, finite)
    return [out, *source, *target, *(errors or []), wire, *results, finite, number]


def factors(lengths, rank):
    layout = FactorLayout([rank] * len(lengths), lengths)
    packed = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(2)
    for view in layout.views(packed):
        view.copy_(torch.randn(view.shape, generator=generator))
    return layout, packed


def orthogonalized(lengths, rank):
    layout, packed = factors(lengths, rank)
    layout.views(packed)[-1][0, 3] = torch.nan
    out, finite = torch.zeros(layout.numel), torch.full((len(lengths),), 7, dtype=torch.int32)
    orthogonalize(packed, layout, out, finite)
    return [out, finite]


def renewed():
    layout, packed = factors((40, 3000, 1025), 4)
    layout.views(packed)[1][2] = 0
    layout.views(packed)[2][1, 1000] = torch.inf
    following, finite = torch.zeros(layout.numel), torch.ones(3, dtype=torch.int32)
    renew(packed, layout, [11, 12, 13], torch.tensor([5]), following, finite)
    return [following, finite]


class Exchange:
    """A bucket of quantized gradients, on one of two ranks, with what each step reads."""

    def __init__(self, wire, errors_dtype):
        self.tensors = gradients()
        self.tensors[1][5] = 1.0
        table = BlockTable(self.tensors, 64, [3, 4, 5, 6])
        layout = MessageLayout([(WIRE_FORMATS[wire], table)], 2, 2)
        (self.section,) = layout.sections
        generator = torch.Generator().manual_seed(3)
        self.rounding = Rounding(torch.tensor([9]), 2) if errors_dtype == BF16 else None
        self.errors = torch.randn(table.numel, generator=generator).to(errors_dtype)
        self.pending = torch.zeros_like(self.errors)
        numel = layout.shard_numel(self.section)
        self.shard_errors = torch.randn(numel, generator=generator).to(errors_dtype)
        self.shard_pending = torch.zeros_like(self.shard_errors)
        self.message = torch.zeros(layout.message_shape, dtype=torch.uint8)
        self.result = torch.zeros(layout.result_shape, dtype=torch.uint8)

    def quantize(self):
        memory = {"errors": self.errors, "pending": self.pending, "rounding": self.rounding}
        quantize(self.tensors, self.section, self.message, scale=0.5, **memory)
        return [self.message, self.pending]

    def reduce(self):
        self.quantize()
        memory = {"errors": self.shard_errors, "pending": self.shard_pending, "rounding": self.rounding}
        reduce_quantized(self.message, self.section, self.result, rank=1, **memory)
        return [self.result, self.shard_pending]

    def sum(self):
        self.quantize()
        total = torch.full_like(self.shard_errors, torch.nan, dtype=FP32)
        sum_quantized(self.message, self.section, total, rank=1)
        return [total]

    def dequantize(self):
        self.quantize()
        targets = [nan(length) for length in LENGTHS]
        dequantize(self.message, self.section, targets)
        return targets

    def commit(self):
        self.quantize()
        commit_errors(self.message, self.pending, self.errors)
        return [self.errors]


QUANTIZED = [("int4", FP32), ("int8", BF16)]

# Each writes its results over whatever was there, and reads nothing that it writes.
IDEMPOTENT = {
    "flatten": lambda: flattened(counts=False),
    "unflatten": unflattened,
    "project": lambda: passes(project),
    "project, M kept": lambda: passes(project, keep=True),
    "project, bf16": lambda: passes(project, dtype=BF16),
    "backproject": lambda: passes(backproject),
    "backproject, M kept": lambda: passes(backproject, keep=True),
    "backproject, rank 17": lambda: passes(backproject, rank=17),
    "reconstruct without errors": lambda: passes(reconstruct, error=False),
    "orthogonalize small factors": lambda: orthogonalized((40, 300, 1000), 4),
    "renew": renewed,
    **{
        f"{step}, {wire}": lambda step=step, wire=wire, errors=errors: getattr(Exchange(wire, errors), step)()
        for step in ("quantize", "reduce", "sum", "dequantize", "commit")
        for wire, errors in QUANTIZED
    },
}
# These count, or replace what they read: the gradient by M, the error memory by the next, P by a better P, the step's
# number by the next.
UPDATING = {
    "flatten with counters": lambda: flattened(counts=True),
    "update_scale": scaled,
    "project in place, M kept": lambda: passes(project, keep=True, in_place=True),
    "reconstruct": lambda: passes(reconstruct),
    "reconstruct and renew": lambda: passes(reconstruct, renews=True),
    "reconstruct in place, M kept": lambda: passes(reconstruct, keep=True, in_place=True),
    "orthogonalize large factors": lambda: orthogonalized((300, 1100), 17),
}


def assert_equal(run, expected, what):
    for i, (actual, wanted) in enumerate(zip(run(), expected, strict=True)):
        assert_same_bits(actual, wanted, f"{what}, result {i}")


SLOW = ("project, M kept", "project, bf16", "backproject, M kept")  # other tests of this file run the same lines
CASES = [
    pytest.param(kernel, seed, marks=[pytest.mark.slow] * (seed > 0 or kernel in SLOW), id=f"{kernel}-{seed}")
    for kernel in [*IDEMPOTENT, *UPDATING]
    for seed in (0, 1)
]


@pytest.mark.parametrize(("kernel", "seed"), CASES)
def test_programs_in_random_order_give_the_same_bits(kernel, seed):
    """A kernel that does not update in place even runs twice."""
    run = (IDEMPOTENT | UPDATING)[kernel]
    expected = run()
    with shuffled(seed, repeats=2 if kernel in IDEMPOTENT else 1) as orders:
        assert_equal(run, expected, kernel)
    if kernel != "update_scale":
        assert any(order != sorted(order) for order in orders), "no launch had programs to shuffle"
