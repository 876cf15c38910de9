"""Hooks in PyTorch's own training tools: gradient scaler, torch.compile, distributed checkpoints, several DDPs."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gradwire.integrations import HookNotUsedWarning, attach
from gradwire.integrations._attach import take_options
from gradwire.integrations._checkpoint import Compression
from tests.integrations import regression_task as task


class Run:
    """Training without a trainer, which can be saved and loaded.

    Args:
        hook: a key of `HOOKS`.
        wrapper: a key of `WRAPPERS`.
        compiles: "inside" to compile the module that is wrapped, "around" to compile the wrapper.
        scaler: scales the loss, if given.
    """

    def __init__(self, hook, wrapper, compiles="", scaler=None):
        torch._dynamo.reset()
        model = task.new_net()
        inner = torch.compile(model, backend="aot_eager") if compiles == "inside" else model
        self.ddp = task.WRAPPERS[wrapper](inner)
        self.model = torch.compile(self.ddp, backend="aot_eager") if compiles == "around" else self.ddp
        self.state, function = task.HOOKS[hook]()
        attach(self.model, self.state, function)
        self.optimizer = task.optimizer_of(self.ddp)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.skipped = 0

    def train(self, epochs=task.EPOCHS, spoil=lambda batch, step: batch):
        for step, batch in enumerate([*task.rank_loader(dist.get_rank())] * epochs):
            self.optimizer.zero_grad()
            self.scaler.scale(task.loss_of(self.model, spoil(batch, step))).backward()
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < scale
        return task.weights(self.ddp)

    def save(self, folder):
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "hook": self.state}, checkpoint_id=folder)

    def load(self, folder, with_state=True):
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        parts = {"model": model, "optimizer": optimizer} | ({"hook": self.state} if with_state else {})
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(self.ddp, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def distributed_checkpoint(hook, wrapper, folder):
    dist.init_process_group("gloo")
    whole = Run(hook, wrapper).train()
    half = Run(hook, wrapper)
    half.train(epochs=1)
    half.save(folder)
    resumed, forgetful = Run(hook, wrapper), Run(hook, wrapper)
    resumed.load(folder)
    forgetful.load(folder, with_state=False)
    return task.plain_run(hook), whole, resumed.train(epochs=1), forgetful.train(epochs=1)


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_distributed_checkpoint_resumes_like_uninterrupted_run(run_on_two_ranks, tmp_path, hook, wrapper):
    for runs in run_on_two_ranks(distributed_checkpoint, hook=hook, wrapper=wrapper, folder=str(tmp_path)):
        task.assert_equals_plain_run_and_resumes(hook, *runs)


def compiled_runs(hook, wrapper, folder):
    dist.init_process_group("gloo")
    around, inside, plain = (Run(hook, wrapper, compiles) for compiles in ("around", "inside", ""))
    # The first of them finds no connections, and rebuilds the buckets in code that is being compiled.
    compiled = [around.train(), inside.train()]
    inside.save(folder)
    around.load(folder)  # the state of the hook has the names of the model that was not compiled
    return plain.train(), *compiled


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
def test_compiled_model_trains_like_the_model_itself(run_on_two_ranks, tmp_path, wrapper):
    for plain, *compiled in run_on_two_ranks(compiled_runs, hook="powersgd", wrapper=wrapper, folder=str(tmp_path)):
        for run in compiled:
            assert task.distance(run, plain) < 1e-6


def overflow_on_rank_1(batch, step):
    """inf in the gradients of one rank, in the fourth step."""
    inputs, targets = batch
    return inputs * (torch.inf if step == 3 and dist.get_rank() == 1 else 1), targets


def scaled_runs(hook, wrapper):
    dist.init_process_group("gloo")
    plain = Run(hook, wrapper).train()
    scaled = Run(hook, wrapper, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10)).train()
    run = Run(hook, wrapper, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    return plain, scaled, run.train(spoil=overflow_on_rank_1), run.skipped


@pytest.mark.parametrize("wrapper", task.WRAPPERS)
@pytest.mark.parametrize("hook", task.RESUME_TOLERANCE)
def test_gradient_scaler_keeps_the_run_and_skips_a_step_on_all_ranks(run_on_two_ranks, hook, wrapper):
    ranks = run_on_two_ranks(scaled_runs, hook=hook, wrapper=wrapper)
    for plain, scaled, after_overflow, skipped in ranks:
        assert task.distance(scaled, plain) < 1e-5
        assert skipped == 1
        assert all(weight.isfinite().all() for weight in after_overflow.values())
        assert task.distance(after_overflow, ranks[0][2]) == 0


def test_siblings_and_nested_ddps_are_refused_with_their_remedies(world_of_one):
    pair = nn.ModuleList(nn.parallel.DistributedDataParallel(task.new_net()) for _ in range(2))
    with pytest.raises(ValueError, match="contains 2 DistributedDataParallel modules; expected one"):
        attach(pair, *task.HOOKS["powersgd"]())
    for wrap in task.WRAPPERS.values():
        twice = wrap(nn.Sequential(wrap(task.new_net())))
        for model in (twice, nn.Sequential(twice)):
            with pytest.raises(ValueError, match="is wrapped in DistributedDataParallel twice, so its gradients"):
                attach(model, *task.HOOKS["powersgd"]())


def test_named_hook_keeps_its_state_in_the_next_wrapper_of_a_model(world_of_one):
    compression = Compression("powersgd-r2", None, None, {"start_powerSGD_iter": 3})
    model, states = task.new_net(), []
    for _ in range(2):
        with pytest.warns(HookNotUsedWarning, match="saves nothing: there is a single process"):
            compression.attach(nn.parallel.DistributedDataParallel(model), None)
        states.append(compression.attachment.state)
    assert states[0] is states[1]
    assert states[0].start_powerSGD_iter == 3


def test_options_of_the_named_hook_are_not_passed_on_to_the_trainer():
    options = {"exempt": ["*.bias"], "bucket_cap_mb": 1, "process_group": None}
    assert take_options("int4", options) == {"exempt": ["*.bias"]}
    assert options == {"bucket_cap_mb": 1, "process_group": None}
    assert take_options(task.HOOKS["powersgd"]()[0], options) == take_options("none", options) == {}


def test_wrong_names_and_options_raise_before_the_model_is_wrapped():
    with pytest.raises(ValueError, match=r"There is no hook 'int-4'. Did you mean 'int4'?"):
        attach(nn.Linear(4, 4), "int-4")
    with pytest.raises(TypeError, match=r"'excempt'. Did you mean exempt="):
        attach(nn.Linear(4, 4), "int4", excempt=["*.bias"])
    with pytest.raises(TypeError, match="There is an option 'exempt' without the name of a hook"):
        attach(nn.Linear(4, 4), task.HOOKS["powersgd"]()[0], exempt=["*.bias"])


def test_single_process_warns_that_the_hook_saves_nothing(world_of_one):
    model = nn.parallel.DistributedDataParallel(task.new_net())
    with pytest.warns(HookNotUsedWarning, match="powerSGD_hook saves nothing: there is a single process"):
        attach(model, *task.HOOKS["powersgd"]())
    with (
        pytest.warns(HookNotUsedWarning, match="within='bf16' saves nothing: there is a single process"),
        pytest.raises(ValueError, match="within has no effect on this model, which has no shards"),
    ):
        attach(fully_shard(nn.Linear(4, 4)), within="bf16")
    with pytest.warns(HookNotUsedWarning, match="within='bf16' is not used: this Linear contains neither"):
        attach(nn.Linear(4, 4), within="bf16")
