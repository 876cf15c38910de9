"""``gradwire run``: an unchanged script trains as with the hook registered in it, and is told what happened."""

import gc
import math
import os
import random
import re
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.cli import run, run_advise, run_compression, run_report
from gradwire.hooks.default_hooks import fp16_compress_hook
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.planner import link_probe, model_probe, probe
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import JobError
from gradwire.planner.model import Overlap
from gradwire.planner.model_probe import STEPS, ScriptProbe
from gradwire.sharded import ReduceScatterOptions
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, SMALLEST, build, gradients, train, train_steps

HANG_LIMIT = 600  # seconds

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print(f"{__name__} {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""


def call(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("hook", ["int4", "fp16", "powersgd-r4", "scaled-fp16"])
@on_ranks(2)
def test_unchanged_loop_has_the_bits_of_the_registered_hook(hook):
    with run_compression.compressed(hook) as made:
        unchanged = train("pytorch", "mlp", steps=12, bucket_cap_mb=SMALL)
    registered = train("pytorch", "mlp", hook=HOOKS[hook].make(None, 2), steps=12, bucket_cap_mb=SMALL)
    assert_same_bits(unchanged, registered)
    (compression,) = made
    assert compression.n_steps == 12
    assert f"gradwire run: {hook} on Mlp" in run_report.report(made)


# --- auto


def steps_of(ddp, number):
    """Gradients of some steps; each draws its batch from the default generator."""
    seen = []
    for _ in range(number):
        ddp.zero_grad()
        ddp(torch.randn(4, next(ddp.parameters()).shape[1])).backward()
        seen.append(gradients(ddp))
    return seen


def advice(hook):
    return SimpleNamespace(recommended=hook, headline=f"Use {hook}", reason="because")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_auto_sends_in_full_while_it_measures_and_then_takes_the_recommended_hook(options):
    seed = 7 + dist.get_rank()
    plain = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL, **options)
    torch.manual_seed(seed)
    expected = steps_of(plain, STEPS + 4)
    with (
        run_compression.compressed("auto") as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("int4")),
    ):
        ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL, **options)
        torch.manual_seed(seed)
        found = steps_of(ddp, STEPS + 4)
    assert_same_bits(found[: STEPS + 2], expected[: STEPS + 2])  # int4 begins with two plain steps
    assert differences(found[-1], expected[-1])
    assert_same_on_all_ranks(from_all_ranks(found))
    (compression,) = made
    assert (compression.hook_name, compression.first_compressed) == ("int4", STEPS + 2)
    text = run_report.report(made)
    assert "gradwire run: int4 on Mlp" in text and "auto: Use int4: because" in text


@pytest.mark.parametrize("start", [2, STEPS + 5])
@on_ranks(2)
def test_auto_does_not_compress_before_the_start_step(start):
    with (
        run_compression.compressed("auto", start=start) as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("int8")),
    ):
        ddp = DistributedDataParallel(build("mlp"))
        steps_of(ddp, STEPS + 1)
    assert made[0]._state.options.start_iter == max(start, STEPS + 2) - STEPS
    assert "nothing was compressed: that begins after" in run_report.report(made)


@on_ranks(2)
def test_auto_measures_the_script_and_prints_its_choice_on_rank_0():
    with mock.patch("builtins.print") as printed, run_compression.compressed("auto", measure=100) as made:
        steps_of(DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL), STEPS + 1)
    texts = [call.args[0] for call in printed.mock_calls]
    assert len(texts) == (dist.get_rank() == 0)
    assert all(text.startswith(("gradwire run: Mlp: auto: Use ", "gradwire run: Mlp: auto: Do not")) for text in texts)
    assert from_all_ranks(made[0].summary) == [made[0].summary] * 2


