"""Checkpoints of every hook state: prepared copies, sums over the ranks by name, and errors of another shape."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from gradwire.hooks import _checkpoint
from tests.support.bits import assert_same_bits
from tests.support.features import FEATURES, Parts
from tests.support.states import FEEDBACK, START, STATES, Training, errors_of
from tests.support.training import SMALLEST, WRAPPERS, message_of
from tests.support.zoo import SparseTable

feedback_states = pytest.mark.parametrize("kind", FEEDBACK)

# --- prepared copies


class Meeting(Exception):
    """A call to the other ranks."""


def nobody_else():
    """Lets every meeting with other ranks raise."""
    return mock.patch.object(_checkpoint, "named_barrier", side_effect=Meeting)


def is_prepared(state):
    """Whether `state_dict` needs no other rank."""
    with nobody_else():
        try:
            state.state_dict()
        except Meeting:
            return False
    return True


def prepared_before_and_after(action, kind, wrapper="gradwire", steps=START + 2):
    """Whether there is a prepared copy before and after ``action(training)``."""
    training = Training(kind, wrapper)
    training.run(steps)
    training.state.prepare_checkpoint()
    before = is_prepared(training.state)
    action(training)
    return before, is_prepared(training.state)


def prepare_and_step(kind, wrapper):
    """Around a plain step and a compressed one."""
    return [prepared_before_and_after(lambda each: each.run(1), kind, wrapper, steps) for steps in (1, START + 2)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@feedback_states
def test_prepared_copy_is_dropped_by_the_next_step(worlds, kind, wrapper):
    assert worlds(2).run(prepare_and_step, kind=kind, wrapper=wrapper) == [[(True, False)] * 2] * 2


def prepare_before_the_first_step(kind, wrapper):
    return prepared_before_and_after(lambda training: None, kind, wrapper, steps=0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@feedback_states
def test_copy_prepared_before_the_first_step_needs_no_other_rank(worlds, kind, wrapper):
    # No step has used any method of an automatic choice's plan yet; all of them are in the checkpoint.
    assert worlds(2).run(prepare_before_the_first_step, kind=kind, wrapper=wrapper) == [(True, True)] * 2


def prepare_and_load(kind):
    training = Training(kind)
    training.run(START + 2)
    early = training.state.state_dict()
    training.run(2)
    training.state.prepare_checkpoint()
    training.state.load_state_dict(early)
    return early, is_prepared(training.state), training.state.state_dict()


@feedback_states
def test_prepared_copy_is_dropped_by_loading_another_state(worlds, kind):
    for early, is_still_prepared, after in worlds(2).run(prepare_and_load, kind=kind):
        assert not is_still_prepared
        assert_same_bits(after, early)  # means and sums of two equal errors are exact


def prepare_and_resynchronize(kind):
    return prepared_before_and_after(lambda training: training.ddp.resynchronize(), kind)


@feedback_states
def test_prepared_copy_is_dropped_by_resynchronization(worlds, kind):
    # Ranks that had begun the failed step have none: one that still returned its copy would leave them waiting.
    assert worlds(2).run(prepare_and_resynchronize, kind=kind) == [(True, False)] * 2


# --- sums over the ranks


class Square(nn.Module):
    """Matrices of one shape, whose errors could be taken for each other's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 6, generator=generator),)


def in_another_order(value):
    """A nested dictionary whose entries come in the opposite order."""
    if not isinstance(value, dict):
        return value
    return {key: in_another_order(each) for key, each in reversed(value.items())}


def saved_with_errors_in_another_order(kind, prepares):
    """Checkpoints before and after a load on which rank 1 has the errors in another order."""
    training = Training(kind, model=Square(), bucket_cap_mb=SMALLEST)
    training.run(START + 2)
    before = training.state.state_dict()
    is_reversed = dist.get_rank() == 1
    training.state.load_state_dict(in_another_order(before) if is_reversed else before)
    if prepares:
        training.state.prepare_checkpoint()
    return before, training.state.state_dict()


