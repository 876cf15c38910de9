"""Segment tables: chunks, blocks of the CPU path, memory order, and the tensors that a table refuses."""

import gc
import weakref
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import SegmentTable, memory_order
from gradwire.kernels.layouts import is_dense
from gradwire.kernels.segment_table import CHUNK_NUMEL
from tests.kernels.support.cases import PROPERTY, SOURCES, Layout, cases, name
from tests.kernels.support.exact import as_float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=name)
@PROPERTY
@given(case=cases())
def test_packed_table_cuts_every_segment_into_chunks(device, dtype, case):
    tensors = case.views(case.sources(dtype, device))
    table = SegmentTable(tensors)
    packed = table.packed(tensors)
    assert packed.dtype == torch.int64 and packed.device.type == device.type
    n = len(table)
    pointers, lengths, offsets, chunk_segment, chunk_start = packed.split([n, n, n, table.n_chunks, table.n_chunks])
    assert pointers.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert lengths.tolist() == table.lengths
    assert offsets.tolist() == table.offsets
    expected = [(i, start) for i, length in enumerate(table.lengths) for start in range(0, length, CHUNK_NUMEL)]
    assert list(zip(chunk_segment.tolist(), chunk_start.tolist(), strict=True)) == expected


@given(
    dimensions=st.lists(
        st.tuples(st.sampled_from((0, 1, 1, 2, 3, 4)), st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12))), max_size=4
    )
)
@PROPERTY
def test_dense_layout_uses_every_address_once(dimensions):
    shape, strides = [d[0] for d in dimensions], [d[1] for d in dimensions]
    addresses = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]
    assert is_dense(shape, strides) == (sorted(addresses) == list(range(len(addresses))))


def test_empty_slice_is_dense():
    assert is_dense((0, 3), torch.empty(4, 6)[:0, ::2].stride())


@pytest.mark.parametrize("dtype", SOURCES, ids=name)
@PROPERTY
@given(case=cases())
def test_memory_order_sorts_elements_by_address(dtype, case):
    guarded = case.sources(dtype, "cpu")
    for one, tensor in zip(guarded, case.views(guarded), strict=True):
        flat = memory_order(tensor)
        assert flat.data_ptr() == tensor.data_ptr() and flat.is_contiguous()
        assert as_float64(flat).tobytes() == as_float64(one.window).tobytes()


REFUSED = {
    "empty list": ([], "needs at least one tensor"),
    "two dtypes": ([torch.ones(2), torch.ones(2).half()], r"Tensor 1 is torch\.float16 .* Use a table for each"),
    "two devices": ([torch.ones(2), torch.ones(2, device="meta")], r"Tensor 1 .* on meta.* Use a table for each"),
    "integers": ([torch.ones(2, dtype=torch.int32)], r"torch\.int32; expected a floating-point or complex"),
    "sparse": ([torch.eye(3).to_sparse()], r"sparse_coo .* Pass tensor\.contiguous\(\)"),
    "gaps": ([torch.ones(6)[::2]], r"gaps or overlaps in memory.* Pass tensor\.contiguous\(\)"),
    "overlaps": ([torch.ones(1).expand(3)], "gaps or overlaps in memory"),
    "lazy conjugate": ([torch.ones(3, dtype=torch.complex64).conj()], r"resolve_conj\(\)"),
    "lazy negative": ([torch._neg_view(torch.ones(3))], r"resolve_neg\(\)"),
}


@pytest.mark.parametrize("tensors, message", REFUSED.values(), ids=REFUSED)
def test_unsupported_tensors_raise(tensors, message):
    with pytest.raises(ValueError, match=message):
        SegmentTable(tensors)


def other(*, shape=(4, 3), strides=(3, 1), dtype=torch.float32, device="cpu"):
    layout = Layout(shape, strides)
    return torch.zeros(layout.numel, dtype=dtype, device=device).as_strided(shape, strides)


@pytest.mark.parametrize(
    "wire, message",
    [
        (torch.empty(4), "expected a contiguous 1-D tensor of 3 elements"),
        (torch.empty(3, 1), "expected a contiguous 1-D tensor of 3 elements"),
        (torch.empty(6)[::2], "expected a contiguous 1-D tensor of 3 elements"),
        (torch.empty(3, device="meta"), "on meta; expected .* on cpu"),
        (torch.empty(3, dtype=torch.int32), r"torch\.int32; expected one of torch\.float32"),
    ],
    ids=["length", "shape", "strides", "device", "dtype"],
)
def test_misfitting_wire_raises(wire, message):
    with pytest.raises(ValueError, match=message):
        SegmentTable([torch.ones(3)]).check_wire(wire)


MISFITS = {
    "count": ([other(), other()], "Got 2 tensors for a table of 1"),
    "shape": ([other(shape=(3, 4), strides=(4, 1))], r"built for torch\.float32 \(4, 3\).* Build a new table"),
    "dtype": ([other(dtype=torch.bfloat16)], r"Tensor 0 is torch\.bfloat16 .* Build a new table"),
    "device": ([other(device="meta")], r"on meta; its table was built for .* on cpu"),
    "strides": ([other(strides=(1, 4))], r"has strides \(1, 4\); its table was built for \(3, 1\)"),
}


def checked_table(tensors):
    """A table that has checked a list before, and so compares later ones in C++ first."""
    table = SegmentTable(tensors)
    table.check_tensors(tensors)
    return table


@pytest.mark.parametrize("make", [SegmentTable, checked_table])
@pytest.mark.parametrize("tensors, message", MISFITS.values(), ids=MISFITS)
def test_misfitting_tensors_raise(tensors, message, make):
    table = make([other()])
    with pytest.raises(ValueError, match=message):
        table.check_tensors(tensors)


@pytest.mark.parametrize("make", [SegmentTable, checked_table])
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_lazy_view_in_place_of_a_tensor_raises(lazy, make):
    table = make([torch.ones(3, dtype=torch.complex64)])
    with pytest.raises(ValueError, match=r"Tensor 0 is a lazy .* resolve_conj\(\)"):
        table.check_tensors([lazy(torch.ones(3, dtype=torch.complex64))])


CHANGES = {
    "transposed": (lambda tensor: tensor.t_(), "shape|Tensor 0 is"),
    "resized": (lambda tensor: tensor.resize_(2, 3), r"\(2, 3\)"),
    "other data": (lambda tensor: setattr(tensor, "data", torch.zeros(5)), r"\(5,\)"),
    "other strides": (lambda tensor: tensor.as_strided_((4, 3), (1, 4)), "strides"),
    "other dtype": (lambda tensor: setattr(tensor, "data", tensor.data.half()), r"torch\.float16"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_tensor_that_changed_in_place_raises(change, message):
    tensor = other()
    table = checked_table([tensor])
    change(tensor)
    with pytest.raises(ValueError, match=message):
        table.check_tensors([tensor])


def test_checked_tensors_are_not_kept_alive():
    tensor = other()
    table, alive = checked_table([tensor]), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    table.check_tensors([other()])
