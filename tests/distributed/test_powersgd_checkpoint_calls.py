"""Who calls `state_dict` and `prepare_checkpoint`: all ranks, or some of them by mistake or by design."""

import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks import _checkpoint
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import SMALL, WRAPPERS, build, gradients, register

EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


def soon():
    """Lets `state_dict` wait half a second for the other ranks."""
    return mock.patch.object(_checkpoint, "STATE_DICT_TIMEOUT", timedelta(seconds=0.5))


def message_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


class Training:
    """A model of the zoo behind a DDP, on this rank's own batches."""

    def __init__(self, wrapper="gradwire", steps=5):
        self.ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
        self.state = register(self.ddp, (PowerSGDState(None, **EARLY), powerSGD_hook))
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self.run(steps)

    def run(self, steps):
        for _ in range(steps):
            self.ddp.zero_grad()
            self.ddp(*self.ddp.module.batch(self._generator)).backward()


# --- a collective call


def save_on_some_ranks(callers, wrapper):
    training = Training(wrapper)
    message = None
    if dist.get_rank() in callers:
        with soon():
            message = message_of(training.state.state_dict)
    dist.barrier()
    return message


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_save_on_some_ranks_only_raises_and_names_the_others(worlds, wrapper):
    message, nothing = worlds(2).run(save_on_some_ranks, callers=[0], wrapper=wrapper)
    assert nothing is None
    assert re.match(
        r"PowerSGDState\.state_dict\(\) is a collective call: ranks \[1\] have not .*on every rank\..*"
        r"call state\.prepare_checkpoint\(\) on every rank, then state\.state_dict\(\) where you save",
        message,
    )
    messages = worlds(3).run(save_on_some_ranks, callers=[1], wrapper=wrapper)
    assert "ranks [0, 2] have not" in messages[1]
    messages = worlds(3).run(save_on_some_ranks, callers=[0, 2], wrapper=wrapper)
    assert all("ranks [1] have not" in messages[rank] for rank in (0, 2))


def test_save_on_one_rank_only_times_out_within_seconds():
    assert timedelta(seconds=5) <= _checkpoint.STATE_DICT_TIMEOUT <= timedelta(seconds=15)


def save_after_failures(callers):
    """The state and the gradients after calls that one rank made alone, one after another."""
    training = Training()
    with soon():
        for caller in callers:
            if dist.get_rank() == caller:
                assert "have not made it" in message_of(training.state.state_dict)
            dist.barrier()
    saved = training.state.state_dict()
    training.run(2)
    return saved, gradients(training.ddp)


@pytest.mark.parametrize("callers", [[0], [0, 0], [0, 1], [1, 0, 0]], ids=str)
def test_save_and_training_continue_after_calls_on_some_ranks_only(worlds, callers):
    after = worlds(2).run(save_after_failures, callers=callers)
    assert_same_on_all_ranks(after)
    assert_same_bits(after, worlds(2).run(save_after_failures, callers=[]))


# --- a prepared copy


def refuse(*_, **__):
    raise AssertionError("a call to the other ranks")


def nobody_else():
    """Lets every meeting with other ranks fail."""
    return mock.patch.object(_checkpoint, "named_barrier", refuse)


def save_a_prepared_copy(wrapper, saver):
    """What the collective call gives, and what one rank gets from the copy; then, as before, all of them."""
    training = Training(wrapper)
    expected = training.state.state_dict()
    training.state.prepare_checkpoint()
    saved = None
    if dist.get_rank() == saver:
        with nobody_else():
            saved = training.state.state_dict(), training.state.state_dict()
    training.run(2)
    return expected, saved, training.state.state_dict(), gradients(training.ddp)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("saver", [0, 1])
def test_one_rank_saves_alone_after_prepare_checkpoint(worlds, saver, wrapper):
    results = worlds(2).run(save_a_prepared_copy, wrapper=wrapper, saver=saver)
    expected, saved, *_ = results[saver]
    for copy in saved:  # training on has not changed them
        assert_same_bits(copy, expected)
    quiet = worlds(2).run(save_a_prepared_copy, wrapper=wrapper, saver=None)
    assert_same_bits([result[2:] for result in results], [result[2:] for result in quiet])


def change_the_dictionary():
    training = Training()
    training.state.prepare_checkpoint()
    first = training.state.state_dict()
    first["errors"].clear()
    first["iter"] = 0
    return training.state.state_dict()


def test_prepared_copy_outlives_changes_of_a_returned_dictionary(worlds):
    for saved in worlds(2).run(change_the_dictionary):
        assert saved["iter"] == 5
        assert saved["errors"]


def prepare_on_one_rank():
    training = Training()
    with mock.patch.object(_checkpoint, "PREPARE_TIMEOUT", timedelta(seconds=0.5)):
        message = message_of(training.state.prepare_checkpoint) if dist.get_rank() == 0 else None
        dist.barrier()
    training.state.prepare_checkpoint()
    return message, training.state.state_dict()


def test_prepare_on_one_rank_raises_and_works_once_all_join(worlds):
    results = worlds(2).run(prepare_on_one_rank)
    assert re.match(r"PowerSGDState\.prepare_checkpoint\(\) is a coll.*ranks \[1\] have not made it", results[0][0])
    assert_same_on_all_ranks([saved for _, saved in results])
