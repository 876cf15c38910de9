"""`QuantizationState`: options, patterns, error memory of new buckets, and pickles of earlier versions."""

import pytest
import torch

from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.kernels import WIRE_FORMATS
from tests.distributed.hooks.test_quantization_laws import hook_of, summed, wrapped
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.training import train_steps

# --- options


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("layer.weight", (4, 4), torch.float32, "int4"),
        ("layer.bias", (4,), torch.float32, "bf16"),
        ("layer.scale", (4,), torch.float16, "fp16"),
        ("layer.scale", (4,), torch.bfloat16, "bf16"),
        ("norm1.weight", (4, 4), torch.float32, "bf16"),
        ("scalar", (), torch.float64, "bf16"),
        ("head.weight", (4, 4), torch.float32, "int8"),
        ("head.bias", (4,), torch.float32, "int8"),
        ("complex", (4,), torch.complex64, "bf16"),
    ],
)
def test_wire_format_of_a_parameter(name, shape, dtype, expected):
    state = QuantizationState(None, "int4", wires={"head.*": "int8"})
    assert state.options.wire_format(name, torch.empty(shape, dtype=dtype)) is WIRE_FORMATS[expected]


# --- memory


def trained(wrapper="gradwire", steps=3, model="mlp", **options):
    ddp, state = wrapped(wrapper, model, hook_of(**({"wire": "int4"} | options)))
    train_steps(ddp, steps)
    return ddp, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_law1_errors_of_both_shots_survive_new_buckets(dtype):
    # Errors summed over ranks before and after the buckets of a state are cut anew, without a step between.
    _, state = trained(error_dtype=dtype)
    before = {name: summed(error) for name, error in state.memory.tensors("errors").items()}
    state.memory.drop_buckets(tuple(before))
    assert not state.memory.buckets
    assert_same_bits({name: summed(error) for name, error in state.memory.tensors("errors").items()}, before)


@on_ranks(1)
def test_pickle_of_an_earlier_version_loads():
    _, state = trained(steps=3)
    now = state.__getstate__()
    memory = dict(now["memory"])
    iteration = memory.pop("iter")
    for earlier in (
        {"options": now["options"], "iter": iteration, "memory": memory, "loaded": now["loaded"]},
        {"options": now["options"], "memory": now["memory"]},
    ):
        again = QuantizationState.__new__(QuantizationState)
        again.__setstate__(earlier)
        assert again.iter == state.iter and repr(again) == repr(state)
        assert_same_bits(again.memory.tensors("errors"), state.memory.tensors("errors"))
