"""Integers on the device: uploads that a CUDA graph captures, at addresses that stay."""

import gc
import weakref

import pytest
import torch

from gradwire.kernels import Matrix, MatrixTable, Operands, SegmentTable, uploads


def tensors_of(*sizes, device):
    return [torch.zeros(size, device=device) for size in sizes]


@pytest.fixture
def sources(monkeypatch):
    """Weak references to the host tensors that are sent to the device."""
    references = []
    pinned = uploads.pinned

    def watched(numbers, device):
        source = pinned(numbers, device)
        references.append(weakref.ref(source))
        return source

    monkeypatch.setattr(uploads, "pinned", watched)
    return references


def packed_table(tensors):
    table = SegmentTable(tensors)
    return table, table.packed


def address_table(tensors):
    table = MatrixTable([Matrix(*t.shape, 1) for t in tensors], tensors[0].dtype, tensors[0].device)
    return table, lambda tensors: table.on_device_addresses(Operands(table, tensors, tensors, tensors, False).addresses)


of_both_tables = pytest.mark.parametrize("make", [packed_table, address_table], ids=["segments", "matrices"])


@of_both_tables
def test_captured_upload_keeps_its_source_as_long_as_the_table(make, sources, device, monkeypatch):
    lists = [tensors_of((4, 5), (2, 3), device=device) for _ in range(4)]
    table, upload = make(lists[0])
    for tensors, is_captured in zip(lists, (True, True, False, False), strict=True):
        monkeypatch.setattr(uploads, "captures_graph", lambda _, is_captured=is_captured: is_captured)
        upload(tensors)
    gc.collect()
    assert [source() is not None for source in sources] == [True, True, False, False]
    del table, upload
    gc.collect()
    assert not any(source() for source in sources)


def test_captured_layout_keeps_its_source_as_long_as_the_table(sources, device, monkeypatch):
    table = MatrixTable([Matrix(4, 5, 1)], torch.float32, device)
    monkeypatch.setattr(uploads, "captures_graph", lambda _: True)
    table.packed()
    gc.collect()
    assert [source() is not None for source in sources] == [True]


@of_both_tables
def test_changed_pointers_alone_are_uploaded_again_to_the_same_address(make, sources, device):
    first, second = tensors_of((4, 5), (2, 3), device=device), tensors_of((4, 5), (2, 3), device=device)
    _, upload = make(first)
    address, n_uploads = upload(first).data_ptr(), len(sources)
    upload(first)
    assert len(sources) == n_uploads
    moved = upload(second)
    assert len(sources) == n_uploads + 1
    assert moved.data_ptr() == address, "a captured graph would read freed memory"
    assert moved[:2].tolist() == [tensor.data_ptr() for tensor in second]


@of_both_tables
def test_each_captured_graph_uploads_its_addresses_itself(make, sources, device, monkeypatch):
    # Otherwise a replay of a graph without a copy would read the addresses of whichever step ran before it.
    static, others = tensors_of((4, 5), (2, 3), device=device), tensors_of((4, 5), (2, 3), device=device)
    _, upload = make(static)
    upload(static)
    for expected in (1, 2):
        monkeypatch.setattr(uploads, "captures_graph", lambda _: True)
        upload(static)
        monkeypatch.setattr(uploads, "captures_graph", lambda _: False)
        assert sum(source() is not None for source in sources) == expected
    # A later step cannot know which graph was replayed before it.
    assert upload(others)[:2].tolist() == [tensor.data_ptr() for tensor in others]
    n_uploads = len(sources)
    upload(others)
    assert len(sources) == n_uploads + 1


def test_kernels_of_a_captured_step_share_one_upload(sources, device, monkeypatch):
    table = MatrixTable([Matrix(4, 5, 1)], torch.float32, device)
    tensors = tensors_of((4, 5), device=device)
    table.on_device_addresses(Operands(table, tensors, tensors, tensors, False).addresses)
    monkeypatch.setattr(uploads, "captures_graph", lambda _: True)
    operands, n_uploads = Operands(table, tensors, tensors, tensors, False), len(sources)
    for _ in range(3):
        table.on_device_addresses(operands.addresses)
    assert len(sources) == n_uploads + 1


@of_both_tables
def test_recorded_step_copies_no_addresses(make, sources, device, monkeypatch):
    tensors = tensors_of((4, 5), (2, 3), device=device)
    _, upload = make(tensors)
    monkeypatch.setattr(uploads, "captures_graph", lambda _: True)
    upload(tensors)
    monkeypatch.setattr(uploads, "captures_graph", lambda _: False)
    upload(tensors)
    n_uploads = len(sources)
    monkeypatch.setattr(uploads, "is_recording", lambda: True)
    upload(tensors)
    assert len(sources) == n_uploads
