"""What hook states refuse: options, loaded states and name patterns that cannot be right, before anything changes."""

import copy
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from gradwire.comm.connections import executor_for
from gradwire.compress import DelayedScaling
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.training import HOOKS, SMALLEST, WRAPPERS, build, message_of, register, train_steps, wrapped

INT64_MAX = 2**63 - 1
EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


def refusal(function, *arguments, **options):
    """The message of the ValueError or TypeError that the call raises."""
    with pytest.raises((ValueError, TypeError)) as raised:
        function(*arguments, **options)
    return str(raised.value)


# --- options

NO_NUMBER = [None, "2", [2], torch.tensor(2), 1 + 0j]
NO_WHOLE_NUMBER = [*NO_NUMBER, 2.5, 2.0, math.nan, math.inf, True, False]
NO_FINITE_NUMBER = [*NO_NUMBER, math.nan, math.inf, -math.inf, True, False]
NO_FLAG = [None, 0, 1, 1.0, "yes", torch.tensor(True)]
BAD_OPTIONS = {
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
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values], ids=repr
)
def test_powersgd_option_out_of_range_raises_with_its_name(name, value):
    message = refusal(PowerSGDState, None, **{name: value})
    assert name in message
    assert "expected" in message
    shown = next(iter(value)) if isinstance(value, dict) and not isinstance(next(iter(value)), str) else value
    assert str(next(iter(shown.values())) if isinstance(shown, dict) else shown).strip("[]") in message


@pytest.mark.parametrize(
    "options",
    [
        {"matrix_approximation_rank": 2**40},
        {"start_powerSGD_iter": 2**70},
        {"start_powerSGD_iter": -3, "use_error_feedback": False, "warm_start": False},
        {"min_compression_rate": 0.5},
        {"min_compression_rate": 10**400},
        {"orthogonalization_epsilon": 1e-8},
        {"random_seed": -(2**80)},
        {"compression_stats_logging_frequency": 0},
        {"ranks": {"*": 0}, "stacks": {"*": 1}},
        {"ranks": None, "stacks": None},
        {"precision": "fp32"},
    ],
    ids=str,
)
def test_powersgd_option_in_range_is_kept(options):
    state = PowerSGDState(None, **options)
    for name, value in options.items():
        if name != "compression_stats_logging_frequency":
            assert getattr(state, name) == ({} if value is None else value)


@pytest.mark.parametrize("value", [*NO_WHOLE_NUMBER, -1, 1000], ids=repr)
@pytest.mark.parametrize("name", ["margin", "growth", "backoff"])
@pytest.mark.parametrize("owner", [DelayedScaling, ScaledCastState])
def test_scaled_cast_option_out_of_range_raises_with_its_name(owner, name, value):
    message = refusal(owner, **{name: value})
    assert re.match(rf"{name} is {re.escape(repr(value))}; expected a whole number of binades", message)


@pytest.mark.parametrize("value", ["float16", None, torch.float32, 16, True], ids=repr)
@pytest.mark.parametrize("owner", [DelayedScaling, ScaledCastState])
def test_scaled_cast_wire_dtype_other_than_16_bit_raises(owner, value):
    assert refusal(owner, dtype=value) == f"dtype is {value}; expected torch.float16 or torch.bfloat16."


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
    """What a step of `Model` leaves under `OPTIONS`."""
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
    "number": lambda tensor: 1,
    "NumPy array": lambda tensor: tensor.numpy(),
    "bool": lambda tensor: tensor.bool(),
    "int8": lambda tensor: tensor.to(torch.int8),
    "fp16": lambda tensor: tensor.half(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "sparse": lambda tensor: tensor.to_sparse(),
    "sparse CSR": lambda tensor: tensor.view(tensor.shape[0], -1).to_sparse_csr(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor.float()]),
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "flat": lambda tensor: tensor.reshape(-1)[: tensor.numel() - 1],
    "one dimension and element more": lambda tensor: torch.cat([tensor.view(-1), tensor.view(-1)[:1]]).unsqueeze(0),
    "0-d": lambda tensor: tensor.view(-1)[0],
    "last column gone": lambda tensor: tensor[..., :-1],
    "twice as long": lambda tensor: torch.cat([tensor, tensor], -1),
    "nothing left": lambda tensor: tensor[:0],
}
FLOAT_DAMAGES = {
    "nan": lambda tensor: with_element(tensor, torch.nan),
    "last is nan": lambda tensor: with_element(tensor, torch.nan, -1),
    "inf": lambda tensor: with_element(tensor, torch.inf),
    "-inf": lambda tensor: with_element(tensor, -torch.inf),
}
FACTOR_DAMAGES = {
    "a column of length 2": lambda tensor: with_element(tensor, 2.0),
    "a rank above the length": lambda tensor: tensor[:, :1].expand(-1, 20, -1),
    "no rank": lambda tensor: tensor[:, :0],
    "one matrix more": lambda tensor: torch.cat([tensor, tensor[:1]]),
}
BAD_COUNTS = {
    "-3": -3,
    "-1": -1,
    "True": True,
    "False": False,
    "2**80": 2**80,
    "int64's largest": INT64_MAX,
    "4.0": 4.0,
    "nan": math.nan,
    "None": None,
    "'4'": "4",
    "a tensor": torch.tensor(4),
}


