"""A parameter that was replaced, added or unfrozen after its model was wrapped raises: nobody would average it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradwire
from tests.support.training import SMALL, build, error_of, gradients

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


def replace_parameter(model):
    model.last.weight = nn.Parameter(torch.ones(4, 4))


def replace_layer(model):
    model.last = nn.Linear(4, 4)


def add_layer(model):
    model.more.append(nn.Linear(4, 4))


def unfreeze(model):
    model.frozen.weight.requires_grad_(True)


def reload(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_behind_the_modules_back(model):
    model.last._parameters["weight"] = nn.Parameter(torch.ones(4, 4))


def cast_and_back(model):
    model.last.half()
    model.last.float()


CHANGES = {
    replace_parameter: "last.weight",
    replace_layer: "last.weight",
    add_layer: "more.0.weight",
    unfreeze: "frozen.weight",
    reload: "first.weight",
}
MODES = {"plain": {}, "find-unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


def train_and_change(change, steps, ignored=(), **options):
    """The error of the forward after the change and of the next one, and the gradients of the model wrapped again."""
    torch.manual_seed(0)
    model = Model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    ddp = DDP(model, bucket_cap_mb=SMALL, **options)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        ddp(x).backward()
    change(model)
    errors = [error_of(lambda: ddp(x).backward()) for _ in range(2)]
    del ddp
    ddp = DDP(model, bucket_cap_mb=SMALL, **options)
    ddp.zero_grad()
    ddp(x).backward()
    return errors, gradients(ddp)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_parameter_changed_after_wrapping_raises_with_its_name(worlds, change, mode, steps):
    results = worlds(2).run(train_and_change, change=change, steps=steps, **MODES[mode])
    for errors, _ in results:
        assert errors[0][0] == errors[1][0] == "RuntimeError"
        assert f"{CHANGES[change]} was replaced, added or unfrozen after the model was wrapped" in errors[0][1]
        assert "Wrap the model again" in errors[0][1]
    assert all(
        torch.equal(results[0][1][name], results[1][1][name]) for name, g in results[0][1].items() if g is not None
    )


def errors_of_64_steps():
    ddp = DDP(Model())
    replace_behind_the_modules_back(ddp.module)
    return [error_of(lambda: ddp(torch.ones(2, 4)).backward()) for _ in range(64)]


def test_parameter_replaced_in_a_modules_dictionary_raises_within_64_steps(worlds):
    for *_, error in worlds(1).run(errors_of_64_steps):
        assert "last.weight was replaced" in error[1]


def test_ignored_parameters_may_change(worlds):
    for change, ignored in ((replace_parameter, ["last.weight"]), (unfreeze, ["frozen.weight"])):
        for errors, _ in worlds(2).run(train_and_change, change=change, steps=2, ignored=ignored):
            assert errors == [None, None]


def rename_ignored():
    """The error of a step after a layer with an ignored parameter got a wrapper, which changes the name."""
    model = Model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    ddp = DDP(model)
    model.last = checkpoint_wrapper(model.last)
    return error_of(lambda: ddp(torch.ones(2, 4)).backward())


def test_ignored_parameter_under_another_name_is_no_change(worlds):
    assert worlds(2).run(rename_ignored) == [None, None]


@pytest.mark.parametrize("mode", MODES)
def test_cast_of_one_layer_that_was_undone_raises(worlds, mode):
    for errors, _ in worlds(2).run(train_and_change, change=cast_and_back, steps=3, **MODES[mode]):
        texts = [text for error in errors if error is not None for text in error]
        assert any("last.weight" in text or "last.bias" in text for text in texts)


def with_other_parameters():
    """The output and the gradients of given parameters, whose modules' own take no part."""
    ddp = DDP(build("mlp"))
    given = {f"module.{name}": p.detach().clone().requires_grad_() for name, p in ddp.module.named_parameters()}
    torch.func.functional_call(ddp, given, ddp.module.batch(torch.Generator())).backward()
    return [p.grad is not None for p in given.values()]


def test_functional_call_with_other_tensors_is_no_change(worlds):
    for found in worlds(2).run(with_other_parameters):
        assert all(found)
