"""Cases of the GPU lane for quantization: every wire format against the references, twice, with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.bench.gpu.case import LaneCase, at_offset, large_numel, name_of, same, same_twice, skip_if_rehearsed

WORLD_SIZE, RANK, PIECES = 3, 1, 2
# Full chunks of 4096 elements, partial blocks, single elements and an empty tensor.
SHAPES = ((4096,), (64, 128), (61, 67), (1,), (), (0, 5), (12289,))
REFERENCES = kernels.QuantizationKernels(
    kernels.quantize_reference,
    kernels.reduce_quantized_reference,
    kernels.sum_quantized_reference,
    kernels.dequantize_reference,
    kernels.commit_errors_reference,
)


def _gradients(dtype: torch.dtype, device: torch.device, offset: int, seed: int, bad: bool) -> list[Tensor]:
    """Normal gradients of very different magnitudes, ``offset`` elements past an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for k, shape in enumerate(SHAPES):
        values = torch.randn(int(torch.Size(shape).numel()), generator=generator) * 10.0 ** (k - 3)
        if len(values) > 100:
            values[7], values[64:128] = 0, 0
            if bad and seed == 0:
                values[5] = torch.nan
        tensors.append(at_offset(values.to(dtype).to(device).view(shape), offset))
    return tensors


def both_shots(
    wire: str,
    dtype: torch.dtype,
    error_dtype: torch.dtype | None,
    offset: int,
    bad: bool,
    device: torch.device,
) -> None:
    """Quantize the gradients of three ranks, reduce a shard of each, decode, and commit the errors."""
    ranks = [_gradients(dtype, device, offset, seed, bad) for seed in range(WORLD_SIZE)]
    keys = [kernels.random_key(0, str(k)) for k in range(len(SHAPES))]
    table = kernels.BlockTable(ranks[0], 64, keys)
    layout = kernels.MessageLayout([(kernels.WIRE_FORMATS[wire], table)], WORLD_SIZE, PIECES)
    (section,) = layout.sections
    step = torch.full((1,), 5, dtype=torch.int64, device=device)
    # Blocks and cells may lack elements, which have no errors.
    present = torch.zeros(table.numel, device=device)
    for view in table.error_views(present):
        view.fill_(1)
    shard_values = torch.zeros(layout.shard_numel(section), device=device)
    for piece, cell in enumerate(shard_values.split(section.blocks_per_cell * table.block_size)):
        begin, end = (table.block_size * block for block in section.cell_blocks(piece * WORLD_SIZE + RANK))
        cell[: end - begin] = present[begin:end]

    def run(functions: kernels.QuantizationKernels) -> list[Tensor]:
        quantizer, reducer, adder, dequantizer, commit = functions
        messages, memory = [], []

        def errors_of(where: Tensor, seed: int) -> tuple[Tensor | None, Tensor | None]:
            if error_dtype is None:
                return None, None
            generator = torch.Generator().manual_seed(seed)
            errors = (where * (0.01 * torch.randn(len(where), generator=generator)).to(device)).to(error_dtype)
            return errors, torch.full_like(errors, torch.nan)

        for rank, tensors in enumerate(ranks):
            message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
            errors, pending = errors_of(present, rank)
            rounding = kernels.Rounding(step, rank)
            quantizer(tensors, section, message, scale=1 / 3, errors=errors, pending=pending, rounding=rounding)
            messages.append(message)
            memory += [pending] if pending is not None else []
        received = torch.stack([message[:, RANK] for message in messages], 1).contiguous()
        result = torch.zeros(layout.result_shape, dtype=torch.uint8, device=device)
        errors, pending = errors_of(shard_values, 9)
        rounding = kernels.Rounding(step, -1)
        reducer(received, section, result, rank=RANK, errors=errors, pending=pending, rounding=rounding)
        total = torch.full_like(shard_values, torch.nan)
        adder(received, section, total, rank=RANK)
        gathered = result.unsqueeze(1).repeat(1, WORLD_SIZE, 1)  # as if all shards were this one
        if errors is not None and pending is not None:
            commit(gathered, pending, errors)
            memory += [errors, pending]
        targets = [torch.full_like(tensor, torch.nan) for tensor in ranks[0]]
        dequantizer(gathered, section, targets)
        return [*messages, result, total, *targets, *memory]

    same_twice(run, kernels.bound_quantization(device), REFERENCES, f"{wire} of {name_of(dtype)}")


