"""`unflatten`: the gradients have the bits of the reference and of the oracle; their largest magnitude."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import SegmentTable, segment_table, unflatten_reference
from tests.kernels.support.calls import unflatten
from tests.kernels.support.cases import (
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
from tests.kernels.support.exact import Guarded, as_float64, assert_same_bits, unflatten_oracle

INF, NAN = float("inf"), float("nan")


def check(case, wire_dtype, target, device, *, scale, absmax, in_table=True):
    """`unflatten` gives the bits of its reference and of the oracle, and writes nothing else.

    ``absmax`` is the maximum before the call, or None not to ask for it.
    """
    numel = case.numel(target)
    wire = case.wire(wire_dtype, numel, device)
    targets = case.targets(target, device)
    tensors = case.views(targets)
    table = SegmentTable(tensors)
    maximum = Guarded(torch.tensor([0.0 if absmax is None else absmax]), device=device)

    unflatten(
        wire.window,
        tensors,
        table=table if in_table else None,
        scale=scale,
        absmax=None if absmax is None else maximum.window,
    )

    wire.assert_untouched("the wire")
    maximum.assert_guards_untouched("the maximum")
    for i, guarded in enumerate(targets):
        guarded.assert_guards_untouched(f"gradient {i}")

    reference = case.targets(target, device)
    reference_maximum = None if absmax is None else torch.tensor([absmax], device=device)
    unflatten_reference(wire.window, case.views(reference), table, scale, reference_maximum)
    for i, (guarded, expected) in enumerate(zip(targets, reference, strict=True)):
        assert_same_bits(guarded.window, expected.window, f"gradient {i}, compared with the reference")

    oracle, largest = unflatten_oracle(as_float64(wire.window), wire_dtype, target.to_real(), float(scale))
    segments = oracle.split(table.lengths)
    for i, (guarded, expected) in enumerate(zip(targets, segments, strict=True)):
        real = torch.view_as_real(guarded.window).flatten() if target.is_complex else guarded.window
        assert_same_bits(real.cpu(), expected, f"gradient {i}, compared with the oracle")
    if absmax is not None:
        expected = torch.maximum(torch.tensor([absmax]), largest)
        assert_same_bits(reference_maximum.cpu(), expected, "the reference's maximum, compared with the oracle")
        assert_same_bits(maximum.window.cpu(), expected, "the maximum, compared with the oracle")


@pytest.mark.parametrize("wire", WIRES, ids=name)
@pytest.mark.parametrize("target", SOURCES, ids=name)
@PROPERTY
@given(case=cases(), scale=SCALES, absmax=st.sampled_from((None, 0.0, 0.0, 1.0, 1e30, INF, NAN)), shape=SCALE_SHAPES)
def test_unflatten_matches_reference_and_oracle(target, wire, device, case, scale, absmax, shape):
    check(case, wire, target, device, scale=scale_of_shape(scale, shape, device), absmax=absmax)


@pytest.mark.parametrize("wire", WIRES, ids=name)
@pytest.mark.parametrize("target", SOURCES, ids=name)
def test_plain_cast_of_any_bits_matches_reference_and_oracle(target, wire, device):
    # Scale 1 and no maximum: what the cast hooks ask for, and a path of its own on the CPU.
    layouts = (Layout((61, 67), (1, 61)), Layout((), ()), Layout((4096,), (1,), offset=1), Layout((0,), (1,)))
    case = Case(layouts, wire_offset=0, kind="bits", seed=0)
    check(case, wire, target, device, scale=1.0, absmax=None, in_table=False)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=name)
def test_fp64_is_rounded_to_fp32_on_the_way_to_16_bits(target, device):
    # Just above a tie: fp32 rounds it onto the tie, which rounds to even. Rounding once would round up.
    wire = torch.tensor([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40], dtype=torch.float64, device=device)
    for absmax in (None, torch.zeros(1, device=device)):
        gradient = torch.full((2,), NAN, dtype=target, device=device)
        unflatten(wire, [gradient], absmax=absmax)
        assert_same_bits(gradient, wire.float().to(target), "the gradient")


@on_the_cpu_path
@pytest.mark.parametrize("wire, target", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.complex64)], ids=name)
@PROPERTY
@given(case=cases(), block=st.sampled_from((2, 64, 1000)), scale=SCALES, absmax=st.sampled_from((None, 0.0)))
def test_any_block_size_gives_same_bits(wire, target, device, case, block, scale, absmax):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_table, "CPU_BLOCK_NUMEL", block)
        check(case, wire, target, device, scale=scale, absmax=absmax)
