"""Quantisation: the two shots of a compressed all-reduce, between gradients and messages of bytes.

    quantize            M = g * scale + E;  message = encode(M);  pending = M - decode(message)
    reduce_quantized    S = sum_i decode(received_i) + E2;  result = encode(S);  pending = S - decode(result)
    dequantize          g = decode(gathered)
    commit_errors       (E, E2) = pending, unless a rank found a number that is not finite

`wire_formats` defines encode and decode, `block_table` where the blocks lie. Rank r sends cell [p, j] of its message to
rank j, reduces the cells [p, r] of all ranks in rank order, and sends the result to all. Each of the first three
operations is one launch for one section of a message. Arithmetic is in fp32 for every dtype of the gradients; fp64 is
rounded to fp32 first. Missing elements of partial blocks count as 0, and their errors stay 0.

A message needs no flag: a scale that is NaN, or an element that is not finite, makes the sum of its block not finite.
`reduce_quantized` then raises the flag in the header of its result, which all ranks receive, and `commit_errors` leaves
the error memories of all ranks as they were.

Without stochastic rounding the error of an element of an integer format is at most

    |x - s q| <= s / 2 * (1 + levels * 2^-20)

because x * fl(1 / s) deviates from x / s, which is at most the number of levels, by two roundings: by 2^-23 of it, or
by 2^-21 if 1 / s is subnormal, as for int2 scales above 2^126. Where the scale is lowered so that s * levels is finite,
in the last 2^-7 below fp32's largest number, elements deviate by s * levels / 128 at most.

Traffic for N elements, with s bytes per gradient element, e bytes per element of the error memory (0 without), and
b = bits / 8 + 2 / block_size bytes per element of the message:

    quantize            (s + 2 e + b) N
    reduce_quantized    ((n + 1) b + 2 e) N / n        for n ranks
    dequantize          (s + b) N
    commit_errors       2 e (N + N / n)

For int4 with blocks of 64, fp32 gradients and many ranks, these are 25.6 N with an error memory in fp32, and 17.6 N
with one in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.block_table import ALIGN_BYTES, Section
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.quantization_cpu import commit_errors_cpu, dequantize_cpu, quantize_cpu, reduce_quantized_cpu
from gradwire.kernels.quantization_reference import (
    commit_errors_reference,
    dequantize_reference,
    quantize_reference,
    reduce_quantized_reference,
)
from gradwire.kernels.quantization_triton import commit_errors_triton, dequantize_triton, quantize_triton
from gradwire.kernels.quantized_reduction_triton import reduce_quantized_triton
from gradwire.kernels.wire_formats import Rounding, WireFormat

ERROR_DTYPES = (torch.float32, torch.bfloat16)


def quantize_bytes(
    numel: int, source: torch.dtype, wire: WireFormat, block_size: int, errors: torch.dtype | None
) -> float:
    """Bytes that quantising ``numel`` elements in full blocks reads and writes."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (source.itemsize + error_bytes + wire.block_bytes(block_size) / block_size)


def reduce_quantized_bytes(
    numel: int, world_size: int, wire: WireFormat, block_size: int, errors: torch.dtype | None
) -> float:
    """Bytes that reducing one rank's ``numel`` elements, in full blocks, reads and writes."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (error_bytes + (world_size + 1) * wire.block_bytes(block_size) / block_size)


def dequantize_bytes(numel: int, wire: WireFormat, block_size: int, target: torch.dtype) -> float:
    """Bytes that dequantising ``numel`` elements in full blocks reads and writes."""
    return numel * (target.itemsize + wire.block_bytes(block_size) / block_size)


def commit_errors_bytes(numel: int, errors: torch.dtype) -> int:
    """Bytes that committing ``numel`` elements of error memory reads and writes."""
    return 2 * numel * errors.itemsize


def _check_buffer(tensor: Tensor, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless a message has ``shape``, and lies where kernels can read 16 bytes at a time."""
    if tensor.dtype != torch.uint8 or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected a contiguous torch.uint8 "
            f"tensor of {shape} on {device}. Allocate it in the shape that its MessageLayout gives."
        )
    _check_alignment(tensor, name)


def _check_alignment(tensor: Tensor, name: str) -> None:
    if tensor.data_ptr() % ALIGN_BYTES != 0:
        raise ValueError(
            f"{name} begins at an address that is no multiple of {ALIGN_BYTES}. Pass a tensor of its own, or a view "
            f"that begins at a multiple of {ALIGN_BYTES} bytes."
        )


def _check_section(tensor: Tensor, name: str, section: Section) -> None:
    """Raise ValueError unless the message has room for the section."""
    table = section.table
    if tensor.dim() != 3:
        raise ValueError(f"{name} has {tensor.dim()} dimensions; expected [pieces, n, cell_bytes].")
    _check_buffer(tensor, name, tuple(tensor.shape), table.device)
    pieces, world_size, cell_bytes = tensor.shape
    end = section.payload_at + section.blocks_per_cell * section.format.payload_bytes(table.block_size)
    if pieces * world_size * section.blocks_per_cell < table.n_blocks or end > cell_bytes:
        raise ValueError(
            f"{name} has {pieces * world_size} cells of {cell_bytes} bytes; the section needs room for "
            f"{table.n_blocks} blocks, {section.blocks_per_cell} in each cell, which end at byte {end}. Use the "
            "MessageLayout that the section belongs to."
        )


