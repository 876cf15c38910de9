"""The kernels of PowerSGD, compiled ahead of time, must not spill, and must move aligned matrices in wide accesses."""

import re
from functools import cache

import pytest
import torch

from gradwire.kernels import (
    Matrix,
    MatrixTable,
    Operands,
    OwnFactor,
    Renewal,
    SegmentTable,
    Uncompressed,
    bound_low_rank,
)
from gradwire.kernels.layouts import next_power_of_2
from gradwire.kernels.orthogonalize_triton import longest_small
from tests.kernels.support.ahead_of_time import (
    BF16,
    FP16,
    FP32,
    TARGETS,
    check_program_number,
    compiled,
    intermediate,
    recorded_launches,
)
from tests.kernels.support.calls import backproject, orthogonalize, project, reconstruct
from tests.kernels.support.cases import name

# The largest number of registers a thread may take, by the rank that a kernel is compiled for: 255 is all there is,
# and 128 for the 16 warps of Gram-Schmidt.
# Measured with Triton 3.6.0 and 3.7.1 on sm_80, sm_90, sm_100 and gfx942, over all variants.
LIMITS = {
    "project": {4: 96, 8: 168, 16: 142, 32: 144, 64: 168},
    "backproject": {4: 112, 8: 168, 16: 128, 32: 128, 64: 168},
    "reconstruct": {4: 120, 8: 160, 16: 120, 32: 144, 64: 232},
    "sum_partials": dict.fromkeys((4, 8, 16, 32, 64), 80),
    "sum_and_pack": dict.fromkeys((4, 8, 16, 32, 64), 144),
    "gram_schmidt": dict.fromkeys((4, 8, 16, 32, 64), 128),
    "gram": {4: 112, 8: 112, 16: 112, 32: 112, 64: 128},
    "factorize": {4: 160, 8: 160, 16: 160, 32: 128, 64: 128},
    "apply_first": {4: 168, 8: 168, 16: 168, 32: 208, 64: 232},
    "apply_second": {4: 168, 8: 168, 16: 168, 32: 208, 64: 208},
    "norms": dict.fromkeys((4, 8, 16, 32, 64), 60),
    "renew": dict.fromkeys((4, 8, 16, 32, 64), 48),
}
# Of 64 KiB, which every target has.
SHARED = 1 << 16
# gradient, wire, whether M is kept, whether there is error feedback
VARIANTS = [
    (FP32, FP32, True, True),
    (FP32, BF16, False, True),
    (FP32, FP32, False, False),
    (BF16, BF16, False, True),
    (FP16, BF16, False, True),
]
RANKS = (4, 8, 16, 32, 64)


