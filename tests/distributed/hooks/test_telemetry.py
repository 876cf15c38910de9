"""Telemetry: measuring a step changes no bit of it, and the numbers are those of the formulas."""

import gc
import json
import math
import os
import subprocess
import sys
import weakref
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

import gradwire
from gradwire.comm import LocalTransport, clock, run_algorithm
from gradwire.exchange import handshake, hook_state, telemetry
from gradwire.exchange.telemetry import Sample, Timeline, to_jsonl, to_tensorboard, to_wandb
from gradwire.hooks.default_hooks import CastState, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from tests.support.bits import assert_same_bits
from tests.support.harness import ENVIRONMENT
from tests.support.ranks import on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    SMALLEST,
    WRAPPERS,
    FailsInBackward,
    error_of,
    logged,
    own_batches,
    train,
    train_steps,
    wrapped,
)
from tests.support.zoo import Probe, SparseTable

STATEFUL = ["bf16_in_fp32", "scaled_fp16", "int4", "powersgd", "powersgd_alternating"]
COUNTS = {"step", "gradient_bytes", "sent_bytes", "compression_ratio", "uncompressed_buckets"}
TIMES = {"encode_ms", "wire_ms", "decode_ms"}
COMPARISON = {"gain", "cosine", "relative_error"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["allreduce", *STATEFUL])
@on_ranks(2, 3)
def test_measured_steps_have_the_same_bits(hook, wrapper):
    reports = []
    state, function = HOOKS[hook](None)
    state = CastState() if state is None else state
    state.observe(every=1, exact_every=2, report=lambda metrics: reports.append(dict(metrics)))
    observed = train(wrapper, "odd", hook=(state, function), steps=5, bucket_cap_mb=SMALL)
    assert_same_bits(observed, train(wrapper, "odd", hook=hook, steps=5, bucket_cap_mb=SMALL))
    assert state.metrics() == reports[-1]
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 5]
    for report in reports:
        names = set(report)
        assert names >= COUNTS | TIMES
        assert (names >= COMPARISON) == (report["step"] % 2 == 0)
        assert all(report[name] >= 0 for name in TIMES)
        assert report["encode_ms"] > 0


@pytest.mark.parametrize("hook", STATEFUL)
@on_ranks(2)
def test_measuring_that_begins_or_ends_during_training_changes_no_bit(hook):
    runs = []
    for is_observed in (True, False):
        state, function = HOOKS[hook](None)
        ddp, generator = wrapped(hook=(state, function)), own_batches()
        seen = train_steps(ddp, 4, generator)
        if is_observed:
            state.observe(every=2, exact_every=3)
        seen += train_steps(ddp, 4, generator)
        if is_observed:
            state.stop_observing()
        runs.append(seen + train_steps(ddp, 2, generator))
    assert_same_bits(*runs)


@pytest.mark.parametrize("has_dense_layer", [True, False])
@on_ranks(2, 3)
def test_sparse_gradients_are_counted_as_uncompressed(has_dense_layer):
    state = QuantizationState(None, "int8")
    ddp = gradwire.DistributedDataParallel(SparseTable(has_dense_layer))
    ddp.register_comm_hook(state, quantization_hook)
    state.observe(every=1, exact_every=1)
    ddp(*ddp.module.batch(dist.get_rank())).backward()
    metrics = state.metrics()
    sparse = 4 * 8 * 4 + 4 * 8  # values and indices
    assert metrics["gradient_bytes"] == metrics["sent_bytes"] == sparse + has_dense_layer * 8 * 8 * 4
    assert metrics["uncompressed_buckets"] == 1 + has_dense_layer
    assert metrics.get("cosine", 1) == pytest.approx(1, abs=1e-6)


def one_matrix(state, hook, steps=1):
    """A run on one 16 x 16 matrix with gradients that differ by rank: metrics, result and exact mean of each step."""
    ddp = wrapped(model=torch.nn.Linear(16, 16, bias=False), hook=(state, hook))
    state.observe(every=1, exact_every=1)
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        batches = [
            torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            for rank in range(dist.get_world_size())
        ]
        ddp(batches[dist.get_rank()]).square().sum().backward()
        with torch.no_grad():
            sums = [2 * ddp.module(batch).double().t() @ batch.double() for batch in batches]
        seen.append((state.metrics(), ddp.module.weight.grad.double(), sum(sums) / len(batches)))
    return seen


