"""What the tests of the quantization kernels share: buckets on several ranks, and one exchange between them."""

from dataclasses import dataclass, field
from math import prod

import torch
from hypothesis import strategies as st

from gradwire.kernels import (
    HEADER_BYTES,
    WIRE_FORMATS,
    BlockTable,
    MessageLayout,
    Rounding,
    commit_errors,
    commit_errors_reference,
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
    reduce_quantized,
    reduce_quantized_reference,
    sum_quantized,
    sum_quantized_reference,
)
from tests.kernels.cases import Layout, layouts, name, values
from tests.kernels.exact import Guarded, assert_same_bits

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
INTEGER_FORMATS = [name for name, wire in WIRE_FORMATS.items() if wire.kind == "integers"]
ODD_FORMATS = [name for name, wire in WIRE_FORMATS.items() if wire.spacing == 2]  # without a zero
SCALED_FORMATS = [name for name, wire in WIRE_FORMATS.items() if wire.is_scaled]
RAW_FORMATS = [name for name, wire in WIRE_FORMATS.items() if not wire.is_scaled]
KINDS = ("normal", "spiked", "tiny", "huge", "bits", "zeros", "outliers")
PUBLIC = (quantize, reduce_quantized, sum_quantized, dequantize, commit_errors)
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
    """Run one exchange of all ranks with the public functions or the references. Nothing else may be written."""
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
        check_only_section_written(view, section, 255)
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
    check_only_section_written(gathered, section, 255)
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


def check_only_section_written(message, section, poison):
    """Bytes outside the blocks' scales and payloads keep their poison; the header is the caller's."""
    cells = message.flatten(0, 1)
    written = torch.zeros_like(cells, dtype=torch.bool)
    written[:, :HEADER_BYTES] = True
    for cell in range(cells.shape[0]):
        first, last = section.cell_blocks(cell)
        scale, payload = section.format.scale_bytes, section.format.payload_bytes(section.table.block_size)
        written[cell, section.scales_at :][: (last - first) * scale] = True
        written[cell, section.payload_at :][: (last - first) * payload] = True
    assert (cells[~written] == poison).all(), "bytes of no block were written"


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
        layouts=tuple(draw(st.lists(layouts(), min_size=1, max_size=5))),
        dtype=dtype,
        world_size=draw(st.sampled_from((1, 2, 3, 5))),
        pieces=draw(st.sampled_from((1, 2))),
        errors=draw(st.sampled_from((None, FP32, BF16))),
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 2**20)),
    )
