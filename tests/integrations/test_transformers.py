"""`GradwireCallback` under Hugging Face's Trainer."""

import os
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'transformers': make test-integrations")

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from gradwire.integrations import HookNotUsedWarning
from gradwire.integrations.transformers import CHECKPOINT_NAME, GradwireCallback
from tests.integrations import regression_task as task


class Regression(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config=None):
        super().__init__(config or PreTrainedConfig())
        self.net = task.Net().net
        self.post_init()

    def _init_weights(self, _):
        """Keep those of `Net`."""

    def get_input_embeddings(self):
        """None, for Accelerate's FSDP2."""

    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


class Items(list):
    """The data as a map-style dataset of dictionaries."""

    def __init__(self):
        super().__init__({"inputs": inputs, "labels": targets} for inputs, targets in task.data())


def trainer_of(folder, hook, epochs=task.EPOCHS, **options):
    model = task.new_net(Regression)
    is_launched = "LOCAL_RANK" in os.environ
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=task.BATCH_SIZE,
        train_sampling_strategy="sequential", learning_rate=task.LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=0, save_strategy="epoch",
        logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        ddp_backend="gloo" if is_launched else None, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Items(), optimizers=(task.optimizer_of(model), None))
    arguments, options = task.arguments_for(hook)
    return trainer, GradwireCallback(trainer, *arguments, **options)


def train_and_resume(hook, folder):
    """(plain run, whole run, resumed run, run resumed without the hook's state), and warnings of the last."""
    task.launched_by_torchrun()
    path = Path(folder) / f"checkpoint-{task.STEPS_PER_EPOCH}"
    whole, _ = trainer_of(folder, hook)
    whole.train()
    resumed, _ = trainer_of(f"{folder}/resumed", hook)
    resumed.train(resume_from_checkpoint=str(path))
    resumed.accelerator.wait_for_everyone()
    if resumed.args.should_save:
        (path / CHECKPOINT_NAME).unlink()
    resumed.accelerator.wait_for_everyone()
    forgetful, _ = trainer_of(f"{folder}/forgetful", hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forgetful.train(resume_from_checkpoint=str(path))
    runs = [task.weights(each.model) for each in (whole, resumed, forgetful)]
    return task.plain_run(hook), *runs, [str(each.message) for each in caught]


@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_trainer_run_equals_plain_run_and_resumes_like_it(run_on_two_ranks, tmp_path, hook):
    for *runs, messages in run_on_two_ranks(train_and_resume, hook=hook, folder=str(tmp_path)):
        task.assert_equals_plain_run_and_resumes(hook, *runs)
        assert any("holds no state of a communication hook" in message for message in messages)


def train_twice(folder):
    task.launched_by_torchrun()
    trainer, callback = trainer_of(folder, "powersgd", epochs=1, save_only_model=True)
    trainer.train()
    trainer.train()
    return callback.attachment.state.iter


def test_second_train_of_a_trainer_goes_on_with_the_hook(run_on_two_ranks, tmp_path):
    assert run_on_two_ranks(train_twice, folder=str(tmp_path)) == [2 * task.STEPS_PER_EPOCH] * 2
    assert list(tmp_path.rglob("model.safetensors"))
    assert not list(tmp_path.rglob(CHECKPOINT_NAME))  # with `save_only_model`


def test_single_process_warns_that_the_hook_is_not_used(tmp_path):
    trainer, callback = trainer_of(str(tmp_path), "powersgd", epochs=1)
    with pytest.warns(HookNotUsedWarning, match="The hook 'powersgd-r2' is not used: this Regression contains"):
        trainer.train()
    assert callback.attachment is None
    assert not list(tmp_path.rglob(CHECKPOINT_NAME))


def test_wrong_names_and_trainers_without_the_extended_methods_are_refused():
    class OtherTrainer:
        pass

    with pytest.raises(ValueError, match=r"There is no hook 'int-4'. Did you mean 'int4'?"):
        GradwireCallback(OtherTrainer(), "int-4")
    with pytest.raises(TypeError, match=r"'excempt'. Did you mean exempt="):
        GradwireCallback(OtherTrainer(), "int4", excempt=["*.bias"])
    with pytest.raises(RuntimeError, match="OtherTrainer has no method _save_optimizer_and_scheduler"):
        GradwireCallback(OtherTrainer(), *task.HOOKS["powersgd"]())
