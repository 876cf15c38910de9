"""`tools.compiled`: bank conflicts and instruction counts by hand, and kernels against the kept results."""

from pathlib import Path

import pytest
import torch

from tests.kernels.cases import INTERPRETED

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

# ruff: noqa: E402
from gradwire.bench.record import load
from tools import compiled
from tools.ahead_of_time import TARGETS, Compiled
from tools.assembly import inspect
from tools.bank_conflicts import Conflicts, bank_conflicts, passes

LANES = np.arange(32)


@pytest.mark.parametrize(
    "addresses, width, expected",
    [
        (4 * LANES, 4, (1, 1)),
        (0 * LANES, 4, (1, 1)),  # one word for all threads
        (8 * LANES, 4, (1, 2)),
        (128 * LANES, 4, (1, 32)),
        (132 * LANES, 4, (1, 1)),  # rows padded by a word
        (2 * LANES, 2, (1, 1)),  # two threads share a word
        (8 * LANES, 8, (2, 2)),
        (16 * LANES, 16, (4, 4)),
        (LANES % 8 * 256, 16, (4, 32)),
        (LANES % 8 * 272, 16, (4, 4)),
        (np.where(LANES < 16, 128 * LANES, -1), 4, (1, 16)),  # half of the threads
    ],
)
def test_number_of_bank_passes_is_that_counted_by_hand(addresses, width, expected):
    assert passes(addresses, width) == expected


PTX = """
.visible .entry _a_kernel(
	.param .u64 .ptr .global .align 16 _a_kernel_param_0,
	.param .u32 _a_kernel_param_1
)
.reqntid 32
{
	.reg .b32 	%r<9>;
	ld.param.b64 	%rd1, [_a_kernel_param_0];
	ld.param.b32 	%r1, [_a_kernel_param_1];
	// begin inline asm
	mov.u64 %rd2, 0x0;
	ld.global.b64 { %rd2 }, [ %rd1 + 8 ];
	// end inline asm
	cvt.u32.u64 	%r2, %rd2;
	mov.u32 	%r3, %tid.x;
	mul.lo.s32 	%r4, %r3, %r2;
	mov.b32 	%r5, 0;
$L__BB0_1:
	ld.shared.b32 	%r6, [%r4+4];
	add.s32 	%r5, %r5, 1;
	add.s32 	%r4, %r4, 128;
	setp.lt.s32 	%p1, %r5, %r1;
	@%p1 bra 	$L__BB0_1;
	BODY
	ret;
}
"""


def conflicts_of(body, stride=4, repeats=3):
    return bank_conflicts(PTX.replace("BODY", body), 32, [torch.tensor([0, stride]), repeats])


@pytest.mark.parametrize("stride, worst", [(4, 1), (8, 2), (132, 1), (128, 32)])
def test_conflicts_follow_from_contents_of_tables(stride, worst):
    assert conflicts_of("", stride) == Conflicts(worst, worst)


def test_mean_covers_all_accesses_without_masked_threads():
    body = "shl.b32 %r7, %r3, 7; setp.lt.u32 %p2, %r3, 4; @%p2 st.shared.b32 [ %r7 + 0 ], { %r6 };"
    assert conflicts_of(body) == Conflicts(4, (3 * 1 + 4) / 4)


def test_swizzled_rows_are_free_of_conflicts():
    rows = "shl.b32 %r7, %r3, 7; and.b32 %r8, %r3, 7; shl.b32 %r8, %r8, 4;"
    load = "ld.shared.v4.b32 {%r1, %r2, %r5, %r6}, [%r7];"
    assert conflicts_of(f"{rows} {load}").worst == 8
    assert conflicts_of(f"{rows} xor.b32 %r7, %r7, %r8; {load}").worst == 1


def test_neighboring_loads_that_the_assembler_merges_count_once():
    rows = "shl.b32 %r7, %r3, 4;"
    loads = "ld.shared.b32 %r6, [%r7]; ld.shared.b32 %r6, [%r7+4]; ld.shared.b32 %r6, [%r7+8];"
    assert conflicts_of(f"bar.sync 0; {rows} {loads}") == Conflicts(1, 1)


def test_address_that_depends_on_floats_is_refused():
    with pytest.raises(ValueError, match="not known"):
        conflicts_of("cvt.rzi.s32.f32 %r7, %f1; ld.shared.b32 %r6, [%r7];")


def test_kernel_without_shared_memory_has_no_conflicts():
    ptx = PTX.replace("ld.shared.b32 	%r6, [%r4+4];", "").replace("BODY", "")
    assert bank_conflicts(ptx, 32, [torch.tensor([0, 4]), 3]) is None


def sass(*instructions):
    lines = [f"        /*{16 * i:04x}*/  {text} ;  /* 0x0 */" for i, text in enumerate(instructions)]
    return "\n".join([*lines, f"        /*{16 * len(lines):04x}*/  BRA {16 * len(lines):#x};"])


