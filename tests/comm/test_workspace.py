"""`Workspace`: where the tensors of a bucket in flight lie."""

import pytest
import torch

from gradwire.comm import Workspace

SIZES = {
    "bytes": [(1, torch.uint8), (63, torch.uint8), (64, torch.uint8), (65, torch.uint8), (5, torch.uint8)],
    "dtypes": [(3, torch.bfloat16), (5, torch.float32), (1, torch.float64), (7, torch.uint8), (9, torch.float16)],
    "empty": [(0, torch.float32), (1, torch.uint8), (0, torch.uint8), (0, torch.bfloat16), (33, torch.float32)],
    "messages of a quantized bucket": [(48, torch.uint8), (48, torch.uint8), (24, torch.uint8), (100, torch.float32)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_wires_begin_at_multiples_of_64_bytes_and_do_not_overlap(sizes):
    workspace = Workspace(torch.device("cpu"))
    for each in (sizes, sizes[::-1]):  # the second time in the same buffer or a larger one
        wires = workspace.wires(*each)
        assert [(wire.numel(), wire.dtype, wire.dim()) for wire in wires] == [(*size, 1) for size in each]
        starts = [wire.storage_offset() * wire.itemsize for wire in wires]
        assert all(start % 64 == 0 for start in starts)
        assert all(wire.data_ptr() % 64 == 0 for wire in wires if wire.numel() > 0)
        ends = [start + wire.nbytes for start, wire in zip(starts, wires, strict=True)]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
