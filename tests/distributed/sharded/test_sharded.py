"""`gradwire.attach` on HSDP and `replicate`, two replicas of two shards, against PyTorch's own all-reduce."""

import copy
import dataclasses
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.hooks.default_hooks import (
    CastState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from gradwire.sharded import ReduceScatterOptions, torch_internals
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.sharded import (
    FEATURES,
    PLACES,
    SHARDED,
    backward,
    gradients,
    mesh,
    message_after_fault_on_rank_1,
    missing_over,
    norm,
    sharded,
    shared_folder,
    train,
)
from tests.support.training import error_of, message_of, wrapped

START = 1


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_uncompressed_hook_has_the_bits_of_the_native_all_reduce(place, feature):
    native, ours = (sharded(place, **FEATURES[feature]) for _ in range(2))
    gradwire.attach(ours, None, allreduce_hook)
    got, exact = train(ours), train(native)
    if feature == "fp16":  # PyTorch sums, gradwire averages and multiplies: subnormal numbers are rounded
        torch.testing.assert_close(got[0], exact[0], rtol=2**-10, atol=2**-21)
    else:
        assert_same_bits(got, exact)


class Watched(torch.futures.Future):
    """A future that notes when its result is taken."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def wait(self):
        self.events.append("result")
        return super().wait()


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_all_reduces_overlap_the_backward_unless_fsdp2_needs_their_results(place):
    def hook(events, bucket):
        events.append("start")
        future = Watched(events)
        future.set_result(bucket.buffer())
        return future

    def events_of(model):
        del events[:]
        backward(model, 0)
        return events

    events, overlapping, in_turn = [], ["start"] * 3 + ["result"] * 3, ["start", "result"] * 3
    model = sharded(place)
    gradwire.attach(model, events, hook)
    assert events_of(model) == overlapping
    assert events_of(model) == in_turn  # FSDP2 adds to the gradients
    model.zero_grad()
    assert events_of(model) == overlapping
    model.zero_grad()
    handles = [each.register_post_accumulate_grad_hook(lambda _: None) for each in model.parameters()]
    assert events_of(model) == in_turn  # they may apply the gradients
    for handle in handles:
        handle.remove()
    rounded = sharded(place, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    gradwire.attach(rounded, events, hook)
    assert events_of(rounded) == in_turn  # FSDP2 casts them


def clipped_hook(state, bucket):
    """A user's hook that calls one of gradwire's."""
    bucket.buffer().clamp_(-1e3, 1e3)
    return quantization_hook(state, bucket)


def fp16_buffer_hook(state, bucket):
    """A user's hook that replaces the buffer, as PyTorch's 16-bit wrappers do."""
    bucket.set_buffer(bucket.buffer().half())
    assert {each.dtype for each in bucket.gradients()} == {torch.float16}
    return allreduce_hook(state, bucket)


COMPRESSED = {
    "fp16": (lambda: None, fp16_compress_hook, 1e-3),
    "bf16": (lambda: None, bf16_compress_hook, 8e-3),
    "fp32 sums": (lambda: CastState(accumulate="fp32"), bf16_compress_hook, 8e-3),
    "scaled": (lambda: ScaledCastState(), None, 1e-3),
    "int8": (lambda: QuantizationState(wire="int8", start_iter=START), None, 2e-2),
    "int4": (lambda: QuantizationState(wire="int4", start_iter=START), None, 0.3),
    "int8, clipped": (lambda: QuantizationState(wire="int8", start_iter=START), clipped_hook, 2e-2),
    "int8 of fp16": (
        lambda: QuantizationState(wire="int8", start_iter=START),
        fp16_compress_wrapper(quantization_hook),
        2e-2,
    ),
    "bf16 wrapper": (lambda: None, bf16_compress_wrapper(allreduce_hook), 8e-3),
    "fp16 buffer": (lambda: None, fp16_buffer_hook, 1e-3),
}


@pytest.mark.parametrize("hook", COMPRESSED)
@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_compressed_gradients_are_near_the_exact_mean_and_equal_on_replicas(place, hook):
    make, function, bound = COMPRESSED[hook]
    native, ours = sharded(place), sharded(place)
    gradwire.attach(ours, make(), function)
    for step in range(START + 1):
        for model in (native, ours):
            model.zero_grad()
            backward(model, step)
        ours_now, exact = gradients(ours), gradients(native)
        if step >= START:
            assert any(not torch.equal(ours_now[name], exact[name]) for name in exact)
        missing = [ours_now[name] - gradient for name, gradient in exact.items()]
        assert norm(missing) <= bound * norm(exact.values())
        replicas = mesh(place).get_group("replicate")
        same = [None] * replicas.size()
        dist.all_gather_object(same, ours_now, group=replicas)
        assert_same_bits(same[0], same[-1])


@pytest.mark.parametrize(("place", "wire"), [*((place, None) for place in PLACES), (PLACES[0], "int8")])
@on_ranks(4)
def test_powersgd_on_row_shards_conserves_the_gradient(place, wire):
    native, ours = sharded(place), sharded(place)
    state = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1, factor_wire=wire)
    attachment = gradwire.attach(ours, state)
    total = missing_over(6, native, ours)
    saved = attachment.state_dict()
    assert {"q", "p"}.isdisjoint(saved)
    assert saved["iter"] == 6
    again = gradwire.attach(sharded(place), PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1))
    again.load_state_dict(saved)
    assert_same_bits(
        [each.to_local() for each in again.state_dict()["errors"].values()],
        [each.to_local() for each in saved["errors"].values()],
    )
    assert total["first.weight"].abs().max() > 1e-4
    for name, missing in total.items():
        torch.testing.assert_close(saved["errors"][name].to_local(), missing, atol=1e-6, rtol=1e-5)


@on_ranks(4)
def test_patterns_match_fully_qualified_names():
    native, ours = sharded("hsdp"), sharded("hsdp")
    state = QuantizationState(wire="sign", start_iter=0, exempt=(), wires={"first.*": "fp32"})
    gradwire.attach(ours, state)
    for model in (native, ours):
        backward(model, 0)
    exact, got = gradients(native), gradients(ours)
    assert_same_bits(got["first.weight"], exact["first.weight"])
    assert not torch.equal(got["spare.weight"], exact["spare.weight"])


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_parameter_group_with_a_missing_gradient_is_reduced_plainly_and_keeps_its_errors(place):
    native, ours = sharded(place), sharded(place)
    state = QuantizationState(wire="int4", start_iter=0)
    attachment = gradwire.attach(ours, state)
    for step in range(2):
        for model in (native, ours):
            model.zero_grad()
            backward(model, step)
            if step == 0:
                ours.requires_grad_(True)
    before = copy.deepcopy(attachment.state_dict()["errors"])
    for model in (native, ours):
        model.zero_grad()
        backward(model, 2, spare=False)
    assert gradients(ours)["spare.weight"] is None
    assert state.iter == 3
    after = attachment.state_dict()["errors"]
    assert_same_bits(after["spare.weight"].to_local(), before["spare.weight"].to_local())
    assert not torch.equal(after["first.weight"].to_local(), before["first.weight"].to_local())


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_skipped_steps_count_in_backwards_without_the_last_parameter_group(place):
    model, state = sharded(place), ScaledCastState()
    gradwire.attach(model, state)
    skipped = []
    for value, spare in ((torch.nan, False), (torch.nan, False), (1.0, False), (torch.nan, True), (1.0, True)):
        model.zero_grad()
        model(torch.full((5, 9), value), spare=spare).sum().backward()
        skipped.append(state.skipped_steps)
    assert skipped == [0, 1, 2, 3, 3]  # a step without its last bucket counts at the next bucket
    assert state.iter == 5


@pytest.mark.parametrize(("saved_in", "loaded_in"), [("hsdp", "hsdp"), ("hsdp", "replicate"), ("replicate", "hsdp")])
@on_ranks(4)
def test_checkpoint_loads_with_other_numbers_of_shards_and_replicas(saved_in, loaded_in):
    first = sharded(saved_in)
    attachment = gradwire.attach(first, QuantizationState(wire="int4", start_iter=START))
    train(first, 3)
    saved = attachment.state_dict()
    path = shared_folder()
    checkpoint.save({"hook": saved}, checkpoint_id=path)
    second = gradwire.attach(sharded(loaded_in), QuantizationState(wire="int4", start_iter=START))
    loaded = {"hook": second.state_dict()}
    checkpoint.load(loaded, checkpoint_id=path)
    second.load_state_dict(loaded["hook"])
    assert second.state.iter == 3
    again = second.state_dict()["errors"]
    for name, error in saved["errors"].items():
        assert error.full_tensor().abs().max() > 0
        torch.testing.assert_close(again[name].full_tensor(), error.full_tensor(), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("loaded_in", PLACES)
@on_ranks(4)
def test_scales_load_from_a_checkpoint_as_the_smallest_of_all_shards(loaded_in):
    first = sharded("hsdp")
    attachment = gradwire.attach(first, ScaledCastState())
    fresh = attachment.state_dict()
    assert not fresh["exponents"].any()
    train(first, 3)
    own = attachment.state.exponents()
    assert len(set(map(str, from_all_ranks(own)))) == 2  # one per shard
    path = shared_folder()
    checkpoint.save({"hook": attachment.state_dict()}, checkpoint_id=path)
    second = gradwire.attach(sharded(loaded_in), ScaledCastState())
    loaded = {"hook": second.state_dict()}
    checkpoint.load(loaded, checkpoint_id=path)
    second.load_state_dict(loaded["hook"])
    of_shards = from_all_ranks(own)
    smallest = {name: min(each[name] for each in of_shards if name in each) for name, _ in first.named_parameters()}
    assert second.state.exponents() == smallest


# Errors.


@on_ranks(4)
def test_failed_exchange_raises_the_reason_on_its_replicas_and_every_later_backward_raises():
    model = sharded("replicate")
    gradwire.attach(model, QuantizationState(wire="int4", start_iter=0))
    backward(model, 0)
    message = message_after_fault_on_rank_1(gradwire.compress.QuantizedBucket, "all_reduce", model)
    assert "on one rank" in message
    assert "on one rank" in message_of(backward, model, 2)


@on_ranks(4)
def test_wires_within_a_replica_that_differ_raise_on_every_rank():
    model = sharded("fsdp")
    gradwire.attach(model, within="bf16" if dist.get_rank() < 2 else "fp16")
    assert "wire: bf16 on ranks 0, 1; fp16 on ranks 2, 3" in message_of(backward, model, 0)


@on_ranks(4)
def test_options_that_differ_between_replicas_raise_on_every_rank():
    model = sharded("replicate")
    gradwire.attach(model, QuantizationState(wire="int4" if dist.get_rank() < 2 else "int8"))
    assert "Communication hooks differ between ranks" in message_of(backward, model, 0)


@on_ranks(4)
def test_attach_refuses_models_without_replicas_and_a_second_hook():
    module = nn.Linear(4, 4)
    assert error_of(gradwire.attach, module, None, allreduce_hook)[0] == "TypeError"
    fully_shard(module)
    kind, text = error_of(gradwire.attach, module, None, allreduce_hook)
    assert kind == "NotImplementedError"
    assert "attach(model, 'bf16')" in text
    assert "no shards" in message_of(gradwire.attach, sharded("replicate"), within="bf16")
    message = message_of(gradwire.attach, module, within="int5")
    assert "within is 'int5'; expected 'int8', " in message and "'fp32' or gradwire.sharded.ReduceScatter" in message
    assert "Did you mean 'int8'?" in message
    unmatched = ReduceScatterOptions(wires={"nothing.*": "int8"})
    assert "wires['nothing.*'] in within matches none" in message_of(gradwire.attach, module, within=unmatched)
    model = sharded("hsdp")
    gradwire.attach(model, QuantizationState())
    assert "attached to this model already" in message_of(gradwire.attach, model, QuantizationState())
    gradwire.attach(part := sharded("fsdp"), within="bf16")._groups[0].restore()  # the others stay compressed
    assert "attached to this model already" in message_of(gradwire.attach, part, within="bf16")
    used, shared = sharded("hsdp"), CastState()
    gradwire.attach(used, shared, bf16_compress_hook)
    backward(used, 0)
    for state in (CastState(), shared):  # also one that has been used with a hook
        assert "attach(model, state, hook)" in message_of(gradwire.attach, sharded("hsdp"), state)
    assert "neither a hook nor within" in message_of(gradwire.attach, sharded("hsdp"))
    assert gradwire.attach(sharded("fsdp"), within="bf16").state_dict() == {}


@on_ranks(4)
def test_attach_takes_names_of_hooks():
    ddp = gradwire.DistributedDataParallel(nn.Linear(8, 8))
    attachment = gradwire.attach(ddp, "int4-no-feedback", exempt=["*.bias"])
    assert repr(attachment.state) == repr(QuantizationState(wire="int4", use_error_feedback=False, exempt=["*.bias"]))
    assert (
        attachment.report == "int4-no-feedback: quantization_hook compresses the all-reduce of DistributedDataParallel"
    )
    assert gradwire.attach(sharded("fsdp"), "fp8").report == gradwire.attach(sharded("fsdp"), within="fp8_e4m3").report
    assert "plain: the all-reduce" not in gradwire.attach(sharded("replicate"), "powersgd-r2").report
    assert gradwire.attach(nn.Linear(2, 2), "none").report == "nothing is compressed"
    assert "Did you mean 'int4'?" in message_of(gradwire.attach, ddp, "int-4")
    assert "has a hook, quantization_hook: hooks can only be attached once" in message_of(gradwire.attach, ddp, "int8")
    assert "got the name 'int4' and a hook" in message_of(gradwire.attach, ddp, "int4", allreduce_hook)
    assert "an option of a state" in message_of(gradwire.attach, ddp, QuantizationState(), exempt=["*.bias"])
    assert "attach(model, 'int4', exempt=...)" in message_of(gradwire.attach, ddp, exempt=["*.bias"])
    assert "fully_shard over a 1-D mesh" in message_of(gradwire.attach, sharded("fsdp"), "powersgd-r2")


@on_ranks(2)
def test_attach_refuses_what_is_no_wrapped_model_with_the_remedy():
    module = nn.Linear(2, 2)
    remedies = {
        "was given an object of type Linear; expected a Dist": module,
        "Wrap the module first: model = gradwire.DistributedDataParallel(module).": module,
        "Pass the model first": torch.optim.SGD(module.parameters(), lr=0.1),
        "was given 'int4'; expected": "int4",
        "Import replicate from torch.distributed._composable.replicate_with_fsdp.": replicate(nn.Linear(2, 2)),
    }
    for remedy, model in remedies.items():
        kind, text = error_of(gradwire.attach, model, "int4")
        assert kind == "TypeError" and remedy in text


@on_ranks(4)
def test_environment_names_the_hook_of_attach_equally_on_all_ranks():
    with mock.patch.dict(os.environ, {"GRADWIRE_HOOK": "int4"}):
        for place in SHARDED:
            assert gradwire.attach(sharded(place)).report == gradwire.attach(sharded(place), "int4").report
    for place in SHARDED:  # rank 0 shares no process group with rank 3 in a 2-D mesh
        with mock.patch.dict(os.environ, {"GRADWIRE_HOOK": "int8" if dist.get_rank() == 3 else "int4"}):
            kind, text = error_of(gradwire.attach, sharded(place))
        assert kind == "RuntimeError"
        assert "GRADWIRE_HOOK: 'int4' on ranks 0, 1, 2; 'int8' on rank 3" in text


@on_ranks(4)
def test_pattern_of_parameters_without_rows_on_some_ranks_matches_on_all():
    model, state = sharded("hsdp"), QuantizationState(start_iter=0, wires={"last.weight": "fp32"})
    gradwire.attach(model, state)  # last.weight has one row
    assert error_of(backward, model, 0) is None


@on_ranks(4)
def test_detached_model_averages_natively():
    native, ours = sharded("hsdp"), sharded("hsdp")
    attachment = gradwire.attach(ours, QuantizationState(wire="int4", start_iter=0))
    for model in (native, ours):
        backward(model, 0)
        model.zero_grad()
    attachment.detach()
    for model in (native, ours):
        backward(model, 1)
    assert_same_bits(gradients(ours), gradients(native))


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_model_attached_when_its_root_is_initialized_trains_like_one_attached_before(place):
    early, late, roots = sharded(place), sharded(place), []

    def attach(root):
        gradwire.attach(root, QuantizationState(wire="int4", start_iter=0))
        roots.append(root)

    attach(early)
    expected = train(early)
    with torch_internals.on_root_init(attach):
        assert_same_bits(train(late), expected)
    train(sharded(place), 1)
    assert roots == [early, late]


@on_ranks(4)
def test_private_name_that_pytorch_lacks_is_named_with_the_remedy_at_attach():
    model = sharded("hsdp")
    state = model._get_fsdp_state()
    group = next(torch_internals.parameter_groups(model))._group
    names = [
        (state, "_is_root"),
        (state._state_ctx, "post_backward_final_callback_queued"),
        (group.mesh_info, "shard_process_group"),
    ]
    for owner, name in names:
        value = vars(owner).pop(name)
        kind, text = error_of(gradwire.attach, model, QuantizationState())
        assert kind == "NotImplementedError"
        assert f"'{name}'. gradwire is tested with torch" in text
        setattr(owner, name, value)
    gradwire.attach(model, QuantizationState())


@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
@on_ranks(2)
def test_attach_registers_the_hook_on_ddp(wrapper):
    ddp, state = wrapped(wrapper), QuantizationState(wire="int8")
    attachment = gradwire.attach(ddp, state)
    assert ddp._comm_hooks == [(quantization_hook, state)]
    assert "quantization_hook compresses the all-reduce" in attachment.report
    assert error_of(attachment.detach)[0] == "RuntimeError"


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_accumulated_gradients_are_reduced_once(place):
    native, ours = sharded(place), sharded(place)
    state = QuantizationState(start_iter=2)
    gradwire.attach(ours, state)
    for model in (native, ours):
        for step, is_last in enumerate((False, False, True)):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_all_reduce(is_last, recurse=False)
            backward(model, step)
    assert_same_bits(gradients(ours), gradients(native))
    assert state.iter == 1


@on_ranks(4)
def test_attach_that_raises_changes_nothing():
    model, state = sharded("hsdp"), QuantizationState(wires={"nothing.*": "int8"})
    assert "wires['nothing.*'] matches none" in message_of(gradwire.attach, model, state, within="bf16")
    assert state.process_group is None
    state.options = dataclasses.replace(state.options, wires={})
    gradwire.attach(model, state)
    backward(model, 0)
    other = fully_shard(nn.Linear(4, 4), mesh=mesh("hsdp"))
    assert "a parameter 'between.bias'" in message_of(gradwire.attach, other, state)
    gradwire.attach(other, QuantizationState())


@pytest.mark.parametrize("divide_factor", [None, 2.0])
@pytest.mark.parametrize("feature", ["plain", "bf16 reduction", "fp16"])
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("place", SHARDED)
@on_ranks(4)
def test_reduce_scatter_in_16_bits_is_the_fp32_sum_of_rounded_gradients(place, wire, feature, divide_factor):
    native, ours = sharded(place, **FEATURES[feature]), sharded(place, **FEATURES[feature])
    attachment = gradwire.attach(ours, within=wire)
    assert f"in {wire}, with sums in fp32" in attachment.report
    assert "feedback" not in attachment.report
    for model in (native, ours):
        if divide_factor is not None and feature == "fp16":  # gloo has no PREMUL_SUM
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(divide_factor)
        backward(model, 0)
        backward(model, 1)  # adds to the gradient
    got, exact = gradients(ours), gradients(native)
    # Half a unit in the last place of every rank's gradient: 2^-9 in bf16, 2^-12 in fp16.
    bound = (2**-8 if wire == "bf16" else 2**-11) + (2**-9 if feature == "fp16" else 0)
    missing = [got[name] - gradient for name, gradient in exact.items()]
    assert norm(missing) <= 2 * bound * norm(exact.values())
    if feature == "plain":
        assert norm(missing) > 0
    attachment.detach()
    for model in (native, ours):
        model.zero_grad()
        backward(model, 2)
    assert_same_bits(gradients(ours), gradients(native))
