"""Options of the hook states: those out of range raise with their name, value and expectation."""

import math
import re
from functools import partial

import pytest
import torch

from gradwire.compress import DelayedScaling
from gradwire.hooks.default_hooks import CastState
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from gradwire.kernels import WIRE_FORMATS
from gradwire.sharded import ReduceScatterOptions

NO_NUMBER = [None, "2", [2], torch.tensor(2), 1 + 0j]
NO_WHOLE_NUMBER = [*NO_NUMBER, 2.5, 2.0, math.nan, math.inf, True, False]
NO_FINITE_NUMBER = [*NO_NUMBER, math.nan, math.inf, -math.inf, True, False]
NO_FLAG = [None, 0, 1, 1.0, "yes", torch.tensor(True)]
NO_BINADES = [*NO_WHOLE_NUMBER, -1, 1000]
SCALING = {
    "dtype": ["float16", None, torch.float32, torch.float64, 16, True],
    "margin": [*NO_BINADES, 13],
    "growth": [*NO_BINADES, 0],
    "backoff": NO_BINADES,
}
BAD_OPTIONS = {
    PowerSGDState: {
        "matrix_approximation_rank": [*NO_WHOLE_NUMBER, 0, -1],
        "start_powerSGD_iter": NO_WHOLE_NUMBER,
        "min_compression_rate": NO_FINITE_NUMBER,
        "use_error_feedback": NO_FLAG,
        "warm_start": NO_FLAG,
        "orthogonalization_epsilon": [*NO_FINITE_NUMBER, -1e-8],
        "random_seed": [*NO_WHOLE_NUMBER, "x"],
        "compression_stats_logging_frequency": NO_WHOLE_NUMBER,
        "batch_tensors_with_same_shape": NO_FLAG,
        "ranks": ["*", ["*"], [("*", 1)], 3, {"*": True}, {"*": 2.5}, {"*": -1}, {"*": math.nan}, {3: 1}, {None: 1}],
        "stacks": ["*", ["*"], [("*", 1)], 3, {"*": True}, {"*": 2.5}, {"*": 0}, {"*": None}, {3: 1}],
        "factor_dtype": ["bfloat16", torch.float16, torch.int8, 16, True],
        "alternating": NO_FLAG,
        "precision": ["ieee", "TF32", None, 32, torch.float32],
        "factor_wire": ["INT8", "int2", "fp32", 8, torch.int8, True],
    },
    QuantizationState: {
        "wire": ["int99", "INT4", None, 4, torch.int8],
        "block_size": [*NO_WHOLE_NUMBER, 0, 16, 48, 2048, -64],
        "use_error_feedback": [each for each in NO_FLAG if each is not None],
        "start_iter": [*NO_WHOLE_NUMBER, -1],
        "exempt": ["*.bias", None, 3, (3,), {"*": 1}],
        "wires": [("*", "int4"), "int4", {"*": "int99"}, {"*": None}, {3: "int4"}],
        "error_dtype": ["float32", torch.float16, torch.float64, None, 32],
        "seed": NO_WHOLE_NUMBER,
    },
    CastState: {"accumulate": ["fp16", None, torch.float32, 32]},
    ScaledCastState: SCALING,
    DelayedScaling: SCALING,
}


CASES = {
    f"{owner.__name__} {name} {value!r}": (owner, name, value)
    for owner, options in BAD_OPTIONS.items()
    for name, values in options.items()
    for value in values
}


@pytest.mark.parametrize("case", CASES)
def test_option_out_of_range_raises_with_name_value_and_expectation(case):
    owner, name, value = CASES[case]
    arguments = () if owner is DelayedScaling else (None,)
    with pytest.raises((ValueError, TypeError)) as raised:
        owner(*arguments, **{name: value})
    message = str(raised.value)
    assert message.startswith(name)
    assert "expected" in message
    shown = value
    if isinstance(value, dict) and message.startswith(f"{name}["):
        ((pattern, shown),) = value.items()
        assert f"[{pattern!r}]" in message
    elif isinstance(value, dict) and " has the pattern " in message:
        (shown,) = value
    assert str(shown).strip("[]") in message


@pytest.mark.parametrize(
    ("make", "option", "value", "meant"),
    [
        (QuantizationState, "wire", "Int4", "'int4'"),
        (QuantizationState, "wire", "INT6", "'int6'"),
        (QuantizationState, "wire", "fp4", "'fp8'"),
        (QuantizationState, "wire", "bfloat16", "'bf16'"),
        (QuantizationState, "wires", {"*.bias": "fp-32"}, "'fp32'"),
        (QuantizationState, "error_dtype", "bfloat16", "torch.bfloat16"),
        (QuantizationState, "error_dtype", torch.float16, "torch.bfloat16"),
        (ReduceScatterOptions, "wire", "int-8", "'int8'"),
        (partial(PowerSGDState, None), "factor_wire", "int5", "'int8'"),
        (partial(PowerSGDState, None), "factor_wire", "none", "None"),
        (partial(PowerSGDState, None), "precision", "TF32", "'tf32'"),
        (partial(PowerSGDState, None), "factor_dtype", torch.float16, "torch.bfloat16"),
        (CastState, "accumulate", "fp-32", "'fp32'"),
        (ScaledCastState, "dtype", "float16", "torch.float16"),
    ],
)
def test_value_that_is_no_choice_raises_with_the_nearest(make, option, value, meant):
    with pytest.raises(ValueError, match=rf"^{option}.* Did you mean {re.escape(meant)}\?"):
        make(**{option: value})


def test_value_like_no_choice_raises_with_all():
    with pytest.raises(ValueError, match=r"^wire is 'zzz'; expected 'int8', 'fp8', .*, 'fp16' or 'fp32'\.$"):
        QuantizationState(wire="zzz")


def test_fp8_e4m3_is_another_name_of_fp8():
    assert "fp8" in WIRE_FORMATS and "fp8_e4m3" not in WIRE_FORMATS
    old, new = (QuantizationState(wire=name, wires={"head.*": name}) for name in ("fp8_e4m3", "fp8"))
    assert old.options == new.options and old.options.wires == {"head.*": "fp8"}
    assert old._compared_options() == new._compared_options()
    assert ReduceScatterOptions(wire="fp8_e4m3") == ReduceScatterOptions(wire="fp8")
    pickled = new.__getstate__()
    pickled["options"] |= {"wire": "fp8_e4m3", "wires": {"head.*": "fp8_e4m3"}}  # as earlier versions wrote it
    loaded = QuantizationState.__new__(QuantizationState)
    loaded.__setstate__(pickled)
    assert loaded.options == new.options


@pytest.mark.parametrize(
    ("state", "argument", "hint"),
    [
        (PowerSGDState, {"rank": 4}, "Did you mean matrix_approximation_rank=4?"),
        (PowerSGDState, {"error_feedback": False}, "Did you mean use_error_feedback=False?"),
        (PowerSGDState, {"start_iter": 10}, "Did you mean start_powerSGD_iter=10?"),
        (QuantizationState, {"wire_format": "int8"}, "Did you mean wire='int8'?"),
        (CastState, {"acumulate": "fp32"}, "Did you mean accumulate='fp32'?"),
        (ScaledCastState, {"bits": 16}, "Expected process_group, dtype, margin, growth, backoff."),
    ],
)
def test_unknown_option_raises_with_the_closest_option(state, argument, hint):
    message = f"{state.__name__}() got an unexpected keyword argument {next(iter(argument))!r}. {hint}"
    with pytest.raises(TypeError, match=re.escape(message)):
        state(**argument)
