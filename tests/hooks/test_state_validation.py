"""Loaded states and name patterns that cannot be right raise in every hook state, before anything changes."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from tests.support.bits import assert_same_bits
from tests.support.states import EARLY

INT64_MAX = 2**63 - 1


def refusal(function, *arguments, **options):
    """The message of the ValueError or TypeError that the call raises."""
    with pytest.raises((ValueError, TypeError)) as raised:
        function(*arguments, **options)
    return str(raised.value)


# --- loaded states


class Model(nn.Module):
    """Two matrices, one of them three fused, and a vector."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 18)
        self.head = nn.Linear(18, 7, bias=False)

    def forward(self, x):
        return self.head(self.qkv(x)).square().mean()


OPTIONS = EARLY | {"matrix_approximation_rank": 2, "stacks": {"qkv.weight": 3}, "alternating": True}


def powersgd_state():
    """A checkpoint of `Model` under `OPTIONS`."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    def columns(*shape):
        return nn.functional.normalize(drawn(*shape), dim=2)

    return {
        "iter": 4,
        "errors": {"qkv.weight": drawn(18, 8), "head.weight": drawn(7, 18)},
        "q": {"qkv.weight": columns(3, 2, 8), "head.weight": columns(1, 2, 18)},
        "p": {"qkv.weight": columns(3, 2, 6), "head.weight": columns(1, 2, 7)},
        "numel": [1000, 500],
    }


def scaled_cast_state():
    return {
        "names": ["head.weight", "qkv.bias", "qkv.weight"],
        "exponents": torch.tensor([[3, 1], [-100, 1], [0, 0]], dtype=torch.int32),
        "counters": torch.tensor([1, 2, 3, 0]),
    }


class Subclass(torch.Tensor):
    pass


def with_element(tensor, value, place=0):
    changed = tensor.clone()
    changed.view(-1)[place] = value
    return changed


# Of a tensor; all are refused, whatever the entry.
TENSOR_DAMAGES = {
    "None": lambda tensor: None,
    "list": lambda tensor: tensor.tolist(),
    "int8": lambda tensor: tensor.to(torch.int8),
    "fp16": lambda tensor: tensor.half(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "sparse": lambda tensor: tensor.to_sparse(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor.float()]),
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "one dimension and element more": lambda tensor: torch.cat([tensor.view(-1), tensor.view(-1)[:1]]).unsqueeze(0),
    "0-d": lambda tensor: tensor.view(-1)[0],
    "last column gone": lambda tensor: tensor[..., :-1],
    "nothing left": lambda tensor: tensor[:0],
}
FLOAT_DAMAGES = {
    "last is nan": lambda tensor: with_element(tensor, torch.nan, -1),
    "-inf": lambda tensor: with_element(tensor, -torch.inf),
}
FACTOR_DAMAGES = {
    "a column of length 2": lambda tensor: with_element(tensor, 2.0),
    "a rank above the length": lambda tensor: tensor[:, :1].expand(-1, 20, -1),
    "no rank": lambda tensor: tensor[:, :0],
    "one matrix more": lambda tensor: torch.cat([tensor, tensor[:1]]),
}
BAD_COUNTS = [-1, True, 2**80, INT64_MAX, 4.0, None, "4", torch.tensor(4)]
NO_STATES = {"None": None, "a list": [powersgd_state()], "a tensor": torch.ones(3), "empty": {}}
# No entry and no tensor of a state may be one of these.
JUNK = [None, True, 0.5, "ab", -1, 2**62 + 1, [1, 2, 3], {"a": 1}, torch.ones(3), torch.ones(3, dtype=torch.bool)]


def changed(state, key, value, inner=None):
    """A copy of a state, one entry of which is another."""
    state = copy.deepcopy(state)
    if inner is None:
        state[key] = value
    else:
        state[key][inner] = value
    return state


def damaged_powersgd_states():
    """(id, damaged state, the entry that the message has to name)."""
    good = powersgd_state()
    for value in BAD_COUNTS:
        yield f"iter is {value!r}", changed(good, "iter", value), "iter"
        for i in range(2):
            yield f"numel[{i}] is {value!r}", changed(good, "numel", value, i), f"numel[{i}]"
    for value in (*JUNK, [12], [12, "ten"]):
        yield f"numel is {value!r}", changed(good, "numel", value), "numel"
    for key in ("errors", "q", "p"):
        for value in (*JUNK, [torch.ones(2)]):
            yield f"{key} is {value!r}", changed(good, key, value), key
            yield f"{key} has {value!r}", changed(good, key, value, "qkv.weight"), f"{key}['qkv.weight']"
        yield f"{key} has a number for a name", changed(good, key, torch.ones(1, 1, 1), 3), key
        damages = TENSOR_DAMAGES | FLOAT_DAMAGES | (FACTOR_DAMAGES if key != "errors" else {})
        for label, damage in damages.items():
            for name in ("qkv.weight", "head.weight"):
                value = damage(good[key][name])
                yield f"{key}[{name}]: {label}", changed(good, key, value, name), f"{key}['{name}']"
    for key in good:
        yield f"no {key}", {other: value for other, value in good.items() if other != key}, f"'{key}'"
    for label, value in NO_STATES.items():
        yield label, value, "iter, errors, q, p and numel"


def damaged_scaled_cast_states():
    """(id, damaged state, the entry that the message has to name)."""
    good = scaled_cast_state()
    for value in (*JUNK, -1, INT64_MAX):
        yield f"iter is {value!r}", changed(good, "iter", value), "iter"
    for key in good:
        yield f"no {key}", {other: value for other, value in good.items() if other != key}, f"'{key}'"
        for value in JUNK:
            yield f"{key} is {value!r}", changed(good, key, value), key
    for key in ("exponents", "counters"):
        for label, damage in TENSOR_DAMAGES.items():
            yield f"{key}: {label}", changed(good, key, damage(good[key])), key
    smallest = torch.iinfo(torch.int32).min
    for key, number, place, entry in (
        *(("exponents", number, 0, "[0, 0]") for number in (smallest, -smallest - 1, -101, 101)),
        *(("exponents", number, -1, "exponents[2, 1]") for number in (-1, 2)),
        *(("counters", number, i, f"counters[{i}]") for i in range(4) for number in (-1, INT64_MAX)),
        ("counters", 2, 3, "counters[3]"),
    ):
        yield f"{key}: {number} at {place}", changed(good, key, with_element(good[key], number, place)), entry
    names = good["names"]
    for value, entry in (
        (tuple(names), "names"),
        ([*names[:2], 3], "names[2]"),
        ([*names[:2], names[0]], "names[2]"),
        (names[:2], "exponents"),
        ([*names, "d"], "exponents"),
    ):
        yield f"names are {value}", changed(good, "names", value), entry
    for label, value in NO_STATES.items():
        yield label, value, "names, exponents and counters"


def damaged_quantization_states():
    """Those of PowerSGD with an entry that both have, without the others."""
    for label, state, entry in damaged_powersgd_states():
        if entry.strip("'").startswith(("iter", "errors")) and isinstance(state, dict) and state:
            yield label, {key: state[key] for key in ("iter", "errors") if key in state}, entry
    for label, value in NO_STATES.items():
        yield label, value, "iter and errors"


def cases(damaged):
    return [pytest.param(state, entry, id=label) for label, state, entry in damaged]


def loaded_powersgd(bound):
    state = PowerSGDState(None, **OPTIONS)
    if bound:
        state.model = Model()  # a state holds it weakly
        state.bind(state.model)
    state.load_state_dict(powersgd_state())
    return state


def memory(state):
    """A copy of a state's memory."""
    if isinstance(state, ScaledCastState):
        return copy.deepcopy(state.state_dict())
    if isinstance(state, QuantizationState):
        return copy.deepcopy(state.__getstate__())
    return copy.deepcopy(state.__getstate__()["memory"])


