"""The GPU lane's stages *bench* and *sanitize* without a GPU: checks, rows and tables at small sizes, the sanitizer."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from gradwire.bench import implementations
from gradwire.bench.gpu import sanitizer, timings
from gradwire.bench.gpu.timings import CAPTURED, LINKED, TIMED, captured_step, hook_bytes, hook_step, kernel
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.kernel_cases import CASES, KernelCase
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.planner.hook_registry import HOOKS
from tests.support.rehearsal import gpu_on_cpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = [[(192,), (192, 192)], [(256, 192), (3, 5)]]


@pytest.fixture
def small(monkeypatch):
    """Small buckets, few rounds, and the code path of a GPU."""
    monkeypatch.setattr(timings, "buckets_of", lambda model, mib, device: SMALL)
    monkeypatch.setattr(timings, "ROUNDS", 1)
    with gpu_on_cpu():
        yield


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_timed_with_pytorch(name, small):
    ours, *others = kernel(name, 25, CPU)
    assert ours["implementation"] == GRADWIRE
    assert ours["graph_ms"]["p50"] >= 0
    assert others
    for row in (ours, *others):
        assert row["nbytes"] > 0
        assert row["device_ms"]["p50"] > 0
        assert row["host_ms"]["p50"] > 0
        assert (row["launches"], row["host_waits"]) == (0, 0)
        assert row["implementation"] != "torch.compile"


def test_wrong_kernel_is_not_timed(small, monkeypatch):
    def wrong(shapes, device):
        case = CASES["flatten to float16"](shapes, device)
        return KernelCase(case.kernel, case.nbytes, {GRADWIRE: lambda: None}, case.check)

    monkeypatch.setitem(CASES, "wrong", wrong)
    with pytest.raises(RuntimeError, match="is wrong; nothing is timed"):
        kernel("wrong", 25, CPU)


@pytest.mark.usefixtures("world_of_one", "small")
class TestHooks:
    @pytest.mark.parametrize("hook", TIMED)
    def test_hook_is_timed_with_pytorchs(self, hook):
        ours, theirs = hook_step(hook, "any", CPU)
        assert ours["implementation"] == GRADWIRE
        assert theirs["implementation"].startswith(PYTORCH)
        assert ours["nbytes"] == hook_bytes(hook, SMALL)
        for row in (ours, theirs):
            assert row["device_ms"]["p50"] > 0
            assert (row["launches"], row["host_waits"]) == (0, 0)

    def test_hook_that_needs_flat_buffers_passes_its_check(self):
        step = timings._ours("powersgd-r4-batched", SMALL, CPU)
        assert isinstance(step.state, PowerSGDState)
        rate, _, _ = step.state.compression_stats()
        assert rate > 2

    @pytest.mark.parametrize("hook", CAPTURED)
    def test_captured_step_is_timed_with_the_eager_step(self, hook):
        assert [row["implementation"] for row in captured_step(hook, "any", CPU)] == ["eager", "captured"]

    @pytest.mark.parametrize("hook", ("fp16", "int4", "powersgd-r4"))
    def test_hook_with_a_wrong_result_is_not_timed(self, hook, monkeypatch):
        entry = HOOKS[hook]

        def make(group, start):
            state, real = entry.make(group, start)

            def wrong(state, bucket):
                future = real(state, bucket)
                future.wait()
                bucket.work().source.tensors[-1].mul_(1.01)
                return future

            return state, wrong

        monkeypatch.setitem(HOOKS, hook, SimpleNamespace(make=make, wire=entry.wire, pytorch=entry.pytorch))
        with pytest.raises(RuntimeError, match="nothing is timed"):
            hook_step(hook, "any", CPU)

    @pytest.mark.parametrize("hook", LINKED)
    def test_step_on_an_emulated_link_is_timed(self, hook, monkeypatch):
        for name, value in {"LAYERS": 2, "NARROW": 160, "WIDE": 320}.items():
            monkeypatch.setattr(implementations, name, value)
        rows = timings.linked_step(hook, "10gbit", CPU)
        assert [row["implementation"] for row in rows] == [PYTORCH, GRADWIRE]
        assert all(row["step_ms"]["p50"] > 0 for row in rows)


def test_hook_bytes_equal_the_bytes_of_its_kernels():
    shapes = [[(100, 200)], [(50,)]]
    assert hook_bytes("fp16", shapes) == 20_050 * (6 + 6)
    int4, bf16 = 4 / 8 + 2 / 64, 2  # an fp16 scale per 64 elements; vectors are sent in bf16
    assert hook_bytes("int4", shapes) == pytest.approx(20_050 * (12 + 8 + 4 + 16) + 4 * (20_000 * int4 + 50 * bf16))
    int8 = 1 + 2 / 64
    assert hook_bytes("int8", shapes) == pytest.approx(20_050 * (4 + 4) + 4 * (20_000 * int8 + 50 * bf16)), "no errors"
    factors = 4 * 100 * (4 + 4) + 4 * 200 * (4 + 4 + 4)
    assert hook_bytes("powersgd-r4", shapes) == 20_000 * 28 + factors + 50 * 16


def executable(folder, name="compute-sanitizer"):
    folder.mkdir(parents=True)
    (folder / name).touch(0o755)
    return str(folder / name)


def test_sanitizer_is_found_on_path_in_a_toolkit_and_in_a_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(sanitizer, "find_spec", lambda name: package if name == "nvidia" else None)
    if sanitizer.find_sanitizer() is not None:
        pytest.skip("there is a CUDA toolkit in /usr/local")
    for folder in ("nvidia/cuda_sanitizer_api/bin", "toolkit/compute-sanitizer", "bin"):
        path = executable(tmp_path / folder)
        assert sanitizer.find_sanitizer() == path


def test_case_runs_under_the_tool_and_fails_with_its_report(monkeypatch):
    ran, statuses = [], iter([0, sanitizer.ERROR_STATUS])

    def run(command, env, **_):
        ran.append((command[:5], command[-2:], env["PYTORCH_NO_CUDA_MEMORY_CACHING"]))
        return subprocess.CompletedProcess(command, next(statuses), "Invalid __global__ write", "")

    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    monkeypatch.setattr(subprocess, "run", run)
    sanitizer.sanitized("racecheck", "delayed scaling", GPU)
    with pytest.raises(AssertionError, match="Invalid __global__ write"):
        sanitizer.sanitized("racecheck", "delayed scaling", GPU)
    tool = ["/bin/compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "86"]
    assert ran == [(tool, ["gradwire.bench.gpu.sanitizer", "delayed scaling"], "1")] * 2
