"""The quantization kernels: bitwise equal to their references, and the properties of one exchange."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels import (
    HEADER_BYTES,
    WIRE_FORMATS,
    BlockTable,
    MessageLayout,
    Rounding,
    commit_errors_reference,
    dequantize_reference,
    quantize_cpu,
    quantize_reference,
    reduce_quantized_reference,
    sum_quantized_reference,
)
from gradwire.kernels import block_table as block_table_module
from gradwire.kernels.wire_formats import Floats, Integers, OddIntegers
from tests.kernels.support.calls import commit_errors, dequantize, quantize, reduce_quantized, sum_quantized
from tests.kernels.support.cases import INTERPRETED, PROPERTY, Layout, layouts, name, values
from tests.kernels.support.exact import Guarded, assert_same_bits

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
INTEGER_FORMATS = [name for name, wire in WIRE_FORMATS.items() if wire.kind == "integers"]
SCALED_FORMATS = [name for name, wire in WIRE_FORMATS.items() if wire.is_scaled]
RAW_FORMATS = [name for name, wire in WIRE_FORMATS.items() if not wire.is_scaled]
KINDS = ("normal", "spiked", "tiny", "huge", "bits", "zeros", "outliers")
BOUND = (quantize, reduce_quantized, sum_quantized, dequantize, commit_errors)
REFERENCE = (
    quantize_reference,
    reduce_quantized_reference,
    sum_quantized_reference,
    dequantize_reference,
    commit_errors_reference,
)


def gradient(numel, dtype, kind, generator):
    """Elements of a gradient: as `cases.values`, or near fp32's ends, with zero blocks, or one huge element per 32."""
    if kind in ("normal", "spiked", "tiny", "bits"):
        return values(numel, dtype, kind, generator)
    result = torch.randn(numel, dtype=FP64, generator=generator)
    if kind == "huge":
        result *= torch.finfo(dtype).max / 4
    elif kind == "zeros":
        result[torch.arange(numel) // 100 % 3 == 1] = 0
    else:
        result[::32] *= 1e4
    return result.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@dataclass(frozen=True)
class Exchange:
    """One bucket, on every rank, and how it is sent."""

    wire: str = "int4"
    block_size: int = 64
    layouts: tuple = (Layout((4097,), (1,)), Layout((), ()), Layout((0, 3), (3, 1)), Layout((61, 67), (1, 61), 1))
    dtype: torch.dtype = FP32
    world_size: int = 2
    pieces: int = 1
    errors: torch.dtype | None = FP32
    kind: str = "normal"
    seed: int = 0

    def __str__(self):
        return f"{self.wire}-{self.block_size}-{name(self.dtype)}-{self.kind}-{self.world_size}x{self.pieces}"

    def table(self, device="cpu"):
        tensors = (
            [torch.empty(1, dtype=self.dtype, device=device).as_strided((0,), (1,))]
            if not self.layouts
            else [
                Guarded(torch.zeros(layout.numel, dtype=self.dtype), offset=layout.offset, device=device).view(
                    layout.shape, layout.strides
                )
                for layout in self.layouts
            ]
        )
        return BlockTable(tensors, self.block_size, [2**62 // (i + 1) - 2**61 for i in range(len(tensors))])


@dataclass
class Outcome:
    """Everything that an exchange writes: one entry for each rank."""

    messages: list = field(default_factory=list)
    pending: list = field(default_factory=list)
    results: list = field(default_factory=list)
    shard_pending: list = field(default_factory=list)
    sums: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    errors: list = field(default_factory=list)

    @property
    def flags(self):
        return [result[:, :4].view(torch.int32).flatten().tolist() for result in self.results]


def poisoned(shape, device):
    """A message of 0xFF between guards."""
    return Guarded(torch.full((prod(shape) // 4,), -1, dtype=torch.int32), device=device)


def memory(numel, dtype, device, generator, scale):
    return (torch.randn(numel, generator=generator) * scale).to(dtype).to(device)


def clear_missing(table, flat):
    for block, count in table.partial_blocks:
        flat.view(-1, table.block_size)[block, count:] = 0


def exchange(case, functions, device, *, gradients=None, errors=None):
    """Run one exchange of all ranks with the bound operations or the references. Nothing else may be written."""
    quantizer, reducer, adder, dequantizer, committer = functions
    table = case.table(device)
    layout = MessageLayout([(WIRE_FORMATS[case.wire], table)], case.world_size, case.pieces)
    (section,) = layout.sections
    outcome, step = Outcome(), torch.tensor([5], device=device)
    generator = torch.Generator().manual_seed(case.seed)
    error_scale = 1e-38 if case.kind == "tiny" else 0.1
    for rank in range(case.world_size):
        values = own_gradients(case, generator) if gradients is None else gradients[rank]
        guarded = [
            Guarded(each, offset=item.offset, device=device) for each, item in zip(values, case.layouts, strict=True)
        ]
        tensors = [g.view(item.shape, item.strides) for g, item in zip(guarded, case.layouts, strict=True)]
        message = poisoned(layout.message_shape, device)
        view = message.window.view(torch.uint8).view(layout.message_shape)
        old = pending = None
        if case.errors is not None:
            old = memory(table.numel, case.errors, device, generator, error_scale) if errors is None else errors[rank]
            clear_missing(table, old)
            pending = Guarded.poisoned(table.numel, case.errors, device=device)
        quantizer(
            tensors,
            section,
            view,
            scale=1 / case.world_size,
            errors=old,
            pending=None if pending is None else pending.window,
            rounding=Rounding(step, rank),
        )
        for i, g in enumerate(guarded):
            g.assert_untouched(f"gradient {i}")
        message.assert_guards_untouched("the message")
        check_only_section_written(view, section)
        outcome.messages.append(view)
        if pending is not None:
            pending.assert_guards_untouched("pending")
            outcome.pending.append(pending.window)
    for rank in range(case.world_size):
        received = torch.stack([torch.stack([m[p, rank] for m in outcome.messages]) for p in range(case.pieces)])
        result = poisoned(layout.result_shape, device)
        view = result.window.view(torch.uint8).view(layout.result_shape)
        view[:, :HEADER_BYTES] = 0
        old = pending = None
        if case.errors is not None:
            old = memory(layout.shard_numel(section), case.errors, device, generator, error_scale)
            pending = Guarded.poisoned(old.numel(), case.errors, device=device)
        before = received.clone()
        reducer(
            received,
            section,
            view,
            rank=rank,
            errors=old,
            pending=None if pending is None else pending.window,
            rounding=Rounding(step, 77),
        )
        assert torch.equal(received, before)
        result.assert_guards_untouched("the result")
        outcome.results.append(view)
        if pending is not None:
            pending.assert_guards_untouched("the shard's pending")
            outcome.shard_pending.append(pending.window)
        total = Guarded.poisoned(layout.shard_numel(section), FP32, device=device)
        adder(received, section, total.window, rank=rank)
        assert torch.equal(received, before)
        total.assert_guards_untouched("the sum")
        outcome.sums.append(total.window)
    receive(case, section, dequantizer, committer, device, outcome)
    return outcome


def own_gradients(case, generator):
    """The values of one rank's gradients."""
    parts = 2 if case.dtype.is_complex else 1
    return [gradient(item.numel * parts, case.dtype.to_real(), case.kind, generator) for item in case.layouts]


def receive(case, section, dequantizer, committer, device, outcome):
    """The end of an exchange on one rank: decode the results of all, and commit the errors."""
    gathered = torch.stack([torch.stack([r[p] for r in outcome.results]) for p in range(case.pieces)])
    check_only_section_written(gathered, section)
    targets = [Guarded.poisoned(item.numel, case.dtype, offset=item.offset, device=device) for item in case.layouts]
    dequantizer(
        gathered, section, [g.view(item.shape, item.strides) for g, item in zip(targets, case.layouts, strict=True)]
    )
    for i, target in enumerate(targets):
        target.assert_guards_untouched(f"target {i}")
        outcome.gradients.append(target.window)
    committed = torch.zeros(4099, device=device)
    committer(gathered, torch.ones(4099, device=device), committed)
    outcome.errors.append(committed)


def check_only_section_written(message, section):
    """Bytes outside the blocks' scales and payloads keep their poison, 255; the header is the caller's."""
    cells = message.flatten(0, 1)
    written = torch.zeros_like(cells, dtype=torch.bool)
    written[:, :HEADER_BYTES] = True
    for cell in range(cells.shape[0]):
        first, last = section.cell_blocks(cell)
        scale, payload = section.format.scale_bytes, section.format.payload_bytes(section.table.block_size)
        written[cell, section.scales_at :][: (last - first) * scale] = True
        written[cell, section.payload_at :][: (last - first) * payload] = True
    assert (cells[~written] == 255).all(), "bytes of no block were written"


def as_numbers(messages, section):
    """Payloads of a raw format as numbers, in which any NaN is the same."""
    size = section.blocks_per_cell * section.format.payload_bytes(section.table.block_size)
    cells = [m.reshape(-1, m.shape[-1])[:, section.payload_at :][:, :size].contiguous() for m in messages]
    return [c.view(section.format.dtype) for c in cells]


def assert_same_outcome(actual, expected, case):
    """All that was written is bitwise equal; a NaN in a raw payload may be any NaN."""
    layout = MessageLayout([(WIRE_FORMATS[case.wire], case.table())], case.world_size, case.pieces)
    for field_name, got in vars(actual).items():
        want = getattr(expected, field_name)
        if case.wire in RAW_FORMATS and field_name in ("messages", "results"):
            got, want = (as_numbers(cells, layout.sections[0]) for cells in (got, want))
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(a, b, f"{field_name} {rank}")


@st.composite
def exchanges(draw, wire, dtype):
    return Exchange(
        wire=wire,
        block_size=draw(st.sampled_from((32, 64, 64, 128, 256, 1024))),
        layouts=tuple(
            draw(st.lists(layouts(), min_size=1, max_size=5).filter(lambda each: any(i.numel for i in each)))
        ),
        dtype=dtype,
        world_size=draw(st.sampled_from((1, 2, 3, 5))),
        pieces=draw(st.sampled_from((1, 2))),
        errors=draw(st.sampled_from((None, FP32, BF16))),
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 2**20)),
    )


FEW = settings(PROPERTY, max_examples=3 if INTERPRETED else 12)
MANY = settings(PROPERTY, max_examples=60)
FORMATS = tuple(WIRE_FORMATS)


def check(case, device):
    assert_same_outcome(exchange(case, BOUND, device), exchange(case, REFERENCE, device), case)


@pytest.mark.parametrize("wire", FORMATS)
@FEW
@given(data=st.data())
def test_exchange_matches_reference(wire, device, data):
    dtype = data.draw(st.sampled_from((FP32, FP32, FP16, BF16, FP64)))
    check(data.draw(exchanges(wire, dtype)), device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=name)
@pytest.mark.parametrize("wire", FORMATS)
@MANY
@given(data=st.data())
def test_exchange_matches_reference_for_every_dtype(wire, dtype, device, data):
    check(data.draw(exchanges(wire, dtype)), device)


@pytest.mark.parametrize("wire", FORMATS)
def test_full_and_partial_chunks_match_reference(wire, device):
    # Two full aligned chunks, a full one that is not aligned, and a partial one.
    layouts = (Layout((8192,), (1,)), Layout((4096,), (1,), 1), Layout((67, 61), (61, 1)))
    # A cell has 86 blocks, so chunks span two cells.
    check(Exchange(wire, layouts=layouts, dtype=BF16, world_size=3), device)


# A chunk has 64 blocks, a tile that rounds errors to bf16 has 32, and a chunk of a sum has 16.
@pytest.mark.parametrize(
    ("world_size", "errors"), [(1, BF16), (2, FP32), (5, FP32)], ids=["33 blocks", "17 blocks", "7 blocks"]
)
@pytest.mark.parametrize("wire", FORMATS)
def test_cells_smaller_than_a_chunk_match_reference(wire, world_size, errors, device):
    layouts = (Layout((4096,), (1,)), Layout((67,), (1,), 1))
    check(Exchange(wire, layouts=layouts, dtype=BF16, pieces=2, world_size=world_size, errors=errors), device)


NEW_FORMATS = [
    Integers("int2 with a zero", 2),
    OddIntegers("odd int4", 4),
    Floats("brain", 16, dtype=BF16),
]


@pytest.mark.parametrize("wire", NEW_FORMATS, ids=lambda wire: wire.name)
def test_new_format_needs_no_change_of_kernels(wire, device, monkeypatch):
    monkeypatch.setitem(WIRE_FORMATS, wire.name, wire)
    check(Exchange(wire.name, layouts=(Layout((1021,), (1,)), Layout((640,), (1,)))), device)


@pytest.mark.parametrize("block_size", [64, 1024])
@pytest.mark.parametrize(("world_size", "wire"), [(9, "int4"), (65, "int8")])
def test_sums_over_many_ranks_match_reference(world_size, wire, block_size, device):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2 * world_size * block_size + 5, generator=generator).to(device)]
    layout = MessageLayout([(WIRE_FORMATS[wire], BlockTable(tensors, block_size, [3]))], world_size)
    (section,) = layout.sections
    message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
    quantize(tensors, section, message, scale=1.0)  # each cell is read as another rank's
    errors = torch.randn(layout.shard_numel(section), generator=generator).to(device)
    found = []
    for reduce, add in ((reduce_quantized, sum_quantized), (reduce_quantized_reference, sum_quantized_reference)):
        result = torch.zeros(layout.result_shape, dtype=torch.uint8, device=device)
        pending, total = torch.full_like(errors, torch.nan), torch.full_like(errors, torch.nan)
        reduce(message, section, result, rank=0, errors=errors, pending=pending, rounding=None)
        add(message, section, total, rank=0)
        found.append((result, pending, total))
    for what, mine, reference in zip(("result", "pending", "total"), *found, strict=True):
        assert_same_bits(mine, reference, what)


# The interpreter, which is slow, meets the others in the slow lane.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", ("int4", "fp8") if INTERPRETED else FORMATS)
def test_extreme_magnitudes_match_reference(wire, kind, device):
    check(Exchange(wire, layouts=(Layout((1021,), (1,)), Layout((640,), (1,))), kind=kind), device)


@pytest.mark.parametrize("wire", ["int4", "sign", "bf16"])
def test_complex_gradients_are_pairs(wire, device):
    real = Exchange(wire, layouts=(Layout((20, 7, 2), (14, 2, 1)),))
    numbers = [[torch.randn(280)] for _ in range(2)]
    expected = exchange(real, BOUND, device, gradients=numbers)
    case = Exchange(wire, layouts=(Layout((20, 7), (7, 1)),), dtype=torch.complex64)
    pairs = [[torch.view_as_complex(g.view(-1, 2)) for g in gradients] for gradients in numbers]
    found = exchange(case, BOUND, device, gradients=pairs)
    assert_same_bits(torch.view_as_real(found.gradients[0]).flatten(), expected.gradients[0], "the gradient")
    assert_same_bits(found.pending[0], expected.pending[0], "the errors")


@pytest.mark.skipif(INTERPRETED, reason="runs belong to the CPU path")
@pytest.mark.parametrize("wire", FORMATS)
def test_runs_of_any_size_match_reference(wire, device, monkeypatch):
    # Several tensors in a run, pieces of one tensor, and runs that end in the middle of a cell.
    layouts = (
        Layout((100,), (1,)),
        Layout((31, 61), (1, 31)),
        Layout((7000,), (1,)),
        Layout((), ()),
        Layout((64,), (1,)),
    )
    for numel in (1024, 2048, 4096):
        monkeypatch.setattr(block_table_module, "RUN_NUMEL", numel)
        monkeypatch.setattr(quantize_cpu, "RUN_NUMEL", numel)
        monkeypatch.setattr(quantize_cpu, "SCRATCH", quantize_cpu.Scratch())
        for dtype in (FP32, BF16):
            check(Exchange(wire, layouts=layouts, dtype=dtype, world_size=3, pieces=2), device)


@pytest.mark.skipif(INTERPRETED, reason="runs belong to the CPU path")
@pytest.mark.parametrize("wire", ["int4", "bf16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_tensor_after_a_tensor_of_several_runs_changes_nothing(wire, world_size, device, monkeypatch):
    monkeypatch.setattr(block_table_module, "RUN_NUMEL", 1024)
    monkeypatch.setattr(quantize_cpu, "RUN_NUMEL", 1024)
    monkeypatch.setattr(quantize_cpu, "SCRATCH", quantize_cpu.Scratch())
    layouts = (Layout((0,), (1,)), Layout((2500,), (1,)), Layout((0,), (1,)))
    check(Exchange(wire, layouts=layouts, world_size=world_size), device)


@pytest.mark.skipif(INTERPRETED, reason="runs belong to the CPU path")
@pytest.mark.parametrize("wire", ["int4", "bf16"])
@pytest.mark.parametrize("position", [0, 2500, -1])
def test_value_that_is_not_finite_in_any_run_of_a_cell_keeps_the_errors(wire, position, device, monkeypatch):
    monkeypatch.setattr(block_table_module, "RUN_NUMEL", 1024)
    monkeypatch.setattr(quantize_cpu, "RUN_NUMEL", 1024)
    monkeypatch.setattr(quantize_cpu, "SCRATCH", quantize_cpu.Scratch())
    case = Exchange(wire, layouts=(Layout((7000,), (1,)),), world_size=2)
    numbers = [[torch.randn(7000)] for _ in range(2)]
    numbers[1][0][position] = torch.inf
    found, expected = (exchange(case, functions, device, gradients=numbers) for functions in (BOUND, REFERENCE))
    assert_same_outcome(found, expected, case)


@pytest.mark.skipif(INTERPRETED, reason="the scratch belongs to the CPU path")
def test_section_works_in_the_scratch_of_the_calling_thread():
    tensors = [torch.randn(1000)]
    layout = MessageLayout([(WIRE_FORMATS["int4"], BlockTable(tensors, 64, [1]))], 1)
    (section,) = layout.sections
    message = torch.zeros(layout.message_shape, dtype=torch.uint8)
    quantize(tensors, section, message, scale=1.0)
    work, expected = quantize_cpu.SCRATCH.works[section], message.clone()
    message.zero_()
    with ThreadPoolExecutor(1) as other:
        other.submit(quantize, tensors, section, message, scale=1.0).result()
        others = other.submit(lambda: quantize_cpu.SCRATCH.works[section]).result()
    assert others is not work and torch.equal(message, expected)
    assert others.decoded.data_ptr() != work.decoded.data_ptr()
    quantize(tensors, section, message, scale=1.0)
    assert quantize_cpu.SCRATCH.works[section] is work


@pytest.mark.parametrize("world_size, pieces", [(4, 1), (3, 2)])
def test_more_cells_than_blocks_leaves_shards_empty(world_size, pieces, device):
    case = Exchange(layouts=(Layout((100,), (1,)), Layout((3,), (1,))), world_size=world_size, pieces=pieces)
    check(case, device)
    outcome = exchange(case, BOUND, device)
    with_errors = torch.stack([pending.view(-1, 64).any(1) for pending in outcome.shard_pending])
    assert with_errors.sum() <= 3, "no block, no error"


def test_commit_of_no_errors_does_nothing(device):
    message, none = torch.zeros(1, 2, 16, dtype=torch.uint8, device=device), torch.empty(0, device=device)
    commit_errors(message, none, none)
    assert not message.any()


def single(wire, values, device, *, block_size=64, errors=None):
    """One rank's message, pending, and what its own message decodes to."""
    tensor = values.to(device)
    table = BlockTable([tensor], block_size, [1])
    layout = MessageLayout([(WIRE_FORMATS[wire], table)], 1)
    (section,) = layout.sections
    message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
    pending = torch.full((table.numel,), torch.nan, device=device)
    errors = torch.zeros_like(pending) if errors is None else errors
    quantize([tensor], section, message, scale=1.0, errors=errors, pending=pending)
    decoded = torch.full_like(tensor, torch.nan)
    dequantize(message, section, [decoded])
    cell = message[0, 0]
    scales = cell[section.scales_at :][: 2 * table.n_blocks].view(BF16).float() if section.format.is_scaled else None
    return decoded.cpu(), pending.cpu(), None if scales is None else scales.cpu()


@pytest.mark.parametrize("wire", [name for name, wire in WIRE_FORMATS.items() if wire.kind != "odd integers"])
def test_values_on_the_grid_round_trip(wire, device):
    generator = torch.Generator().manual_seed(3)
    scale = torch.randn(40, 1, generator=generator).abs().to(BF16).float() + 0.125
    shape = 40, 64
    if wire in INTEGER_FORMATS:
        levels = WIRE_FORMATS[wire].levels
        q = torch.randint(-levels, levels, shape, generator=generator).float()
        q[:, 0] = -levels  # else the scale is smaller
        values = q * scale.to(BF16).float()
    elif WIRE_FORMATS[wire].kind == "signs":
        values = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0) * scale.to(BF16).float()
    elif WIRE_FORMATS[wire].kind == "e4m3fn":
        q = torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn).float()
        q[:, 0] = 448
        values = q * scale.to(BF16).float()
    else:
        values = torch.randn(shape, generator=generator).to(WIRE_FORMATS[wire].dtype).float()
    decoded, pending, _ = single(wire, values.flatten(), device)
    assert_same_bits(decoded, values.flatten(), "the values")
    assert not pending.any()


@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "outliers"])
@pytest.mark.parametrize("wire", INTEGER_FORMATS)
def test_error_is_at_most_half_a_step(wire, kind, device):
    values = gradient(8192, FP32, kind, torch.Generator().manual_seed(1))
    values[64:128] = 0
    decoded, _, scales = single(wire, values, device)
    levels, max_scale = WIRE_FORMATS[wire].levels, WIRE_FORMATS[wire].max_scale
    # The derivation is in the docstring of `quantize`. Elements beyond the grid saturate.
    scale = scales.double().repeat_interleave(64)
    smallest, largest = (
        torch.minimum(-levels * scale, (levels - 1) * scale),
        torch.maximum(-levels * scale, (levels - 1) * scale),
    )
    clamped = values.double().clamp(smallest, largest)
    assert ((decoded.double() - clamped).abs() <= scale.abs() / 2 * (1 + levels * 2.0**-20)).all()
    assert (
        (values.double() - clamped).abs()
        <= torch.where(scale.abs() < max_scale, scale.abs() * (1 + 2.0**-20), torch.inf)
    ).all()
    # A step is the largest element over the levels, rounded up to 8 bits, and at least the smallest normal number.
    absmax = values.view(-1, 64).abs().amax(1).double()
    assert (scales.double().abs() <= (absmax / levels * (1 + 2.0**-7)).clamp(min=2.0**-126)).all()
    assert (decoded[64:128] == 0).all()
    assert scales[1] == 0


