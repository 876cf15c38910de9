"""Arguments of the quantization kernels that do not fit are refused with a remedy."""

import pytest
import torch

from gradwire.kernels import (
    WIRE_FORMATS,
    BlockTable,
    MessageLayout,
    Rounding,
    dequantize,
    quantize,
    reduce_quantized,
    sum_quantized,
)

TENSORS = [torch.ones(100), torch.ones(64)]
TABLE = BlockTable(TENSORS, 64, [1, 2])
LAYOUT = MessageLayout([(WIRE_FORMATS["int4"], TABLE)], 2)
(SECTION,) = LAYOUT.sections
MESSAGE = torch.zeros(LAYOUT.message_shape, dtype=torch.uint8)
RESULT = torch.zeros(LAYOUT.result_shape, dtype=torch.uint8)


def errors(dtype=torch.float32, numel=TABLE.numel, device="cpu"):
    return {name: torch.zeros(numel, dtype=dtype, device=device) for name in ("errors", "pending")}


def unaligned(tensor):
    return torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)[8:].view(tensor.shape)


MESSAGES = {
    "dtype": (MESSAGE.to(torch.int8), "expected a contiguous torch.uint8"),
    "dimensions": (MESSAGE[0], r"expected \[pieces, n, cell_bytes\]"),
    "stride": (torch.zeros(1, 2, 2 * LAYOUT.cell_bytes, dtype=torch.uint8)[..., ::2], "expected a contiguous"),
    "device": (MESSAGE.to("meta"), "on cpu"),
    "alignment": (unaligned(MESSAGE), "not a multiple of 16"),
    "size": (torch.zeros(1, 1, LAYOUT.cell_bytes, dtype=torch.uint8), "the section needs room for 3 blocks"),
    "cell": (torch.zeros(1, 2, 32, dtype=torch.uint8), "2 in each cell, which end at byte 96"),
}


@pytest.mark.parametrize("message, match", MESSAGES.values(), ids=MESSAGES)
def test_misfitting_message_raises(message, match):
    quantize(TENSORS, SECTION, MESSAGE, scale=1.0)  # one that fits, and whose layout is checked once
    with pytest.raises(ValueError, match=f"message.*{match}"):
        quantize(TENSORS, SECTION, message, scale=1.0)
    with pytest.raises(ValueError, match=f"received.*{match}"):
        reduce_quantized(message, SECTION, RESULT, rank=0)
    with pytest.raises(ValueError, match=f"gathered.*{match}"):
        dequantize(message, SECTION, TENSORS)


MEMORIES = {
    "one": ({"errors": torch.zeros(TABLE.numel)}, "come together"),
    "size": (errors(numel=100), r"expected a contiguous .* tensor of \(192,\)"),
    "device": (errors(device="meta"), "on meta; expected .* on cpu"),
    "dtype": (errors(torch.float16), "torch.float32 or torch.bfloat16 tensor"),
    "two dtypes": (
        {"errors": torch.zeros(TABLE.numel), "pending": torch.zeros(TABLE.numel, dtype=torch.bfloat16)},
        "expected one dtype",
    ),
    "alignment": (
        {"errors": torch.zeros(TABLE.numel), "pending": torch.zeros(TABLE.numel + 1)[1:]},
        "not a multiple of 16",
    ),
    "bf16 without random numbers": (errors(torch.bfloat16), r"pass rounding=Rounding\(step\)"),
    "step of another dtype": ({"rounding": Rounding(torch.zeros(1))}, "expected one element of torch.int64"),
    "two steps": ({"rounding": Rounding(torch.zeros(2, dtype=torch.int64))}, "expected one element of torch.int64"),
}


@pytest.mark.parametrize("memory, match", MEMORIES.values(), ids=MEMORIES)
def test_misfitting_error_memory_or_rounding_raises(memory, match):
    with pytest.raises(ValueError, match=match):
        quantize(TENSORS, SECTION, MESSAGE, scale=1.0, **memory)


def test_misfitting_arguments_of_the_reduction_raise():
    with pytest.raises(ValueError, match="rank is 2; expected a number from 0 to 1"):
        reduce_quantized(MESSAGE, SECTION, RESULT, rank=2)
    with pytest.raises(ValueError, match="result is"):
        reduce_quantized(MESSAGE, SECTION, RESULT[:, :-16], rank=0)
    with pytest.raises(ValueError, match=r"errors is .* tensor of \(128,\)"):
        reduce_quantized(MESSAGE, SECTION, RESULT, rank=0, **errors())
    with pytest.raises(ValueError, match="rank is 2; expected a number from 0 to 1"):
        sum_quantized(MESSAGE, SECTION, torch.zeros(128), rank=2)
    with pytest.raises(ValueError, match=r"total is .* tensor of \(128,\)"):
        sum_quantized(MESSAGE, SECTION, torch.zeros(64), rank=0)


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
