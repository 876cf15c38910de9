"""GRADWIRE_HOOK: the hook of a job whose script names none, on gradwire's DDP and by ``attach(model)``."""

import copy
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.hooks import by_name
from gradwire.hooks.default_hooks import allreduce_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import WRAPPERS, error_of, logged, message_of, train_steps, wrapped


def environment(value):
    """Meanwhile, GRADWIRE_HOOK has this value on this rank; None: it is not set."""
    without = {name: each for name, each in os.environ.items() if name != by_name.VARIABLE}
    return mock.patch.dict(os.environ, without | ({} if value is None else {by_name.VARIABLE: value}), clear=True)


def wrapped_in(value, **options):
    """gradwire's DDP, wrapped while GRADWIRE_HOOK has this value; and the texts of the warnings."""
    with environment(value), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = wrapped(**options)
    return ddp, [str(each.message) for each in caught]


@pytest.mark.parametrize("name", ["int4", "powersgd-r2-int8", "bf16"])
@on_ranks(2, 3)
def test_model_trains_as_if_the_script_had_attached_the_hook(name):
    by_name.log_name_from_environment.cache_clear()
    with logged() as records:
        ours, shown = wrapped_in(f" {name} ")
        again, _ = wrapped_in(name)
    expected = wrapped()
    gradwire.attach(expected, name)
    assert_same_bits(train_steps(copy.deepcopy(ours), 4), train_steps(expected, 4))
    assert_same_bits(train_steps(again, 4), train_steps(ours, 4))
    assert ours._get_ddp_logging_data()["comm_hook"] == expected._get_ddp_logging_data()["comm_hook"]
    assert shown == []
    texts = [(each.levelname, each.getMessage()) for each in records if by_name.VARIABLE in each.getMessage()]
    assert len(texts) == (dist.get_rank() == 0)  # for both models
    assert all(level == "WARNING" and f"compresses the gradients with {name}." in text for level, text in texts)


@on_ranks(2)
def test_nothing_is_compressed_with_none_or_an_empty_value():
    by_name.log_name_from_environment.cache_clear()
    plain = train_steps(wrapped(), 3)
    with logged() as records:
        for value in ("none", "", " "):
            ddp, shown = wrapped_in(value)
            assert not ddp._comm_hooks and shown == []
            assert_same_bits(train_steps(ddp, 3), plain)
        with environment("none"):
            for wrapper in WRAPPERS:
                assert gradwire.attach(wrapped(wrapper)).report == "nothing is compressed"
    assert [each.getMessage() for each in records if by_name.VARIABLE in each.getMessage()] == []


# What the script does by itself, and the words of the warning.
SCRIPTS = {
    "registers a hook": (lambda ddp: ddp.register_comm_hook(None, allreduce_hook), "registers allreduce_hook"),
    "registers PowerSGD": (
        lambda ddp: ddp.register_comm_hook(PowerSGDState(None, 2, 2), powerSGD_hook),
        "registers powerSGD_hook",
    ),
    "registers a builtin hook": (
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        "registers fp16_compress_hook",
    ),
    "attaches a name": (lambda ddp: gradwire.attach(ddp, "int8", start_iter=0), "registers quantization_hook"),
    "attaches none": (lambda ddp: gradwire.attach(ddp, "none"), "attaches 'none'"),
}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("script", SCRIPTS)
@on_ranks(2)
def test_hook_of_the_script_wins_with_one_warning(script, steps_before):
    action, words = SCRIPTS[script]
    ddp, _ = wrapped_in("int4")
    expected = wrapped()
    for model in (ddp, expected):  # rebuilds the buckets
        train_steps(model, steps_before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action(ddp)
    (warning,) = caught
    assert str(warning.message) == f"GRADWIRE_HOOK=int4 is not used for this Mlp: the script {words}."
    action(expected)
    assert ddp._get_ddp_logging_data().get("comm_hook") == expected._get_ddp_logging_data().get("comm_hook")
    assert_same_bits(train_steps(ddp, 4), train_steps(expected, 4))
    if script != "attaches none":
        assert "can only be called once" in message_of(ddp.register_comm_hook, None, fp16_compress_hook)


@on_ranks(2)
def test_attach_without_a_name_takes_the_hook_of_the_environment():
    ours, _ = wrapped_in("int4")
    theirs = wrapped("pytorch")
    with environment("int4"), warnings.catch_warnings():
        warnings.simplefilter("error")
        attachments = [gradwire.attach(ddp) for ddp in (ours, theirs)]
    for ddp, attachment in zip((ours, theirs), attachments, strict=True):
        assert ddp._comm_hooks == [(quantization_hook, attachment.state)]
        assert repr(attachment.state) == repr(QuantizationState(wire="int4"))
        assert attachment.report == f"int4: quantization_hook compresses the all-reduce of {type(ddp).__name__}"
    with environment(None):
        kind, text = error_of(gradwire.attach, wrapped("pytorch"))
        assert kind == "TypeError" and "the environment variable GRADWIRE_HOOK names no hook" in text
        assert "GRADWIRE_HOOK names no hook" in message_of(gradwire.attach, torch.nn.Linear(2, 2))


@on_ranks(2, 3)
def test_value_that_differs_between_ranks_raises_on_every_rank():
    for first, others in (("int4", None), (None, "int4"), ("int4", "int8"), ("int4", "int5"), ("none", None)):
        with environment(others if dist.get_rank() else first):
            of_ddp, of_attach = error_of(wrapped), error_of(gradwire.attach, wrapped("pytorch"))
        assert of_ddp[0] == of_attach[0] == "RuntimeError"
        ranks = "ranks 1, 2" if dist.get_world_size() == 3 else "rank 1"
        assert f"GRADWIRE_HOOK: {first or 'not set'} on rank 0; {others or 'not set'} on {ranks}" in of_ddp[1]
        shown = [repr(value) if value else "nothing" for value in (first, others)]
        assert f"GRADWIRE_HOOK: {shown[0]} on rank 0; {shown[1]} on {ranks}" in of_attach[1]
        assert_same_on_all_ranks(from_all_ranks((of_ddp, of_attach)))


@on_ranks(2)
def test_unknown_name_raises_on_every_rank_with_the_nearest():
    with environment("int-4"):
        for kind, text in (error_of(wrapped), error_of(gradwire.attach, wrapped("pytorch"))):
            assert kind == "ValueError"
            assert text.startswith(
                "The environment variable GRADWIRE_HOOK is 'int-4'. There is no hook 'int-4'. Did you"
            )
