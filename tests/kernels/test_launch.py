"""Launches that are recorded as bound calls: their arguments, and the operators that a recording notes."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.kernels import Recording, SegmentTable, flatten_kernels
from gradwire.kernels.launch import bound, is_recording, needs_repetition
from tests.kernels.support.empty_driver import empty_gpu


def launcher_of_this_triton(calls, **sizes):
    """The launcher of the installed Triton, whose C function notes its arguments."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launcher = object.__new__(driver.CudaLauncher)
    names = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    vars(launcher).update(dict.fromkeys(names, 0), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True)
    vars(launcher).update(sizes, arg_annotations=("an annotation",), kernel_signature=b"a signature")
    launcher.launch = lambda *arguments: calls.append(arguments)
    return launcher


class PublicLauncher:
    """A launcher without the attributes of Triton 3.7's."""

    def __init__(self, calls):
        self._calls = calls

    def __call__(self, *arguments):
        self._calls.append(arguments)


def test_keeping_memory_for_a_stream_needs_no_repetition():
    assert not needs_repetition(torch.ops.aten.record_stream.default), "every wire buffer is kept for its stream"


@pytest.mark.parametrize("make", [launcher_of_this_triton, PublicLauncher])
def test_bound_launch_passes_what_triton_passes(make):
    calls = []
    compiled = SimpleNamespace(run=make(calls), packed_metadata=(4, 1, 0), function=77)
    values = [123456, None, 8, True]
    compiled.run(3, 2, 1, 5, compiled.function, compiled.packed_metadata, None, None, None, *values)
    bound(compiled, 5, (3, 2, 1), values)()
    through_triton, directly = calls
    assert directly == through_triton


def test_kernel_with_scratch_memory_is_launched_through_triton():
    launcher = launcher_of_this_triton([], global_scratch_size=16)
    call = bound(SimpleNamespace(run=launcher, packed_metadata=(), function=77), 0, (1, 1, 1), [])
    assert call.func is launcher


def test_recorded_launch_is_the_launch_with_addresses_as_numbers():
    tensors = [torch.empty(100) for _ in range(3)]
    table, wire = SegmentTable(tensors), torch.empty(300, dtype=torch.bfloat16)
    with empty_gpu() as driver:
        flatten_kernels(table).flatten(tensors, table, wire)  # uploads the addresses
        driver.launches.clear()
        with Recording(stream=9) as recording:
            assert is_recording()
            flatten_kernels(table).flatten(tensors, table, wire)
        (call,) = recording.calls
        call()
    (launched, replayed), addresses = driver.launches, [each.data_ptr() for each in recording.kept]
    assert recording.operator is None
    assert not is_recording()
    assert replayed[:2] == launched[:2]
    as_numbers = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in launched[2]]
    assert list(replayed[2]) == as_numbers
    assert wire.data_ptr() in addresses


@pytest.mark.parametrize(
    ("work", "operator"),
    [
        (lambda x: x.zero_(), "aten.zero_.default"),
        (lambda x: torch.zeros_like(x), "aten.zeros_like.default"),
        (lambda x: torch.add(x, 1, out=torch.empty(0)), "aten.add.out"),
        (lambda x: [x.view(-1)[1:], x.t(), x.detach(), torch.empty_like(x), x.new_empty(3), torch.empty(2)], None),
        (lambda x: x.split(1), None),
    ],
)
def test_recording_notes_operators_that_compute(work, operator):
    x = torch.ones(2, 3)
    with Recording(stream=0) as recording:
        work(x)
    assert recording.operator == operator
    assert recording.calls == []
