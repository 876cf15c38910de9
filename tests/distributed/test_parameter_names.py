"""Names of parameters behind PyTorch's DDP, which does not tell them: found without `bind`, or asked for."""

import copy
import gc
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradwire.hooks import _parameter_names
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.states import STATES, Training, make
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, gradients, register, train

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
    generator = generator or torch.Generator().manual_seed(dist.get_rank())
    ddp(*_parameter_names.unwrapped(ddp.module).batch(generator)).backward()


def names_after_a_step(state, ddp):
    """The names that the state has for all parameters after one step; None for those that it does not know."""
    step(ddp)
    return [state._names._names.get(parameter) for parameter in ddp.module.parameters()]


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


def checkpointed():
    return Part(linear(), checkpoint_wrapper(nn.Sequential(linear(), linear())))


def compiled():
    return torch.compile(Part(linear(), linear()), backend="eager")


def compiled_part():
    return Part(linear(), torch.compile(linear(), backend="eager"))


MODELS = {model.__name__: model for model in (tied, frozen, nested, checkpointed, compiled, compiled_part)}


def remembered_names(model, cap, hook):
    """The names in the memory of a state behind each DDP, and those of the parameters that are compressed."""
    found = []
    for wrapper in WRAPPERS.values():
        ddp = wrapper(MODELS[model](), bucket_cap_mb=cap)
        state = PowerSGDState(None, **EARLY)
        register(ddp, (state, hook))
        for _ in range(4):
            step(ddp)
        module = ddp.module
        expected = sorted(name for name, p in module.named_parameters() if p.requires_grad and p.dim() == 2)
        found.append((sorted(state.tensors("errors")), sorted(state.tensors("q")), expected))
    return found


@pytest.mark.parametrize("cap", [SMALLEST, 25], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("model", ["tied", "frozen", "nested"])
def test_names_without_bind_equal_named_parameters(worlds, model, cap):
    for found in worlds(2).run(remembered_names, model=model, cap=cap, hook=powerSGD_hook):
        for errors, factors, expected in found:
            assert errors == factors == expected != []


@pytest.mark.parametrize("model", ["checkpointed", "compiled", "compiled_part"])
def test_names_have_no_wrapper_components_on_both_ddps(worlds, model):
    for found in worlds(1).run(remembered_names, model=model, cap=25, hook=powerSGD_hook):
        wrapped = found[0][-1]
        plain = sorted(re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name) for name in wrapped)
        assert all(errors == factors == plain for errors, factors, _ in found)


def handing_on_hook(state, bucket):
    """A user's hook that hands on a state of which the DDP knows nothing."""
    return powerSGD_hook(state["powersgd"], bucket)


def names_behind_a_users_hook():
    found = []
    for wrapper in WRAPPERS.values():
        ddp = wrapper(nested())
        state = PowerSGDState(None, **EARLY)
        ddp.register_comm_hook({"powersgd": state}, handing_on_hook)
        for _ in range(4):
            step(ddp)
        found.append(sorted(state.tensors("errors")))
    return found


def test_names_are_found_if_a_users_hook_passes_the_state_on(worlds):
    for theirs, ours in worlds(2).run(names_behind_a_users_hook):
        assert theirs == ours
        assert "layers.0.1.0.weight" in ours


# --- several models


def gan():
    generator, discriminator = Part(linear(), linear()), Part(linear(), linear(), linear())
    return [generator, discriminator], nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def ensemble():
    trunk = linear()
    return [Part(trunk, linear()), Part(linear(), linear(), trunk)], trunk


def averaged_copy():
    model = Part(linear(), linear())
    return [model], WRAPPERS["pytorch"](copy.deepcopy(model))


def part_of_the_model():
    inner = Part(linear(), linear())
    return [inner], WRAPPERS["pytorch"](nn.ModuleList([linear(), inner]))


def twins():
    layers = linear(), linear()  # in two models of the same parameters under other names
    return [Part(*layers), Part(nn.Sequential(*layers))], None


SEVERAL = {models.__name__: models for models in (gan, ensemble, averaged_copy, part_of_the_model, twins)}


def names_with_several_models(models):
    """For each of the models behind a DDP of PyTorch's, all alive at once, the names found and the right ones."""
    modules, others = SEVERAL[models]()
    ddps = [WRAPPERS["pytorch"](module, bucket_cap_mb=SMALLEST) for module in modules]
    states = [register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook)) for ddp in ddps]
    found = [(names_after_a_step(*pair), names_of(pair[1])) for pair in zip(states, ddps, strict=True)]
    del others
    return found


