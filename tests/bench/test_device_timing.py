"""`timed` on a GPU, with a double whose host and device have clocks of their own; and its method on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.bench import timing
from gradwire.bench.timing import SPIN_CYCLES, Timing, timed

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MICROSECOND = 1e-6


class Gpu:
    """A device that runs its queue in order, at 1 GHz, and a host that enqueues; both clocks in seconds."""

    def __init__(self):
        self.host = 0.0
        self.idle_from = 0.0

    def enqueue(self, host_us, device_us):
        self.host += host_us * MICROSECOND
        self.idle_from = max(self.host, self.idle_from) + device_us * MICROSECOND

    def synchronize(self, *_):
        self.host = max(self.host, self.idle_from)

    def sleep(self, cycles):
        self.enqueue(0, 1e-3 * cycles)

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.host, self.gpu.idle_from)

    def query(self):
        return self.gpu.host >= self.at

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    for name, double in {"Event": gpu.event, "_sleep": gpu.sleep, "synchronize": gpu.synchronize}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    return gpu


def kernels(gpu, count, host_us, device_us, calls):
    def work():
        calls.append(count)
        for _ in range(count):
            gpu.enqueue(host_us, device_us)

    return work


def test_small_kernels_are_timed_without_the_host(gpu):
    calls = []
    measured = timed(kernels(gpu, 3, host_us=20, device_us=2, calls=calls), GPU)
    assert measured.seconds == pytest.approx(6 * MICROSECOND)
    assert measured.host_seconds == pytest.approx(60 * MICROSECOND)
    assert not measured.includes_host
    assert len(calls) == 1


def test_spin_is_doubled_until_the_host_is_ahead(gpu):
    calls = []
    measured = timed(kernels(gpu, 300, host_us=20, device_us=2, calls=calls), GPU)
    assert measured.seconds == pytest.approx(600 * MICROSECOND)
    assert measured.host_seconds == pytest.approx(6000 * MICROSECOND)
    assert not measured.includes_host
    assert 1e-9 * SPIN_CYCLES[len(calls) - 2] < measured.host_seconds < 1e-9 * SPIN_CYCLES[len(calls) - 1]


def test_work_that_waits_for_the_device_includes_the_host(gpu):
    def work():
        gpu.enqueue(20, 2)
        gpu.synchronize()
        gpu.enqueue(20, 2)

    measured = timed(work, GPU)
    assert measured.includes_host
    assert measured.seconds == pytest.approx(44 * MICROSECOND), "without any spin"


def test_work_before_the_measurement_is_waited_for(gpu):
    gpu.enqueue(0, 1e6)
    assert timed(kernels(gpu, 1, 20, 2, []), GPU).seconds == pytest.approx(2 * MICROSECOND)


def test_cpu_is_timed_with_its_clock_alone(monkeypatch):
    clock, calls = iter([10.0, 10.25]), []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("a CPU has no events"))
    assert timed(lambda: calls.append(1), CPU) == Timing(0.25)
    assert calls == [1]
