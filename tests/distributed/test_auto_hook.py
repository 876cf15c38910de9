"""`auto_hook`: measuring changes no bit, ranks agree on the plan, and a plan trains like the hooks that it names."""

import io
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.hooks import auto_hook as auto_module
from gradwire.hooks._auto_trial import TOLERANCE, Cost, Trial, choose, predicted_ms
from gradwire.hooks.auto_hook import AutoState, auto_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, error_of, gradients, register, train
from tests.support.zoo import SparseTable

# --- the choice

milliseconds = st.floats(0, 100)
costs = st.builds(Cost, milliseconds, milliseconds, milliseconds)


@st.composite
def measurements(draw):
    n = draw(st.integers(1, 5))
    ready = [0.0]
    for _ in range(n - 1):
        ready.append(ready[-1] + draw(milliseconds))
    names = ("plain", "int8", "int4")
    return ready, [{name: draw(costs) for name in names} for _ in range(n)]


def of_plan(ready, of_buckets, plan):
    return predicted_ms(ready, [of[name] for of, name in zip(of_buckets, plan, strict=True)])


@given(measurements(), st.integers(0, 4), st.sampled_from(Cost._fields), milliseconds)
def test_prediction_never_falls_when_a_cost_rises(measured, bucket, part, more):
    ready, of_buckets = measured
    plan = [of["plain"] for of in of_buckets]
    i = bucket % len(plan)
    dearer = [*plan[:i], plan[i]._replace(**{part: getattr(plan[i], part) + more}), *plan[i + 1 :]]
    assert predicted_ms(ready, dearer) >= predicted_ms(ready, plan) >= ready[-1]


def test_prediction_hides_the_wire_behind_the_backward():
    waits = [Cost(1, 8, 1)] * 3
    assert predicted_ms([0, 10, 20], waits) == 30  # only the last exchange is exposed
    assert predicted_ms([0, 0, 0], waits) == 1 + 3 * 8 + 1  # the wire is the bottleneck
    assert predicted_ms([0, 0, 0], [Cost(8, 1, 4)] * 3) == 36  # computing is


@given(measurements(), st.floats(1, 2))
def test_choice_is_plain_or_gains_enough(measured, min_gain):
    ready, of_buckets = measured
    plan = choose(ready, of_buckets, min_gain)
    base = of_plan(ready, of_buckets, ["plain"] * len(plan))
    if set(plan) != {"plain"}:
        assert of_plan(ready, of_buckets, plan) <= TOLERANCE / min_gain * base * (1 + 1e-9)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [(124.5, "plain"), (125.0, "int4"), (125.5, "int4")],
    ids=["just-below", "exactly", "just-above"],
)
def test_choice_compresses_from_exactly_min_gain_on(plain, expected):
    """The fastest plan takes 100 ms, so a gain of 1.25 needs 125 ms without compression."""
    of_bucket = {"plain": Cost(0, plain, 0), "int4": Cost(0, 100, 0)}
    assert choose([0], [of_bucket], 1.25) == [expected]


@pytest.mark.parametrize(
    ("precise", "expected"),
    [(101.5, "int8"), (102.0, "int8"), (102.5, "int4")],
    ids=["just-below", "exactly", "just-above"],
)
def test_more_precise_plan_is_chosen_up_to_exactly_the_tolerance(precise, expected):
    """The fastest plan takes 100 ms, so a more precise one may take 102 ms."""
    assert TOLERANCE == 1.02
    of_bucket = {"plain": Cost(0, 200, 0), "int8": Cost(0, precise, 0), "int4": Cost(0, 100, 0)}
    assert choose([0], [of_bucket], 1.05) == [expected]


def test_choice_is_plain_on_a_fast_link():
    fast = {"plain": Cost(1, 1, 1), "int8": Cost(4, 0.3, 4), "int4": Cost(4, 0.1, 4)}
    assert choose([0, 5, 10], [fast] * 3, 1.05) == ["plain"] * 3


def test_choice_compresses_on_a_slow_link():
    slow = {"plain": Cost(1, 100, 1), "int8": Cost(4, 27, 4), "int4": Cost(4, 14, 4)}
    assert choose([0, 5, 10], [slow] * 3, 1.05) == ["int4"] * 3