@pytest.mark.parametrize("models", SEVERAL)
def test_names_among_several_models_are_from_the_states_own(worlds, models):
    for found in worlds(1).run(names_with_several_models, models=models):
        assert all(names == expected for names, expected in found)


def names_after_the_model_was_wrapped_again():
    """The first DDP is in a cycle, and may live on."""
    module = Part(linear(), linear())
    state = PowerSGDState(None, **EARLY)
    found = []
    gc.disable()
    for wrapped in (module, module):
        ddp = WRAPPERS["pytorch"](wrapped)
        register(ddp, (state, powerSGD_hook))
        found.append(names_after_a_step(state, ddp))
        del ddp
    gc.enable()
    return found, names_of(WRAPPERS["pytorch"](module))


def test_names_are_found_if_a_model_is_wrapped_again(worlds):
    for found, expected in worlds(1).run(names_after_the_model_was_wrapped_again):
        assert found == [expected, expected]


def unregistered_beside_another_model(kind, wrapper):
    """What a checkpoint of a state without a model says while another one trains; whose names it has then, and later.

    The other model is of the same class, so its names would fit.
    """
    other = Training(kind, wrapper)
    other.run(1)
    module = build("mlp")
    state, hook = make(kind, module)
    message, found = message_of(state.state_dict), state._names.module
    ddp = WRAPPERS[wrapper](module)
    register(ddp, (state, hook))
    state.state_dict()
    return message, found is None, state._names.module is module


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", STATES)
def test_unregistered_state_does_not_take_names_of_another_live_model(worlds, kind, wrapper):
    for message, has_no_model, has_its_own in worlds(2).run(
        unregistered_beside_another_model, kind=kind, wrapper=wrapper
    ):
        assert ("has no model yet" in message) == (kind != "scaled_fp16")
        assert has_no_model
        assert has_its_own


# --- law 4 and options by name


def on_both(options, model="conv", **ddp_options):
    """Records and counts of elements of both DDPs, without `bind`."""
    found = []
    for wrapper in WRAPPERS:
        state = PowerSGDState(None, **(EARLY | options))
        record = train(wrapper, model, hook=(state, powerSGD_hook), bucket_cap_mb=SMALL, steps=6, **ddp_options)
        found.append((record, state.compression_stats()))
    return found


VARIANTS = {
    "plain": {},
    "cold": {"warm_start": False},
    "alternating": {"alternating": True},
    "ranks": {"ranks": {"*.0.*": 2, "head*": 0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_gradients_without_bind_are_bitwise_equal_on_both_ddps(world, variant, view):
    for theirs, ours in world.run(on_both, options=VARIANTS[variant], gradient_as_bucket_view=view):
        assert_same_bits(ours, theirs)


def test_ranks_by_name_apply_without_bind(worlds):
    for found in worlds(2).run(on_both, options={"ranks": {"*.weight": 0}}, model="mlp"):
        for _, (rate, before, after) in found:
            assert (rate, before) == (1, after)


def stacks_without_bind():
    found = []
    for wrapper in WRAPPERS.values():
        state = PowerSGDState(None, **EARLY, stacks={"layers.0.weight": 2})
        ddp = wrapper(Part(linear(), linear()))
        register(ddp, (state, powerSGD_hook))
        for _ in range(4):
            step(ddp)
        found.append({name: tuple(factor.shape) for name, factor in state.tensors("q").items()})
    return found


def test_stacks_by_name_apply_without_bind(worlds):
    for theirs, ours in worlds(1).run(stacks_without_bind):
        assert theirs == ours == {"layers.0.weight": (2, 1, 6), "layers.1.weight": (1, 1, 6)}


# --- law 7


CUT, TOTAL = 6, 10


def train_steps(ddp, optimizer, steps):
    seen = []
    for i in steps:
        optimizer.zero_grad()
        step(ddp, torch.Generator().manual_seed(10 * i + dist.get_rank()))
        seen.append(torch.cat([gradient.flatten() for gradient in gradients(ddp).values()]))
        optimizer.step()
    return seen


def prepared(wrapper, state, hook):
    torch.manual_seed(0)
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, hook))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def interrupted(path, first, second, options):
    """Gradients of the later steps: of one run, and of one that is saved and restored, without `bind` anywhere."""
    state = PowerSGDState(None, **(EARLY | options))
    ddp, optimizer = prepared(first, state, powerSGD_hook)
    train_steps(ddp, optimizer, range(CUT))
    everything = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "powersgd": state}
    dcp.save(everything, checkpoint_id=path)
    whole = train_steps(ddp, optimizer, range(CUT, TOTAL))

    state = PowerSGDState(None, **(EARLY | options))
    ddp, optimizer = prepared(second, state, powerSGD_hook)
    for parameter in ddp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's state, to be loaded into
    restored = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "powersgd": state}
    dcp.load(restored, checkpoint_id=path)
    ddp.module.load_state_dict(restored["model"])
    optimizer.load_state_dict(restored["optimizer"])
    return whole, train_steps(ddp, optimizer, range(CUT, TOTAL)), sorted(state.tensors("errors"))


