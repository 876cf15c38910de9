"""Parameter names on PyTorch's DDP, which does not pass them to hooks: found without `bind`, or requested."""

import copy
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradwire.exchange import names
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import STATES, Training, make
from tests.support.training import SMALLEST, WRAPPERS, build, error_of, message_of, own_batches, register

EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


class Part(nn.Module):
    """A module with its own batches."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def batch(self, generator):
        return (torch.randn(4, 6, generator=generator),)

    def forward(self, x):
        return self.layers(x).square().mean()


def linear():
    return nn.Linear(6, 6)


def step(ddp, generator=None):
    ddp.zero_grad()
    ddp(*names.unwrapped(ddp.module).batch(generator or own_batches())).backward()


def trained(module, wrapper="pytorch", steps=4, state=None, cap=25, **options):
    """A DDP after some steps with a state that was not bound, and the state."""
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=cap)
    state = PowerSGDState(None, **(EARLY | options)) if state is None else state
    register(ddp, (state, powerSGD_hook))
    for _ in range(steps):
        step(ddp)
    return ddp, state


def names_after_a_step(state, ddp):
    """The names that the state has for all parameters after one step; None for those that it does not know."""
    step(ddp)
    return [state.names._names.get(parameter) for parameter in ddp.module.parameters()]


def names_of(ddp):
    return [name for name, _ in ddp.module.named_parameters()]


# --- one model


def tied():
    first, last = linear(), linear()
    last.weight = first.weight
    return Part(first, nn.ReLU(), last)


def frozen():
    part = Part(linear(), linear(), linear())
    part.layers[1].requires_grad_(False)
    return part


def nested():
    return Part(nn.Sequential(linear(), nn.Sequential(linear(), nn.LayerNorm(6))), linear())


MODELS = {
    "tied": tied,
    "frozen": frozen,
    "nested": nested,
    "checkpointed": lambda: Part(linear(), checkpoint_wrapper(nn.Sequential(linear(), linear()))),
    "compiled": lambda: torch.compile(Part(linear(), linear()), backend="eager"),
    "compiled part": lambda: Part(linear(), torch.compile(linear(), backend="eager")),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("model", "cap"),
    [*((model, 25) for model in MODELS), *((model, SMALLEST) for model in ("tied", "frozen", "nested"))],
)
@on_ranks(2)
def test_names_without_bind_omit_wrapper_components(model, wrapper, cap):
    ddp, state = trained(MODELS[model](), wrapper, cap=cap)
    named = [name for name, p in ddp.module.named_parameters() if p.requires_grad and p.dim() == 2]
    plain = sorted(re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name) for name in named)
    assert sorted(state.memory.tensors("errors")) == sorted(state.memory.tensors("q")) == plain != []


def handing_on_hook(state, bucket):
    """A user's hook that hands on a state of which the DDP knows nothing."""
    return powerSGD_hook(state["powersgd"], bucket)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_names_are_found_if_a_users_hook_passes_the_state_on(wrapper):
    ddp, state = WRAPPERS[wrapper](nested()), PowerSGDState(None, **EARLY)
    ddp.register_comm_hook({"powersgd": state}, handing_on_hook)
    for _ in range(4):
        step(ddp)
    assert sorted(state.memory.tensors("errors")) == ["layers.0.0.weight", "layers.0.1.0.weight", "layers.1.weight"]


# --- several models


def gan():
    generator, discriminator = Part(linear(), linear()), Part(linear(), linear(), linear())
    return [generator, discriminator], nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def ensemble():
    trunk = linear()
    return [Part(trunk, linear()), Part(linear(), linear(), trunk)], trunk


def twins():
    layers = linear(), linear()  # in two models of the same parameters under other names
    return [Part(*layers), Part(nn.Sequential(*layers))], None


SEVERAL = {models.__name__: models for models in (gan, ensemble, twins)}


@pytest.mark.parametrize("models", SEVERAL)
@on_ranks(1)
def test_names_among_several_models_come_from_the_states_model(models):
    modules, others = SEVERAL[models]()
    pairs = [trained(module, steps=0, cap=SMALLEST) for module in modules]
    assert all(names_after_a_step(state, ddp) == names_of(ddp) for ddp, state in pairs)
    del others


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", STATES)
@on_ranks(2)
def test_unregistered_state_does_not_take_names_of_another_live_model(kind, wrapper):
    # The other model is of the same class, so its names would fit.
    other, module = Training(kind, wrapper), build("mlp")
    other.run(1)
    state, hook = make(kind, module)
    assert ("has no model yet" in str(message_of(state.state_dict))) == (kind != "scaled_fp16")
    assert state.names.module is None
    ddp = WRAPPERS[wrapper](module)
    register(ddp, (state, hook))
    state.state_dict()
    assert state.names.module is module


