"""Bytes that the kernels read and write for ``numel`` elements, in full blocks where there are blocks."""

from __future__ import annotations

import torch

from gradwire.kernels import WireFormat, compute_dtype

BLOCK_SIZE = 64  # elements per scale: the default of `quantization_hook`


def copy_bytes(numel: int, source: torch.dtype, target: torch.dtype) -> int:
    """Bytes of `flatten`, `unflatten`, `commit_errors`; at least those of `orthogonalize`."""
    return numel * (source.itemsize + target.itemsize)


def lowrank_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of `project`, `backproject` and `reconstruct` together, with error feedback; ``numel`` of the matrices."""
    gradient, error = dtype.itemsize, compute_dtype(dtype).itemsize
    if gradient == error:  # M is kept in the target
        return numel * ((2 * gradient + error) + gradient + (2 * gradient + error))
    return numel * ((gradient + error) + (gradient + error) + (2 * gradient + 2 * error))


def renew_bytes(numel: int, wire: torch.dtype, following: torch.dtype) -> int:
    """Bytes of `renew`: the wire twice, because norms come first."""
    return numel * (2 * wire.itemsize + following.itemsize)


def element_bytes(wire: WireFormat) -> float:
    """Bytes of an element in a message, with its part of a scale."""
    return wire.block_bytes(BLOCK_SIZE) / BLOCK_SIZE


def quantize_bytes(numel: int, source: torch.dtype, wire: WireFormat, errors: torch.dtype | None) -> float:
    """Bytes of `quantize`."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (source.itemsize + error_bytes + element_bytes(wire))


def reduce_quantized_bytes(numel: int, world_size: int, wire: WireFormat, errors: torch.dtype | None) -> float:
    """Bytes of `reduce_quantized`; ``numel`` of one rank's shard."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (error_bytes + (world_size + 1) * element_bytes(wire))


def sum_quantized_bytes(numel: int, world_size: int, wire: WireFormat) -> float:
    """Bytes of `sum_quantized`; ``numel`` of one rank's shard."""
    return numel * (4 + world_size * element_bytes(wire))


def dequantize_bytes(numel: int, wire: WireFormat, target: torch.dtype) -> float:
    """Bytes of `dequantize`."""
    return numel * (target.itemsize + element_bytes(wire))