# No entry and no tensor of a state may be one of these.
JUNK = {
    "None": None,
    "a bool": True,
    "a fraction": 0.5,
    "a string": "ab",
    "a negative number": -1,
    "a number beyond 2**62": 2**62 + 1,
    "a list": [1, 2, 3],
    "a dictionary of numbers": {"a": 1},
    "a tensor of fp32": torch.ones(3),
    "a tensor of bools": torch.ones(3, dtype=torch.bool),
}


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
    for label, value in BAD_COUNTS.items():
        yield f"iter is {label}", changed(good, "iter", value), "iter"
        for i in range(2):
            yield f"numel[{i}] is {label}", changed(good, "numel", value, i), f"numel[{i}]"
    for label, value in (JUNK | {"one number": [12], "not of numbers": [12, "ten"]}).items():
        yield f"numel is {label}", changed(good, "numel", value), "numel"
    for key in ("errors", "q", "p"):
        for label, value in (JUNK | {"a list of tensors": [torch.ones(2)]}).items():
            yield f"{key} is {label}", changed(good, key, value), key
            yield f"{key} has {label}", changed(good, key, value, "qkv.weight"), f"{key}['qkv.weight']"
        yield f"{key} has a number for a name", changed(good, key, torch.ones(1, 1, 1), 3), key
        damages = TENSOR_DAMAGES | FLOAT_DAMAGES | (FACTOR_DAMAGES if key != "errors" else {})
        for label, damage in damages.items():
            for name in ("qkv.weight", "head.weight"):
                value = damage(good[key][name])
                yield f"{key}[{name}]: {label}", changed(good, key, value, name), f"{key}['{name}']"
    for key in good:
        yield f"no {key}", {other: value for other, value in good.items() if other != key}, f"'{key}'"
    for label, value in {"None": None, "a list": [good], "a tensor": torch.ones(3), "empty": {}}.items():
        yield label, value, "iter, errors, q, p and numel"


