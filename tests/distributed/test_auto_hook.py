"""`auto_hook`: measuring changes no bit, ranks agree on the plan, and a plan trains like the hooks that it names."""

import io
import itertools
import logging
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
from gradwire.hooks._auto_trial import TOLERANCE, Cost, Trial, choose, predicted_ms, reason
from gradwire.hooks.auto_hook import AutoState, auto_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    build,
    error_of,
    message_of,
    own_batches,
    register,
    train,
    train_steps,
    wrapped,
)
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


def plan_ms(ready, bucket_costs, plan):
    return predicted_ms(ready, [of[name] for of, name in zip(bucket_costs, plan, strict=True)])


@given(measurements(), st.integers(0, 4), st.sampled_from(Cost._fields), milliseconds)
def test_prediction_never_falls_when_a_cost_rises(measured, bucket, part, more):
    ready, bucket_costs = measured
    plan = [of["plain"] for of in bucket_costs]
    i = bucket % len(plan)
    dearer = [*plan[:i], plan[i]._replace(**{part: getattr(plan[i], part) + more}), *plan[i + 1 :]]
    assert predicted_ms(ready, dearer) >= predicted_ms(ready, plan) >= ready[-1]


def test_prediction_overlaps_the_wire_with_the_backward():
    waits = [Cost(1, 8, 1)] * 3
    assert predicted_ms([0, 10, 20], waits) == 30  # only the last exchange is exposed
    assert predicted_ms([0, 0, 0], waits) == 1 + 3 * 8 + 1  # the wire is the bottleneck
    assert predicted_ms([0, 0, 0], [Cost(8, 1, 4)] * 3) == 36  # computing is


@given(measurements(), st.floats(1, 2))
def test_choice_is_plain_or_gains_enough(measured, min_gain):
    ready, bucket_costs = measured
    plan = choose(ready, bucket_costs, min_gain)
    base = plan_ms(ready, bucket_costs, ["plain"] * len(plan))
    if set(plan) != {"plain"}:
        assert plan_ms(ready, bucket_costs, plan) <= TOLERANCE / min_gain * base * (1 + 1e-9)


@pytest.mark.parametrize(
    ("plain", "int8", "min_gain", "expected"),
    [
        # The fastest plan takes 100 ms, so a gain of 1.25 needs 125 ms without compression.
        (124.5, 110, 1.25, "plain"),
        (125.0, 110, 1.25, "int4"),
        (125.5, 110, 1.25, "int4"),
        # A more precise plan may take 102 ms.
        (200, 101.5, 1.05, "int8"),
        (200, 102.0, 1.05, "int8"),
        (200, 102.5, 1.05, "int4"),
    ],
)
def test_choice_thresholds_are_exactly_min_gain_and_the_tolerance(plain, int8, min_gain, expected):
    assert TOLERANCE == 1.02
    exchange_costs = {"plain": Cost(0, plain, 0), "int8": Cost(0, int8, 0), "int4": Cost(0, 100, 0)}
    assert choose([0], [exchange_costs], min_gain) == [expected]


@pytest.mark.parametrize(
    ("plain", "int4", "min_gain", "expected"),
    [
        (100, 40, 1.05, "40 ms from the first gradient to the last result instead of 100 (predicted)"),
        (103, 100, 1.05, "int4 would be 1.03 times as fast (predicted), less than min_gain=1.05"),
        (101, 100, 1, "int4 would be 1.01 times as fast (predicted), within the tolerance of 2%"),
        (100, 103, 1.05, "no candidate is faster"),
    ],
)
def test_reason_of_a_choice_is_one_sentence(plain, int4, min_gain, expected):
    exchange_costs = [{"plain": Cost(0, plain, 0), "int4": Cost(0, int4, 0)}]
    assert reason([0], exchange_costs, choose([0], exchange_costs, min_gain), min_gain) == expected


def test_reason_names_the_fastest_candidate_of_each_bucket():
    costs = [{"plain": Cost(0, 10, 0), "int4": Cost(0, 9.9, 0), "bf16": Cost(0, 30, 0)}]
    costs += [{"plain": Cost(0, 10, 0), "int4": Cost(0, 30, 0), "bf16": Cost(0, 9.9, 0)}]
    chosen = choose([0, 0], costs, 1.05)
    assert chosen == ["plain", "plain"]
    assert reason([0, 0], costs, chosen, 1.05).startswith("int4 and bf16 would be 1.01 times as fast")


