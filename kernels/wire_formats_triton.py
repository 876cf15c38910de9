"""`wire_formats.encode` and `decode` in Triton, for a tile [blocks, block_size] of the blocks of one program, and
loads and stores of these blocks in messages.

The columns of a tile alternate between the planes of a packed format: `elements` tells which element a column holds.
Joining planes to a tile, and splitting it into planes, then moves no data between threads. Scales are reductions along
the rows. Divisions are rounded to nearest, and launches set ``enable_fp_fusion=False``: multiply and add stay
separate instructions, so all devices and the reference give the same bits. Codes in fp8 come from integer arithmetic:
the conversions of some architectures saturate differently, and others have none.

``FORMAT`` is a `WireFormat`. FULL tells that no element is missing, and that counts and masks are not to be read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.common_triton import random_bits_triton


@triton.jit
def unit_bytes(units):
    """A size in bytes, from its count of 16 bytes."""
    return units.to(tl.int64) * 16


@triton.jit
def _round(y):
    """Round to an integer, to nearest even. Magnitudes are below 2^22."""
    return (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: fp32 holds only integers there


@triton.jit
def _clamp(x, limit):
    """Saturate finite numbers; inf and NaN pass through."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -limit), limit), x)


@triton.jit
def _round_to_bf16(x, random):
    """`wire_formats.round_to_bf16`."""
    bits = (x.to(tl.int32, bitcast=True) + (random >> 8).to(tl.int32)) & -65536
    rounded = tl.minimum(tl.maximum(bits.to(tl.float32, bitcast=True), -3.3895313892515355e38), 3.3895313892515355e38)
    return tl.where(tl.abs(x) < float("inf"), rounded, x).to(tl.bfloat16)