def damaged_scaled_cast_states():
    """(id, damaged state, the entry that the message has to name)."""
    good = scaled_cast_state()
    for key in good:
        for label, value in JUNK.items():
            yield f"{key} is {label}", changed(good, key, value), key
    for key in ("exponents", "counters"):
        for label, damage in TENSOR_DAMAGES.items():
            yield f"{key}: {label}", changed(good, key, damage(good[key])), key
        for label, number in {"nan": math.nan, "inf": math.inf, "0.5": 0.5}.items():
            yield f"{key}: {label}", changed(good, key, with_element(good[key].float(), number)), key
    smallest = torch.iinfo(torch.int32).min
    for number in (smallest, -smallest - 1, -101, 101, -128):
        yield f"an exponent of {number}", changed(good, "exponents", with_element(good["exponents"], number)), "[0, 0]"
    for number in (-1, 2, smallest):
        value = with_element(good["exponents"], number, -1)
        yield f"a flag of {number}", changed(good, "exponents", value), "exponents[2, 1]"
    int8 = torch.tensor([[-128, 1], [0, 1], [0, 0]], dtype=torch.int8)
    yield "an int8 exponent of -128", changed(good, "exponents", int8), "exponents"
    for i, number in [*((i, number) for i in range(4) for number in (-1, -(2**63), INT64_MAX)), (3, 2)]:
        value = with_element(good["counters"], number, i)
        yield f"counters[{i}] is {number}", changed(good, "counters", value), f"counters[{i}]"
    names = good["names"]
    for label, value, entry in (
        ("a tuple", tuple(names), "names"),
        ("a name is a number", [*names[:2], 3], "names[2]"),
        ("a name is a list", [*names[:2], []], "names[2]"),
        ("a name comes twice", [*names[:2], names[0]], "names[2]"),
        ("one name is missing", names[:2], "exponents"),
        ("one name more", [*names, "d"], "exponents"),
    ):
        yield f"names: {label}", changed(good, "names", value), entry
    for key in good:
        yield f"no {key}", {other: value for other, value in good.items() if other != key}, f"'{key}'"
    for label, value in {"None": None, "a list": [good], "a tensor": torch.ones(3), "empty": {}}.items():
        yield label, value, "names, exponents and counters"


def damaged_quantization_states():
    """Those of PowerSGD with an entry that both have, without the others."""
    for label, state, entry in damaged_powersgd_states():
        if entry.strip("'").startswith(("iter", "errors")) and isinstance(state, dict) and state:
            yield label, {key: state[key] for key in ("iter", "errors") if key in state}, entry
    for label, value in {"None": None, "a list": [powersgd_state()], "empty": {}}.items():
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
    """What a state remembers, as it is."""
    if isinstance(state, ScaledCastState):
        return copy.deepcopy(state.state_dict())
    if isinstance(state, QuantizationState):
        return copy.deepcopy(state.__getstate__())
    return copy.deepcopy(state.__getstate__()["memory"])


def assert_refuses(state, damaged, entry):
    """Loading raises and names the entry, what it is and what was expected; the state stays as it was."""
    before = memory(state)
    message = refusal(state.load_state_dict, damaged)
    assert entry in message
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
    state = ScaledCastState()
    state.load_state_dict(scaled_cast_state())
    assert_refuses(state, damaged, entry)


@pytest.mark.parametrize("shape", [(8, 18), (144,), (2, 72), (18, 8, 1)], ids=str)
def test_error_of_right_size_and_other_shape_raises_in_bound_state(shape):
    good = powersgd_state()
    damaged = changed(good, "errors", good["errors"]["qkv.weight"].reshape(shape), "qkv.weight")
    assert_refuses(loaded_powersgd(bound=True), damaged, "errors['qkv.weight']")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("iter", "4", "iter is '4'; expected a whole number"),
        (
            "errors",
            torch.ones(2, 3),
            r"errors is a strided Tensor of torch\.float32 of shape \(2, 3\).*; expected a dict",
        ),
        (
            "errors",
            {"a": [1.0]},
            r"errors\['a'\] is \[1\.0\]; expected a dense tensor of torch\.float32 or torch\.float64",
        ),
        ("errors", {3: torch.ones(2)}, "errors has the name 3; expected a string"),
        ("q", {"a": None}, r"q\['a'\] is None; expected a dense tensor"),
        ("numel", [12], r"numel is \[12\]; expected a list of two whole numbers"),
        ("numel", [12, "ten"], r"numel\[1\] is 'ten'; expected a whole number"),
    ],
)
def test_refusal_of_a_state_shows_the_value_and_the_expectation(key, value, message):
    assert re.match(message, refusal(PowerSGDState(None).load_state_dict, powersgd_state() | {key: value}))


@pytest.mark.parametrize(("side", "columns", "expected"), [("q", 8, "(3, rank, 8)"), ("p", 18, "(3, rank, 6)")])
def test_factor_of_one_matrix_for_stack_of_three_raises_in_bound_state(side, columns, expected):
    damaged = changed(powersgd_state(), side, torch.full((1, 2, columns), 0.1), "qkv.weight")
    message = refusal(loaded_powersgd(bound=True).load_state_dict, damaged)
    assert f"{side}['qkv.weight'] has shape (1, 2, {columns}); expected {expected}" in message