@pytest.mark.parametrize("reason", ["recommended", "one rank", "subgroup"])
@on_ranks(2)
def test_auto_sends_in_full_if_no_hook_is_worthwhile_or_none_can_be_measured(reason):
    own, _ = dist.new_subgroups(group_size=1)
    group = own if reason == "subgroup" else None
    plain = DistributedDataParallel(build("mlp"), process_group=group)
    torch.manual_seed(0)
    expected = steps_of(plain, STEPS + 4)
    with (
        run_compression.compressed("auto", measure=100) as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("none")),
    ):
        ddp = DistributedDataParallel(build("mlp"), process_group=group)
        failure = mock.patch.object(run_compression, "measured_script", side_effect=JobError("one rank"))
        with failure if reason == "one rank" else nullcontext():
            torch.manual_seed(0)
            assert_same_bits(steps_of(ddp, STEPS + 4), expected)
    texts = {"recommended": "because", "one rank": "one rank", "subgroup": "the model has 1 of 2 ranks"}
    lines = run_report.report(made).splitlines()
    assert lines[0].startswith("gradwire run: auto on Mlp")
    assert lines[-1].startswith("  auto: ") and lines[-1].endswith(texts[reason])


@on_ranks(2)
def test_auto_keeps_gradients_and_random_numbers_of_the_script():
    with run_compression.compressed("auto"):
        ddp = DistributedDataParallel(build("mlp"))
        steps_of(ddp, STEPS)
        kept, numbers = [parameter.grad for parameter in ddp.parameters()], torch.get_rng_state()
        values = gradients(ddp)
        ddp(torch.ones(4, next(ddp.parameters()).shape[1]))  # measures
    assert [id(parameter.grad) for parameter in ddp.parameters()] == [id(each) for each in kept]
    assert_same_bits(gradients(ddp), values)
    assert torch.equal(torch.get_rng_state(), numbers)


@on_ranks(2)
def test_auto_refuses_sharded_models():
    model = fully_shard(build("mlp"), mesh=init_device_mesh("cpu", (2,)))
    with (
        run_compression.compressed("auto"),
        pytest.raises(ValueError, match="--hook auto measures models of Distributed"),
    ):
        model(*model.batch(torch.Generator()))


@on_ranks(2)
def test_hook_of_the_script_wins():
    with run_compression.compressed("int4") as made:
        ddp = DistributedDataParallel(build("mlp"))
        with pytest.warns(
            run_compression.HookReplacedWarning, match=r"registers fp16_compress_hook on its Mlp.*--hook int4"
        ):
            ddp.register_comm_hook(None, fp16_compress_hook)
        own = train_steps(ddp, 3)
        with pytest.raises(RuntimeError, match="called twice"):
            ddp.register_comm_hook(None, fp16_compress_hook)
    plain = DistributedDataParallel(build("mlp"))
    plain.register_comm_hook(None, fp16_compress_hook)
    assert_same_bits(own, train_steps(plain, 3))
    assert "not used" in run_report.report(made)


def test_gradwires_class_and_later_wrappers_are_left_alone(world_of_one):
    with run_compression.compressed("int4") as made:
        gradwire.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert made == []
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert len(made) == 1
    DistributedDataParallel(torch.nn.Linear(2, 2))
    assert len(made) == 1, "the class is as before"
    assert ddp._comm_hooks == [], "a copy or a pickle of the model holds no state of the hook"
    del ddp
    gc.collect()
    assert made[0]._state is None, "its error memory is freed with the model"