@pytest.mark.parametrize(
    ("ready", "plain", "int8", "int4", "min_gain", "expected"),
    [
        ([0, 5, 10], (1, 1, 1), (4, 0.3, 4), (4, 0.1, 4), 1.05, ["plain"] * 3),
        ([0, 5, 10], (1, 100, 1), (4, 27, 4), (4, 14, 4), 1.05, ["int4"] * 3),
        # Buckets that the backward hides stay precise; int4 for the last would end the step 0.7 % earlier.
        ([0, 100, 200], (1, 10, 1), (2, 3, 2), (2, 1.5, 2), 1.01, ["plain", "plain", "int8"]),
    ],
    ids=["fast-link", "slow-link", "hidden-buckets"],
)
def test_choice_depends_on_the_link_and_the_overlap_with_the_backward(ready, plain, int8, int4, min_gain, expected):
    bucket = {"plain": Cost(*plain), "int8": Cost(*int8), "int4": Cost(*int4)}
    assert choose(ready, [bucket] * 3, min_gain) == expected


# --- measuring


NAMES = [name for name, _ in build("mlp").named_parameters()]


def trained(steps, wrapper="gradwire", model="mlp", bucket_cap_mb=SMALL, view=False, **options):
    """The record of a training, and its state."""
    state = AutoState(**options)
    ddp_options = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": view}
    return train(wrapper, model, hook=(state, auto_hook), steps=steps, **ddp_options), state


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_law3_measured_steps_are_bitwise_the_plain_all_reduce(wrapper, view):
    candidates = ("plain", "bf16", "int4", "powersgd-r1")
    auto, state = trained(12, wrapper, "odd", view=view, candidates=candidates, repeats=1, min_gain=1e9)
    plain = train(wrapper, "odd", hook="allreduce", bucket_cap_mb=SMALL, gradient_as_bucket_view=view, steps=12)
    assert_same_bits(auto, plain)
    assert set(state.plan.values()) == {"plain"}  # no gain is enough
    assert state.residuals() == []


def with_wire_ms(ms):
    """Lets every bucket of a trial take ``ms(trial)`` on the wire."""
    return mock.patch.object(Trial, "costs", lambda trial: [[0.0, ms(trial), 0.0]] * len(trial.buckets))


def costs_of(times):
    """Milliseconds on the wire by candidate, those of rank 1 ten times longer."""
    return with_wire_ms(lambda trial: times[trial.candidate] * (10 if dist.get_rank() == 1 else 1))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", ["mlp", "odd", "lstm"])
@on_ranks(2, 3)
def test_measured_times_lead_to_one_plan_for_every_parameter(wrapper, model):
    _, state = trained(11, wrapper, model, candidates=("plain", "bf16", "int4", "powersgd-r1"), repeats=1)
    assert state.plan.keys() == {name for name, parameter in build(model).named_parameters() if parameter.requires_grad}
    assert_same_on_all_ranks(from_all_ranks(state.plan))


@on_ranks(2, 3)
def test_measuring_leaves_sparse_gradients_as_they_are():
    runs = []
    for hook in ((AutoState(candidates=("plain", "int4"), repeats=1, min_gain=1e9), auto_hook), "allreduce"):
        torch.manual_seed(0)
        ddp = gradwire.DistributedDataParallel(SparseTable(has_dense_layer=True))
        register(ddp, hook)
        steps = train_steps(ddp, 8, dist.get_rank() + 1)
        runs.append([{name: grad.to_dense() for name, grad in step.items()} for step in steps])
    assert_same_bits(*runs)


@on_ranks(2, 3)
def test_telemetry_counts_measured_steps_too():
    reports, state = [], AutoState(candidates=("plain", "int4"), repeats=1)
    state.observe(every=1, report=lambda metrics: reports.append(metrics["step"]))
    train_steps(wrapped(hook=(state, auto_hook)), 9)
    state.metrics()
    assert reports == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_capture_before_the_choice_raises(world_of_one, monkeypatch):
    monkeypatch.setattr(auto_module, "is_capturing", lambda device: True)
    ddp = wrapped(hook=(AutoState(candidates=("plain", "int8"), repeats=2), auto_hook))
    with pytest.raises(RuntimeError, match="Step 0 is captured in a CUDA graph, but auto_hook chooses in step 8"):
        train_steps(ddp)


@on_ranks(2, 3)
def test_candidate_that_is_fastest_by_chance_is_not_chosen():
    times, measured = {"plain": (3.0, 9.0, 9.0), "int4": (1.0, 4.0, 4.0)}, itertools.count(1)
    with with_wire_ms(lambda trial: times[trial.candidate][next(measured) % 3]):
        _, state = trained(11, candidates=("plain", "int4"), repeats=3)
    assert set(state.plan.values()) == {"plain"}


@pytest.mark.parametrize(
    "warm_ups",
    [{"plain": 10.0, "int4": 1000.0}, {"plain": 0.1, "int4": 1.0}],
    ids=["expensive-candidate", "cheap-plain"],
)
@on_ranks(2, 3)
def test_warm_up_step_of_a_candidate_does_not_count(warm_ups):
    times = {"plain": 10.0, "int4": 1.0}
    state = AutoState(candidates=tuple(times), repeats=1)

    def ms(trial):
        first = next(each for each in state._trials if each.candidate == trial.candidate)
        return (warm_ups if trial is first else times)[trial.candidate]

    with with_wire_ms(ms):
        train_steps(wrapped(hook=(state, auto_hook)), 2 + 2 * len(times) + 1)
    assert set(state.plan.values()) == {"int4"}