@triton.jit
def _with_sign(magnitude, bits):
    """``magnitude`` with the top bit of ``bits``, int32, as its sign. Zeros keep it; ``-x`` would be 0 - x."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _to_float(x, FORMAT: tl.constexpr):
    """Round to the dtype of a format without scales. Finite numbers saturate; inf and NaN pass through."""
    if FORMAT.element == "float32":
        y = x
    elif FORMAT.element == "bfloat16":
        y = _clamp(x, 3.3895313892515355e38).to(tl.bfloat16)
    else:
        y = _clamp(x, 65504.0).to(tl.float16)
    return y


@triton.jit
def _to_e4m3(x):
    """The bits of finite numbers in e4m3fn, rounded to nearest even, in int32."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    # The distance of neighbors on the grid, a power of two, and its inverse, from their bits.
    step = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((3 - exponent + 127) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.minimum(_round(magnitude * inverse) * step, 448.0)
    normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - (120 << 3)  # exponent bias 7 instead of 127
    subnormal = (magnitude * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(magnitude < 0.015625, subnormal, normal) | sign  # 2^-6 is the smallest normal number


@triton.jit
def _from_e4m3(codes):
    """Numbers from their bits in e4m3fn, which are given in int32."""
    bits = codes & 0x7F
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)  # 2^-9
    return _with_sign(magnitude, codes << 24)


@triton.jit
def elements(BLOCK: tl.constexpr, PLANES: tl.constexpr):
    """The elements of a block in the columns of a tile: plane t holds those from t * BLOCK / PLANES on. [1, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    return (columns % PLANES * (BLOCK // PLANES) + columns // PLANES)[None, :]


@triton.jit
def load_tile(
    pointers,  # [N, WIDTH]: to the elements of the first plane, of BLOCK / PLANES of them
    counts,  # [N] int32: number of elements to be read; the others are 0. Not read if FULL.
    PLANES: tl.constexpr,
    FULL: tl.constexpr,
    FIRST: tl.constexpr = 0,
    STRIDE: tl.constexpr = 1,
):
    """Load every STRIDE-th plane of blocks: [N, WIDTH * PLANES / STRIDE]."""
    N: tl.constexpr = pointers.shape[0]
    WIDTH: tl.constexpr = pointers.shape[1]
    if STRIDE < PLANES:
        even = load_tile(pointers, counts, PLANES, FULL, FIRST, 2 * STRIDE)
        odd = load_tile(pointers, counts, PLANES, FULL, FIRST + STRIDE, 2 * STRIDE)
        tile = tl.reshape(tl.join(even, odd), (N, WIDTH * PLANES // STRIDE))
    elif FULL:
        tile = tl.load(pointers + FIRST * WIDTH)
    else:
        exists = FIRST * WIDTH + tl.arange(0, WIDTH)[None, :] < counts[:, None]
        tile = tl.load(pointers + FIRST * WIDTH, mask=exists, other=0)
    return tile


@triton.jit
def store_tile(
    pointers,
    counts,
    tile,
    PLANES: tl.constexpr,
    FULL: tl.constexpr,
    FIRST: tl.constexpr = 0,
    STRIDE: tl.constexpr = 1,
):
    """The inverse of `load_tile`."""
    N: tl.constexpr = pointers.shape[0]
    WIDTH: tl.constexpr = pointers.shape[1]
    if STRIDE < PLANES:
        even, odd = tl.split(tl.reshape(tile, (N, WIDTH * PLANES // STRIDE // 2, 2)))
        store_tile(pointers, counts, even, PLANES, FULL, FIRST, 2 * STRIDE)
        store_tile(pointers, counts, odd, PLANES, FULL, FIRST + STRIDE, 2 * STRIDE)
    elif FULL:
        tl.store(pointers + FIRST * WIDTH, tile)
    else:
        exists = FIRST * WIDTH + tl.arange(0, WIDTH)[None, :] < counts[:, None]
        tl.store(pointers + FIRST * WIDTH, tile, mask=exists)


@triton.jit
def _round_scale(largest, quotient, FORMAT: tl.constexpr):
    """`WireFormat.round_scale`."""
    up = ((quotient.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(up, 1.1754943508222875e-38), FORMAT.max_scale)  # 2^-126
    scale = tl.where(largest > 0, scale, 0.0)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def _inverse(scale):
    """`wire_formats._inverse`: one division for the block and a product for each element; divisions are slow."""
    return tl.where(tl.abs(scale) > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)


@triton.jit
def _block_scales(
    values,  # [N, BLOCK]
    counts,  # [N] int32
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """The scale of each block: [N]; see `WireFormat.encode`."""
    N: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    # As integers, the bits of magnitudes sort like the numbers, followed by inf and NaN.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    if FORMAT.kind == "signs":
        unit = _round_scale(largest, largest * 6.103515625e-05, FORMAT)  # 2^-14
        multiples = _round(tl.abs(values) * _inverse(unit)[:, None])
        coarse = _round(multiples * 0.0078125)  # 2^-7
        # Sums of integers up to 2^24: exact in any order.
        total, squares = tl.sum(multiples, axis=1), tl.sum(coarse * coarse, axis=1)
        numbers = tl.full((N,), BLOCK, tl.float32) if FULL else tl.maximum(counts, 1).to(tl.float32)
        matched = tl.div_rn(squares * 16384.0, tl.maximum(total, 1.0))
        quotient = unit * tl.minimum(matched, (tl.div_rn(total, numbers) - 0.5) * 1.984375)
    else:
        quotient = tl.div_rn(largest, tl.full((N,), FORMAT.levels, tl.float32))
    scale = _round_scale(largest, quotient, FORMAT)
    if FORMAT.kind == "integers":
        # The largest element becomes -levels: the scale is negative if no negative one is as large.
        scale = tl.where((tl.min(values, axis=1) > -largest) & (largest < float("inf")), -scale, scale)
    return scale


@triton.jit
def _pack(codes, FORMAT: tl.constexpr, STRIDE: tl.constexpr = 1):
    """`wire_formats.pack`: every STRIDE-th plane of [N, BLOCK] to words, [N, WIDTH], in int32."""
    packed = codes
    if STRIDE < FORMAT.planes:
        even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        packed = _pack(even, FORMAT, 2 * STRIDE) | (_pack(odd, FORMAT, 2 * STRIDE) << (STRIDE * FORMAT.bits))
    return packed


@triton.jit
def _unpack(words, FORMAT: tl.constexpr, STRIDE: tl.constexpr = 1):
    """`wire_formats.unpack`: every STRIDE-th plane of words, [N, WIDTH], in int32."""
    codes = words & ((1 << FORMAT.bits) - 1)
    if STRIDE < FORMAT.planes:
        even = _unpack(words, FORMAT, 2 * STRIDE)
        odd = _unpack(words >> (STRIDE * FORMAT.bits), FORMAT, 2 * STRIDE)
        codes = tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
    return codes


@triton.jit
def encode_blocks(
    values,  # [N, BLOCK]
    counts,  # [N] int32
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode blocks: scales, [N] (0 without scales), payload, [N, WIDTH], and what they decode to, [N, BLOCK].

    The payload is in words of codes, in int32, or in the format's dtype without scales.
    """
    if not FORMAT.is_scaled:
        scale = tl.zeros((values.shape[0],), tl.float32)
        payload = _to_float(values, FORMAT)
        decoded = payload.to(tl.float32)
    else:
        scale = _block_scales(values, counts, FORMAT, FULL)
        # A block that is not finite has the codes of zeros.
        valid = tl.where((scale == scale)[:, None], values, 0.0)
        if FORMAT.kind == "signs":
            codes = tl.where(valid >= 0, 1, 0)
            q = tl.where(valid >= 0, 1.0, -1.0)
        else:
            inverse = _inverse(scale)
            limit: tl.constexpr = FORMAT.levels * 1.0
            scaled = tl.minimum(tl.maximum(valid * inverse[:, None], -limit), limit)
            if FORMAT.kind == "odd integers":
                # 2 floor(y / 2) + 1 is the odd number nearest to y.
                half = scaled * 0.5
                # Not `tl.floor`, which on NVIDIA takes a negative subnormal number for 0.
                truncated = half.to(tl.int32).to(tl.float32)
                code = truncated - tl.where(truncated > half, 1.0, 0.0) + FORMAT.offset * 1.0
                codes = code.to(tl.int32)
                q = 2.0 * code - limit
            elif FORMAT.kind == "integers":
                q = tl.minimum(_round(scaled), limit - 1)
                codes = q.to(tl.int32) + FORMAT.offset
            else:
                tl.static_assert(FORMAT.kind == "e4m3fn")
                codes = _to_e4m3(scaled)
                q = _from_e4m3(codes)
        payload = _pack(codes, FORMAT)
        decoded = q * scale[:, None]
    return scale, payload, decoded


@triton.jit
def locate_blocks(
    first, N: tl.constexpr, FULL: tl.constexpr, message, blocks_per_cell, cell_units, scales_unit, payload_unit
):
    """Addresses of the scales and the payloads of the cells of N blocks, and the slots of the blocks; [N].

    Blocks are counted in int32: 2^31 of the smallest are 64 Gi elements. If FULL, the blocks are in two cells at most.
    """
    rows = tl.arange(0, N)
    if FULL:
        cell = first // blocks_per_cell
        slots = first - cell * blocks_per_cell + rows
        is_next = slots >= blocks_per_cell
        cells = cell + tl.where(is_next, 1, 0)
        slots -= tl.where(is_next, blocks_per_cell, 0)
    else:
        cells = (first + rows) // blocks_per_cell
        slots = first + rows - cells * blocks_per_cell
    starts = message + cells.to(tl.int64) * unit_bytes(cell_units)
    return starts + unit_bytes(scales_unit), starts + unit_bytes(payload_unit), slots


@triton.jit
def _payload_ptrs(payload, slots, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the lowest bytes, or the elements, of each block, [N, WIDTH], from the first address in its cell."""
    SIZE: tl.constexpr = BLOCK * FORMAT.bits // 8
    HALF: tl.constexpr = tl.bfloat16 if FORMAT.element == "bfloat16" else tl.float16
    FLOAT: tl.constexpr = tl.float32 if FORMAT.element == "float32" else HALF
    ELEMENT: tl.constexpr = tl.uint8 if FORMAT.element == "uint8" else FLOAT
    first = (payload + slots.to(tl.int64) * SIZE).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(first, min(SIZE & -SIZE, 16))[:, None] + tl.arange(0, BLOCK // FORMAT.planes)[None, :]


@triton.jit
def load_blocks(
    scales,  # address of the first scale of the cell: a number, or [N]
    payload,  # address of the first payload of the cell: a number, or [N]
    slots,  # [N]: the place of the block in its cell
    mask,  # [N]
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load and decode blocks of a message: [N, BLOCK], fp32."""
    payload_ptrs = _payload_ptrs(payload, slots, FORMAT, BLOCK)
    encoded = tl.load(payload_ptrs) if FULL else tl.load(payload_ptrs, mask=mask[:, None], other=0)
    if not FORMAT.is_scaled:
        values = encoded.to(tl.float32)
    else:
        words = encoded.to(tl.int32)
        N_BYTES: tl.constexpr = FORMAT.word_bytes
        for i in tl.static_range(1, N_BYTES):
            byte_ptrs = payload_ptrs + i * (BLOCK // FORMAT.planes)
            byte = tl.load(byte_ptrs) if FULL else tl.load(byte_ptrs, mask=mask[:, None], other=0)
            words |= byte.to(tl.int32) << (8 * i)
        codes = _unpack(words, FORMAT)
        if FORMAT.kind == "odd integers" or FORMAT.kind == "signs":
            q = (2 * codes - FORMAT.levels).to(tl.float32)
        elif FORMAT.kind == "integers":
            signed = codes - FORMAT.offset if FORMAT.offset > 0 else codes << 24 >> 24
            q = signed.to(tl.float32)
        else:
            q = _from_e4m3(codes)
        scale_ptrs = (scales + slots.to(tl.int64) * 2).to(tl.pointer_type(tl.int16))
        bits = tl.load(scale_ptrs) if FULL else tl.load(scale_ptrs, mask=mask, other=0)
        values = q * (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
    return values


@triton.jit
def store_blocks(
    scales,  # address of the first scale of the cell: a number, or [N]
    payload,  # address of the first payload of the cell: a number, or [N]
    slots,  # [N]: the place of the block in its cell
    mask,  # [N]
    scale,  # [N] fp32
    encoded,  # [N, WIDTH]: the payload
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Store what `encode_blocks` returned into a message."""
    payload_ptrs = _payload_ptrs(payload, slots, FORMAT, BLOCK)
    if not FORMAT.is_scaled:
        tl.store(payload_ptrs, encoded, mask=None if FULL else mask[:, None])
    else:
        N_BYTES: tl.constexpr = FORMAT.word_bytes
        for i in tl.static_range(N_BYTES):
            byte = (encoded >> (8 * i)).to(tl.uint8)
            tl.store(payload_ptrs + i * (BLOCK // FORMAT.planes), byte, mask=None if FULL else mask[:, None])
        # One NaN for all devices: those of arithmetic differ in their bits.
        bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True) >> 16, 0x7FC0).to(tl.int16)
        scale_ptrs = (scales + slots.to(tl.int64) * 2).to(tl.pointer_type(tl.int16))
        tl.store(scale_ptrs, bits, mask=None if FULL else mask)


@triton.jit
def sum_blocks(
    received_ptr,
    program,  # int64
    n_blocks,
    blocks_per_cell,
    chunks_per_cell,
    rank,
    world_size,
    cell_units,
    scales_unit,
    payload_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    PEERS: tl.constexpr,
):
    """The sum of N blocks of this rank's cells in a piece, [N, BLOCK], in rank order: the same to the bit in every run.

    Also returns the piece, the slots of the blocks in their cell, their numbers, and whether they exist.
    """
    # Blocks are counted in int32, as in `locate_blocks`.
    piece = program.to(tl.int32) // chunks_per_cell
    slots = (program.to(tl.int32) - piece * chunks_per_cell) * N + tl.arange(0, N)
    blocks = (piece * world_size + rank) * blocks_per_cell + slots
    exists = (slots < blocks_per_cell) & (blocks < n_blocks)
    received = received_ptr.to(tl.int64) + (piece * world_size).to(tl.int64) * unit_bytes(cell_units)
    # Whole blocks are masked, never parts of them, so accesses stay wide.
    total = tl.zeros((N, BLOCK), tl.float32)
    peer = 0
    while peer < world_size:
        # Unrolled, so that the loads of all these peers are in flight at once. What is missing adds 0.
        for i in tl.static_range(PEERS):
            cell = received + i * unit_bytes(cell_units)
            scales, payload = cell + unit_bytes(scales_unit), cell + unit_bytes(payload_unit)
            total += load_blocks(scales, payload, slots, exists & (peer + i < world_size), FORMAT, BLOCK, False)
        received += PEERS * unit_bytes(cell_units)
        peer += PEERS
    return total, piece, slots, blocks, exists


@triton.jit
def load_errors(
    address,  # address of [N * BLOCK], 16-byte aligned
    mask,  # [N]
    ERROR: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
    N: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load the errors of blocks, fp32 or bf16: [N, BLOCK], fp32."""
    WIDTH: tl.constexpr = BLOCK // PLANES
    errors_ptr = address.to(tl.pointer_type(ERROR))
    pointers = tl.multiple_of(errors_ptr, 16) + tl.arange(0, N)[:, None] * BLOCK + tl.arange(0, WIDTH)[None, :]
    return load_tile(pointers, tl.where(mask, BLOCK, 0), PLANES, FULL).to(tl.float32)


@triton.jit
def store_errors(
    address,  # address of [N * BLOCK], 16-byte aligned
    error,  # [N, BLOCK] fp32
    counts,  # [N] int32
    mask,  # [N]
    key,  # int64, one or [N, 1]: of the random numbers; not read for fp32
    step,  # int64; not read for fp32
    index,  # [N, BLOCK] int64: the place in the tensor; not read for fp32
    ERROR: tl.constexpr,
    PLANES: tl.constexpr,
    FULL: tl.constexpr,
):
    """Store the errors of blocks as fp32 or bf16; those of missing elements are 0."""
    N: tl.constexpr = error.shape[0]
    BLOCK: tl.constexpr = error.shape[1]
    WIDTH: tl.constexpr = BLOCK // PLANES
    pending_ptr = address.to(tl.pointer_type(ERROR))
    pointers = tl.multiple_of(pending_ptr, 16) + tl.arange(0, N)[:, None] * BLOCK + tl.arange(0, WIDTH)[None, :]
    if not FULL:
        error = tl.where(elements(BLOCK, PLANES) < counts[:, None], error, 0.0)
    error += 0.0  # the error of -0 is 0, whatever the sign of its code
    if ERROR == tl.bfloat16:
        error = _round_to_bf16(error, random_bits_triton(key, step, index))
    store_tile(pointers, tl.where(mask, BLOCK, 0), error.to(ERROR), PLANES, FULL)