def train_sharded(mesh_shape, compress=lambda model: None):
    """Gradients of the last step of a model sharded over a mesh of ``mesh_shape``, and of its replicas."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    compress(model)
    for step in range(24):
        model.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("hook", "within"), [("int8", "int8"), ("int4", ReduceScatterOptions(wire="int4"))], ids=["int8", "int4"]
)
@on_ranks(2)
def test_unchanged_loop_of_fsdp2_has_the_bits_of_attach(hook, within):
    with run_compression.compressed(hook) as made:
        unchanged = train_sharded((2,))
    assert_same_bits(unchanged, train_sharded((2,), lambda model: gradwire.attach(model, within=within)))
    (compression,) = made
    assert compression.n_steps == 24
    assert f"2 parameter groups are reduce-scattered in {hook}" in run_report.report(made)


@on_ranks(2)
def test_unchanged_loop_of_hsdp_has_the_bits_of_attach():
    with run_compression.compressed("int4") as made:
        unchanged = train_sharded((2, 1))
    attached = train_sharded((2, 1), lambda model: gradwire.attach(model, QuantizationState(wire="int4")))
    assert_same_bits(unchanged, attached)
    text = run_report.report(made)
    assert "2 ranks, 24 steps" in text and "times fewer bytes" in text
    assert made[0].metrics["step"] == [12, 22], "one step in ten, after two plain ones"
    assert set(made[0].metrics["gradient_bytes"]) == {4 * 2 * (64 * 64 + 64)}
    assert "speed                not measured" in text and "compare with the step time without gradwire" in text
    assert "quantization_hook compresses the all-reduce of 2 parameter groups" in text


@on_ranks(2)
def test_hook_that_fsdp_cannot_use_raises_with_the_choices():
    with (
        run_compression.compressed("powersgd-r4"),
        pytest.raises(ValueError, match=r"--hook powersgd-r4 .* one of bf16, fp16, int8"),
    ):
        train_sharded((2,))


@on_ranks(2)
def test_stretches_alternate_without_telemetry_and_give_an_interval():
    first, n_steps = 2 + run_compression.WARM_UP, 100
    sent = []
    plain = mock.Mock(wraps=torch_hooks.allreduce_hook)
    own_seconds, plain_seconds, slow, elsewhere = 0.003, 0.007, 9.0, 0.005
    now = 0.0
    with ExitStack() as stack:
        made = stack.enter_context(run_compression.compressed("int4", measure=n_steps))
        stack.enter_context(mock.patch.object(run_compression.torch_hooks, "allreduce_hook", plain))
        stack.enter_context(mock.patch.object(run_compression, "time", SimpleNamespace(perf_counter=lambda: now)))
        ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=1)
        observed = []
        for step in range(first + n_steps + 12):
            n_sent = plain.call_count
            train_steps(ddp, 1)
            sent.append(plain.call_count)
            observed.append(made[0]._state.telemetry is not None)
            if first <= step < first + n_steps:  # the first step of a stretch is slow
                seconds = plain_seconds if plain.call_count > n_sent else own_seconds
                now += seconds if (step - first) % run_compression.STRETCH else slow
            else:
                now += elsewhere
    (compression,) = made
    kinds = [False, True, True, False] * 2 + [False, True]
    assert [kind for kind, _ in compression.stretches] == kinds
    expected = [own_seconds if kind else plain_seconds for kind in kinds]
    assert [seconds for _, seconds in compression.stretches] == pytest.approx(expected, rel=1e-6)
    assert compression.step_seconds == pytest.approx([elsewhere] * len(compression.step_seconds), rel=1e-6)
    # The steps of the state, which has seen every second stretch only.
    assert compression.metrics["step"] == [12, 22, first + n_steps // 2 + 10]
    is_plain = [after > before for before, after in zip([0, *sent], sent, strict=False)]
    tens = [
        is_plain[at : at + run_compression.STRETCH] for at in range(first, first + n_steps, run_compression.STRETCH)
    ]
    assert [set(each) for each in tens] == [{not kind} for kind in kinds]
    assert not any(is_plain[:first] + is_plain[first + n_steps :])
    assert not any(observed[first : first + n_steps])
    assert len(compression.metrics["step"]) == 3, "two before, one after"
    text = run_report.report(made)
    assert "not measured" not in text and re.search(r"time of a step +5 ms\n", text)
    own, other, gain, low, high = re.search(
        r"faster: (\S+) ms a step without int4, (\S+) ms with it, (\S+) times as fast "
        r"\(95 % interval (\S+) to (\S+), 5 pairs of 10 steps\)$",
        text,
    ).groups()
    assert (own, other, gain) == ("7", "3", "2.33")
    assert float(low) <= float(gain) <= float(high)
    assert float(own) / float(other) == pytest.approx(float(gain), rel=0.02)


def stretches_of(gains):
    """Plain and compressed stretches in the order of a run; each pair has another pace, and the logarithm of its ratio
    is its gain.
    """
    pairs = [((False, 0.3 + 0.1 * i), (True, (0.3 + 0.1 * i) * math.exp(-gain))) for i, gain in enumerate(gains)]
    return [each for i, pair in enumerate(pairs) for each in (pair if i % 2 == 0 else pair[::-1])]


def test_speed_up_is_the_mean_of_the_pairs_with_students_interval():
    found = run_report.speed_up(stretches_of([0.1, 0.3, 0.2, 0.25, 0.15]))
    assert math.log(found.ratio) == pytest.approx(0.2)
    # The standard deviation is sqrt(0.025 / 4), and the 97.5 % quantile 2.776 with 4 degrees of freedom.
    half = 2.776 * math.sqrt(0.025 / 4) / math.sqrt(5)
    assert math.log(found.low) == pytest.approx(0.2 - half, rel=0.01)
    assert math.log(found.high) == pytest.approx(0.2 + half, rel=0.01)
    assert found.plain == pytest.approx((0.3 * 0.4 * 0.5 * 0.6 * 0.7) ** (1 / 5))
    assert found.own == pytest.approx(found.plain / found.ratio)
    assert found.pairs == 5
    assert run_report.speed_up(stretches_of([0.1, 0.3, 0.2, 0.25])) is None, "four pairs are too few"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.25, 0.15], r"  measured             faster: .* 1.22 times as fast \(.*\)$"),
        ([-0.1, -0.3, -0.2, -0.25, -0.15], r"  measured             slower: .* 0.819 times as fast \(.*\)$"),
        # The standard deviation is sqrt(0.178 / 4), so 20 (2.8 * 0.211 / 0.07)^2 = 1,424 steps.
        (
            [0.3, -0.1, 0.2, -0.2, 0.15],
            r"  measured             no difference shown: .* 1.07 times as fast \(95 % interval 0.82[56] to 1.39, "
            r"5 pairs of 10 steps\); about 1,500 steps would decide it: --measure 1500$",
        ),
        (
            [0.25, -0.25, 0.5, -0.5, 0.0],
            r"  measured             no difference shown: .*\); not even 1,000,000 steps would decide it$",
        ),
    ],
    ids=["faster", "slower", "undecided", "equal"],
)
def test_report_begins_with_the_answer_that_the_interval_allows(gains, expected):
    compression = SimpleNamespace(hook_name="int4", comparison_end=123, stretches=stretches_of(gains))
    assert re.match(expected, run_report._speed(compression))


def test_suggested_steps_decide_four_of_five_runs():
    draw, mean, spread = random.Random(0), 0.1, 0.2

    def gains(number):
        return [draw.gauss(mean, spread) for _ in range(number)]

    # Five pairs whose mean and standard deviation are those of the distribution.
    found = run_report.speed_up(stretches_of([mean + spread * each for each in (-1.2, -0.4, -0.4, 0.8, 1.2)]))
    verdicts = [
        run_report.speed_up(stretches_of(gains(found.deciding_steps // (2 * run_compression.STRETCH)))).verdict
        for _ in range(500)
    ]
    assert 0.72 < verdicts.count("faster") / len(verdicts) < 0.88
    assert verdicts.count("slower") < 5


def test_error_at_first_and_at_the_end_are_the_first_and_the_last_measured(world_of_one):
    with run_compression.compressed("int4") as made:
        train_steps(DistributedDataParallel(build("mlp")), 13)
    made[0].release()
    made[0].metrics["residual_ratio"] = [0.5, 0.3, 0.2, 0.1]
    text = run_report.report(made)
    assert "error / gradient     0.5 at first, 0.1 at the end" in text
    assert "1 rank, 13 steps" in text


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (("-m", "gradwire.cli", "run", "--standalone", "--nproc-per-node", "2"), 2),
        (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "gradwire.run"), 1),
    ],
    ids=["gradwire-run", "torchrun"],
)
def test_script_runs_as_main_with_its_arguments_and_a_report(tmp_path, command, processes):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    status, output, errors = call(*command, "--hook", "int4", str(path), "0.1", "--hook")
    assert status == 0, errors
    assert output.count("__main__ ['0.1', '--hook']") == processes
    assert errors.count("gradwire run: ") == 1, "one rank reports"
    assert f"int4 on Linear, 4,160 parameters, {processes} rank{'s' * (processes > 1)}, 25 steps\n" in errors
    assert "speed                not measured: int4 may make steps faster or slower; add --measure 200" in errors
    assert re.search(r"sent in a step +\S+ kB instead of 16.6 kB: \S+ times fewer bytes", errors)
    assert re.search(r"error / gradient +\S+ at first", errors)


def advice_of(ddp_probe):
    """Exit status and output of the advice for a probe, with few measurements of two hooks."""
    few = {"HOOKS": {name: HOOKS[name] for name in ("none", "bf16", "noop")}}
    printed = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(run_advise, **few))
        stack.enter_context(mock.patch.multiple(link_probe, SIZES=(1 << 8, 1 << 12)))
        stack.enter_context(mock.patch.multiple(probe, HOOK_BUDGET=0.0))
        stack.enter_context(
            mock.patch("rich.console.Console.print", lambda _, *text, **__: printed.append(" ".join(map(str, text))))
        )
        end = stack.enter_context(pytest.raises(SystemExit))
        run_advise._advise_script(ddp_probe)
    return end.value, "\n".join(printed)


def probed(ddp, done):
    probe = ScriptProbe(ddp, done, averages=False)
    ddp.register_comm_hook(probe, ScriptProbe.reduce)
    return probe


def trained_probe():
    probes = []
    ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    probed(ddp, probes.append)
    train_steps(ddp, STEPS + 1)
    return probes[0]


@pytest.mark.parametrize(("n_hosts", "nodes"), [(1, "4 ranks on 1 node,"), (2, "4 ranks on 2 nodes,")])
@on_ranks(4)
def test_advise_finds_nodes_by_host_names_without_a_variable_of_the_launcher(n_hosts, nodes):
    host = f"host {dist.get_rank() * n_hosts // 4}"
    with mock.patch.dict(os.environ), mock.patch("socket.gethostname", lambda: host):
        for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
        end, printed = advice_of(trained_probe())
    assert (type(end), end.code) == (run_advise.AdviceGiven, 0)
    assert (f"Network:  {nodes}" in printed) == (dist.get_rank() == 0)
    assert (printed == "") == (dist.get_rank() > 0)


@on_ranks(2)
def test_advise_ends_every_rank_if_a_model_cannot_be_measured():
    failing = mock.Mock(device=torch.device("cpu"))
    failing.model.side_effect = JobError("no gradient") if dist.get_rank() == 1 else None
    with mock.patch("builtins.print") as printed:
        end, _ = advice_of(failing)
    assert end.code == 1
    assert [call.args for call in printed.mock_calls] == [("gradwire run: On rank 1: no gradient",)] * (
        dist.get_rank() == 0
    )


@on_ranks(2)
def test_advise_measures_the_first_model_of_all_ranks_and_ignores_its_hook():
    own, _ = dist.new_subgroups(group_size=1)
    with mock.patch.object(run_advise, "ScriptProbe", reduce=ScriptProbe.reduce) as made, run_advise.advised():
        DistributedDataParallel(build("mlp"), process_group=own)
        gradwire.DistributedDataParallel(build("mlp"))
        assert made.mock_calls == []
        ddp = DistributedDataParallel(build("mlp"))
        ddp.register_comm_hook(None, fp16_compress_hook)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        DistributedDataParallel(build("mlp"))
    made.assert_called_once_with(ddp, run_advise._advise_script, averages=False)
    DistributedDataParallel(build("mlp"))
    assert made.call_count == 1, "the class is as before"


class Tick(torch.autograd.Function):
    """Lets a clock run in the forward and in the backward."""

    @staticmethod
    def forward(context, values, clock, forward, backward):
        context.clock, context.seconds = clock, backward
        clock[0] += forward
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        context.clock[0] += context.seconds
        return gradient, None, None, None


def test_probe_counts_times_of_buckets_from_the_begin_of_the_backward(world_of_one, monkeypatch):
    clock = [0.0]

    class Mark:
        def __init__(self, device):
            self.seconds = clock[0]

        def milliseconds_since(self, earlier):
            return 1e3 * (self.seconds - earlier.seconds)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, values):
            return self.second(Tick.apply(self.first(values), clock, 40, 20))

    monkeypatch.setattr(model_probe, "Mark", Mark)
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALLEST)
    ddp_probe = probed(ddp, lambda _: None)
    for _ in range(STEPS + 1):
        output = ddp(torch.ones(1, 4))
        clock[0] += 1  # the loss
        output.sum().backward()
        clock[0] += 3  # the optimizer
    cost, buckets = ddp_probe.model(Overlap.NOTHING)
    names = [name for spec in buckets.specs for name in spec.names]
    assert names == ["second.bias", "second.weight", "first.bias", "first.weight"]
    assert cost.forward == pytest.approx(40)
    assert cost.ready == pytest.approx((1, 1, 21, 21))
    assert cost.backward == pytest.approx(21)
    assert cost.optimizer == pytest.approx(3)


def test_advise_says_that_a_script_is_too_short(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(0)")
    with pytest.raises(SystemExit) as end:
        run.main(["--advise", str(path)])
    assert end.value.code == 1
    assert "the script ended before the 14 steps" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 3])
def test_script_without_ddp_is_told_so_and_keeps_its_exit_status(tmp_path, status):
    path = tmp_path / "train.py"
    path.write_text("import helper\nraise SystemExit(helper.STATUS)")
    (tmp_path / "helper.py").write_text(f"STATUS = {status}")
    code, _, errors = call("-m", "gradwire.run", "--hook", "int4", str(path))
    assert code == status
    assert ("trained no model of torch.nn.parallel.DistributedDataParallel" in errors) == (status == 0)


def test_module_and_error_of_a_script_are_as_without_it(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text(
        "import sys\nprint(__name__, sys.argv[1:])\nraise ValueError('of the script')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output, errors = call("-m", "gradwire.run", "--hook", "int4", "-m", "training", "-x")
    assert (code, output) == (1, "__main__ ['-x']\n")
    assert errors.endswith("ValueError: of the script\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "one of the arguments --hook --advise is required"),
        (["train.py", "--hook", "int4"], "--hook stands after the script's name, so it is an option of the script."),
        (["train.py", "--hook=int4"], "script's name: python -m gradwire.run --hook int4 train.py"),
        (["-m", "training", "x", "--advise"], "--advise stands after the script's name"),
        (["--hook", "int4", "--advise", "train.py"], "--advise: not allowed with argument --hook"),
        (["--hook", "int5", "train.py"], "invalid choice: 'int5'"),
        (["--hook", "int4", "--measure", "20", "train.py"], "'20' is not a whole number of steps, at least 100"),
        (["--hook", "powersgd-r4", "--start", "1", "train.py"], "at least 2"),
        (["--hook", "int4"], "required: SCRIPT"),
        (["--hook", "int4", "absent.py"], "there is no script absent.py"),
    ],
)
def test_bad_options_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert message in capsys.readouterr().err


def test_options_after_the_script_are_refused_by_the_launcher(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.launch(["--nproc-per-node", "2", "train.py", "--hook", "int4"])
    assert "stand before the script's name: gradwire run --hook int4 train.py" in capsys.readouterr().err