@on_ranks(2, 3)
def test_metrics_of_cast_hook_follow_the_formulas():
    ((metrics, applied, exact),) = one_matrix(CastState(), fp16_compress_hook)
    assert metrics["gradient_bytes"] == 256 * 4
    assert metrics["sent_bytes"] == 256 * 2
    assert metrics["compression_ratio"] == 2
    assert metrics["uncompressed_buckets"] == 0
    assert metrics["cosine"] == pytest.approx(1, abs=1e-6)
    error = float((applied - exact).norm() / exact.norm())
    # The exact mean is summed in fp32 by the hook and in fp64 here: 2^-24, compared with fp16's 2^-11.
    assert metrics["relative_error"] == pytest.approx(error, rel=1e-3)


@on_ranks(2, 3)
def test_metrics_of_powersgd_follow_the_formulas():
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    seen = one_matrix(state, powerSGD_hook, steps=4)
    residual = sum(float(error.double().square().sum()) for error in state.memory.residuals()) ** 0.5
    for metrics, _, _ in seen[:2]:  # the plain all-reduce
        assert metrics["uncompressed_buckets"] == 1
        assert metrics["compression_ratio"] == 1
        assert metrics["cosine"] == pytest.approx(1, abs=1e-6)
    for metrics, applied, exact in seen[2:]:
        assert metrics["uncompressed_buckets"] == 0
        assert metrics["sent_bytes"] == (16 + 16) * 4
        cosine = float((applied * exact).sum() / applied.norm() / exact.norm())
        assert metrics["cosine"] == pytest.approx(cosine, rel=1e-4)
        assert metrics["gain"] == pytest.approx(float((applied * exact).sum() / exact.norm() ** 2), rel=1e-4)
        assert metrics["cosine"] < 0.999
    metrics, applied, _ = seen[-1]
    assert metrics["residual_ratio"] == pytest.approx(residual / float(applied.norm()), rel=1e-4)
    (error,) = state.memory.residuals()
    dist.all_reduce(error)
    ratio = float(error.double().norm() / dist.get_world_size() / seen[-1][2].norm())
    assert metrics["delayed_ratio"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("wire", ["int4", "int2"])
@on_ranks(2, 3)
def test_delayed_ratio_of_quantization_counts_both_shots_of_all_ranks(wire):
    state = QuantizationState(None, wire)
    *_, (metrics, _, exact) = one_matrix(state, quantization_hook, steps=4)
    total = state.state_dict()["errors"]["weight"].double()  # the sum over the ranks
    assert metrics["delayed_ratio"] == pytest.approx(float(total.norm() / exact.norm()), rel=1e-3)


@on_ranks(2)
def test_gradients_that_mostly_arrive_late_are_logged_once_by_the_first_rank():
    with logged("gradwire.exchange.telemetry") as records:
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        one_matrix(state, powerSGD_hook, steps=12)
    assert len(records) == (dist.get_rank() == 0)
    for record in records:
        message = record.getMessage()
        assert message.startswith("powerSGD_hook: in step ")
        assert "Raise the rank" in message


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["int4", "powersgd"])
@on_ranks(2)
def test_comparison_of_some_elements_estimates_that_of_all(hook, wrapper):
    seen = []
    for compared_numel in (telemetry.COMPARED_NUMEL, 1500):
        with mock.patch.object(telemetry, "COMPARED_NUMEL", compared_numel):
            state, function = HOOKS[hook](None)
            torch.manual_seed(0)
            ddp = wrapped(wrapper, torch.nn.Linear(96, 80), hook=(state, function))
            state.observe(every=1, exact_every=1)
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(4):
                ddp(torch.randn(16, 96, generator=generator)).square().sum().backward()
            seen.append(state.metrics())
    every, some = seen
    for name in ("gain", "cosine", "relative_error", "delayed_ratio"):
        # A share of 1500 / 7760: the standard error of a mean of squares of normal numbers is 4 %.
        assert some[name] == pytest.approx(every[name], rel=0.15)
        assert some[name] != every[name]


