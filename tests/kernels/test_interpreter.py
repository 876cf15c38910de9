"""The interpreter lane itself: it must round as the hardware does, and the kernels must address 64 bits wide."""

import numpy as np
import pytest
import torch

from gradwire.kernels.flatten_triton import NUM_WARPS, _flatten_kernel
from gradwire.kernels.segment_table import CHUNK_NUMEL
from tests.kernels.support.cases import INTERPRETED, name
from tests.kernels.support.exact import Guarded, as_float64, assert_same_bits, round_to

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, set before Triton is imported")


@triton.jit
def _cast_kernel(source_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(source_ptr + offs).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=name)
def test_interpreter_casts_from_fp32_round_to_nearest_even(target):
    integers = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0))
    source = integers.to(torch.int32).view(torch.float32)
    source[:5] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 65520.0, 1 + 2.0**-11, torch.finfo(torch.float32).max])
    out = torch.full((4096,), torch.nan, dtype=target)
    _cast_kernel[(1,)](source, out, N=4096)
    assert_same_bits(out, round_to(as_float64(source), target), "cast")


@triton.jit
def _copy_kernel(addresses_ptr, out_ptr, first, N: tl.constexpr):
    source_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + tl.arange(0, N), tl.load(source_ptr + first + tl.arange(0, N)))


@pytest.mark.parametrize(("first", "numel"), [(1, 8), (-1, 8), (0, 7)], ids=["after", "before", "store"])
def test_access_out_of_bounds_raises(first, numel):
    memory, out = torch.arange(24.0), torch.zeros(numel)
    source = memory[8:16]
    table = torch.tensor([source.data_ptr()])
    with pytest.raises(triton.runtime.errors.InterpreterError, match="out of bounds: 1 of 8 elements"):
        _copy_kernel[(1,)](table, out, first, N=8)
    right = torch.zeros(8)
    _copy_kernel[(1,)](table, right, 0, N=8)
    assert right.tolist() == source.tolist()


def test_access_to_freed_memory_raises():
    memory = np.zeros(8, np.float32)  # stays allocated, so that no other tensor is given its address
    source = torch.from_numpy(memory)
    table = torch.tensor([source.data_ptr()])
    del source
    with pytest.raises(triton.runtime.errors.InterpreterError, match="out of bounds: 8 of 8 elements"):
        _copy_kernel[(1,)](table, torch.zeros(8), 0, N=8)


class Shifted:
    """A tensor argument whose base address lies ``elements`` before its memory: element number ``elements`` is real."""

    def __init__(self, tensor, elements):
        self.tensor, self.elements, self.dtype = tensor, elements, tensor.dtype

    def data_ptr(self):
        return self.tensor.data_ptr() - self.elements * self.tensor.itemsize

    # What the interpreter asks of an argument on its way to host memory, where this one is already.
    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    def __getattr__(self, attribute):
        return getattr(self.tensor, attribute)


START = 2**31 + 3  # first element of the segment that the two chunks below are about
OFFSET = 2**32 + 5  # of that segment in the wire
NUMEL = CHUNK_NUMEL + 901


def table_beyond_2_31(tensor):
    """Two segments; the two chunks are the last of the second, of which only the last ``NUMEL`` elements are real."""
    pointers = [0, tensor.data_ptr() - START * tensor.itemsize]
    lengths = [OFFSET, START + NUMEL]
    return torch.tensor([*pointers, *lengths, 0, OFFSET, 1, 1, START, START + CHUNK_NUMEL])


SHAPE = {"n_segments": 2, "n_chunks": 2, "CHUNK": CHUNK_NUMEL, "num_warps": NUM_WARPS}


def test_flatten_addresses_beyond_2_31_elements():
    source = Guarded(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    wire = Guarded.poisoned(NUMEL, torch.bfloat16)
    counters = torch.zeros(2, dtype=torch.int64)
    _flatten_kernel[(2,)](
        table_ptr=table_beyond_2_31(source.window),
        wire_ptr=Shifted(wire.window, OFFSET + START),
        scale_ptr=None,
        statistics_ptr=counters,
        scale=2.0,
        limit=1.0,
        GRADIENT=tl.float32,
        COMPUTE=tl.float32,
        **SHAPE,
    )
    expected = (source.window * 2).clamp(-1, 1).bfloat16()
    assert_same_bits(wire.window, expected, "the wire")
    wire.assert_guards_untouched("the wire")
    assert counters.tolist() == [0, (source.window.abs() > 0.5).sum().item()]
