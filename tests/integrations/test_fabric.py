"""Hooks under Lightning Fabric, on PyTorch's DistributedDataParallel and on gradwire's."""

import pytest

pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")

from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy

from gradwire.integrations import HookNotUsedWarning, attach
from gradwire.integrations.fabric import GradwireStrategy
from tests.integrations import regression_task as task

STRATEGIES = {"pytorch": DDPStrategy, "gradwire": GradwireStrategy}


class Run:
    """Training under a Fabric of its own, which can be saved and loaded."""

    def __init__(self, hook, wrapper):
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=STRATEGIES[wrapper]())
        self.fabric.launch()
        model = task.new_net()
        self.model, self.optimizer = self.fabric.setup(model, task.optimizer_of(model))
        state, function = task.HOOKS[hook]()
        attach(self.model, state, function)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "hook": state}

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
    del forgetful.parts["hook"]
    forgetful.fabric.load(path, forgetful.parts)
    return task.plain_run(hook), whole, resumed.train(epochs=1), forgetful.train(epochs=1)


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_fabric_run_equals_plain_run_and_resumes_like_it(run_on_two_ranks, tmp_path, hook, wrapper):
    for runs in run_on_two_ranks(train_and_resume, hook=hook, wrapper=wrapper, path=str(tmp_path / "saved.ckpt")):
        task.assert_equals_plain_run_and_resumes(hook, *runs)


def hook_methods():
    task.launched_by_torchrun()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy())
    fabric.launch()
    model, _ = fabric.setup(model := task.new_net(), task.optimizer_of(model))
    return hasattr(model, "register_comm_hook")


def test_fabrics_wrapper_does_not_pass_register_comm_hook_on(run_on_two_ranks):
    """The reason for `gradwire.integrations.attach`, stated in docs/trainers.md."""
    assert run_on_two_ranks(hook_methods) == [False, False]


def test_one_process_warns_that_the_hook_is_not_used():
    model = Fabric(accelerator="cpu", devices=1).setup(task.new_net())
    with pytest.warns(HookNotUsedWarning, match="powerSGD_hook is not used: this _FabricModule contains neither"):
        assert attach(model, *task.HOOKS["powersgd"]()) is None
