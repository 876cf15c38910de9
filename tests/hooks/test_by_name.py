"""Hooks by name: what each name stands for, options beside a name, and names that do not exist."""

import pytest
import torch

from gradwire.hooks.by_name import hook_named, name_from_environment
from gradwire.hooks.default_hooks import CastState, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook

NAMES = {
    "allreduce": (CastState(), allreduce_hook),
    "fp16": (CastState(), fp16_compress_hook),
    "bf16": (CastState(), bf16_compress_hook),
    "bf16-fp32-sum": (CastState(accumulate="fp32"), bf16_compress_hook),
    "scaled-fp16": (ScaledCastState(), scaled_cast_hook),
    **{
        wire: (QuantizationState(wire=wire), quantization_hook)
        for wire in ("int8", "fp8", "int6", "int4", "int2", "sign")
    },
    "fp8_e4m3": (QuantizationState(wire="fp8"), quantization_hook),
    "fp8_e4m3-no-feedback": (QuantizationState(wire="fp8", use_error_feedback=False), quantization_hook),
    "int4-no-feedback": (QuantizationState(wire="int4", use_error_feedback=False), quantization_hook),
    "powersgd-r1": (PowerSGDState(None, 1), powerSGD_hook),
    "powersgd-r13": (PowerSGDState(None, 13), powerSGD_hook),
    "powersgd-r16-int8": (PowerSGDState(None, 16, factor_wire="int8"), powerSGD_hook),
    "powersgd-r8-int4": (PowerSGDState(None, 8, factor_wire="int4"), powerSGD_hook),
    "powersgd-r4-bf16": (PowerSGDState(None, 4, factor_dtype=torch.bfloat16), powerSGD_hook),
    "powersgd-r4-fp16": (PowerSGDState(None, 4, factor_wire="fp16"), powerSGD_hook),
    "powersgd-r4-alternating": (PowerSGDState(None, 4, alternating=True), powerSGD_hook),
    "powersgd-r4-bf16-alternating-no-feedback": (
        PowerSGDState(None, 4, factor_dtype=torch.bfloat16, alternating=True, use_error_feedback=False),
        powerSGD_hook,
    ),
    "powersgd-r4-batched": (PowerSGDState(None, 4), batched_powerSGD_hook),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_stands_for_state_and_hook(name):
    state, hook = NAMES[name]
    named = hook_named(name)
    assert named.hook is hook
    assert repr(named.state()) == repr(state)


def test_options_are_those_of_the_state():
    state = hook_named("int4").state(None, exempt=["*.bias"], start_iter=7)
    assert repr(state) == repr(QuantizationState(wire="int4", exempt=["*.bias"], start_iter=7))
    with pytest.raises(TypeError, match=r"wire='int8' contradicts the name of the hook: wire='int4'"):
        hook_named("int4").state(wire="int8")
    with pytest.raises(TypeError, match=r"'excempt'. Did you mean exempt="):
        hook_named("int4").state(excempt=["*.bias"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int-4", "int4"),
        ("INT4", "int4"),
        ("fp8_e4m", "fp8"),
        ("powersgd", "powersgd-r4"),
        ("powersgd-16-int8", "powersgd-r16-int8"),
        ("powersgd-r0", "powersgd-r4"),
        ("powersgd-r16-int6", "powersgd-r16-int8"),
        ("powersgd-r8-int9", "powersgd-r8-int8"),
        ("PowerSGD-r8", "powersgd-r8"),
        ("bf16-no-feedback", "bf16"),
        ("int4-nofeedback", "int4-no-feedback"),
        ("fp16-fp32-sum", "bf16-fp32-sum"),
    ],
)
def test_unknown_name_suggests_the_nearest(name, meant):
    with pytest.raises(ValueError, match=f"There is no hook '{name}'. Did you mean '{meant}'?") as raised:
        hook_named(name)
    assert "int8, fp8, int6, int4, int2, sign, and powersgd-rN" in str(raised.value)


def test_name_like_no_other_lists_the_hooks():
    with pytest.raises(ValueError, match=r"There is no hook 'zzz'. Hooks: allreduce, fp16, bf16"):
        hook_named("zzz")


def test_environment_names_a_hook_none_or_nothing(monkeypatch):
    monkeypatch.delenv("GRADWIRE_HOOK", raising=False)
    assert name_from_environment() is None
    for value, name in {"": None, "  ": None, "none": "none", " powersgd-r3\n": "powersgd-r3"}.items():
        monkeypatch.setenv("GRADWIRE_HOOK", value)
        assert name_from_environment() == name
    monkeypatch.setenv("GRADWIRE_HOOK", "powersgd")
    with pytest.raises(ValueError, match=r"GRADWIRE_HOOK is 'powersgd'. There is no hook .* mean 'powersgd-r4'\?"):
        name_from_environment()