@on_ranks(2, 3)
def test_ranks_agree_on_the_plan_and_then_train_as_with_the_chosen_hook():
    times = {"plain": 10.0, "int8": 3.0, "int4": 1.0}
    with costs_of(times):
        auto, state = trained(12, candidates=tuple(times), repeats=1)
    assert state.plan == dict.fromkeys(NAMES, "int4")
    first = 2 + 2 * len(times)  # the step of the choice is compressed already
    hook = QuantizationState(None, "int4", start_iter=first), quantization_hook
    assert_same_bits(auto, train("gradwire", "mlp", hook=hook, steps=12, bucket_cap_mb=SMALL))
    assert state.iter == 12
    assert "parameters int4" in repr(state)


@on_ranks(2, 3)
def test_only_the_choice_is_logged_with_its_reason_by_rank_0():
    times, records = {"plain": 10.0, "powersgd-r1": 1.0}, []
    handler, state = logging.Handler(), AutoState(candidates=tuple(times), repeats=1, min_gain=1.5)
    handler.emit = lambda record: record.module == "nodes" or records.append(record.getMessage())
    package = logging.getLogger("gradwire")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        ddp = wrapped(hook=(state, auto_hook))
        with with_wire_ms(lambda trial: times[trial.candidate]):
            train_steps(ddp, 6)
            measuring, before = state.summary(), list(records)
            train_steps(ddp, 1)
    finally:
        package.removeHandler(handler)
        package.setLevel(logging.NOTSET)
    assert measuring == "auto_hook has sent all gradients uncompressed, and chooses from plain, powersgd-r1 in step 6"
    assert before == [], "a trial reads as if training were compressed"
    assert state.summary().startswith(f"auto_hook has chosen powersgd-r1 for {len(state.plan)} parameters: ")
    assert state.summary().endswith(" (predicted)")
    assert (
        AutoState(candidates=("plain",)).summary()
        == "auto_hook sends all gradients uncompressed: plain is the only candidate"
    )
    said = [each for each in records if each.startswith("auto_hook")]
    assert said == [state.summary()] * (dist.get_rank() == 0)
    given = AutoState(plan=state.plan)
    assert given.summary() == f"auto_hook has chosen powersgd-r1 for {len(state.plan)} parameters"


@on_ranks(2, 3)
def test_changed_buckets_are_measured_again():
    state = AutoState(candidates=("plain", "int8"), repeats=1)
    ddp, seen = wrapped(hook=(state, auto_hook)), []
    with costs_of({"plain": 10.0, "int8": 1.0}):
        for step in range(14):
            train_steps(ddp)
            if step == 4:
                state._trials[-1].buckets.reverse()
                state._trials[0].buckets = [("another",)]
            seen.append(bool(state.plan))
    # Steps 2 to 5 would have measured; the change is noticed in step 5, and 6 to 9 measure anew.
    assert seen.index(True) == 10


# --- plans


