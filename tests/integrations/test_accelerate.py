"""Hooks under Accelerate, on PyTorch's DistributedDataParallel and on gradwire's."""

import pytest

pytest.importorskip("accelerate", reason="needs the extra 'accelerate': make test-integrations")

import torch
from accelerate import Accelerator
from torch import nn

from gradwire import integrations
from gradwire.integrations._attach import find_ddp
from gradwire.integrations.accelerate import attach, prepare_model
from tests.integrations import regression_task as task
from tests.support.training import message_of


class Run:
    """Training under an Accelerator of its own, which can be saved and loaded."""

    def __init__(self, hook, wrapper, saves_state=True, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        model = task.new_net()
        optimizer = task.optimizer_of(model)
        if wrapper == "gradwire":
            self.model = prepare_model(self.accelerator, model)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        arguments, options = task.arguments_for(hook)
        if saves_state:
            attach(self.accelerator, self.model, *arguments, **options)
        else:
            integrations.attach(self.model, *arguments, **options)

    def train(self, epochs=task.EPOCHS):
        for _ in range(epochs):
            for batch in task.rank_loader(self.accelerator.process_index):
                with self.accelerator.accumulate(self.model):
                    self.optimizer.zero_grad()
                    self.accelerator.backward(task.loss_of(self.model, batch))
                    self.optimizer.step()
        return task.weights(self.model)


def train_and_resume(hook, wrapper, folder):
    """Weights of the plain run, the whole run, the resumed run, and the run resumed without the hook's state."""
    task.launched_by_torchrun()
    whole = Run(hook, wrapper).train()
    rest = []
    for saves_state in (True, False):
        half = Run(hook, wrapper, saves_state)
        half.train(epochs=1)
        half.accelerator.save_state(f"{folder}/{saves_state}")
        half.accelerator.wait_for_everyone()
        resumed = Run(hook, wrapper, saves_state)
        resumed.accelerator.load_state(f"{folder}/{saves_state}")
        rest.append(resumed.train(epochs=1))
    return task.plain_run(hook), whole, *rest


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_accelerate_run_equals_plain_run_and_resumes_like_it(run_on_two_ranks, tmp_path, hook, wrapper):
    for runs in run_on_two_ranks(train_and_resume, hook=hook, wrapper=wrapper, folder=str(tmp_path)):
        task.assert_equals_plain_run_and_resumes(hook, *runs)


def wrap_twice():
    task.launched_by_torchrun()
    accelerator = Accelerator(cpu=True)
    wrapped = nn.parallel.DistributedDataParallel(task.new_net())
    with_gradwires = message_of(prepare_model, accelerator, wrapped)
    twice = accelerator.prepare(wrapped)
    return isinstance(twice.module, nn.parallel.DistributedDataParallel), [
        with_gradwires,
        message_of(attach, accelerator, twice, *task.HOOKS["powersgd"]()),
    ]


def test_model_that_accelerate_wraps_a_second_time_is_refused(run_on_two_ranks):
    for is_twice, (prepared, registered) in run_on_two_ranks(wrap_twice):
        assert is_twice
        assert "is wrapped in DistributedDataParallel already. Pass the unwrapped model" in prepared
        assert "twice, so its gradients are averaged twice. Pass the unwrapped model" in registered


def train_on_both_classes(options):
    task.launched_by_torchrun()
    return [Run("powersgd", wrapper, **options).train() for wrapper in ("gradwire", "pytorch")]


def test_mixed_precision_and_accumulation_of_accelerate_are_kept(run_on_two_ranks):
    default, changed = (
        run_on_two_ranks(train_on_both_classes, options=options)
        for options in ({}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2})
    )
    for (ours, pytorchs), (with_fp32, _) in zip(changed, default, strict=True):
        assert task.distance(ours, pytorchs) == 0
        assert task.distance(ours, with_fp32) > 0.01


def follow_the_scaler():
    task.launched_by_torchrun()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as with fp16 on a GPU
    attachment = attach(accelerator, prepare_model(accelerator, task.new_net()), "powersgd-r2")
    return attachment.state.memory.scaler is accelerator.scaler


def test_error_memory_follows_the_scaler_of_accelerate(run_on_two_ranks):
    assert run_on_two_ranks(follow_the_scaler) == [True, True]


def test_one_process_warns_and_saves_no_state_of_the_hook(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = prepare_model(accelerator, task.Net())
    assert find_ddp(model) is None
    with pytest.warns(integrations.HookNotUsedWarning, match="The hook 'int4' is not used: this Net contains neither"):
        assert attach(accelerator, model, "int4") is None
    with pytest.raises(ValueError, match=r"There is no hook 'int-4'. Did you mean 'int4'?"):
        attach(accelerator, model, "int-4")
    accelerator.save_state(str(tmp_path))  # without the state of the hook