def test_choice_keeps_hidden_buckets_precise():
    slow = {"plain": Cost(1, 10, 1), "int8": Cost(2, 3, 2), "int4": Cost(2, 1.5, 2)}
    plan = choose([0, 100, 200], [slow] * 3, 1.01)
    assert plan == ["plain", "plain", "int8"]  # int4 would end the step 0.7 % earlier


# --- measuring


def measured_and_plain(wrapper, view):
    state = AutoState(candidates=("plain", "bf16", "int4", "powersgd-r1"), repeats=1, min_gain=1e9)
    options = {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": view, "steps": 12}
    auto = train(wrapper, "odd", hook=(state, auto_hook), **options)
    return auto, train(wrapper, "odd", hook="allreduce", **options), state.plan, state.residuals()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law3_measured_steps_are_bitwise_the_plain_all_reduce(world, wrapper, view):
    for auto, plain, plan, residuals in world.run(measured_and_plain, wrapper=wrapper, view=view):
        assert_same_bits(auto, plain)
        assert set(plan.values()) == {"plain"}  # no gain is enough
        assert residuals == []


def costs_of(times):
    """A stand-in for `Trial.costs` with milliseconds on the wire by candidate, those of rank 1 ten times longer."""

    def faked(trial):
        return [[0.0, times[trial.candidate] * (10 if dist.get_rank() == 1 else 1), 0.0] for _ in trial.buckets]

    return mock.patch.object(Trial, "costs", faked)


def with_times(times, steps, model="mlp", state=None, **options):
    state = state or AutoState(candidates=tuple(times), repeats=1)
    with costs_of(times):
        record = train("gradwire", model, hook=(state, auto_hook), steps=steps, bucket_cap_mb=SMALL, **options)
    return record, state


def chosen(times):
    _, state = with_times(times, steps=2 + 2 * len(times) + 1)
    return state.plan


def test_ranks_agree_on_the_plan(world):
    names = [name for name, _ in build("mlp").named_parameters()]
    for plan in world.run(chosen, times={"plain": 10.0, "int8": 3.0, "int4": 2.0}):
        assert plan == dict.fromkeys(names, "int4")


def with_own_times(wrapper, model):
    """The plan that really measured times lead to."""
    state = AutoState(candidates=("plain", "bf16", "int4", "powersgd-r1"), repeats=1)
    train(wrapper, model, hook=(state, auto_hook), steps=11, bucket_cap_mb=SMALL)
    return state.plan


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", ["mlp", "odd", "lstm"])
def test_measured_times_lead_to_one_plan_for_every_parameter(world, wrapper, model):
    plans = world.run(with_own_times, wrapper=wrapper, model=model)
    names = {name for name, parameter in build(model).named_parameters() if parameter.requires_grad}
    assert plans[0].keys() == names
    assert all(plan == plans[0] for plan in plans)


def with_sparse_gradients():
    seen = []
    for hook in ((AutoState(candidates=("plain", "int4"), repeats=1, min_gain=1e9), auto_hook), "allreduce"):
        torch.manual_seed(0)
        ddp = gradwire.DistributedDataParallel(SparseTable(has_dense_layer=True))
        register(ddp, hook)
        for _ in range(8):
            ddp.zero_grad()
            ddp(*ddp.module.batch(dist.get_rank())).backward()
            seen.append({name: grad.to_dense() for name, grad in gradients(ddp).items()})
    return seen[:8], seen[8:]


def test_measuring_leaves_sparse_gradients_as_they_are(world):
    for auto, plain in world.run(with_sparse_gradients):
        assert_same_bits(auto, plain)


def observed_run():
    reports = []
    state = AutoState(candidates=("plain", "int4"), repeats=1)
    state.observe(every=1, report=lambda metrics: reports.append(metrics["step"]))
    train("gradwire", "mlp", hook=(state, auto_hook), steps=9, bucket_cap_mb=SMALL)
    state.metrics()
    return reports


def test_telemetry_counts_measured_steps_too(world):
    for reports in world.run(observed_run):
        assert reports == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_capture_before_the_choice_raises(world_of_one, monkeypatch):
    monkeypatch.setattr(auto_module, "is_capturing", lambda device: True)
    state = AutoState(candidates=("plain", "int8"), repeats=2)
    ddp = gradwire.DistributedDataParallel(build("mlp"))
    ddp.register_comm_hook(state, auto_hook)
    with pytest.raises(RuntimeError, match="Step 0 is captured in a CUDA graph, but auto_hook chooses in step 8"):
        ddp(*ddp.module.batch(torch.Generator())).backward()


def chosen_under_load():
    """Plain takes 3 ms at best and int4 1 ms, but 9 and 4 ms in two of three steps."""
    measured = []

    def faked(trial):
        times = (3.0, 9.0, 9.0) if trial.candidate == "plain" else (1.0, 4.0, 4.0)
        measured.append(trial)
        return [[0.0, times[len(measured) % 3], 0.0] for _ in trial.buckets]

    state = AutoState(candidates=("plain", "int4"), repeats=3)
    with mock.patch.object(Trial, "costs", faked):
        train("gradwire", "mlp", hook=(state, auto_hook), steps=11, bucket_cap_mb=SMALL)
    return set(state.plan.values())


def test_candidate_that_is_fastest_by_chance_is_not_chosen(world):
    assert all(plan == {"plain"} for plan in world.run(chosen_under_load))


def chosen_with_other_warm_ups(times, warm_ups):
    """The plan if the first step of each candidate takes another time than its later steps."""
    state = AutoState(candidates=tuple(times), repeats=1)

    def faked(trial):
        first = next(each for each in state._trials if each.candidate == trial.candidate)
        of_step = warm_ups if trial is first else times
        return [[0.0, of_step[trial.candidate], 0.0] for _ in trial.buckets]

    with mock.patch.object(Trial, "costs", faked):
        train("gradwire", "mlp", hook=(state, auto_hook), steps=2 + 2 * len(times) + 1, bucket_cap_mb=SMALL)
    return set(state.plan.values())


@pytest.mark.parametrize(
    "warm_ups",
    [{"plain": 10.0, "int4": 1000.0}, {"plain": 0.1, "int4": 1.0}],
    ids=["expensive-candidate", "cheap-plain"],
)
def test_warm_up_step_of_a_candidate_does_not_count(world, warm_ups):
    for plan in world.run(chosen_with_other_warm_ups, times={"plain": 10.0, "int4": 1.0}, warm_ups=warm_ups):
        assert plan == {"int4"}


def auto_and_direct():
    times = {"plain": 10.0, "int4": 1.0}
    auto, state = with_times(times, steps=12)
    first = 2 + 2 * len(times)  # the step of the choice is compressed already
    direct = train(
        "gradwire",
        "mlp",
        hook=(QuantizationState(None, "int4", start_iter=first), quantization_hook),
        steps=12,
        bucket_cap_mb=SMALL,
    )
    return auto, direct, state.iter, repr(state)


def test_training_after_the_choice_is_training_with_the_chosen_hook(world):
    for auto, direct, iteration, text in world.run(auto_and_direct):
        assert_same_bits(auto, direct)
        assert iteration == 12
        assert "parameters int4" in text


def in_rebuilt_buckets():
    """A backward leaves a bucket out in one step of the measurement: the buckets of that step differ."""
    state = AutoState(candidates=("plain", "int8"), repeats=1)
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, auto_hook))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    with costs_of({"plain": 10.0, "int8": 1.0}):
        for step in range(14):
            ddp.zero_grad()
            ddp(*ddp.module.batch(generator)).backward()
            if step == 4:
                state._trials[-1].buckets.reverse()
                state._trials[0].buckets = [("another",)]
            seen.append(bool(state.plan))
    return seen