def facts(assembly, ttgir):
    return inspect(Compiled("sm_90", 32, 0, ttgir, "", assembly, "REG:20 STACK:0"))


LAYOUTS = """
#blocked = #ttg.blocked<{sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [1], order = [0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [1, 1], order = [1, 0]}>
"""
TILE = "%x = tt.load %p : tensor<128x!tt.ptr<f32>, #blocked>"


def test_instructions_of_aligned_branch_are_counted():
    code = sass("S2R R0", "@P0 BRA 0x50", "LDG.E.128 R4, [R2.64]", "FADD R4, R4, R4", "EXIT", *["LDG.E R4"] * 9, "EXIT")
    binary = facts(code, TILE)
    assert (binary.instructions, binary.elements, binary.is_loop) == (5, 4, False)
    assert (binary.loaded, binary.program_elements) == (512, 128)


LOOP = f"""{LAYOUTS}
    scf.for %i = %c0_i32 to %c512_i32 step %c64_i32 iter_args(%a = %b) -> (f32) {{
      {TILE}
    }} loc(#loc1)
"""


@pytest.mark.parametrize("unrolled", [1, 2])
def test_instructions_of_a_loop_are_counted_once_for_each_tile(unrolled):
    body = ["LDG.E.128 R4, [R2.64]", "FADD R4, R4, R4", "IADD3 R0, R0, 0x1, RZ"] * unrolled
    binary = facts(sass("S2R R0", "MOV R1, R2", *body, "@!P1 BRA 0x20", "STG.E [R2.64], R4", "EXIT"), LOOP)
    assert (binary.instructions, binary.elements, binary.is_loop) == (3 * unrolled + 1, 4 * unrolled, True)
    assert binary.program_elements == 8 * 128


def test_elements_shared_by_all_rows_of_a_tile_do_not_count_as_unrolling():
    tile = "%x = tt.load %p : tensor<4x32x!tt.ptr<f32>, #blocked1>"
    row = "%y = tt.load %q : tensor<1x32x!tt.ptr<f32>, #blocked1>"
    sliced = "%z = tt.load %r : tensor<32x!tt.ptr<f32>, #ttg.slice<{dim = 0, parent = #blocked1}>>"
    loop = LOOP.replace(TILE, f"{tile}\n      {row}\n      {sliced}")
    binary = facts(sass("S2R R0", *["LDG.E.128 R4, [R2.64]"] * 3, "@!P1 BRA 0x10", "EXIT"), loop)
    assert (binary.instructions, binary.elements) == (4, 4)


def test_far_branch_by_a_call_leaves_the_loop():
    body = ["LDG.E.128 R4, [R2.64]", "@P1 CALL.REL.NOINC 0x60", "FADD R4, R4, R4", "BRA 0x10"]
    binary = facts(sass("S2R R0", *body, "NOP", "STG.E [R2.64], R4", "EXIT"), LOOP)
    assert (binary.instructions, binary.is_loop) == (4, True)


RESULTS = load(Path(__file__).parents[2] / "bench" / "results" / "compiled.jsonl")
SAME_COMPILER = RESULTS[0].provenance["settings"]["triton"] == triton.__version__
KEPT = {}
for record in RESULTS:
    KEPT.setdefault((record["options"], record["kernel"], record["target"]), {})[record.metric] = record.p50


def test_kept_results_have_every_kernel_on_every_target():
    expected = {
        (case, kernel, target) for case in compiled.CASES for kernel in compiled.launches(case) for target in TARGETS
    }
    assert expected == set(KEPT), "run `gradwire bench compiled --output bench/results/compiled.jsonl`"


def check(case, kernel, target):
    """The kernel is as the kept results say; with another version of Triton it is about as good."""
    kept, now = KEPT[case, kernel, target], compiled.facts_of(compiled.launches(case)[kernel], target)
    assert now[compiled.SPILLS] == 0
    assert now[compiled.SHARED] <= 1 << 16, "more shared memory than every target has"
    if SAME_COMPILER:
        assert now == kept, "run `gradwire bench compiled --output bench/results/compiled.jsonl`, and look what changed"
    else:
        assert now[compiled.STORED] >= kept[compiled.STORED]
        assert now.get(compiled.INSTRUCTIONS, 0) <= 1.25 * kept.get(compiled.INSTRUCTIONS, 0)
        assert (now.get(compiled.CONFLICTS) or 1) <= (kept.get(compiled.CONFLICTS) or 1)


USUAL = [("Cast: fp32 gradients, fp16 wire", "flatten"), ("Quantization: int4 wire, fp32 errors", "quantize")]


@pytest.mark.parametrize("case, kernel", USUAL)
def test_usual_kernels_are_as_the_kept_results_say(case, kernel):
    check(case, kernel, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("case, kernel, target", KEPT, ids="-".join)
def test_every_kernel_is_as_the_kept_results_say(case, kernel, target):
    check(case, kernel, target)