FACTORS_ABOVE_RANK_4 = {
    "q of a wide matrix": (4, 9, "q", (1, 5, 9)),
    "p of a tall matrix": (9, 4, "p", (1, 5, 9)),
    "q of a stack": (8, 5, "q", (2, 5, 5)),
}


@pytest.mark.parametrize("known", ["bound", "exempt", "by its error", "at the first step"])
@pytest.mark.parametrize("case", FACTORS_ABOVE_RANK_4)
def test_factor_of_rank_above_its_matrix_raises(world_of_one, case, known):
    # The factor is no longer than its matrix, and alone: the other side would be refused for its own shape.
    rows, columns, side, shape = FACTORS_ABOVE_RANK_4[case]
    model = Summed(nn.Linear(columns, rows, bias=False))
    options = {"ranks": {"*": 0}} if known == "exempt" else {"stacks": {"*": shape[0]}}
    state = PowerSGDState(None, **EARLY, **options)
    if known in ("bound", "exempt"):
        state.bind(model)
    errors = {"inner.weight": torch.zeros(rows, columns)} if known == "by its error" else {}
    good = {"iter": 4, "errors": errors, "q": {}, "p": {}, "numel": [0, 0]}
    state.load_state_dict(changed(good, side, torch.full((shape[0], 4, shape[2]), 0.1), "inner.weight"))
    damaged = changed(good, side, torch.full(shape, 0.1), "inner.weight")
    if known != "at the first step":
        assert_refuses(state, damaged, f"{side}['inner.weight'] has shape {shape}")
        return
    state.load_state_dict(damaged)
    ddp = WRAPPERS["gradwire"](model)
    register(ddp, (state, powerSGD_hook))
    message = refusal(ddp(torch.ones(2, columns)).backward)
    assert f"{side}['inner.weight'] has shape {shape}" in message


def test_factor_of_bucket_that_does_not_fit_other_side_raises():
    good = powersgd_state() | {"errors": {}}
    for names in (good["q"], good["p"]):
        names["a ... b, 2 parameters"] = torch.full((1, 2, 9), 0.1)
    state = PowerSGDState(None)
    state.load_state_dict(good)
    good["p"]["a ... b, 2 parameters"] = torch.full((2, 2, 9), 0.1)
    assert_refuses(state, good, "p['a ... b, 2 parameters']")