def test_changed_buckets_are_measured_again(world):
    for seen in world.run(in_rebuilt_buckets):
        # Steps 2 to 5 would have measured; the change is noticed in step 5, and 6 to 9 measure anew.
        assert seen.index(True) == 10


# --- plans


def mixed_plan(candidate):
    names = [name for name, _ in build("mlp").named_parameters()]
    plan = {name: candidate if i < len(names) // 2 else "plain" for i, name in enumerate(names)}
    state = AutoState(plan=plan)
    state.observe(every=1)
    record = train("gradwire", "mlp", hook=(state, auto_hook), steps=4, bucket_cap_mb=SMALL)
    plain = train("gradwire", "mlp", hook="allreduce", steps=1, bucket_cap_mb=SMALL)
    return record, plain, state.metrics(), [name for name in plan if plan[name] == "plain"]


@pytest.mark.parametrize("candidate", ["bf16", "int8", "powersgd-r1"])
def test_given_plan_is_used_from_the_first_step(world, candidate):
    results = world.run(mixed_plan, candidate=candidate)
    assert_same_on_all_ranks([record for record, *_ in results])
    for record, plain, metrics, uncompressed in results:
        assert metrics["uncompressed_buckets"] > 0
        for name in uncompressed:
            assert_same_bits(record.gradients[0][name], plain.gradients[0][name])


def resynchronized_with_unequal_methods(planned, extra_on):
    """The replicated state and the checkpoint's methods of a rank; one rank has used a method before a step failed."""
    names = [name for name, _ in build("mlp").named_parameters()]
    state = AutoState(plan=dict.fromkeys(names, "int4") if planned else None)
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(state, auto_hook)
    if dist.get_rank() == extra_on:
        state.exchange("int4")
    ddp.resynchronize()
    return state.replicated_state(), sorted(state.state_dict()["states"])


@pytest.mark.parametrize("planned", [False, True], ids=["no-plan", "plan"])
@pytest.mark.parametrize("extra_on", [0, 1])
def test_resynchronized_ranks_have_the_same_methods(world, planned, extra_on):
    results = world.run(resynchronized_with_unequal_methods, planned=planned, extra_on=extra_on)
    assert_same_on_all_ranks(results)
    assert ("int4" in results[0][1]) == (planned or extra_on == 0)


def methods_after_a_change_of_group(way):
    """Whether each method of a state, and the candidate that is measured, has the state's new process group."""
    names = [name for name, _ in build("mlp").named_parameters()]
    options = {"candidates": ("plain", "int4"), "repeats": 1}
    plan = {name: ("int4", "powersgd-r1")[i % 2] for i, name in enumerate(names)} if way != "measuring" else None
    state = AutoState(plan=plan, **options)
    train("gradwire", "mlp", hook=(state, auto_hook), steps=3, bucket_cap_mb=SMALLEST)
    if way == "pickled":
        state = pickle.loads(pickle.dumps(state))
    state.process_group = group = dist.new_group()
    exchanges = [*state._exchanges.values(), *(trial.exchange for trial in state._trials)]
    return [exchange.state.process_group is group for exchange in exchanges]


@pytest.mark.parametrize("way", ["planned", "measuring", "pickled"])
def test_methods_follow_the_process_group_of_the_state(worlds, way):
    # In three steps the first candidate is measured, with the plain all-reduce beside it.
    for follow in worlds(2).run(methods_after_a_change_of_group, way=way):
        assert follow == [True, True]


def resumed(wrapper, way):
    """Gradients of an uninterrupted run, and of one that is saved and loaded at each of two points of it."""
    times, at = {"plain": 10.0, "int8": 4.0, "powersgd-r1": 1.0}, (5, 14)
    runs = []
    for interrupts in (False, True):
        state = AutoState(candidates=tuple(times), repeats=1)
        module = build("mlp")
        ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL)
        register(ddp, (state, auto_hook))
        generator = torch.Generator().manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        seen = []
        with costs_of(times):
            for step in range(18):
                if interrupts and step in at:
                    saved = io.BytesIO()
                    if way == "pickle":
                        pickle.dump(state, saved)
                        state = pickle.loads(saved.getvalue())
                    else:
                        torch.save(state.state_dict(), saved)
                        saved.seek(0)
                        state = AutoState(candidates=tuple(times), repeats=1)
                        state.load_state_dict(torch.load(saved, weights_only=True))
                    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL)
                    register(ddp, (state, auto_hook))
                optimizer.zero_grad()
                ddp(*module.batch(generator)).backward()
                seen.append(gradients(ddp))
                optimizer.step()
        runs.append((seen, dict(state.plan), state.iter))
    return runs


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_checkpoint_resumes_with_the_same_plan(world, wrapper, way):
    for (whole, plan, n), (parts, same_plan, m) in world.run(resumed, wrapper=wrapper, way=way):
        assert plan == same_plan
        assert set(plan.values()) >= {"powersgd-r1"}
        assert n == m == 18
        assert_same_bits(parts[:5], whole[:5])
        for before, after in zip(whole[14:], parts[14:], strict=True):
            for name in before:
                assert torch.isfinite(after[name]).all()
                assert after[name].shape == before[name].shape