def _check_errors(
    errors: Tensor | None, pending: Tensor | None, numel: int, rounding: Rounding | None, device: torch.device
) -> None:
    """Raise ValueError unless the error memories fit, and there are random numbers for what needs them."""
    if rounding is not None:
        step = rounding.step
        if step.dtype != torch.int64 or step.numel() != 1 or step.device != device:
            raise ValueError(
                f"rounding.step is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of "
                f"torch.int64 on {device}. Pass torch.tensor([step], device=...)."
            )
    if errors is None and pending is None:
        return
    if errors is None or pending is None:
        raise ValueError("errors and pending come together; pass both, or None for both: no error feedback.")
    for name, tensor in (("errors", errors), ("pending", pending)):
        if tensor.dtype not in ERROR_DTYPES or tensor.shape != (numel,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected a contiguous 1-D tensor of {numel} elements "
                f"in {' or '.join(map(str, ERROR_DTYPES))}."
            )
        _check_alignment(tensor, name)
    if errors.dtype != pending.dtype:
        raise ValueError(f"errors is {errors.dtype}, pending is {pending.dtype}; expected one dtype.")
    if pending.dtype == torch.bfloat16 and rounding is None:
        raise ValueError("pending is torch.bfloat16, which is rounded stochastically; pass rounding=Rounding(step).")


def quantize(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    *,
    scale: float,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Encode ``tensors * scale + errors`` into the cells of ``message``, and write what encoding lost to ``pending``.

    Args:
        tensors: those that ``section.table`` was built for.
        section: the layout and the format.
        message: uint8, [pieces, n, cell_bytes]. The section's scales and payloads are overwritten.
        scale: multiplies the gradients before anything else; 1 / n for a mean over n ranks.
        errors: the error memory, flat, `BlockTable.numel` elements of fp32 or bf16, 0 where blocks lack elements;
            None: no error feedback.
        pending: like ``errors``: overwritten by the error of this step, which `commit_errors` makes permanent.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.

    Raises:
        ValueError: an argument does not fit the section.
    """
    table = section.table
    table.check(tensors)
    _check_section(message, "message", section)
    _check_errors(errors, pending, table.numel, rounding, table.device)
    if table.n_blocks == 0:
        return
    if use_triton(message.device):
        implementation = quantize_triton
    else:
        implementation = quantize_cpu if message.device.type == "cpu" else quantize_reference
    implementation(tensors, section, message, scale=scale, errors=errors, pending=pending, rounding=rounding)


def reduce_quantized(
    received: Tensor,
    section: Section,
    result: Tensor,
    *,
    rank: int,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Encode ``sum(decode(received)) + errors`` into ``result``, and write what encoding lost to ``pending``.

    The flag in the header of a piece of ``result`` becomes 1 if one of its sums is not finite. The caller sets the
    flags to 0 before the first section.

    Args:
        received: uint8, [pieces, n, cell_bytes]: cell [p, ``rank``] of the message of each of the n ranks.
        section: the layout and the format.
        result: uint8, [pieces, cell_bytes]. The section's scales and payloads are overwritten.
        rank: this rank, from 0 to n - 1.
        errors: this rank's error memory of the second shot, flat, `MessageLayout.shard_numel` elements of fp32 or
            bf16; None: no error feedback.
        pending: like ``errors``: overwritten by the error of this step. It is 0 where cells have no blocks.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.

    Raises:
        ValueError: an argument does not fit the section.
    """
    _check_section(received, "received", section)
    pieces, world_size, cell_bytes = received.shape
    _check_buffer(result, "result", (pieces, cell_bytes), received.device)
    numel = pieces * section.blocks_per_cell * section.table.block_size
    _check_errors(errors, pending, numel, rounding, received.device)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected a number from 0 to {world_size - 1}, the shards in received.")
    if section.blocks_per_cell == 0:
        return
    if use_triton(received.device):
        implementation = reduce_quantized_triton
    else:
        implementation = reduce_quantized_cpu if received.device.type == "cpu" else reduce_quantized_reference
    implementation(received, section, result, rank=rank, errors=errors, pending=pending, rounding=rounding)


def dequantize(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """Decode the cells of ``gathered`` into the tensors, in place.

    Finite values saturate at the range of the tensors' dtype if that is fp16 or bf16.

    Args:
        gathered: uint8, [pieces, n, cell_bytes]: piece p of the result of each of the n ranks.
        section: the layout and the format.
        tensors: those that ``section.table`` was built for. Overwritten.

    Raises:
        ValueError: an argument does not fit the section.
    """
    section.table.check(tensors)
    _check_section(gathered, "gathered", section)
    if section.table.n_blocks == 0:
        return
    if use_triton(gathered.device):
        dequantize_triton(gathered, section, tensors)
    elif gathered.device.type == "cpu":
        dequantize_cpu(gathered, section, tensors)
    else:
        dequantize_reference(gathered, section, tensors)


def commit_errors(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """Copy ``pending`` to ``errors`` unless a header of ``gathered`` has a flag. A GPU is not synchronised.

    Args:
        gathered: uint8, [pieces, n, cell_bytes].
        pending: flat, of any dtype: the errors of this step, of both shots and all sections.
        errors: the error memories, like ``pending``. Overwritten.

    Raises:
        ValueError: the tensors do not fit one another.
    """
    _check_buffer(gathered, "gathered", tuple(gathered.shape), errors.device)
    is_flat = errors.dim() == 1 and errors.is_contiguous() and pending.is_contiguous()
    if errors.dtype != pending.dtype or errors.shape != pending.shape or not is_flat:
        raise ValueError(
            f"pending is {pending.dtype} {tuple(pending.shape)}, errors is {errors.dtype} {tuple(errors.shape)}; "
            "expected contiguous 1-D tensors of one dtype and size."
        )
    if errors.numel() == 0:
        return
    if use_triton(gathered.device):
        commit_errors_triton(gathered, pending, errors)
    elif gathered.device.type == "cpu":
        commit_errors_cpu(gathered, pending, errors)
    else:
        commit_errors_reference(gathered, pending, errors)
