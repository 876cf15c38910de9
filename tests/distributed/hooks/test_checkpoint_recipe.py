"""The recipe of docs/checkpointing.md: checkpoints are complete or absent, and a resumed run continues from them."""

import copy
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.recipe import latest, load, save
from tests.support.training import WRAPPERS, gradients, register, wrapped


class Training:
    """A model with its optimizer, scheduler and hook, trained on batches from this rank's random numbers."""

    def __init__(self, hook=None, wrapper="gradwire", seed=0):
        self.ddp = wrapped(wrapper, seed=seed)
        self.state = register(self.ddp, hook) if hook else None
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.others = {"scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 2)}
        if hasattr(self.state, "state_dict"):
            self.others["hook"] = self.state
        torch.manual_seed(100 * seed + dist.get_rank())

    def steps(self, number):
        for _ in range(number):
            self.optimizer.zero_grad()
            self.ddp(torch.randn(4, 11)).backward()
            self.optimizer.step()
            self.others["scheduler"].step()
        return {
            "gradients": gradients(self.ddp),
            "parameters": dict(self.ddp.module.state_dict()),
            "rate": self.optimizer.param_groups[0]["lr"],
        }

    def save(self, folder, step):
        save(folder, step, self.ddp, self.optimizer, **self.others)

    def load(self, folder):
        return load(folder, self.ddp, self.optimizer, **self.others)


# Their memory is the same on a resumed rank.
EXACT = [None, "fp16", "scaled_fp16"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", EXACT)
@on_ranks(2)  # the sums of three ranks depend on the buckets, which start anew
def test_resumed_training_is_bitwise_equal_to_the_uninterrupted_one(hook, wrapper, tmp_path):
    training = Training(hook, wrapper)
    training.steps(4)
    training.save(tmp_path, 4)
    expected = training.steps(3)
    resumed = Training(hook, wrapper, seed=1)
    assert resumed.load(tmp_path) == 4
    assert_same_bits(resumed.steps(3), expected)


def save_four_steps(folder):
    training = Training("int4")
    training.steps(4)
    training.save(folder, 4)
    return facts(training)


def load_and_train(folder):
    resumed = Training("int4", seed=1)
    step = resumed.load(folder)
    return step, facts(resumed), resumed.steps(2)


def facts(training):
    """Copies of the states of the hook, the model and the optimizer."""
    return copy.deepcopy(
        (training.state.state_dict(), training.ddp.module.state_dict(), training.optimizer.state_dict())
    )


def assert_loaded(loaded, saved):
    """On another number of ranks, shares of errors are rounded."""
    assert loaded[0]["iter"] == saved[0]["iter"]
    for name, error in saved[0]["errors"].items():
        torch.testing.assert_close(loaded[0]["errors"][name], error, rtol=1e-6, atol=1e-7)
    assert_same_bits(loaded[1:], saved[1:])


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=str)
def test_training_resumes_on_another_number_of_ranks(worlds, tmp_path, sizes):
    saved, *_ = worlds(sizes[0]).run(save_four_steps, folder=tmp_path)
    results = worlds(sizes[1]).run(load_and_train, folder=tmp_path)
    assert_same_on_all_ranks([steps for _, _, steps in results])
    for step, loaded, _ in results:
        assert step == 4
        assert_loaded(loaded, saved)


@on_ranks(2)
def test_folder_without_a_checkpoint_changes_nothing(tmp_path):
    training = Training("int4")
    before = facts(training)
    assert training.load(tmp_path / "absent") == training.load(tmp_path) == 0
    assert_same_bits(facts(training), before)


@on_ranks(2)
def test_latest_checkpoint_is_that_of_the_most_steps(tmp_path):
    training = Training("int4")
    for step in (9, 10, 8):
        training.save(tmp_path, step)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_8", "step_9"]
    assert latest(tmp_path) == tmp_path / "step_10"
    assert Training("int4").load(tmp_path) == 10


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


BARRIER = dist.barrier


def die_after_the_barrier():
    BARRIER()
    die()


# The function in which the victim dies, and its substitute.
DEATHS = {
    "a data file, before it is closed": (os, "fsync", die),
    "DCP's metadata": (dcp.FileSystemWriter, "finish", die),
    "before the barrier": (dist, "barrier", die),
    "before the rename": (dist, "barrier", die_after_the_barrier),
}


def save_and_die(folder, victim, place):
    """Train a step from the checkpoint, and save; the victim dies meanwhile."""
    dist.init_process_group("gloo")
    training = Training("int4", seed=1)
    assert training.load(folder) == 4
    training.steps(1)
    if dist.get_rank() == victim:
        owner, name, substitute = DEATHS[place]
        mock.patch.object(owner, name, substitute).start()
    try:
        training.save(folder, 5)
    except BaseException as error:  # that of DCP is no Exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (rank, place)
        for place in DEATHS
        for rank in (0, 1)
        if rank == 0 or place not in ("DCP's metadata", "before the rename")
    ],
)
def test_rank_killed_while_it_saves_leaves_the_earlier_checkpoint(worlds, tmp_path, victim, place):
    saved, _ = worlds(2).run(save_four_steps, folder=tmp_path)
    outcomes = worlds(2).run_fresh(save_and_die, folder=tmp_path, victim=victim, place=place)
    assert outcomes[victim].exit_code == -signal.SIGKILL, outcomes[victim].output
    peer = outcomes[1 - victim]
    assert peer.how == ("returned" if place == "before the rename" else "raised"), peer.output
    (unfinished,) = tmp_path.glob("tmp-step_5-*")
    assert list(unfinished.glob("*.distcp")), "it died in the middle"
    assert latest(tmp_path) == tmp_path / "step_4"
    for size in (2, 3):
        for step, loaded, _ in worlds(size).run(load_and_train, folder=tmp_path):
            assert step == 4
            assert_loaded(loaded, saved)
    worlds(2).run(save_five_steps, folder=tmp_path)  # despite the folder that is left
    assert latest(tmp_path) == tmp_path / "step_5"


def save_five_steps(folder):
    training = Training("int4", seed=1)
    training.load(folder)
    training.steps(1)
    training.save(folder, 5)


@on_ranks(2)
def test_error_of_one_rank_raises_on_every_rank_and_leaves_the_earlier_checkpoint(tmp_path):
    training = Training("int4")
    training.steps(3)
    training.save(tmp_path, 3)
    fails = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError("no space left"))
    if dist.get_rank() == 1:
        fails.start()
    try:
        with pytest.raises(dcp.CheckpointException, match="no space left"):
            training.save(tmp_path, 4)
    finally:
        mock.patch.stopall()
    assert latest(tmp_path) == tmp_path / "step_3"
    training.save(tmp_path, 4)
    dist.barrier()
    assert latest(tmp_path) == tmp_path / "step_4"