def distributed_checkpoint(folder):
    """What was saved, what a state with the plan and one without it load, and the error of the latter."""
    names = [name for name, _ in build("mlp").named_parameters()]
    plan = {name: ("int8", "powersgd-r1", "plain")[i % 3] for i, name in enumerate(names)}

    def new_training(plan):
        state, ddp = AutoState(plan=plan), gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALLEST)
        ddp.register_comm_hook(state, auto_hook)
        return state, ddp

    state, ddp = new_training(plan)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        ddp(*ddp.module.batch(generator)).backward()
    dcp.save({"hook": state}, checkpoint_id=folder)
    resumed, _ddp = new_training(plan)
    dcp.load({"hook": resumed}, checkpoint_id=folder)
    forgetful, _ddp = new_training(None)
    error = error_of(lambda: dcp.load({"hook": forgetful}, checkpoint_id=folder))
    return state.state_dict(), resumed.state_dict(), error, forgetful.iter


def test_distributed_checkpoint_loads_into_a_state_with_the_plan_only(world, tmp_path):
    for saved, loaded, (_, message), iteration in world.run(distributed_checkpoint, folder=str(tmp_path)):
        assert set(saved["states"]) == {"int8", "powersgd-r1"}
        assert all(state["errors"] for state in saved["states"].values())
        assert loaded["plan"] == saved["plan"]
        torch.testing.assert_close(loaded["states"], saved["states"])
        assert "The plan has 0 parameters, but 8 were saved" in message
        assert iteration == 0


