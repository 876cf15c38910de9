"""Hooks under Lightning Fabric, on PyTorch's DistributedDataParallel and on gradwire's."""

import os
import warnings

import pytest

pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")

import torch
from lightning import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import DDPStrategy

from gradwire.integrations import HookNotUsedWarning, attach
from gradwire.integrations.fabric import GradwireStrategy
from tests.integrations import regression_task as task


class Run:
    """Training under a Fabric of its own, which can be saved and loaded."""

    def __init__(self, hook, wrapper):
        arguments, options = task.arguments_for(hook)
        self.strategy = GradwireStrategy(*arguments, **options) if wrapper == "gradwire" else DDPStrategy()
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy)
        self.fabric.launch()
        model = task.new_net()
        self.model, self.optimizer = self.fabric.setup(model, task.optimizer_of(model))
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        if wrapper == "pytorch":
            self.parts["hook"] = attach(self.model, *arguments, **options).state

    def forget(self):
        """Save and load without the state of the hook from now on."""
        self.parts.pop("hook", None)
        self.strategy.attachments = []

    def train(self, epochs=task.EPOCHS):
        for _ in range(epochs):
            for batch in task.rank_loader(self.fabric.global_rank):
                self.optimizer.zero_grad()
                self.fabric.backward(task.loss_of(self.model, batch))
                self.optimizer.step()
        return task.weights(self.model.module)


def train_and_resume(hook, wrapper, path):
    """Weights of the plain run, the whole run, the resumed run, and the run resumed without the hook's state."""
    task.launched_by_torchrun()
    whole = Run(hook, wrapper).train()
    half = Run(hook, wrapper)
    half.train(epochs=1)
    half.fabric.save(path, half.parts)
    half.fabric.barrier()
    resumed, forgetful = Run(hook, wrapper), Run(hook, wrapper)
    resumed.fabric.load(path, resumed.parts)
    forgetful.forget()
    forgetful.fabric.load(path, forgetful.parts)
    return task.plain_run(hook), whole, resumed.train(epochs=1), forgetful.train(epochs=1)


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_fabric_run_equals_plain_run_and_resumes_like_it(run_on_two_ranks, tmp_path, hook, wrapper):
    for runs in run_on_two_ranks(train_and_resume, hook=hook, wrapper=wrapper, path=str(tmp_path / "saved.ckpt")):
        task.assert_equals_plain_run_and_resumes(hook, *runs)


def two_models(path):
    """Steps of the hooks of two models, as saved and as loaded, and a warning for a checkpoint without them."""
    task.launched_by_torchrun()

    def setup():
        precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        strategy = GradwireStrategy("int4", start_iter=3, bucket_cap_mb=1)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[precision])
        fabric.launch()
        models = [fabric.setup(model := task.new_net(), task.optimizer_of(model)) for _ in range(2)]
        return fabric, strategy, {"optimizer": models[0][1]}, models

    fabric, strategy, parts, models = setup()
    for model, _ in models[:1] * 2 + models[1:]:
        fabric.backward(task.loss_of(model, next(iter(task.rank_loader(fabric.global_rank)))))
    states = [each.state for each in strategy.attachments]
    assert all(
        each.memory.scaler is fabric.strategy.precision.scaler and each.options.start_iter == 3 for each in states
    )
    fabric.save(path, parts)
    fabric.save(f"{path}.model", {"model": models[0][0]})
    fabric.barrier()
    later, strategy, parts, _ = setup()
    later.load(path, parts)
    loaded = [each.state.iter for each in strategy.attachments]
    strategy.attachments, attachments = [], strategy.attachments
    later.save(f"{path}.forgetful", parts)
    later.barrier()
    strategy.attachments = attachments
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        later.load(f"{path}.forgetful", parts)
    only_model = sorted(torch.load(f"{path}.model", weights_only=True))
    return [each.iter for each in states], loaded, [str(each.message) for each in caught], only_model


def test_each_model_of_fabric_has_a_state_that_checkpoints_with_an_optimizer_hold(run_on_two_ranks, tmp_path):
    for steps, loaded, messages, only_model in run_on_two_ranks(two_models, path=str(tmp_path / "saved.ckpt")):
        assert steps == loaded == [2, 1]
        assert sum("holds no state of a communication hook" in message for message in messages) == 2
        assert only_model == ["model"]


def hook_methods():
    """Whether Fabric's wrapper has ``register_comm_hook``, and hooks of the environment and of the name none."""
    task.launched_by_torchrun()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy())
    fabric.launch()
    model, _ = fabric.setup(model := task.new_net(), task.optimizer_of(model))
    os.environ["GRADWIRE_HOOK"] = "int4"
    states = []
    for arguments in ((), ("none",)):
        strategy = GradwireStrategy(*arguments)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        fabric.setup(task.new_net())
        states += [type(each.state).__name__ for each in strategy.attachments]
    return hasattr(model, "register_comm_hook"), states


def test_fabrics_wrapper_has_no_register_comm_hook_and_the_environment_names_one(run_on_two_ranks):
    """The reason for `gradwire.integrations.attach`, stated in docs/trainers.md; a strategy with a name ignores it."""
    assert run_on_two_ranks(hook_methods) == [(False, ["QuantizationState", "NoneType"])] * 2


def test_one_process_warns_that_the_hook_is_not_used():
    model = Fabric(accelerator="cpu", devices=1).setup(task.new_net())
    with pytest.warns(HookNotUsedWarning, match="powerSGD_hook is not used: this _FabricModule contains neither"):
        assert attach(model, *task.HOOKS["powersgd"]()) is None


def test_wrong_name_is_refused_at_once():
    with pytest.raises(ValueError, match=r"There is no hook 'int-4'. Did you mean 'int4'?"):
        GradwireStrategy("int-4")