def test_compared_elements_are_different_ones_and_stand_for_all():
    tensors = [torch.arange(1.0, 5001.0), torch.ones(3, dtype=torch.bfloat16), torch.ones(70, 50).t(), torch.ones(0)]
    assert torch.equal(telemetry.compared(tensors), torch.cat([tensor.reshape(-1).float() for tensor in tensors]))
    with mock.patch.object(telemetry, "COMPARED_NUMEL", 1000):
        chosen = telemetry.compared(tensors)
    assert chosen.dtype == torch.float32
    assert 1000 <= len(chosen) <= 1003
    assert chosen.square().sum() == pytest.approx(sum(float(each.double().square().sum()) for each in tensors), rel=0.1)
    n = math.ceil(5000 / (8503 / 1000))
    assert len(set((chosen[:n] / (5000 / n) ** 0.5).round().tolist())) == n


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_low", [True, False])
@on_ranks(2)
def test_state_that_nobody_observes_warns_of_gradients_that_arrive_late(wrapper, is_low):
    with ExitStack() as stack:
        records = stack.enter_context(logged("gradwire.exchange.telemetry"))
        measured = stack.enter_context(
            mock.patch.object(Sample, "measured", autospec=True, side_effect=Sample.measured)
        )
        seen = []
        for every in (4, 10**9):
            stack.enter_context(mock.patch.object(hook_state, "CHECK_EVERY", every))
            rank = 1 if is_low else 16
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=5, min_compression_rate=0.1)
            ddp, generator = wrapped(wrapper, Probe((16, 16)), hook=(state, powerSGD_hook)), own_batches()
            for _ in range(18):
                ddp.zero_grad()
                ddp(torch.randn(16, 16, generator=generator)).backward()
                seen.append(ddp.module.weights[0].grad.clone())
            with pytest.raises(RuntimeError, match="not measured"):
                state.metrics()
    assert_same_bits(seen[:18], seen[18:])
    assert measured.call_count == 3  # of steps 8, 12, 16; step 4 is a plain one
    assert len(records) == (is_low and dist.get_rank() == 0)
    for record in records:
        assert record.getMessage().startswith("powerSGD_hook: in step 8, the error memory is ")


@on_ranks(2)
def test_check_of_errors_needs_no_handshake_and_leaves_observers_alone():
    with mock.patch.object(hook_state, "CHECK_EVERY", 2):
        state, function = HOOKS["int4"](None)
        ddp, generator = wrapped(hook=(state, function)), own_batches()
        train_steps(ddp, 3, generator)
        with mock.patch.object(handshake, "compare_settings") as compared:
            train_steps(ddp, 4, generator)
        assert not compared.called
        reports = []
        state.observe(every=1, report=lambda metrics: reports.append(dict(metrics)))
        train_steps(ddp, 2, generator)
        state.stop_observing()
        assert ["gain" in report for report in reports] == [False, False]
        train_steps(ddp, 2, generator)


def second_step(hook, gradients_of_ranks):
    """Metrics of a second step with a list of gradients for each rank, one bucket for each matrix."""
    state, function = hook
    own = gradients_of_ranks[dist.get_rank()]
    model = Probe(*(gradient.shape for gradient in own), dtype=own[0].dtype)
    ddp = gradwire.DistributedDataParallel(model, bucket_cap_mb=SMALLEST)
    ddp.register_comm_hook(state, function)
    state.observe(every=1, exact_every=1)
    for _ in range(2):  # the first step ends with a bucket for each matrix
        ddp.zero_grad()
        ddp(*own).backward()
    return state.metrics()


@pytest.mark.parametrize("has_large_bucket", [False, True])
@on_ranks(2, 3)
def test_bucket_that_sends_more_than_its_gradients_counts_as_uncompressed(has_large_bucket):
    # A rank's cell of a 2 x 2 matrix has a header and a scale, of 16 bytes each, and a block of 64: 96 bytes. A matrix
    # of 192 n x 64 has 192 blocks in each of n cells: a header, 192 scales of 2 bytes and 192 blocks of 64.
    n, hook = dist.get_world_size(), (QuantizationState(None, "int8", start_iter=0), quantization_hook)
    metrics = second_step(hook, [[torch.ones(2, 2), *[torch.ones(192 * n, 64)] * has_large_bucket]] * n)
    assert metrics["gradient_bytes"] == 16 + 192 * n * 64 * 4 * has_large_bucket
    assert metrics["sent_bytes"] == 96 * n + (16 + 384 + 192 * 64) * n * has_large_bucket
    assert metrics["compression_ratio"] == metrics["gradient_bytes"] / metrics["sent_bytes"]
    assert metrics["uncompressed_buckets"] == 1