def unknown_plan(wrapper):
    state = AutoState(plan={"layers.0.weight": "int4", "layer.2.weight": "int4"})
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, auto_hook))
    return error_of(lambda: ddp(*ddp.module.batch(torch.Generator().manual_seed(0))).backward())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_plan_of_another_model_raises(world, wrapper):
    for kind, message in world.run(unknown_plan, wrapper=wrapper):
        assert kind == "ValueError"
        assert "chooses int4 for 'layer.2.weight', which is no parameter of this Mlp; 1 of 2 names" in message


def direct_powersgd():
    names = [name for name, _ in build("mlp").named_parameters()]
    auto = train("gradwire", "mlp", hook=(AutoState(plan=dict.fromkeys(names, "powersgd-r1")), auto_hook), steps=6)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return auto, train("gradwire", "mlp", hook=(state, powerSGD_hook), steps=6)


def test_plan_of_one_hook_is_that_hook(world):
    for auto, direct in world.run(direct_powersgd):
        assert_same_bits(auto, direct)


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ()}, "begins with 'plain'"),
        ({"candidates": ("int8", "plain")}, "begins with 'plain'"),
        ({"candidates": ("plain", "int8", "int8")}, "different names"),
        ({"candidates": ("plain", "int5")}, "no candidate 'int5'"),
        ({"candidates": ("plain", "powersgd-r0")}, "no candidate 'powersgd-r0'"),
        ({"repeats": 0}, "repeats is 0"),
        ({"min_gain": 0.5}, "min_gain is 0.5"),
        ({"min_gain": float("nan")}, "min_gain is nan"),
        ({"plan": {"weight": "zip"}}, "no candidate 'zip'"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        AutoState(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iter": -1}, "iter is -1"),
        ({"chosen": 3}, "The plan has 0 parameters, but 3 were saved"),
        ({"plan": [1]}, "plan is"),
        ({"plan": {"weight": "zip"}, "chosen": 1}, "no candidate 'zip'"),
        ({"states": {"bf16": {}}}, "bf16 keeps nothing"),
        ({"states": {"int8": {}}}, "no 'iter'"),
    ],
)
def test_bad_checkpoint_raises_and_changes_nothing(changes, message):
    state = AutoState()
    with pytest.raises(ValueError, match=message):
        state.load_state_dict({"iter": 7, "plan": {}, "chosen": 0, "states": {}} | changes)
    assert (state.iter, state.plan) == (0, {})


def different_candidates():
    state = AutoState(candidates=("plain", "int8") if dist.get_rank() == 0 else ("plain", "int4"))
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, auto_hook))
    return error_of(lambda: ddp(*ddp.module.batch(torch.Generator().manual_seed(0))).backward())


def test_different_candidates_raise_on_every_rank(world):
    for kind, message in world.run(different_candidates):
        assert kind == "RuntimeError"
        assert "candidates" in message