@pytest.mark.parametrize("options", [{}, {"alternating": True}], ids=["both-sides", "alternating"])
@pytest.mark.parametrize(
    ("first", "second"), [("pytorch", "pytorch"), ("pytorch", "gradwire"), ("gradwire", "pytorch")]
)
def test_law7_distributed_checkpoint_without_bind_resumes_like_uninterrupted_run(
    worlds, tmp_path, first, second, options
):
    case = {"path": str(tmp_path), "first": first, "second": second, "options": options}
    for whole, resumed, names in worlds(2).run(interrupted, **case):
        assert names == ["layers.0.weight", "layers.2.weight", "layers.4.weight", "layers.6.weight"]
        for expected, actual in zip(whole, resumed, strict=True):
            # 400 roundings a step, each of which a column of P may enlarge tenfold, as in test_powersgd_state.py.
            assert (actual - expected).norm() <= 400 * 10 * (TOTAL - CUT) * 2.0**-24 * expected.norm()


def resume_scaled(first, second):
    """Names and exponents before and after a restart on the other DDP."""
    state = ScaledCastState()
    train(first, "mlp", hook=(state, scaled_cast_hook), bucket_cap_mb=SMALL)
    loaded = ScaledCastState()
    loaded.load_state_dict(state.state_dict())
    train(second, "mlp", hook=(loaded, scaled_cast_hook), bucket_cap_mb=25)
    return sorted(state.exponents()), sorted(loaded.exponents()), sorted(names_of_the_mlp())


def names_of_the_mlp():
    return [name for name, _ in build("mlp").named_parameters()]


@pytest.mark.parametrize(("first", "second"), [("pytorch", "gradwire"), ("gradwire", "pytorch")])
def test_law7_scales_without_bind_resume_on_other_ddp(worlds, first, second):
    for before, after, expected in worlds(2).run(resume_scaled, first=first, second=second):
        assert before == after == expected


def resume_under_wrappers(before, after):
    """A state saved under one wrapper of the model and loaded under another; its errors' names then."""
    torch.manual_seed(0)
    state, found = PowerSGDState(None, **EARLY), []
    for wrap, wrapper in (before, after):
        module = Part(linear(), linear())
        ddp = WRAPPERS[wrapper](torch.compile(module, backend="eager") if wrap else module)
        register(ddp, (state, powerSGD_hook))
        for _ in range(3):
            step(ddp)
        saved = state.state_dict()
        found.append(sorted(saved["errors"]))
        state = PowerSGDState(None, **EARLY)
        state.load_state_dict(saved)
    return found


@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_law7_state_of_compiled_model_loads_into_plain_model(worlds, before, after):
    case = {"before": (True, before), "after": (False, after)}
    for found in worlds(1).run(resume_under_wrappers, **case):
        assert found == [["layers.0.weight", "layers.1.weight"]] * 2


def unused_in_a_compiled_model():
    """The error of a parameter that no rank uses, behind gradwire's DDP, in two steps of which it is unused in one."""
    module = Part(linear(), linear())
    ddp = WRAPPERS["gradwire"](torch.compile(module, backend="eager"), find_unused_parameters=True)
    state = register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
    for _ in range(4):
        step(ddp)
    layers, error = module.layers, state.tensors("errors")["layers.1.weight"]
    before = error.clone()
    module.layers = layers[:1]
    module._modules["rest"] = layers[1]
    step(ddp)
    return before, error.clone(), module.rest.weight.grad is None


def test_error_of_unused_parameter_is_kept_in_compiled_model(worlds):
    for before, after, stays_none in worlds(2).run(unused_in_a_compiled_model):
        assert stays_none
        assert before.any()
        torch.testing.assert_close(after, before, rtol=0, atol=4 * 2.0**-24 * before.abs().max().item())


# --- where names are not known