@pytest.mark.parametrize("candidate", ["bf16", "int8", "powersgd-r1", "powersgd-r1-int8"])
@on_ranks(2, 3)
def test_given_plan_is_used_from_the_first_step(candidate):
    plan = {name: candidate if i < len(NAMES) // 2 else "plain" for i, name in enumerate(NAMES)}
    state = AutoState(plan=plan)
    state.observe(every=1)
    record = train("gradwire", "mlp", hook=(state, auto_hook), steps=4, bucket_cap_mb=SMALL)
    plain = train("gradwire", "mlp", hook="allreduce", steps=1, bucket_cap_mb=SMALL)
    assert_same_on_all_ranks(from_all_ranks(record))
    assert state.metrics()["uncompressed_buckets"] > 0
    for name in plan:
        if plan[name] == "plain":
            assert_same_bits(record.gradients[0][name], plain.gradients[0][name])


@pytest.mark.parametrize("planned", [False, True], ids=["no-plan", "plan"])
@pytest.mark.parametrize("extra_on", [0, 1])
@on_ranks(2, 3)
def test_resynchronized_ranks_have_the_same_methods(planned, extra_on):
    state = AutoState(plan=dict.fromkeys(NAMES, "int4") if planned else None)
    ddp = wrapped(hook=(state, auto_hook))
    if dist.get_rank() == extra_on:
        state._method("int4")
    ddp.resynchronize()
    saved = sorted(state.state_dict()["states"])
    assert_same_on_all_ranks(from_all_ranks((state.replicated_state(), saved)))
    assert ("int4" in saved) == (planned or extra_on == 0)


@pytest.mark.parametrize("way", ["planned", "measuring", "pickled"])
@on_ranks(2)
def test_methods_follow_the_process_group_of_the_state(way):
    # In three steps the first candidate is measured, together with the plain all-reduce.
    plan = {name: ("int4", "powersgd-r1")[i % 2] for i, name in enumerate(NAMES)} if way != "measuring" else None
    _, state = trained(3, bucket_cap_mb=SMALLEST, plan=plan, candidates=("plain", "int4"), repeats=1)
    if way == "pickled":
        state = pickle.loads(pickle.dumps(state))
    state.process_group = group = dist.new_group()
    methods = [*state._methods.values(), *(trial.method for trial in state._trials)]
    assert [method.state.process_group is group for method in methods] == [True, True]


def saved_and_loaded(state, way):
    saved = io.BytesIO()
    if way == "pickle":
        pickle.dump(state, saved)
        return pickle.loads(saved.getvalue())
    torch.save(state.state_dict(), saved)
    saved.seek(0)
    loaded = AutoState(candidates=state.candidates, repeats=1)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    return loaded


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_checkpoint_resumes_with_the_same_plan(wrapper, way):
    times, runs = {"plain": 10.0, "int8": 4.0, "powersgd-r1": 1.0}, []
    for interrupts in (False, True):
        state, module, generator, seen = AutoState(candidates=tuple(times), repeats=1), build("mlp"), own_batches(), []
        ddp, optimizer = (
            wrapped(wrapper, module, hook=(state, auto_hook)),
            torch.optim.SGD(module.parameters(), lr=0.05),
        )
        with costs_of(times):
            for step in range(18):
                if interrupts and step in (5, 14):
                    state = saved_and_loaded(state, way)
                    ddp = wrapped(wrapper, module, hook=(state, auto_hook))
                seen += train_steps(ddp, 1, generator, optimizer)
        runs.append((seen, dict(state.plan), state.iter))
    (whole, plan, n), (parts, same_plan, m) = runs
    assert plan == same_plan
    assert set(plan.values()) >= {"powersgd-r1"}
    assert n == m == 18
    assert_same_bits(parts[:5], whole[:5])
    for before, after in zip(whole[14:], parts[14:], strict=True):
        for name in before:
            assert torch.isfinite(after[name]).all()
            assert after[name].shape == before[name].shape


@on_ranks(2)
def test_distributed_checkpoint_of_a_plan_is_refused_by_a_state_without_it(tmp_path):
    planned, forgetful = states = [AutoState(plan=plan) for plan in (dict.fromkeys(NAMES, "int8"), None)]
    models = [wrapped(hook=(state, auto_hook)) for state in states]
    train_steps(models[0], 5)
    dcp.save({"hook": planned}, checkpoint_id=str(tmp_path))
    message = message_of(dcp.load, {"hook": forgetful}, checkpoint_id=str(tmp_path))
    assert "The plan has 0 parameters, but 8 were saved" in message
    assert forgetful.iter == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_plan_of_another_model_raises(wrapper):
    state = AutoState(plan={"layers.0.weight": "int4", "layer.2.weight": "int4"})
    ddp = wrapped(wrapper, hook=(state, auto_hook))
    kind, message = error_of(train_steps, ddp)
    assert kind == "ValueError"
    assert "chooses int4 for 'layer.2.weight', which is not a parameter of this Mlp; 1 of 2 names" in message


@on_ranks(2, 3)
def test_plan_of_one_hook_is_that_hook():
    auto, _ = trained(6, plan=dict.fromkeys(NAMES, "powersgd-r1"))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    assert_same_bits(auto, train("gradwire", "mlp", hook=(state, powerSGD_hook), steps=6, bucket_cap_mb=SMALL))


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ()}, "begins with 'plain'"),
        ({"candidates": ("int8", "plain")}, "begins with 'plain'"),
        ({"candidates": ("plain", "int8", "int8")}, "different names"),
        ({"candidates": ("plain", "int5")}, "no candidate 'int5'"),
        ({"candidates": ("plain", "powersgd-r0")}, "no candidate 'powersgd-r0'"),
        ({"candidates": ("plain", "powersgd-r4-int2")}, "no candidate 'powersgd-r4-int2'"),
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
        ({"states": {"bf16": {}}}, "the candidate bf16 has no memory"),
        ({"states": {"int8": {}}}, "no entry 'iter'"),
    ],
)
def test_bad_checkpoint_raises_and_changes_nothing(changes, message):
    state = AutoState()
    with pytest.raises(ValueError, match=message):
        state.load_state_dict({"iter": 7, "plan": {}, "chosen": 0, "states": {}} | changes)
    assert (state.iter, state.plan) == (0, {})