@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "outliers"])
def test_int2_sends_the_nearest_of_four_levels(kind, device):
    values = gradient(8192, FP32, kind, torch.Generator().manual_seed(1))
    values[64:128] = 0
    decoded, pending, scales = single("int2", values, device)
    exact, scale = values.double(), scales.double().repeat_interleave(64)
    third = exact.view(-1, 64).abs().amax(1) / 3
    assert (scales.double() >= third.clamp(max=WIRE_FORMATS["int2"].max_scale) * (1 - 2.0**-20)).all()
    assert (scales.double() <= (third * (1 + 2.0**-7 + 2.0**-20)).clamp(min=2.0**-126)).all()
    levels = scale * torch.tensor([-3.0, -1.0, 1.0, 3.0]).double().view(-1, 1)
    assert ((decoded.double() == levels) | (scale == 0)).any(0).all()
    nearest = (exact - levels).abs().amin(0)
    assert ((decoded.double() - exact).abs() <= nearest + scale * 2.0**-20).all()
    assert torch.allclose((decoded + pending).double(), exact, rtol=2.0**-23, atol=float(scale.max()) * 2.0**-23)
    assert (decoded[64:128] == 0).all() and scales[1] == 0


@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "outliers", "zeros"])
@pytest.mark.parametrize("wire", INTEGER_FORMATS)
def test_sent_plus_pending_is_the_value_to_the_bit(wire, kind, device):
    values = gradient(12289, FP32, kind, torch.Generator().manual_seed(2))
    decoded, pending, _ = single(wire, values, device)
    assert_same_bits(decoded + pending[:12289], values + 0.0, "the sum")  # + 0: the sum of 0 and -0 is 0
    assert not pending[12289:].any(), "missing elements have no error"


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_element_flags_the_step_on_all_ranks(wire, bad, device):
    case = Exchange(wire, layouts=(Layout((1000,), (1,)),), pieces=2, world_size=3)
    gradients = [[torch.ones(1000)] for _ in range(3)]
    gradients[1][0][517] = bad
    outcome = exchange(case, BOUND, device, gradients=gradients)
    table = case.table()
    cell = 517 // 64 // MessageLayout([(WIRE_FORMATS[wire], table)], 3, 2).sections[0].blocks_per_cell
    flagged = [(rank, piece) for rank, flags in enumerate(outcome.flags) for piece, flag in enumerate(flags) if flag]
    assert flagged == [(cell % 3, cell // 3)], "the piece and the rank that reduced the block"
    assert not outcome.errors[0].any(), "the error memory keeps its values"
    (result,) = (g.cpu() for g in outcome.gradients)
    if wire in SCALED_FORMATS:
        assert result[512:576].isnan().all(), "the whole block"
    assert not result[517].isfinite()
    assert result[:512].isfinite().all()
    assert result[576:].isfinite().all()


def test_random_numbers_are_repeatable_and_depend_on_step_salt_and_key():
    tensor = [torch.randn(6400)]

    def errors_of(key=1, step=0, salt=0):
        table = BlockTable(tensor, 64, [key])
        layout = MessageLayout([(WIRE_FORMATS["int4"], table)], 1)
        message = torch.zeros(layout.message_shape, dtype=torch.uint8)
        errors, pending = torch.zeros(2, table.numel, dtype=torch.bfloat16)
        rounding = Rounding(torch.tensor([step]), salt)
        quantize(tensor, layout.sections[0], message, scale=1.0, errors=errors, pending=pending, rounding=rounding)
        return pending

    first = errors_of()
    assert torch.equal(errors_of(), first)
    for other in (errors_of(key=2), errors_of(step=1), errors_of(salt=1)):
        assert not torch.equal(other, first)


@pytest.mark.parametrize("cell", range(4))
def test_flag_in_any_header_stops_commit(cell, device):
    gathered = torch.full((2, 2, 64), 255, dtype=torch.uint8, device=device)
    gathered[..., :4] = 0
    errors, pending = torch.zeros(5000, device=device), torch.ones(5000, device=device)
    gathered.view(4, 64)[cell, 0] = 1
    commit_errors(gathered, pending, errors)
    assert not errors.any()
    gathered[..., :4] = 0
    commit_errors(gathered, pending, errors)
    assert errors.all()


@pytest.mark.parametrize("flagged", [None, 0, 127, 128, 255, 256, 299])
def test_flag_among_many_cells_stops_commit(flagged, device):
    # The kernel reads the headers of 128 cells at a time.
    gathered = torch.full((20, 15, 32), 255, dtype=torch.uint8, device=device)
    gathered[..., :4] = 0
    if flagged is not None:
        gathered.view(300, 32)[flagged, 0] = 1
    pending = torch.randn(4099, generator=torch.Generator().manual_seed(0)).to(device)
    errors, expected = torch.zeros_like(pending), torch.zeros_like(pending)
    commit_errors(gathered, pending, errors)
    commit_errors_reference(gathered, pending, expected)
    assert_same_bits(errors, expected, "the errors")
    assert bool(errors.any()) == (flagged is None)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=name)
def test_decoded_values_saturate_at_the_range_of_the_gradients(dtype, device):
    limit = torch.finfo(dtype).max
    for wire in ("fp32", "int4", "bf16"):
        table = BlockTable([torch.empty(64, dtype=dtype, device=device)], 64, [1])
        layout = MessageLayout([(WIRE_FORMATS[wire], table)], 1)
        wide = BlockTable([torch.empty(64, device=device)], 64, [1])
        message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
        large = torch.full((64,), torch.finfo(FP32).max, device=device)
        quantize([large], MessageLayout([(WIRE_FORMATS[wire], wide)], 1).sections[0], message, scale=1.0)
        out = torch.empty(64, dtype=dtype, device=device)
        dequantize(message, layout.sections[0], [out])
        assert (out == limit).all() or (wire == "bf16" and dtype == BF16)
        assert out.isfinite().all()