@pytest.mark.parametrize("rank", [1, 2, 5, 6])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_factors_of_other_rank_load(bound, rank):
    state = powersgd_state()
    for side in ("q", "p"):
        state[side]["qkv.weight"] = torch.full((3, rank, {"q": 8, "p": 6}[side]), 0.1)
    loaded = loaded_powersgd(bound)
    loaded.load_state_dict(state)
    assert_same_bits(memory(loaded), state)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"errors": {}},
        {"q": {}},
        {"p": {}},
        {"errors": {}, "q": {}, "p": {}},
        {"iter": 0, "numel": [0, 0]},
        {"iter": 2**62, "numel": [2**62, 2**62]},
        {"an entry of a later version": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_whole_powersgd_state_loads(bound, change):
    state = powersgd_state() | change
    loaded = loaded_powersgd(bound)
    loaded.load_state_dict(state)
    assert_same_bits(memory(loaded), {key: state[key] for key in powersgd_state()})


def test_loaded_errors_are_detached_plain_tensors():
    state = powersgd_state()
    state["errors"]["head.weight"] = nn.Parameter(state["errors"]["head.weight"])
    loaded = PowerSGDState(None)
    loaded.load_state_dict(state)
    error = memory(loaded)["errors"]["head.weight"]
    assert type(error) is torch.Tensor
    assert not error.requires_grad


def test_errors_in_fp64_and_any_shape_load():
    errors = {"a": torch.ones(4, 3, dtype=torch.float64), "b": torch.ones(()), "c": torch.ones(0, 3)}
    state = powersgd_state() | {"errors": errors, "q": {}, "p": {}}
    loaded = PowerSGDState(None)
    loaded.load_state_dict(state)
    assert_same_bits(memory(loaded), state)


# --- shapes that only the first step can compare


def current_transport():
    """Of the hooks' algorithms; a failed step brings another one."""
    return executor_for(None, torch.device("cpu")).transport


# Entry, parameter and shape.
WRONG_SHAPES = [
    ("errors", "qkv.weight", (8, 18)),
    ("errors", "head.weight", (18, 7)),
    ("errors", "head.weight", (3, 3)),
    ("q", "qkv.weight", (3, 2, 9)),
    ("p", "qkv.weight", (2, 2, 9)),
    ("q", "head.weight", (1, 2, 14)),
]


@pytest.mark.parametrize("when", ["bound later", "after plain steps"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("key", "name", "shape"), WRONG_SHAPES)
def test_wrong_shape_raises_before_first_compressed_step_changes_anything(
    world_of_one, wrapper, key, name, shape, when
):
    damaged = changed(powersgd_state(), key, torch.full(shape, 0.1), name)
    for other in {"errors", "q", "p"} - {key}:  # or it is found by comparing the entries with each other
        del damaged[other][name]
    entry, state, model = f"{key}['{name}']", PowerSGDState(None, **OPTIONS), Model()
    ddp = WRAPPERS[wrapper](model, bucket_cap_mb=SMALLEST)
    if when == "after plain steps":
        state.bind(model)
        register(ddp, (state, powerSGD_hook))
        step(ddp)
        assert_refuses(state, damaged, entry)
        return
    state.load_state_dict(damaged)
    before, transport = memory(state), current_transport()
    sent = transport.payload_bytes
    state.bind(model)
    register(ddp, (state, powerSGD_hook))
    message = refusal(step, ddp)
    assert entry in message
    assert "Load the state of this model" in message
    assert transport.payload_bytes == sent
    assert_same_bits(memory(state), before)


# --- name patterns


def step(ddp):
    ddp.zero_grad()
    ddp(torch.ones(3, 8)).backward()


UNMATCHED = {
    "ranks": ({"head.*": 1, "embedding.*": 0}, "ranks['embedding.*']"),
    "stacks": ({"*.weight": 1, "*.qkv": 3}, "stacks['*.qkv']"),
    "a part of a name": ({"qkv": 1}, "stacks['qkv']"),
    "the name behind a wrapper": ({"module.head.weight": 1}, "stacks['module.head.weight']"),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_pattern_without_match_raises_at_bind(case):
    patterns, named = UNMATCHED[case]
    state = PowerSGDState(None, **{"ranks" if case == "ranks" else "stacks": patterns})
    message = refusal(state.bind, Model())
    assert message.startswith(f"{named} matches none of the model's 3 parameters, head.weight, qkv.bias, qkv.weight")
    assert "Correct or remove it" in message


def test_pattern_without_match_raises_at_registration(world_of_one):
    hook = PowerSGDState(None, ranks={"tail.*": 1}), powerSGD_hook
    assert "ranks['tail.*'] matches none" in refusal(wrapped, model=Model(), hook=hook)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_pattern_without_match_raises_without_bound_model(world_of_one, wrapper):
    state = PowerSGDState(None, ranks={"tail.*": 1})
    hook = None, lambda _, bucket: powerSGD_hook(state, bucket)
    ddp = wrapped(wrapper, Model(), hook=hook, bucket_cap_mb=SMALLEST)
    assert "ranks['tail.*'] matches none" in refusal(lambda: [step(ddp) for _ in range(2)])
    assert state.iter <= 1


def test_pattern_without_match_set_in_training_raises(world_of_one):
    state = PowerSGDState(None, ranks={"head.*": 1})
    ddp = wrapped(model=Model(), hook=(state, powerSGD_hook))
    step(ddp)
    state.ranks = {"tail.*": 1}
    assert "ranks['tail.*'] matches none" in refusal(step, ddp)


def test_patterns_that_match_do_not_raise(world_of_one):
    state = PowerSGDState(None, ranks={"head.*": 0, "*": 2}, stacks={"qkv.*t": 3}, **EARLY)
    ddp = wrapped(model=Model(), hook=(state, powerSGD_hook))
    for _ in range(4):
        step(ddp)


# --- nothing to compress


class Adapters(nn.Module):
    """Low-rank adapters of a frozen matrix."""

    def __init__(self, rank=4, width=640):
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return (self.frozen(x) + self.lora_b(self.lora_a(x))).square().mean()


class Summed(nn.Module):
    """The sum of what a module returns."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x).sum()


def warned(model, inputs, hook=powerSGD_hook, wrapper="gradwire", steps=5, **options):
    """After which steps there was a warning, and its message."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **options)
    ddp = WRAPPERS[wrapper](model)
    state.bind(model)
    register(ddp, (state, hook))
    found = []
    for i in range(steps):
        ddp.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(inputs).backward()
        found += [(i + 1, str(each.message)) for each in caught if "PowerSGD" in str(each.message)]
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"matrix_approximation_rank": 4},
            "4 x 640 elements; its factors of rank 4 have 2,576, a rate of 0.99. "
            "Lower matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 2, "min_compression_rate": 2},
            "4 x 640 elements; its factors of rank 2 have 1,288, a rate of 1.99. min_compression_rate=2 asks for a "
            "higher one: lower it, or matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 1, "min_compression_rate": 5},
            "4 x 640 elements; its factors of rank 1 have 644, a rate of 3.98. min_compression_rate=5 asks for a "
            "higher one: lower it.",
        ),
        (
            {"matrix_approximation_rank": 4, "min_compression_rate": 5},
            "4 x 640 elements; its factors of rank 4 have 2,576, a rate of 0.99. Lower matrix_approximation_rank and "
            "min_compression_rate: rank 1 has 3.98.",
        ),
        ({"ranks": {"*": 0}}, "ranks exempts every matrix."),
    ],
    ids=["rank", "rate or rank", "rate", "rate and rank", "exempt"],
)
def test_powersgd_that_compresses_no_adapter_warns_once_with_reason(world_of_one, wrapper, options, reason):
    ((when, message),) = warned(Adapters(), torch.ones(2, 640), wrapper=wrapper, **options)
    assert when == 3, "the first compressed step"
    assert message.startswith("PowerSGD compresses nothing here: it sends all 5,120 elements. ")
    assert reason in message
    if "rank 4" in reason:
        assert "The largest matrix, lora_" in message