def test_times_of_a_bucket_are_split_at_the_collectives(monkeypatch):
    # Begin and end of each part between collectives, in seconds.
    times = iter([0.0, 2.0, 5.0, 12.0, 13.0, 18.0])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    transport, timeline = LocalTransport(), Timeline(torch.device("cpu"))

    async def two_collectives():
        await transport.all_reduce(torch.zeros(3))
        await transport.all_reduce(torch.zeros(5))

    run_algorithm(timeline.measured(two_collectives()), transport)
    encode, wire, decode = timeline.milliseconds()
    assert (encode, wire, decode) == (1e3 * (2 + 7), 1e3 * (3 + 1), 1e3 * 5)
    assert timeline.sent_bytes == 4 * (3 + 5)


# --- which steps are measured


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_step_of_a_resumed_run_is_that_of_the_state(wrapper):
    before = QuantizationState(None, "int8")
    train_steps(wrapped(wrapper, hook=(before, quantization_hook)), 4)
    state, reports = QuantizationState(None, "int8"), []
    for bucket_cap_mb in (25, SMALL):  # one bucket and several
        ddp = wrapped(wrapper, hook=(state, quantization_hook), bucket_cap_mb=bucket_cap_mb)
        state.load_state_dict(before.state_dict())
        state.observe(every=2, report=lambda metrics: reports.append(metrics["step"]))
        train_steps(ddp, 4)
        state.stop_observing()
        assert state.iter == 8
        state = QuantizationState(None, "int8")
    assert reports == [6, 8, 6, 8]


def test_metrics_without_observe_raise_and_without_a_model_warn():
    for state in (CastState(), ScaledCastState(), QuantizationState(None), PowerSGDState(None)):
        with pytest.raises(RuntimeError, match=r"Call state.observe\(\) on every rank"):
            state.metrics()
        state.observe()
        for call in (state.metrics, state.stop_observing):
            with pytest.warns(UserWarning, match="State is observed, but has no model.*register_comm_hook"):
                call()
        with pytest.raises(RuntimeError, match="is not measured"):
            state.metrics()


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"every": True}, {"exact_every": -1}])
def test_observe_rejects_steps_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; expected a whole number of steps"):
        CastState().observe(**options)


@pytest.mark.parametrize("how", ["number", "phase"])
@on_ranks(2, 3)
def test_unequal_telemetry_raises_on_every_rank(how):
    rank, state = dist.get_rank(), QuantizationState(None)
    if how == "number":
        state.observe(exact_every=5 + rank)
    elif rank == 0:
        state.observe(exact_every=5)
    kind, message = error_of(train_steps, wrapped(hook=(state, quantization_hook)))
    assert kind == "RuntimeError"
    assert "exact_every of observe()" in message


@pytest.mark.parametrize("hook", ["bf16_in_fp32", "int4"])
@on_ranks(2, 3)
def test_telemetry_continues_after_failed_step(hook):
    state, function = HOOKS[hook](None)
    reports, failures = [], []
    state.observe(every=1, exact_every=3, report=lambda metrics: reports.append("cosine" in metrics))
    ddp = wrapped(hook=(state, function))
    for step in range(9):
        with ExitStack() as stack:
            if step == 4 and dist.get_rank() == 0:
                hooked = ddp.module.layers[2].register_forward_hook(lambda _, __, output: FailsInBackward.apply(output))
                stack.callback(hooked.remove)
            failure = error_of(train_steps, ddp)
        if failure is not None:
            failures.append(step)
            ddp.resynchronize()
    state.metrics()
    assert failures == [4]
    third = [False, False, True]
    assert reports == [*third, False, *third, False], "all ranks count anew after the fault"


# --- where the numbers go


class FullDiskError(Exception):
    pass