def assert_refuses(state, damaged, *parts):
    """Loading raises with an expectation and parts such as the entry's name; the state stays as it was."""
    before = memory(state)
    message = refusal(state.load_state_dict, damaged)
    assert all(part in message for part in parts)
    assert re.search("expected|its gradient", message)
    assert_same_bits(memory(state), before)


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize(("damaged", "entry"), cases(damaged_powersgd_states()))
def test_damaged_powersgd_state_raises_and_changes_nothing(damaged, entry, bound):
    assert_refuses(loaded_powersgd(bound), damaged, entry)


@pytest.mark.parametrize(("damaged", "entry"), cases(damaged_quantization_states()))
def test_damaged_quantization_state_raises_and_changes_nothing(damaged, entry):
    state, model = QuantizationState(None), Model()
    state.bind(model)
    state.load_state_dict({key: powersgd_state()[key] for key in ("iter", "errors")})
    assert_refuses(state, damaged, entry)


@pytest.mark.parametrize(("damaged", "entry"), cases(damaged_scaled_cast_states()))
def test_damaged_scaled_cast_state_raises_and_changes_nothing(damaged, entry):
    state, model = ScaledCastState(), Model()
    state.bind(model)  # an unbound state looks for its model among all objects
    state.load_state_dict(scaled_cast_state())
    assert_refuses(state, damaged, entry)


def factors_of_rank(rank):
    """The changes of a state whose factors have another rank than the options ask for."""
    good = powersgd_state()
    return {side: good[side] | {"qkv.weight": torch.full((3, rank, n), 0.1)} for side, n in (("q", 8), ("p", 6))}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"errors": {}},
        {"q": {}},
        {"p": {}},
        {"errors": {}, "q": {}, "p": {}},
        {"errors": {name: error.double() for name, error in powersgd_state()["errors"].items()}},
        {"iter": 0, "numel": [0, 0]},
        {"iter": 2**62, "numel": [2**62, 2**62]},
        {"an entry of a later version": 1},
        *(factors_of_rank(rank) for rank in (1, 2, 5, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_whole_powersgd_state_loads(bound, change):
    state = powersgd_state() | change
    loaded = loaded_powersgd(bound)
    loaded.load_state_dict(state)
    assert_same_bits(memory(loaded), {key: state[key] for key in powersgd_state()})


# --- name patterns


UNMATCHED = {
    "ranks": ({"head.*": 1, "embedding.*": 0}, "ranks['embedding.*']"),
    "stacks": ({"*.weight": 1, "*.qkv": 3}, "stacks['*.qkv']"),
    "a part of a name": ({"qkv": 1}, "stacks['qkv']"),
    "the name behind a wrapper": ({"module.head.weight": 1}, "stacks['module.head.weight']"),
    "exempt": (["*.bias", "*norm*", "bias"], "exempt['bias']"),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_pattern_without_match_raises_at_bind(case):
    patterns, named = UNMATCHED[case]
    kind = QuantizationState if case == "exempt" else PowerSGDState
    state = kind(None, **{case if case in ("ranks", "exempt") else "stacks": patterns})
    message = refusal(state.bind, Model())
    assert message.startswith(f"{named} matches none of the model's 3 parameters, head.weight, qkv.bias, qkv.weight")
    assert "Correct or remove it" in message