def hidden_models():
    """Lets no search find a model, as after ``gc.freeze()``."""
    return mock.patch.object(_parameter_names, "live_wrappers", lambda: [])


def message_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def unknown_names():
    with hidden_models():
        ddp = WRAPPERS["pytorch"](Part(linear(), linear()))
        state = register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
        for _ in range(4):
            step(ddp)
        other = WRAPPERS["pytorch"](Part(linear(), linear()))
        scales = register(other, (ScaledCastState(), scaled_cast_hook))
        step(other)
        copies = copy.deepcopy((state, scales))
        return {
            "remembers": sorted(state.tensors("errors")),
            "state_dict": message_of(state.state_dict),
            "prepare_checkpoint": message_of(state.prepare_checkpoint),
            "bind": message_of(lambda: state.bind(ddp)),
            "scales": message_of(scales.state_dict),
            "copied": (sorted(copies[0].tensors("errors")), sorted(copies[1].exponents())),
        }


def test_unknown_names_train_by_number_and_checkpoints_raise(worlds):
    for found in worlds(2).run(unknown_names):
        assert found["remembers"] == ["parameter.0", "parameter.2"]
        assert found["copied"] == (found["remembers"], [f"parameter.{i}" for i in range(4)])
        for call in ("state_dict", "prepare_checkpoint", "scales"):
            assert re.match(r"RuntimeError: A checkpoint of a .*Call state\.bind\(model\) before", found[call])
        assert re.match(
            "ValueError: This state has trained without parameter names.*before the first step", found["bind"]
        )


def options_by_name(option):
    """What the first step says, and the names that are remembered once the same state is bound."""
    with hidden_models():
        ddp = WRAPPERS["pytorch"](Part(linear(), linear()))
        state = register(ddp, (PowerSGDState(None, **EARLY, **{option: {"layers.1.*": 1}}), powerSGD_hook))
        message = message_of(lambda: step(ddp))
        again = WRAPPERS["pytorch"](Part(linear(), linear()))  # PyTorch's DDP is broken after an error
        state.bind(again)
        register(again, (state, powerSGD_hook))
        for _ in range(4):
            step(again)
        return message, state.iter, sorted(state.tensors("errors"))


@pytest.mark.parametrize("option", ["ranks", "stacks"])
def test_options_by_name_raise_with_unknown_names_and_apply_once_bound(worlds, option):
    for message, steps, names in worlds(2).run(options_by_name, option=option):
        assert re.match(r"RuntimeError: A pattern in ranks or stacks.*Call state\.bind\(model\) before", message)
        assert steps == 4, "the step that raised does not count"
        assert names == ["layers.0.weight", "layers.1.weight"]


def shared_between_users_hooks():
    """Two models of the same parameters, whose states no DDP knows: which names are meant is not certain."""
    layers = linear(), linear()
    ddps = [WRAPPERS["pytorch"](module) for module in (Part(*layers), Part(nn.Sequential(*layers)))]
    states = [PowerSGDState(None, **EARLY) for _ in ddps]
    for ddp, state in zip(ddps, states, strict=True):
        ddp.register_comm_hook({"powersgd": state}, handing_on_hook)
    step(ddps[0])
    return states[0]._names.are_numbers, message_of(states[0].state_dict)


def test_names_shared_by_two_models_are_not_used(worlds):
    for are_numbers, message in worlds(1).run(shared_between_users_hooks):
        assert are_numbers
        assert "no model, or more than one, was found" in message


def new_state_of_a_compiled_part(wrapper):
    ddp = WRAPPERS[wrapper](compiled_part())
    state = register(ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
    return sorted(state.state_dict()["errors"])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_entries_of_new_state_have_no_wrapper_components(worlds, wrapper):
    (names,) = worlds(1).run(new_state_of_a_compiled_part, wrapper=wrapper)
    assert names == ["layers.0.weight", "layers.1.weight"]


def new_state():
    state = PowerSGDState(None, **EARLY)
    before = message_of(state.state_dict)
    ddp = WRAPPERS["pytorch"](build("mlp"))
    register(ddp, (state, powerSGD_hook))
    return before, state.state_dict()


def test_new_state_has_entries_once_registered(worlds):
    saved = []
    for message, entries in worlds(2).run(new_state):
        assert re.match("RuntimeError: This PowerSGDState has no model yet.*register_comm_hook", message)
        weights = sorted(name for name in names_of_the_mlp() if name.endswith("weight"))
        assert sorted(entries["errors"]) == sorted(entries["q"]) == weights
        saved.append(entries)
    assert_same_on_all_ranks(saved)