@pytest.mark.parametrize("hook", ["bf16_in_fp32", "int4"])
@on_ranks(2)
def test_report_that_raises_is_logged_once_and_changes_no_bit(hook):
    state, function = HOOKS[hook](None)
    called, n_failures = [], 3

    def report(metrics):
        called.append(metrics["step"])
        if len(called) <= n_failures:
            raise FullDiskError("no space left")

    state.observe(every=1, report=report if dist.get_rank() == 0 else None)
    with logged(telemetry.logger.name) as records:
        observed = train("gradwire", "mlp", hook=(state, function), steps=5)
        state.stop_observing()
    assert_same_bits(observed, train("gradwire", "mlp", hook=hook, steps=5))
    assert called == [1, 2, 3, 4, 5] * (dist.get_rank() == 0)
    assert [record.levelname for record in records] == ["WARNING"] * (dist.get_rank() == 0)
    for record in records:
        assert "The report passed to observe() failed in step 1" in record.getMessage()
        assert record.exc_info[0] is FullDiskError


@pytest.mark.parametrize("holder", ["state", "report"])
def test_last_step_is_reported_when_the_state_is_released(holder, world_of_one):
    """Also if the report holds the state, as a method of a trainer does."""
    state, reports = QuantizationState(None, "int8"), []
    kept = state if holder == "report" else None

    def report(metrics, state=kept):
        reports.append(metrics["step"])

    ddp = wrapped(hook=(state, quantization_hook))
    state.observe(every=1, report=report)
    train_steps(ddp, 3)
    assert reports == [1, 2]
    released = weakref.ref(state)
    del state, ddp, kept, report
    gc.collect()
    assert released() is None
    assert reports == [1, 2, 3]


UNTIL_EXIT = """
import sys
import torch
import torch.distributed as dist
import gradwire
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks import to_jsonl

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = gradwire.DistributedDataParallel(torch.nn.Linear(8, 8))
state = QuantizationState()
model.register_comm_hook(state, quantization_hook)
unused = QuantizationState()
unused.observe()
state.observe(every=1, report=to_jsonl(sys.argv[1]))
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
if sys.argv[2] == "fails":
    raise ValueError("of the script")
"""


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_last_step_is_reported_at_exit(tmp_path, how):
    path = tmp_path / "folder" / "metrics.jsonl"
    command = [sys.executable, "-c", UNTIL_EXIT, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | ENVIRONMENT)
    assert done.returncode == (how == "fails"), done.stderr
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert done.stderr.count("QuantizationState is observed, but has no model") == 1, done.stderr
    assert ("Traceback" in done.stderr) == (how == "fails")


def test_jsonl_report_appends_one_line_per_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, path = to_jsonl("new/folder/metrics.jsonl"), tmp_path / "new/folder/metrics.jsonl"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    report({"step": 1, "wire_ms": 2.5})
    report({"step": 11, "wire_ms": math.inf})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "wire_ms": 2.5},
        {"step": 11, "wire_ms": None},
    ]


@pytest.mark.parametrize("path", ["a_folder", "a_file/metrics.jsonl"])
def test_jsonl_path_that_cannot_be_written_raises_at_the_call(tmp_path, path):
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_file").touch()
    with pytest.raises(OSError, match=path.split("/")[0]):
        to_jsonl(tmp_path / path)


def test_tensorboard_report_writes_scalars_at_the_step():
    writer = mock.Mock()
    to_tensorboard(writer)({"step": 7, "wire_ms": 2.5, "cosine": 0.5})
    assert writer.add_scalar.mock_calls == [mock.call("gradwire/wire_ms", 2.5, 7), mock.call("gradwire/cosine", 0.5, 7)]


def test_wandb_report_logs_all_numbers_at_once_over_the_step():
    run = mock.Mock()
    to_wandb(run, prefix="hook/")({"step": 7, "wire_ms": 2.5})
    run.define_metric.assert_called_once_with("hook/*", step_metric="hook/step")
    assert run.log.mock_calls == [mock.call({"hook/step": 7, "hook/wire_ms": 2.5})]


# --- profiler ranges


@on_ranks(2, 3)
def test_profile_names_reducer_and_hook():
    ddp = wrapped(hook="int4")
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=all_threads) as recorded:
        train_steps(ddp, 4)
    names = {event.key for event in recorded.key_averages()}
    assert {f"gradwire::quantization_hook, bucket 0, part {part}" for part in (1, 2, 3)} <= names
    assert "gradwire::launch bucket 1" in names
    assert "gradwire::wait for buckets" in names
