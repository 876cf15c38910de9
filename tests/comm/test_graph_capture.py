"""CUDA graph capture, with CPU doubles: no event is queried, and captured memory stays allocated."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from gradwire.comm import Workspace
from gradwire.kernels import is_capturing
from gradwire.reducer.step_times import StepTimes

GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)
STREAM, OTHER_STREAM = "a stream", "another stream"


class Event:
    """A CUDA event whose work is done; it may not be used while a capture is under way."""

    capture = None

    def __init__(self, enable_timing=False):
        assert enable_timing

    def _use(self):
        assert not self.capture.is_under_way, "operation not permitted when stream is capturing"

    def record(self, stream):
        self._use()

    def query(self):
        self._use()
        return True

    def elapsed_time(self, end):
        self._use()
        return 1.0


class Capture:
    """Whether a capture is under way on `GPU`, and which device and stream are the current ones."""

    def __init__(self):
        self.is_under_way = False
        self.device = GPU
        self.stream = STREAM

    @contextmanager
    def current(self, index):
        """Stands in for ``torch.cuda.device``."""
        before, self.device = self.device, torch.device("cuda", index)
        yield
        self.device = before

    def is_on_current_device(self):
        """Stands in for ``torch.cuda.is_current_stream_capturing``."""
        return self.is_under_way and self.device == GPU

    def __enter__(self):
        self.is_under_way = True

    def __exit__(self, *_):
        self.is_under_way = False


@pytest.fixture
def capture(monkeypatch):
    capture = Capture()
    monkeypatch.setattr(Event, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: capture.stream)
    monkeypatch.setattr(torch.cuda, "device", capture.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capture.is_on_current_device)
    return capture


BACKWARD = ("backward_compute_time_start", "backward_comm_time_start", "backward_compute_time_end")


def step(times):
    times.begin_forward()
    for event in (*BACKWARD, "backward_comm_time_end"):
        times.record(event)


def test_captured_step_is_not_timed_but_the_previous_one_is(capture):
    times = StepTimes(GPU)
    step(times)
    with capture:
        step(times)
        assert "forward_compute_time" not in times.summary()
    summary = times.summary()
    assert summary["forward_compute_time"] == 1_000_000
    assert times.iterations == 2
    assert times.reported == 0
    step(times)
    assert times.summary()["avg_forward_compute_time"] == 1_000_000
    assert times.reported == 2


class Buffer(torch.Tensor):
    """A tensor on the CPU that stands for one on a GPU: the streams that the allocator was told of are noted."""

    def record_stream(self, stream):
        self.streams = {*getattr(self, "streams", ()), stream}


@pytest.fixture
def workspace(capture):
    workspace = Workspace(torch.device("cpu"))
    workspace._device = GPU
    workspace._buffer = torch.empty(0, dtype=torch.uint8).as_subclass(Buffer)
    return workspace


def steps_with(workspace, numel, steps=Workspace.STEPS_BEFORE_SHRINKING + 1):
    for _ in range(steps):
        workspace.start_step()
        wire = workspace.wire(numel, torch.float32)
    return wire.data_ptr()


def test_captured_buffer_does_not_shrink(capture, workspace):
    steps_with(workspace, 1000)
    with capture:
        captured = steps_with(workspace, 1000, 1)
    assert steps_with(workspace, 10) == captured
    assert workspace.nbytes == 4000


def test_captured_buffer_outlives_its_larger_replacement(capture, workspace):
    with capture:
        steps_with(workspace, 10, 1)
    captured, wire = weakref.ref(workspace._buffer), workspace.wire(10, torch.float32)
    steps_with(workspace, 1000)
    larger = weakref.ref(workspace._buffer)
    steps_with(workspace, 100)
    assert workspace.nbytes == 400  # the larger one was in no capture
    gc.collect()
    assert larger() is None
    assert captured() is not None
    assert captured().data_ptr() == wire.data_ptr()


def test_capture_is_found_whichever_device_is_current(capture, workspace):
    for capture.device in (GPU, OTHER_GPU):
        assert not is_capturing(GPU)
        with capture:
            assert is_capturing(GPU)
            assert not is_capturing(OTHER_GPU)
            assert not is_capturing(torch.device("cpu"))
    large = steps_with(workspace, 1000)
    with capture:
        steps_with(workspace, 1000, 1)
    assert steps_with(workspace, 10) == large


def test_buffer_is_recorded_on_every_stream_that_uses_it(capture, workspace):
    steps_with(workspace, 1000, 1)
    first = workspace._buffer
    capture.stream = OTHER_STREAM
    workspace.wires((10, torch.float16), (20, torch.float32))
    assert workspace._buffer is first
    assert first.streams == {STREAM, OTHER_STREAM}
    workspace.wire(2000, torch.float32)
    assert workspace._buffer is not first
    assert workspace._buffer.streams == {OTHER_STREAM}
