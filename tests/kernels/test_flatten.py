"""`flatten`: the wire has the bits of the reference and of the oracle; counters of special elements."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.kernels import SegmentTable, flatten_reference, segment_table
from tests.kernels.support.calls import flatten
from tests.kernels.support.cases import (
    LIMITS,
    PROPERTY,
    SCALE_SHAPES,
    SCALES,
    SOURCES,
    WIRES,
    Case,
    Layout,
    cases,
    name,
    on_the_cpu_path,
    scale_of_shape,
)
from tests.kernels.support.exact import Guarded, as_float64, assert_same_bits, flatten_oracle

INF, NAN = float("inf"), float("nan")


def check(case, source, wire, device, *, scale, limit, counted, in_table=True):
    """`flatten` gives the bits of its reference and of the oracle, and writes nothing else."""
    sources = case.sources(source, device)
    tensors = case.views(sources)
    numel = case.numel(source)
    table = SegmentTable(tensors)
    out = Guarded.poisoned(numel, wire, offset=case.wire_offset, device=device)
    counters = Guarded(torch.tensor([3, 5]), device=device)

    flatten(
        tensors,
        out.window,
        table=table if in_table else None,
        scale=scale,
        limit=limit,
        counters=counters.window if counted else None,
    )

    out.assert_guards_untouched("the wire")
    counters.assert_guards_untouched("the counters")
    for i, guarded in enumerate(sources):
        guarded.assert_untouched(f"gradient {i}")

    reference = torch.full((numel,), NAN, dtype=wire, device=device)
    reference_counters = torch.tensor([3, 5], device=device) if counted else None
    flatten_reference(tensors, table, reference, scale, limit, reference_counters)
    assert_same_bits(out.window, reference, "the wire, compared with the reference")

    parts = [flatten_oracle(as_float64(g.window), source.to_real(), wire, float(scale), limit) for g in sources]
    oracle = torch.cat([part[0] for part in parts])
    assert_same_bits(out.window.cpu(), oracle, "the wire, compared with the oracle")
    if counted:
        expected = [3 + sum(part[1] for part in parts), 5 + sum(part[2] for part in parts)]
        assert reference_counters.tolist() == expected
        assert counters.window.tolist() == expected


@pytest.mark.parametrize("wire", WIRES, ids=name)
@pytest.mark.parametrize("source", SOURCES, ids=name)
@PROPERTY
@given(case=cases(), scale=SCALES, limit=LIMITS, shape=SCALE_SHAPES, counted=st.booleans())
def test_flatten_matches_reference_and_oracle(source, wire, device, case, scale, limit, shape, counted):
    check(case, source, wire, device, scale=scale_of_shape(scale, shape, device), limit=limit, counted=counted)


@pytest.mark.parametrize("wire", WIRES, ids=name)
@pytest.mark.parametrize("source", SOURCES, ids=name)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_plain_cast_of_any_bits_matches_reference_and_oracle(source, wire, scale, device):
    # No limit, no counters, |scale| <= 1: what the hooks ask for, and a path of its own on the CPU.
    layouts = (Layout((61, 67), (1, 61)), Layout((), ()), Layout((4096,), (1,), offset=1), Layout((0,), (1,)))
    case = Case(layouts, wire_offset=0, kind="bits", seed=0)
    check(case, source, wire, device, scale=scale, limit=INF, counted=False, in_table=False)


# Source value, scale, expected wire value, and which counter it adds to (0 non-finite, 1 saturated).
FP16_MAX, FP16_TINY = 65504.0, 2.0**-24
BF16_MAX, FP32_MAX = float(torch.finfo(torch.bfloat16).max), float(torch.finfo(torch.float32).max)
EXPLICIT = {
    torch.float16: [
        (-0.0, 1.0, -0.0, None),
        (NAN, 1.0, NAN, 0),
        (-INF, 0.5, -INF, 0),
        (INF, 0.0, NAN, 0),
        (65519.99, 1.0, FP16_MAX, 1),
        (-7e4, 1.0, -FP16_MAX, 1),
        (7e4, -1.0, -FP16_MAX, 1),
        (1e5, 0.5, 49984.0, None),  # scaled before the cast; 5e4 is a tie
        (-3e38, 4.0, -FP16_MAX, 1),  # the product overflows fp32
        (1.0, INF, FP16_MAX, 1),
        (1.0, NAN, NAN, None),  # a finite element, and not above the limit
        (FP16_TINY / 2, 1.0, 0.0, None),  # ties to even
        (1 + 3 * 2.0**-11, 1.0, 1 + 2.0**-9, None),
    ],
    torch.bfloat16: [
        (FP32_MAX, 1.0, BF16_MAX, 1),  # would round to infinity
        (2.0**-133, 1.0, 2.0**-133, None),  # smallest subnormal
        (1 + 3 * 2.0**-8, 1.0, 1 + 2.0**-6, None),
    ],
    torch.float32: [
        (-FP32_MAX, 2.0, -FP32_MAX, 1),
        (2.0**-126, 0.5, 2.0**-127, None),  # subnormal numbers are kept
    ],
}


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("wire", EXPLICIT, ids=name)
def test_flatten_of_explicit_fp32_values_gives_written_down_wire(wire, counted, device):
    for value, scale, expected, counter in EXPLICIT[wire]:
        source = torch.tensor([1.0, value, 1.0], device=device)
        out = torch.full((3,), NAN, dtype=wire, device=device)
        counters = torch.zeros(2, dtype=torch.int64, device=device)
        flatten([source], out, scale=scale, counters=counters if counted else None)
        what = f"{value!r} * {scale!r}"
        assert_same_bits(out[1].cpu(), torch.tensor(expected).to(wire), what)
        if counted and abs(scale) < INF:
            assert counters.tolist() == [int(counter == 0), int(counter == 1)], what


def test_fp64_is_rounded_to_fp32_on_the_way_to_16_bits(device):
    # Just above a tie: fp32 rounds it onto the tie, which rounds to even. Rounding once would round up.
    source = torch.tensor([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40], dtype=torch.float64, device=device)
    for wire in (torch.float16, torch.bfloat16):
        out = torch.full((2,), NAN, dtype=wire, device=device)
        flatten([source], out)
        assert_same_bits(out, source.float().to(wire), name(wire))


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", WIRES, ids=name)
def test_flatten_of_single_source_works_in_place(dtype, scale, device):
    case = Case((Layout((9001,), (1,), offset=1),), wire_offset=0, kind="spiked", seed=1)
    separate = case.sources(dtype, device)[0]
    expected = flatten([separate.window], torch.full_like(separate.window, NAN), scale=scale)
    guarded = case.sources(dtype, device)[0]
    flatten([guarded.window], guarded.window, scale=scale)
    assert_same_bits(guarded.window, expected, "scaled in place")
    guarded.assert_guards_untouched("the source")


def test_flatten_with_infinite_scale_counts_no_masked_elements(device):
    out = torch.full((3,), NAN, dtype=torch.float16, device=device)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    flatten([torch.tensor([1.0, -1.0, 2.0], device=device)], out, scale=INF, counters=counters)
    assert out.tolist() == [FP16_MAX, -FP16_MAX, FP16_MAX]
    assert counters.tolist() == [0, 3]


@on_the_cpu_path
@pytest.mark.parametrize("source, wire", [(torch.bfloat16, torch.float16), (torch.complex64, torch.float32)], ids=name)
@PROPERTY
@given(case=cases(), block=st.sampled_from((2, 64, 1000)), scale=SCALES, limit=LIMITS, counted=st.booleans())
@example(  # an empty tensor after the pieces of another is a block of its own
    case=Case((Layout((3,), (1,)), Layout((0,), (1,))), wire_offset=0, kind="normal", seed=0),
    block=2,
    scale=1.0,
    limit=2.0**-70,
    counted=True,
)
def test_any_block_size_gives_same_bits(source, wire, device, case, block, scale, limit, counted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_table, "CPU_BLOCK_NUMEL", block)
        check(case, source, wire, device, scale=scale, limit=limit, counted=counted)


def test_table_serves_other_tensors_of_its_layout(device):
    layouts = (Layout((61, 7), (1, 61)), Layout((4097,), (1,)))
    lists = [Case(layouts, 0, "normal", seed).sources(torch.float32, device) for seed in (4, 5)]
    first, second = (Case(layouts, 0, "normal", 0).views(guarded) for guarded in lists)
    table = SegmentTable(first)
    for tensors in (first, second, first):
        wire = torch.full((table.numel,), NAN, dtype=torch.bfloat16, device=device)
        flatten(tensors, wire, table=table, scale=3.0)
        assert_same_bits(wire, flatten(tensors, torch.full_like(wire, NAN), scale=3.0), "with a table of its own")


def test_views_of_the_same_memory_in_another_dtype_are_new():
    table = SegmentTable([torch.zeros(3), torch.zeros(2, 5)])
    wire = torch.zeros(13)
    assert table.views(wire)[0] is table.views(wire)[0]
    assert [view.dtype for view in table.views(wire.view(torch.int32))] == [torch.int32] * 2