@pytest.mark.parametrize("prepares", [False, True], ids=["collective", "prepared"])
@feedback_states
def test_errors_in_another_order_on_one_rank_are_summed_by_name(worlds, kind, prepares):
    for before, after in worlds(2).run(saved_with_errors_in_another_order, kind=kind, prepares=prepares):
        errors = errors_of(before)
        assert errors.keys() == {f"layers.{i}.weight" for i in range(4)}
        assert len({error.norm().item() for error in errors.values()}) == 4
        assert_same_bits(errors_of(after), errors)  # means and sums of two equal errors are exact


# --- parameters that no compressed step has had


class SomeParts(Parts):
    """Uses two of its five layers."""

    @staticmethod
    def batch(generator):
        return torch.randn(3, 4, generator=generator), (0, 2)


class Sparse(SparseTable):
    """A sparse gradient, which no hook compresses, and a dense one."""

    def __init__(self):
        super().__init__(has_dense_layer=True)

    @staticmethod
    def batch(generator):
        return (torch.randint(64, (4,), generator=generator),)


PARTLY_COMPRESSED = {"unused": (SomeParts, FEATURES["skip-unused"]), "sparse": (Sparse, {})}


def load_distributed(kind, wrapper, situation, path):
    """What a training saves, and what a new state of the same model loads."""
    model, options = PARTLY_COMPRESSED[situation]
    trainings = []
    for _ in range(2):
        torch.manual_seed(0)
        trainings.append(Training(kind, wrapper, model(), bucket_cap_mb=SMALLEST, **options))
    trainings[0].run(START + 2)
    trained, fresh = (training.state for training in trainings)
    dcp.save({"hook": trained}, checkpoint_id=path)
    dcp.load({"hook": fresh}, checkpoint_id=path)
    return trained.state_dict(), fresh.state_dict()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("situation", PARTLY_COMPRESSED)
@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "batched_powersgd"])  # whose factors are buckets'
def test_law7_distributed_checkpoint_loads_if_a_parameter_was_never_compressed(
    worlds, tmp_path, kind, situation, wrapper
):
    options = {"kind": kind, "situation": situation, "wrapper": wrapper, "path": str(tmp_path)}
    for saved, loaded in worlds(2).run(load_distributed, **options):
        assert_same_bits(loaded, saved)  # means and sums of two equal errors are exact
        if kind != "scaled_fp16":
            assert "table.weight" not in errors_of(saved), "no memory for a sparse gradient"


# --- errors of another shape


def load_transposed_error(kind, wrapper, is_bound):
    """The refusal of an error of the right number of elements: at the load, or at the first step of a new state."""
    training = Training(kind, wrapper)
    training.run(START + 2)
    saved = training.state.state_dict()
    for state in saved["states"].values() if "states" in saved else [saved]:
        if (error := state["errors"].get("layers.0.weight")) is not None:
            state["errors"]["layers.0.weight"] = error.t().contiguous()
            for factors in (state.get("q", {}), state.get("p", {})):  # which would not fit it
                factors.pop("layers.0.weight", None)
    if is_bound:
        return message_of(training.state.load_state_dict, saved), training.state.iter
    fresh = Training(kind, wrapper, load=saved)
    return message_of(fresh.run, 1), fresh.state.iter


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_bound", [True, False], ids=["at-load", "at-first-step"])
@feedback_states
def test_loaded_error_of_right_size_and_other_shape_is_refused(worlds, kind, wrapper, is_bound):
    results = worlds(2).run(load_transposed_error, kind=kind, wrapper=wrapper, is_bound=is_bound)
    for message, iteration in results:
        assert re.match(
            r"The error memory of layers\.0\.weight has shape \(11, 23\), its gradient \(23, 11\).*Load the state of",
            str(message),
        )
        assert iteration == START + 2