def reduction(wire: str, world_size: int, device: torch.device) -> None:
    """Reduce a shard of the messages that this many ranks would send."""
    shapes = [torch.Size([4096 * 3 + 17]), torch.Size([64, 65])]
    generator, keys = torch.Generator().manual_seed(0), [kernels.random_key(0, str(k)) for k in range(len(shapes))]
    table = kernels.BlockTable([torch.empty(shape, device=device) for shape in shapes], 64, keys)
    layout = kernels.MessageLayout([(kernels.WIRE_FORMATS[wire], table)], world_size)
    (section,) = layout.sections
    bound, received = kernels.bound_quantization(device), []
    for _ in range(world_size):
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
        bound.quantize(gradients, section, message, 1 / world_size)
        received.append(message[:, RANK])
    received_by_rank = torch.stack(received, 1).contiguous()

    def reduced(reduce: Callable[..., None], add: Callable[..., None]) -> list[Tensor]:
        result = torch.zeros(layout.result_shape, dtype=torch.uint8, device=device)
        reduce(received_by_rank, section, result, rank=RANK, errors=None, pending=None, rounding=None)
        total = torch.full((layout.shard_numel(section),), torch.nan, device=device)
        add(received_by_rank, section, total, rank=RANK)
        return [result, total]

    expected = reduced(kernels.reduce_quantized_reference, kernels.sum_quantized_reference)
    for mine, reference in zip(reduced(bound.reduce_quantized, bound.sum_quantized), expected, strict=True):
        same(mine, reference, f"{wire} of {world_size} ranks")


def quantization_beyond_int32(device: torch.device) -> None:
    """int4 codes of a gradient of more than 2^31 elements that are on its grid come back to the bit."""
    numel = large_numel(device, 3)
    gradient = torch.empty(numel, dtype=torch.bfloat16, device=device)
    for part in gradient.split(1 << 24):
        part.copy_(torch.arange(len(part), device=device) % 15 - 7)
    table = kernels.BlockTable([gradient], 64, [0])
    layout = kernels.MessageLayout([(kernels.WIRE_FORMATS["int4"], table)], 1)
    message = torch.zeros(layout.message_shape, dtype=torch.uint8, device=device)
    bound = kernels.bound_quantization(device)
    bound.quantize([gradient], layout.sections[0], message, 1.0)
    target = torch.full_like(gradient, torch.nan)
    bound.dequantize(message, layout.sections[0], [target])
    for part, expected in zip(target.split(1 << 24), gradient.split(1 << 24), strict=True):
        same(part, expected, "the round trip")
    skip_if_rehearsed(numel)


def _label(wire: str, dtype: torch.dtype, error_dtype: torch.dtype | None, offset: int) -> str:
    errors = "no errors" if error_dtype is None else f"errors in {name_of(error_dtype)}"
    return f"quantize {name_of(dtype)} to {wire}, {errors}{', unaligned' if offset else ''}"


_VARIANTS: tuple[tuple[torch.dtype, torch.dtype | None, int], ...] = (
    (torch.float32, torch.float32, 0),
    (torch.float32, torch.float32, 1),
    (torch.float32, torch.bfloat16, 0),
    (torch.bfloat16, None, 0),
    (torch.float16, torch.float32, 1),
)
QUANTIZATION_CHECKS: dict[str, LaneCase] = {
    **{
        _label(wire, *variant): partial(both_shots, wire, *variant, False)
        for wire in kernels.WIRE_FORMATS
        for variant in _VARIANTS
    },
    **{
        f"quantize NaN to {wire}": partial(both_shots, wire, torch.float32, torch.float32, 0, True)
        for wire in kernels.WIRE_FORMATS
    },
    **{
        f"reduce messages of {world_size} ranks, {wire}": partial(reduction, wire, world_size)
        for world_size in (8, 64)
        for wire in ("int8", "int4")
    },
    "int4 of more than 2^31 elements": quantization_beyond_int32,
}
