"""``gradwire run --hook``: an unchanged loop trains as with the hook registered in it, and stretches are compared."""

import gc
import re
from contextlib import ExitStack
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
from gradwire.cli import run_comparison, run_compression, run_report
from gradwire.hooks.default_hooks import fp16_compress_hook
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.planner.hook_registry import HOOKS
from tests.support.bits import assert_same_bits, differences
from tests.support.ranks import on_ranks
from tests.support.training import SMALL, build, train, train_steps


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


@pytest.mark.parametrize("other", ["int8", "none"])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@on_ranks(2)
def test_names_that_differ_between_ranks_raise_on_all(wrap, other):
    hook = "int4" if dist.get_rank() == 0 else other
    with run_compression.compressed(hook), pytest.raises(RuntimeError, match=rf"--hook {other} on rank 1"):
        wrap(torch.nn.Linear(8, 8))(torch.ones(2, 8))


@on_ranks(2)
def test_none_leaves_every_model_as_it_is():
    with run_compression.compressed("none") as made:
        found = train("pytorch", "mlp", steps=3)
    assert made == []
    assert_same_bits(found, train("pytorch", "mlp", steps=3))


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


@on_ranks(2)
def test_models_of_one_class_have_numbers_in_the_report():
    with run_compression.compressed("int8") as made:
        models = [DistributedDataParallel(build(name)) for name in ("mlp", "conv", "mlp", "mlp")]
        for steps, model in enumerate(models, 3):
            train_steps(model, steps)
        with pytest.warns(run_compression.HookReplacedWarning, match="on its Mlp 3, so"):
            models[3].register_comm_hook(None, fp16_compress_hook)
        fully_shard(last := torch.nn.Linear(8, 8))
        last(torch.ones(2, 8))
    heads = re.findall(r"gradwire run: int8 on (.+?), .* (\d+) steps", run_report.report(made))
    assert heads == [("Mlp", "3"), ("ConvNet", "4"), ("Mlp 2", "5"), ("Mlp 3", "6"), ("FSDPLinear", "0")]


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


