"""`QuantizationState`: options, patterns, checkpoints, damaged states, copies and the handshake."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.kernels import WIRE_FORMATS
from tests.distributed.test_quantization_laws import hook_of, summed, wrapped
from tests.distributed.test_state_validation import (
    BAD_COUNTS,
    FLOAT_DAMAGES,
    NO_FLAG,
    NO_WHOLE_NUMBER,
    TENSOR_DAMAGES,
    changed,
    refusal,
)
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import WRAPPERS, build, gradients, message_of, register

# --- options

BAD_OPTIONS = {
    "wire": ["int3", "INT4", None, 4, torch.int8],
    "block_size": [*NO_WHOLE_NUMBER, 0, 16, 48, 2048, -64],
    "use_error_feedback": NO_FLAG,
    "start_iter": [*NO_WHOLE_NUMBER, -1],
    "exempt": ["*.bias", None, 3, (3,), {"*": 1}],
    "wires": [("*", "int4"), "int4", {"*": "int3"}, {"*": None}, {3: "int4"}],
    "stochastic_rounding": NO_FLAG,
    "error_dtype": ["float32", torch.float16, torch.float64, None, 32],
    "seed": NO_WHOLE_NUMBER,
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values], ids=repr
)
def test_option_out_of_range_raises_with_its_name(name, value):
    message = refusal(QuantizationState, None, **{name: value})
    assert message.startswith(name)
    assert "expected" in message


def test_options_are_kept_and_shown():
    state = QuantizationState(None, "int2", block_size=32, exempt=["*.scale"], wires={"head.*": "fp32"})
    assert state.options.exempt == ("*.scale",)
    assert repr(state).startswith("QuantizationState(iter=0, wire='int2', block_size=32, use_error_feedback=True")
    assert "wires={'head.*': 'fp32'}" in repr(state)


def test_process_group_that_is_none_raises():
    assert "process_group is 'x'" in refusal(QuantizationState, "x")


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


def test_pattern_that_matches_no_parameter_raises():
    state = QuantizationState(None, wires={"*.wieght": "int8"})
    message = refusal(state.bind, build("mlp"))
    assert message.startswith("wires['*.wieght'] matches none of the model's 8 parameters")


# --- the handshake


def options_that_differ(options):
    ddp = WRAPPERS["gradwire"](build("mlp"))
    register(ddp, hook_of(**({"wire": "int4"} | (options if dist.get_rank() == 1 else {}))))
    return message_of(lambda: ddp(*ddp.module.batch(torch.Generator())).backward())


@pytest.mark.parametrize(
    "options", [{"wire": "int8"}, {"block_size": 128}, {"start_iter": 1}, {"stochastic_rounding": True}], ids=str
)
def test_options_that_differ_between_ranks_raise_on_all(worlds, options):
    ((name, value),) = options.items()
    for message in worlds(2).run(options_that_differ, options=options):
        assert f"{name}: " in message
        assert str(value) in message


# --- checkpoints


def trained(wrapper="gradwire", steps=3, model="mlp", **options):
    ddp, state = wrapped(wrapper, model, hook_of(**({"wire": "int4"} | options)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
    return ddp, state


def saved_state(**options):
    _, state = trained(**options)
    saved = state.state_dict()
    return saved, {name: summed(error) for name, error in state.tensors("errors").items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saved_errors_are_sums_over_ranks(world, wrapper):
    results = world.run(saved_state, wrapper=wrapper)
    assert_same_on_all_ranks([saved for saved, _ in results])
    saved, sums = results[0]
    assert set(saved) == {"iter", "errors"}
    assert saved["iter"] == 3
    assert saved["errors"].keys() == sums.keys() == dict(build("mlp").named_parameters()).keys()
    for name, error in saved["errors"].items():
        assert (error.dtype, error.device.type) == (torch.float32, "cpu")
        assert (error - sums[name]).abs().max() <= world.size * 2.0**-23 * sums[name].abs().max()


def state_before_the_first_step(**options):
    _, state = trained(steps=0, **options)
    return state.state_dict()


def test_state_before_the_first_step_has_an_entry_for_every_parameter(worlds):
    (saved,) = worlds(1).run(state_before_the_first_step)
    assert saved["iter"] == 0
    assert {name: error.shape for name, error in saved["errors"].items()} == {
        name: parameter.shape for name, parameter in build("mlp").named_parameters()
    }
    (saved,) = worlds(1).run(state_before_the_first_step, use_error_feedback=False)
    assert saved == {"iter": 0, "errors": {}}


def saving_changes_nothing():
    runs = []
    for saves in (True, False):
        ddp, state = trained()
        if saves:
            state.state_dict()
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
        runs.append((gradients(ddp), state.tensors("errors")))
    return runs


def test_saving_changes_nothing(world):
    for saving, plain in world.run(saving_changes_nothing):
        assert_same_bits(saving, plain)


def prepared_on_rank_0():
    _, state = trained()
    state.prepare_checkpoint()
    return state.state_dict() if dist.get_rank() == 0 else None


def test_prepared_checkpoint_is_saved_by_one_rank(worlds):
    saved, nothing = worlds(2).run(prepared_on_rank_0)
    assert nothing is None
    assert saved["iter"] == 3


def distributed_checkpoint(folder):
    _, state = trained()
    dcp.save({"hook": state.state_dict()}, checkpoint_id=folder)
    _, other = wrapped("pytorch", "mlp", hook_of("int4"))
    loaded = {"hook": other.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["hook"])
    return state.state_dict(), other.state_dict()


def test_state_loads_from_a_distributed_checkpoint(worlds, tmp_path):
    for saved, loaded in worlds(2).run(distributed_checkpoint, folder=str(tmp_path)):
        assert_same_bits(loaded, saved)  # halves of a sum add up exactly


def pickled_state():
    _, state = trained()
    again = pickle.loads(pickle.dumps(state))
    return state.tensors("errors"), again.tensors("errors"), (state.iter, repr(state)), (again.iter, repr(again))


def test_pickled_state_keeps_options_and_own_errors(worlds):
    for errors, again, facts, facts_again in worlds(2).run(pickled_state):
        assert_same_bits(again, errors)
        assert facts_again == facts


def resumed_after_rebuild(**options):
    """Errors summed over ranks before and after the buckets of a state are cut anew, without a step between."""
    _, state = trained(**options)
    before = {name: summed(error) for name, error in state.tensors("errors").items()}
    state.drop_buckets(tuple(before))
    return before, {name: summed(error) for name, error in state.tensors("errors").items()}, bool(state._buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_law1_errors_of_both_shots_survive_new_buckets(world, dtype):
    for before, after, has_buckets in world.run(resumed_after_rebuild, error_dtype=dtype):
        assert not has_buckets
        assert_same_bits(after, before)


# --- damaged states


def good_state():
    generator = torch.Generator().manual_seed(0)
    errors = {name: torch.randn(p.shape, generator=generator) for name, p in build("mlp").named_parameters()}
    return {"iter": 4, "errors": errors}


def damaged_states():
    good = good_state()
    for label, value in BAD_COUNTS.items():
        yield f"iter is {label}", changed(good, "iter", value), "iter"
    for label, value in {"None": None, "a list": [torch.ones(2)], "a tensor": torch.ones(2)}.items():
        yield f"errors is {label}", changed(good, "errors", value), "errors"
    yield "a number for a name", changed(good, "errors", torch.ones(1), 3), "errors"
    for label, damage in (TENSOR_DAMAGES | FLOAT_DAMAGES).items():
        name = "layers.2.weight"
        yield label, changed(good, "errors", damage(good["errors"][name]), name), f"errors['{name}']"
    for key in good:
        yield f"no {key}", {other: value for other, value in good.items() if other != key}, f"'{key}'"
    for label, value in {"None": None, "a list": [good], "empty": {}}.items():
        yield label, value, "iter and errors"


@pytest.mark.parametrize(
    ("damaged", "entry"), [pytest.param(state, entry, id=label) for label, state, entry in damaged_states()]
)
def test_damaged_state_raises_and_changes_nothing(damaged, entry):
    state, model = QuantizationState(None), build("mlp")
    state.bind(model)
    state.load_state_dict(good_state())
    before = copy.deepcopy(state.__getstate__())
    message = refusal(state.load_state_dict, damaged)
    assert entry in message
    assert re.search("expected|its gradient", message)
    assert_same_bits(state.__getstate__(), before)


def loaded_of_another_model():
    _, state = wrapped("gradwire", "mlp", hook_of("int4"))
    saved = good_state()
    saved["errors"]["layers.0.weight"] = torch.zeros(3, 3)
    return message_of(state.load_state_dict, saved)


def test_loaded_error_of_another_shape_raises(worlds):
    (message,) = worlds(1).run(loaded_of_another_model)
    assert "error memory of layers.0.weight has shape (3, 3), its gradient (23, 11)" in message


def error_without_a_state():
    ddp = WRAPPERS["pytorch"](build("mlp"))
    register(ddp, (None, quantization_hook))
    return message_of(lambda: ddp(*ddp.module.batch(torch.Generator())).backward())


def test_hook_without_its_state_raises_with_the_remedy(worlds):
    (message,) = worlds(1).run(error_without_a_state)
    assert "The state of quantization_hook is None; expected a gradwire QuantizationState" in message
    assert "register_comm_hook(QuantizationState(process_group), quantization_hook)" in message