# --- compiled models


@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
@on_ranks(1)
def test_law7_state_of_compiled_model_loads_into_plain_model(before, after):
    _, state = trained(MODELS["compiled"](), before, steps=3)
    loaded = PowerSGDState(None, **EARLY)
    loaded.load_state_dict(state.state_dict())
    trained(Part(linear(), linear()), after, steps=3, state=loaded)
    for each in (state, loaded):
        assert sorted(each.state_dict()["errors"]) == ["layers.0.weight", "layers.1.weight"]


@on_ranks(2)
def test_error_of_unused_parameter_is_kept_in_compiled_model():
    module = Part(linear(), linear())
    ddp = WRAPPERS["gradwire"](torch.compile(module, backend="eager"), find_unused_parameters=True)
    state = register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
    for _ in range(4):
        step(ddp)
    layers, error = module.layers, state.memory.tensors("errors")["layers.1.weight"]
    before = error.clone()
    dist.all_reduce(before)
    module.layers = layers[:1]
    module._modules["rest"] = layers[1]
    step(ddp)
    assert module.rest.weight.grad is None
    assert before.any()
    dist.all_reduce(error)  # a rank takes back the mean of what the ranks have sent
    torch.testing.assert_close(error, before, rtol=0, atol=16 * 2.0**-24 * before.abs().max().item())


# --- where names are not known


def hidden_models():
    """Lets no search find a model, as after ``gc.freeze()``."""
    return mock.patch.object(names, "live_wrappers", lambda: [])


BIND_BEFORE = r"Call state\.bind\(model\) before"


@on_ranks(2)
def test_unknown_names_train_by_number_and_checkpoints_raise():
    with hidden_models():
        ddp, state = trained(Part(linear(), linear()))
        other, scales = WRAPPERS["pytorch"](Part(linear(), linear())), ScaledCastState()
        register(other, (scales, scaled_cast_hook))
        step(other)
        for each in (state, copy.deepcopy(state)):
            assert sorted(each.memory.tensors("errors")) == ["parameter.0", "parameter.2"]
        assert sorted(copy.deepcopy(scales).exponents()) == [f"parameter.{i}" for i in range(4)]
        for call in (state.state_dict, state.prepare_checkpoint, scales.state_dict):
            kind, text = error_of(call)
            assert kind == "RuntimeError"
            assert re.match(rf"A checkpoint of a .*{BIND_BEFORE}", text)
        kind, text = error_of(state.bind, ddp)
        assert kind == "ValueError"
        assert re.match("This state has trained without parameter names.*before the first step", text)


@pytest.mark.parametrize("number", range(4))
@on_ranks(1)
def test_memory_loaded_before_numbers_are_known_is_checked_in_every_bucket(number):
    # Nothing else would notice: a factor of another size is replaced by a new one.
    state, name = PowerSGDState(None, **EARLY), f"parameter.{number}"
    factors = {"q": {name: torch.ones(1, 1, 9) / 3}, "p": {}, "errors": {}}
    state.load_state_dict({"iter": 2, "numel": [0, 0], **factors})
    # With this option, the first step has several buckets.
    ddp = WRAPPERS["pytorch"](Part(linear(), linear()), bucket_cap_mb=SMALLEST, find_unused_parameters=True)
    register(ddp, (state, powerSGD_hook))
    with hidden_models():
        message = message_of(step, ddp)
    assert f"q['{name}']" in message


@pytest.mark.parametrize("option", ["ranks", "stacks"])
@on_ranks(2)
def test_options_by_name_raise_with_unknown_names_and_apply_once_bound(option):
    with hidden_models():
        ddp, state = trained(Part(linear(), linear()), steps=0, **{option: {"layers.1.*": 1}})
        kind, text = error_of(step, ddp)
        assert kind == "RuntimeError"
        assert re.match(rf"A pattern in ranks or stacks.*{BIND_BEFORE}", text)
        again = Part(linear(), linear())  # PyTorch's DDP is broken after an error
        state.bind(again)
        trained(again, state=state)
        assert state.iter == 4, "the step that raised does not count"
        assert sorted(state.memory.tensors("errors")) == ["layers.0.weight", "layers.1.weight"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_new_state_has_entries_without_wrapper_components_once_registered(wrapper):
    state = PowerSGDState(None, **EARLY)
    kind, text = error_of(state.state_dict)
    assert kind == "RuntimeError"
    assert re.match("This PowerSGDState has no model yet.*register_comm_hook", text)
    _ddp, _ = trained(MODELS["compiled part"](), wrapper, steps=0, state=state)
    saved = state.state_dict()
    assert sorted(saved["errors"]) == sorted(saved["q"]) == ["layers.0.weight", "layers.1.weight"]
    assert_same_on_all_ranks(from_all_ranks(saved))