def train_sharded(mesh_shape, compress=lambda model: None, n_steps=24):
    """Gradients of each step of a model sharded over a mesh of ``mesh_shape``, and of its replicas."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    compress(model)
    seen = []
    for step in range(n_steps):
        model.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        seen.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    return seen


@pytest.mark.parametrize("hook", ["int8", "int4"])
@on_ranks(2)
def test_unchanged_loop_of_fsdp2_has_the_bits_of_attach(hook):
    with run_compression.compressed(hook) as made:
        unchanged = train_sharded((2,))
    assert_same_bits(unchanged, train_sharded((2,), lambda model: gradwire.attach(model, hook)))
    (compression,) = made
    assert compression.n_steps == 24
    compression.release()
    text = run_report.report(made)
    assert f"2 parameter groups are reduce-scattered in {hook}" in text
    bits = int(hook[3:]) + 0.25
    before, sent = compression.metrics["gradient_bytes"][0], compression.metrics["sent_bytes"][0]
    assert before == 4 * 2 * (64 * 64 + 64) and sent == pytest.approx(before * bits / 32, rel=0.15)
    assert re.search(r"sent in a step +\S+ kB instead of 33.3 kB: \S+ times fewer bytes", text)


@pytest.mark.parametrize(("mesh_shape", "first"), [((2,), 0), ((2, 1), 2)], ids=["fsdp", "hsdp"])
@on_ranks(2)
def test_steps_of_sharded_models_alternate_between_compressed_and_exact(mesh_shape, first):
    n_steps, begin = 100, first + run_compression.WARM_UP
    with run_compression.compressed("int8", measure=n_steps) as made:
        seen = train_sharded(mesh_shape, n_steps=begin + n_steps + 3)
    exact = train_sharded(mesh_shape, n_steps=len(seen))
    is_plain = [not differences(own, other) for own, other in zip(seen, exact, strict=True)]
    comparison = made[0].comparison
    kinds = [False, True, True, False] * 2 + [False, True]
    assert [kind for kind, _ in comparison.stretches] == kinds
    stretches = [not kind for kind in kinds for _ in range(run_comparison.STRETCH)]
    assert is_plain == [True] * first + [False] * run_compression.WARM_UP + stretches + [False] * 3
    assert "95 % interval" in run_report.report(made)


@on_ranks(2)
def test_unchanged_loop_of_hsdp_has_the_bits_of_attach():
    with run_compression.compressed("int4") as made:
        unchanged = train_sharded((2, 1))
    attached = train_sharded((2, 1), lambda model: gradwire.attach(model, QuantizationState(wire="int4")))
    assert_same_bits(unchanged, attached)
    made[0].release()
    text = run_report.report(made)
    assert "2 ranks, 24 steps" in text and "times fewer bytes" in text
    assert made[0].metrics["step"] == [12, 22], "one step in ten, after two plain ones"
    assert set(made[0].metrics["gradient_bytes"]) == {4 * 2 * (64 * 64 + 64)}
    assert "speed                not measured: int4 may make" in text
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
    start = 2
    first, n_steps = start + run_compression.WARM_UP, 100
    sent = []
    plain = mock.Mock(wraps=torch_hooks.allreduce_hook)
    own_seconds, plain_seconds, slow, elsewhere = 0.003, 0.007, 9.0, 0.005
    now = 0.0
    with ExitStack() as stack:
        made = stack.enter_context(run_compression.compressed("int4", measure=n_steps))
        stack.enter_context(mock.patch.object(run_compression.torch_hooks, "allreduce_hook", plain))
        for module in (run_compression, run_comparison):
            stack.enter_context(mock.patch.object(module, "time", SimpleNamespace(perf_counter=lambda: now)))
        ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=1)
        observed = []
        for step in range(first + n_steps + 12):
            n_sent = plain.call_count
            train_steps(ddp, 1)
            sent.append(plain.call_count)
            observed.append(made[0]._state.telemetry is not None)
            if first <= step < first + n_steps:  # the first step of a stretch is slow
                seconds = plain_seconds if plain.call_count > n_sent else own_seconds
                now += seconds if (step - first) % run_comparison.STRETCH else slow
            else:
                now += elsewhere if step >= start else plain_seconds
    (compression,) = made
    kinds = [False, True, True, False] * 2 + [False, True]
    assert [kind for kind, _ in compression.comparison.stretches] == kinds
    expected = [own_seconds if kind else plain_seconds for kind in kinds]
    assert [seconds for _, seconds in compression.comparison.stretches] == pytest.approx(expected, rel=1e-6)
    # The time of a step is known when the next one begins, so the last step has none.
    n_timed = run_compression.WARM_UP - 1 + 11
    assert compression.step_seconds == pytest.approx([elsewhere] * n_timed, rel=1e-6)
    # The steps of the state, which has seen every second stretch only.
    assert compression.metrics["step"] == [12, 22, first + n_steps // 2 + 10]
    is_plain = [after > before for before, after in zip([0, *sent], sent, strict=False)]
    tens = [is_plain[at : at + run_comparison.STRETCH] for at in range(first, first + n_steps, run_comparison.STRETCH)]
    assert [set(each) for each in tens] == [{not kind} for kind in kinds]
    assert not any(is_plain[:first] + is_plain[first + n_steps :])
    assert not any(observed[first : first + n_steps])
    assert len(compression.metrics["step"]) == 3, "two before, one after"
    text = run_report.report(made)
    assert compression._state is not None, "a report only reads"
    assert "not measured" not in text and re.search(r"time of a step +5 ms\n", text)
    gain, own, other, low, high = re.search(
        r"int4 is faster here \((\S+) times\): (\S+) ms a step instead of (\S+) ms "
        r"\(95 % interval of the speed-up (\S+) to (\S+), 5 pairs of 10 steps\)$",
        text,
    ).groups()
    assert (gain, own, other) == ("2.33", "3", "7")
    assert float(low) <= float(gain) <= float(high)