@pytest.mark.parametrize(
    ("model", "width", "options", "text"),
    [
        (Summed(nn.LayerNorm(8)), 8, {}, "No parameter is a matrix"),
        (Summed(nn.Linear(2, 2)), 2, {}, "too small for any rank"),
        (
            Adapters(),
            640,
            {"hook": batched_powerSGD_hook, "matrix_approximation_rank": 64},
            "No bucket is large enough",
        ),
    ],
    ids=["vectors", "tiny matrix", "batched"],
)
def test_powersgd_on_a_model_too_small_for_it_warns_with_the_reason(world_of_one, model, width, options, text):
    ((_, message),) = warned(model, torch.ones(2, width), **options)
    assert text in message


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_powersgd_that_compresses_does_not_warn(world_of_one, hook):
    assert warned(Adapters(), torch.ones(2, 640), hook=hook, matrix_approximation_rank=1) == []


# --- loaded states of other models


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["powersgd", "int4"])
@on_ranks(2, 3)
def test_errors_of_another_models_parameters_are_refused(hook, wrapper):
    name, parameter = next(iter(build("mlp").named_parameters()))
    empty = {"q": {}, "p": {}, "numel": [0, 0]} if hook == "powersgd" else {}
    for names in (["elsewhere.weight"], ["elsewhere.weight", name]):
        state, function = HOOKS[hook](None)
        ddp = WRAPPERS[wrapper](build("mlp"))
        register(ddp, (state, function))
        errors = {each: torch.zeros(parameter.shape) for each in names}
        loaded = {"iter": 5, "errors": errors, **empty}
        message = message_of(state.load_state_dict, loaded) or message_of(train_steps, ddp)
        assert (
            f"1 of {len(names)} entries of the error memory belong to parameters that this model does not have, such "
            "as 'elsewhere.weight'"
        ) in message
