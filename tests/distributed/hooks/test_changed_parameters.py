"""A parameter that was replaced, added or unfrozen after its model was wrapped raises: nobody would average it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradwire
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, build, error_of, gradients, own_batches, wrapped

DDP = gradwire.DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4)
        self.more = nn.ModuleList()

    def forward(self, x):
        x = self.last(self.frozen(self.first(x)))
        for layer in self.more:
            x = layer(x)
        return x.square().sum()


def reload(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_weight(model):
    model.last.weight = nn.Parameter(torch.ones(4, 4))


def unfreeze(model):
    model.frozen.weight.requires_grad_(True)


# A change of the model, and the parameter that the error names.
CHANGES = {
    "parameter replaced": (replace_weight, "last.weight"),
    "layer replaced": (lambda model: setattr(model, "last", nn.Linear(4, 4)), "last.weight"),
    "layer added": (lambda model: model.more.append(nn.Linear(4, 4)), "more.0.weight"),
    "unfrozen": (unfreeze, "frozen.weight"),
    "reloaded": (reload, "first.weight"),
}
MODES = {"plain": {}, "find-unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


def errors_after(change, steps, ignored=(), **options):
    """The errors of two steps after the change; the model wrapped again trains."""
    torch.manual_seed(0)
    model = Model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    ddp = DDP(model, bucket_cap_mb=SMALL, **options)
    x = torch.randn(2, 4, generator=own_batches())
    for _ in range(steps):
        ddp(x).backward()
    change(model)
    errors = [error_of(lambda: ddp(x).backward()) for _ in range(2)]
    del ddp
    ddp = DDP(model, bucket_cap_mb=SMALL, **options)
    ddp.zero_grad()
    ddp(x).backward()
    if not ignored:
        assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))
    return errors


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_parameter_changed_after_wrapping_raises_with_its_name(change, mode, steps):
    act, name = CHANGES[change]
    (kind, text), (next_kind, _) = errors_after(act, steps, **MODES[mode])
    assert kind == next_kind == "RuntimeError"
    assert f"{name} was replaced, added or unfrozen after the model was wrapped" in text
    assert "Wrap the model again" in text


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrize(model):
    nn.utils.parametrize.register_parametrization(model.last, "weight", Doubled())


def make_orthogonal(model):
    nn.utils.parametrizations.orthogonal(model.last)


def write_to_dictionary(model):
    model.last._parameters["weight"] = nn.Parameter(torch.ones(4, 4))


def cast_and_back(model):
    model.last.half()
    model.last.float()


def replace_memory(model):
    with torch.no_grad():
        model.last.weight.set_(torch.ones(4, 4))


def swap(model):
    torch.utils.swap_tensors(model.last.weight, nn.Parameter(torch.ones(4, 4)))


# Changes after which autograd adds gradients to the parameter of which no reducer hears.
UNHEARD = {
    "parametrized": (parametrize, "last."),
    "made orthogonal": (make_orthogonal, "last."),
    "replaced in a dictionary": (write_to_dictionary, "last.weight was replaced"),
    "cast and back": (cast_and_back, "last."),
    "new memory": (replace_memory, "last.weight"),
    "swapped": (swap, "last.weight"),
}


# A hook refers to parameters weakly, and PyTorch refuses to swap them then.
@pytest.mark.parametrize(
    ("change", "hook"), [(each, hook) for each in UNHEARD for hook in (None, "int4") if each != "swapped" or not hook]
)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, 3)
def test_parameter_whose_gradients_would_stay_local_raises_before_the_first_such_step(change, mode, hook):
    act, words = UNHEARD[change]
    torch.manual_seed(0)
    model = Model()
    ddp = wrapped(model=model, hook=hook, group=dist.new_group(), **MODES[mode])
    optimizer, generator = torch.optim.SGD(ddp.parameters(), lr=0.1), own_batches()

    def step():
        ddp.zero_grad()
        ddp(torch.randn(2, 4, generator=generator)).backward()
        optimizer.step()

    for _ in range(3):
        step()
    act(model)
    before = [each.detach().clone() for each in model.parameters()]
    if act in (parametrize, make_orthogonal):  # these register a parameter
        assert error_of(ddp, torch.ones(2, 4)) is not None
    errors = from_all_ranks(error_of(step))
    assert all(kind == "RuntimeError" and words in text for kind, text in errors)
    assert all("after the model was wrapped" in text and "Wrap the model again" in text for _, text in errors)
    assert_same_bits([each.detach() for each in model.parameters()], before)
    del ddp
    ddp = wrapped(model=model, hook=hook, group=dist.new_group(), **MODES[mode])
    for _ in range(3):
        step()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_parameter_added_to_a_modules_dictionary_raises_within_64_steps(mode):
    ddp = DDP(Model(), **MODES[mode])
    ddp.module.last._parameters["bias"] = None  # as in a layer without one
    ddp = DDP(ddp.module, **MODES[mode])
    ddp.module.last._parameters["bias"] = nn.Parameter(torch.ones(4))
    *_, error = [error_of(lambda: ddp(torch.ones(2, 4)).backward()) for _ in range(64)]
    assert "last.bias was replaced, added or unfrozen" in error[1]


@on_ranks(2)
def test_layer_that_the_latest_steps_did_not_use_is_still_known():
    ddp = wrapped(model=Model(), group=dist.new_group(), find_unused_parameters=True)
    ddp.module.more.append(ddp.module.frozen)  # no change of what is trained
    ddp(torch.ones(2, 4)).backward()
    last, ddp.module.last = ddp.module.last, nn.Identity()
    for _ in range(2):
        ddp(torch.ones(2, 4)).backward()
    ddp.module.last = last
    nn.utils.prune.l1_unstructured(last, "weight", 0.5)  # the parameter has another name now
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((2, 4), 1.0 + dist.get_rank())).backward()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@on_ranks(2)
def test_ignored_parameters_may_change():
    for change, ignored in ((replace_weight, ["last.weight"]), (unfreeze, ["frozen.weight"])):
        assert errors_after(change, 2, ignored) == [None, None]


@on_ranks(2)
def test_ignored_parameter_under_another_name_is_no_change():
    model = Model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    ddp = DDP(model)
    model.last = checkpoint_wrapper(model.last)
    assert error_of(lambda: ddp(torch.ones(2, 4)).backward()) is None


@on_ranks(2)
def test_functional_call_with_other_tensors_is_no_change():
    ddp = DDP(build("mlp"))
    given = {f"module.{name}": p.detach().clone().requires_grad_() for name, p in ddp.module.named_parameters()}
    torch.func.functional_call(ddp, given, ddp.module.batch(torch.Generator())).backward()
    assert all(p.grad is not None for p in given.values())
