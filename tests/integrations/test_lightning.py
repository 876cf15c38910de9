"""`GradwireStrategy` under Lightning's Trainer."""

import os
import warnings

import pytest

pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from gradwire.hooks.default_hooks import fp16_compress_wrapper
from gradwire.integrations import HookNotUsedWarning
from gradwire.integrations.lightning import GradwireModelParallelStrategy, GradwireStrategy
from tests.integrations import regression_task as task


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = task.Net().net

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, _):
        return task.loss_of(self, batch)

    def configure_optimizers(self):
        return task.optimizer_of(self)


def fit(rank, strategy, epochs=task.EPOCHS, resume_from=None, devices=2, **options):
    """Train a new model; returns the trainer and the weights."""
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    model = task.new_net(Regression)
    trainer.fit(model, task.rank_loader(rank), ckpt_path=resume_from)
    return trainer, task.weights(model)


def strategy_of(hook, wrapper="gradwire"):
    arguments, options = task.arguments_for(hook)
    return GradwireStrategy(*arguments, ddp_class=task.WRAPPERS[wrapper], **options)


def train_and_resume(hook, wrapper, folder):
    """(plain run, whole run, resumed run, run resumed without the hook's state), and warnings of the last."""
    rank = task.launched_by_torchrun()
    path = f"{folder}/checkpoint.ckpt"
    _, whole = fit(rank, strategy_of(hook, wrapper))
    trainer, _ = fit(rank, strategy_of(hook, wrapper), epochs=1)
    trainer.save_checkpoint(path)
    _, resumed = fit(rank, strategy_of(hook, wrapper), resume_from=path)

    trainer.strategy.attachment = None  # as Lightning's own strategy
    trainer.save_checkpoint(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, forgetful = fit(rank, strategy_of(hook, wrapper), resume_from=path)
    return task.plain_run(hook), whole, resumed, forgetful, [str(each.message) for each in caught]


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_lightning_run_equals_plain_run_and_resumes_like_it(run_on_two_ranks, tmp_path, hook, wrapper):
    for *runs, messages in run_on_two_ranks(train_and_resume, hook=hook, wrapper=wrapper, folder=str(tmp_path)):
        task.assert_equals_plain_run_and_resumes(hook, *runs)
        assert any("holds no state of a communication hook" in message for message in messages)


def train_with_wrapped_hook_and_options():
    rank = task.launched_by_torchrun()
    strategy = GradwireStrategy(
        "powersgd-r2", ddp_comm_wrapper=fp16_compress_wrapper, bucket_cap_mb=1, start_powerSGD_iter=3
    )
    wrappers = []
    setup = strategy._setup_model
    strategy._setup_model = lambda model: wrappers.append(setup(model)) or wrappers[-1]
    fit(rank, strategy, epochs=1)
    (ddp,) = wrappers
    state = strategy.attachment.state
    return state.iter, state.start_powerSGD_iter, ddp.bucket_bytes_cap, [hook.__name__ for hook, _ in ddp._comm_hooks]


def test_options_of_hook_and_ddp_and_wrapper_of_the_hook_arrive(run_on_two_ranks):
    for steps, start, cap, hooks in run_on_two_ranks(train_with_wrapped_hook_and_options):
        assert (steps, start, cap) == (task.STEPS_PER_EPOCH, 3, 2**20)
        assert hooks == ["fp16_compress_wrapper_hook"]


def follow_the_scaler():
    rank, strategy = task.launched_by_torchrun(), strategy_of("powersgd")
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit(rank, strategy, epochs=1, plugins=[precision])
    return strategy.attachment.state.memory.scaler is precision.scaler


def test_error_memory_follows_the_scaler_of_lightning(run_on_two_ranks):
    assert run_on_two_ranks(follow_the_scaler) == [True, True]


def warnings_on_one_device():
    os.environ.pop("MASTER_PORT")  # each process is a world of its own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(0, strategy_of("powersgd"), epochs=1, devices=1)
    return [str(each.message) for each in caught if each.category is HookNotUsedWarning]


def test_one_device_warns_once_that_the_hook_saves_nothing(run_on_two_ranks):
    for messages in run_on_two_ranks(warnings_on_one_device):
        (message,) = messages
        assert message.startswith("powerSGD_hook saves nothing: there is a single process")


def test_wrong_names_are_refused_at_once():
    for strategy in (GradwireStrategy, GradwireModelParallelStrategy):
        with pytest.raises(ValueError, match=r"There is no hook 'int-4'. Did you mean 'int4'?"):
            strategy("int-4")
    with pytest.raises(TypeError, match=r"There is a hook next to the name 'int4'. Leave out the hook"):
        GradwireStrategy("int4", task.HOOKS["powersgd"]()[1])
    with pytest.raises(TypeError, match=r"ddp_comm_wrapper has no hook to wrap. Pass the name of a hook"):
        GradwireStrategy(task.HOOKS["powersgd"]()[0], ddp_comm_wrapper=fp16_compress_wrapper)
    GradwireStrategy("none", ddp_comm_wrapper=fp16_compress_wrapper)