@cache
def launches(gradient, wire, keep, error, rank, shortening=1, precision="tf32"):
    """The kernels of one step on aligned matrices, one with the longest P that is small, one with a large P."""
    longest = longest_small(next_power_of_2(rank))

    def step():
        matrices = [Matrix(longest // shortening, max(64, rank), rank), Matrix(2 * longest, 64, rank)]
        table = MatrixTable(matrices, gradient, torch.device("cpu"), precision)
        matrices = [torch.zeros(matrix.rows, matrix.columns, dtype=gradient) for matrix in table.matrices]
        errors = [torch.zeros(matrix.shape) for matrix in matrices] if error else None
        q, basis = torch.zeros(table.q.numel), torch.zeros(table.p.numel)
        p_wire, q_wire = torch.zeros(table.p.numel, dtype=wire), torch.zeros(table.q.numel, dtype=wire)
        finite, number = torch.ones(2, dtype=torch.int32), torch.tensor([5])
        others = [torch.zeros(5000, dtype=gradient)]
        uncompressed = Uncompressed(SegmentTable(others), others, others, torch.zeros(5000, dtype=gradient), table.p)
        renewal = Renewal(table.q, q, number, 6)
        # Quantized factors are in fp32 before and after, and only they leave a residual.
        residual = torch.zeros(table.q.numel) if wire == FP32 else None
        own = OwnFactor(table.q, torch.zeros(table.q.numel, dtype=wire), residual, 2) if error else None
        operands = Operands(table, matrices, matrices, errors, keep, uncompressed, renewal, own)
        bound_low_rank(table).draw(table.q, table.keys, number, q)
        project(operands, q, p_wire, scale=0.5)
        orthogonalize(p_wire, table.p, basis, finite)
        backproject(operands, basis, q_wire, scale=0.5)
        reconstruct(operands, basis, q_wire, finite)

    found = {}
    for launch in recorded_launches(step):
        kernel, arguments = launch.name, launch.arguments
        if kernel == "apply":
            kernel = "apply_second" if arguments["next_grams_ptr"] is None else "apply_first"
        if kernel == "sum_partials" and arguments["n_others"] > 0:
            kernel = "sum_and_pack"
        if kernel == "multiply":
            kernel = "project" if arguments["PASS"].to_p else "backproject"
        found[kernel] = launch
    assert sorted(found) == sorted(LIMITS), "a kernel that no step launches is not tested"
    return found


def matrix_bytes(kernel, gradient, keep, error):
    """Bytes of a full block of matrix elements that a program reads and writes in wide accesses, at the least."""
    read = gradient.itemsize + (4 if error and not (keep and kernel != "project") else 0)
    written = {"project": gradient.itemsize if keep else 0, "reconstruct": gradient.itemsize + (4 if error else 0)}
    if kernel == "reconstruct" and not error:
        read = 0
    return read, written.get(kernel, 0)


def check(kernel, variant, rank, target, precision="tf32"):
    gradient, _, keep, error = variant
    launch = launches(*variant, rank, precision=precision)[kernel]
    arguments, binary = launch.arguments, compiled(launch, target, LIMITS[kernel][rank])
    assert binary.shared <= SHARED, binary
    if kernel in ("project", "backproject", "reconstruct") and target != "gfx942":
        read, written = matrix_bytes(kernel, gradient, keep, error)
        block = arguments["PASS"].rows * arguments["PASS"].columns
        # 16-bit elements of a block that 8 warps share are too few for 16 bytes a thread.
        if block * gradient.itemsize >= 16 * 32 * arguments["num_warps"]:
            assert binary.loaded >= block * read, binary
            assert binary.stored >= block * written, binary


USUAL = [(kernel, VARIANTS[0], rank) for kernel in LIMITS for rank in (4, 64)]
USUAL += [(kernel, VARIANTS[3], 4) for kernel in LIMITS]
USUAL += [("gram_schmidt", VARIANTS[0], 16)]  # the longest rows


@pytest.mark.parametrize("kernel, variant, rank", USUAL, ids=lambda v: name(v[0]) if isinstance(v, tuple) else str(v))
def test_powersgd_kernel_for_sm_90_does_not_spill(kernel, variant, rank):
    check(kernel, variant, rank, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: f"{name(v[0])}-{name(v[1])}{'-kept' * v[2]}{'-error' * v[3]}"
)
@pytest.mark.parametrize("kernel", LIMITS)
def test_every_powersgd_kernel_for_every_gpu_does_not_spill(kernel, variant, rank, target):
    check(kernel, variant, rank, target)


@pytest.mark.parametrize("kernel", LIMITS)
def test_program_id_is_widened_to_64_bits_before_arithmetic(kernel):
    check_program_number(launches(*VARIANTS[0], 4)[kernel])


@pytest.mark.parametrize("rank", [4, 32])
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[3]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["project", "backproject", "reconstruct"])
def test_tiles_of_m_have_64_bit_addresses_and_32_bit_offsets(kernel, variant, rank):
    launch = launches(*variant, rank)[kernel]
    tile, lines = launch.arguments["PASS"], [line.split(" loc(")[0] for line in intermediate(launch, "sm_90")]
    scalars = [line for line in lines if re.search(r"tt\.addptr .*: !tt\.ptr<b?f\d+>, ", line)]
    assert len(scalars) >= 6, "source, target, error, P and Q, in two branches"
    for line in scalars:
        assert line.endswith("i64"), line
    shape = f"{tile.rows}x{tile.columns}"
    tiles = [line for line in lines if f": tensor<{shape}x!tt.ptr" in line and "tt.addptr" in line]
    assert tiles, "in the aligned branch"
    if kernel == "reconstruct" or rank == 4:  # tiles of factors have the same shape at rank 32
        for line in tiles:
            assert line.endswith(f"tensor<{shape}xi32>"), line
    for line in lines:  # where 32 bits multiply, it is a row of a tile
        if "arith.muli" in line and "i32" in line:
            assert re.search(r": tensor<\d+x1xi32>|: i32", line), line


@pytest.mark.parametrize("rank", [4, 8])
def test_products_without_dot_sum_in_one_order_at_every_address(rank):
    """`tl.sum` adds in an order that depends on the layout, which the two branches choose by their addresses."""

    def summed(kernel):
        lines = intermediate(launches(*VARIANTS[0], rank)[kernel], "sm_90")
        return re.findall(r"tt\.call @\S*standard\.sum\S* : \(tensor<(\w+)xf32>\)", "\n".join(lines))

    assert all(shape.endswith("x2") for shape in summed("project")), "a sum of two has one order"
    assert summed("backproject") == ["16x64"] * rank, "one for both branches"


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[3]], ids=lambda v: f"{name(v[0])}{'-kept' * v[2]}")
def test_reconstruct_stores_result_after_all_threads_have_loaded_m(variant):
    # The compiled kernel has barriers of its own, at layout conversions that another version may leave out.
    lines = intermediate(launches(*variant, 4)["reconstruct"], "sm_90")
    tiles = "\n".join(lines).split("tt.func private @")[1:]
    order = [
        re.findall(r"tt\.call @\S*(load_m)|\b(barrier)\b|\btt\.(store)\b", tile)
        for tile in tiles
        if re.match(r"\S*_reconstruct_strip", tile)
    ]
    found = [["".join(word) for word in words] for words in order]
    assert found == [["load_m", "barrier", "store", "store"]] * 2, "the aligned branch and the other one"
