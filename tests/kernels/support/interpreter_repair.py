"""Casts of Triton's interpreter, replaced by ones that round as the hardware does: once, to the nearest even.

As shipped, the interpreter truncates fp32 to bf16, and takes fp64 for an integer on the way to bf16. Triton 3.6.0's
does not accept loaded numbers as bounds of a loop with NumPy 2.4. Triton 3.9.0's does not accept the conjunction
of a mask and a number as a mask, which the compiler takes.
"""

import numpy as np
import torch

SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def install():
    from triton.runtime import interpreter

    shipped = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder, operand, dtype):
        source, target = operand.dtype.scalar, dtype.scalar
        if source.is_fp64() and target.is_bf16():
            return interpreter.TensorHandle(_convert_float(operand.data, source, target, None), target)
        return shipped(builder, operand, dtype)

    shipped_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        shipped_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    shipped_load = interpreter.InterpreterBuilder.create_masked_load
    shipped_store = interpreter.InterpreterBuilder.create_masked_store

    def create_masked_load(builder, ptrs, mask, *others):
        return shipped_load(builder, ptrs, _as_mask(mask), *others)

    def create_masked_store(builder, ptrs, value, mask, *others):
        return shipped_store(builder, ptrs, value, _as_mask(mask), *others)

    def _as_mask(handle):
        return interpreter.TensorHandle(handle.data.astype(bool), interpreter.tl.int1)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    interpreter.InterpreterBuilder.create_masked_store = create_masked_store
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter._convert_float = _convert_float


def _convert_float(data, source, target, rounding_mode):
    bits = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}")
    values = torch.from_numpy(bits.copy()).view(_torch_dtype(source))
    if source.is_fp64() and target.primitive_bitwidth == 16:
        values = _round_to_odd(values)
    result = values.to(_torch_dtype(target))
    return result.view(SIGNED[result.itemsize]).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


def _torch_dtype(dtype):
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[dtype.name]


def _round_to_odd(values):
    """Fp32 numbers that round to 16 bits as the fp64 numbers would have without the stop in between."""
    nearest = values.float()
    toward_zero = torch.where(nearest.double().abs() > values.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)
    inexact = toward_zero.double() != values
    odd = (toward_zero.view(torch.int32) | 1).view(torch.float32)
    return torch.where(inexact & values.isfinite(), odd, toward_zero)
