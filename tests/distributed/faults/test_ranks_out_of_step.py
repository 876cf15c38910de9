"""Ranks that make different numbers of forward and backward passes raise, with the counts of each rank."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.bits import assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import error_of, gradients, own_batches, train_steps, wrapped

# What carries the number of passes.
CARRIERS = {
    "used map": {"find_unused_parameters": True},
    "used map, static graph": {"static_graph": True},
    "drift check": {"check_every": 1},
    "header of quantized messages": {"hook": "int4"},
}


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


@pytest.mark.parametrize("carrier", CARRIERS)
@on_ranks(2, 3)
def test_skipped_backward_of_one_rank_raises_on_all_with_the_counts(carrier):
    ddp, generator = wrapped(group=dist.new_group(), **CARRIERS[carrier]), own_batches()
    train_steps(ddp, 4, generator)
    before = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    if is_last_rank():
        ddp(*ddp.module.batch(generator))  # a bad loss: its backward is left out
    kind, text = error_of(train_steps, ddp, 1, generator)
    last = dist.get_world_size() - 1
    assert kind == "RuntimeError"
    assert "The ranks are out of step; synchronized forward passes: 5 on rank 0" in text
    assert f"6 on rank {last}" in text
    assert all(value.equal(before[name]) for name, value in ddp.module.state_dict().items())
    ddp.resynchronize()
    train_steps(ddp, 2, generator)
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@pytest.mark.parametrize(("late", "counts"), [((3,), "5 on rank 2, 6 on rank 3"), ((2, 3), "5 on rank 1, 6 on rank 3")])
@on_ranks(4)
def test_skipped_backward_raises_on_all_ranks_if_nodes_exchange_their_sums(late, counts):
    state = QuantizationState(None, wire="int4", local_size=2)
    ddp, generator = wrapped(group=dist.new_group(), hook=(state, quantization_hook)), own_batches()
    train_steps(ddp, 4, generator)
    if dist.get_rank() in late:
        ddp(*ddp.module.batch(generator))
    error = error_of(train_steps, ddp, 1, generator)
    errors = from_all_ranks(error)
    assert all(kind == "RuntimeError" for kind, _ in errors)
    assert f"synchronized forward passes: {counts}" in errors[3][1]


@pytest.mark.parametrize("carrier", CARRIERS)
@on_ranks(2)
def test_forwards_of_one_rank_before_training_do_not_count(carrier):
    ddp, generator = wrapped(group=dist.new_group(), **CARRIERS[carrier]), own_batches()
    if is_last_rank():
        ddp(*ddp.module.batch(generator))  # looks at its model
    train_steps(ddp, 4, generator)
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@pytest.mark.parametrize("hook", [None, "int4"])
@on_ranks(2, 3, limit=60)
def test_timeout_of_a_further_step_names_the_ranks_that_do_not_make_it(hook):
    ddp, generator = wrapped(group=dist.new_group(timeout=timedelta(seconds=3)), hook=hook), own_batches()
    train_steps(ddp, 3, generator)
    error = error_of(train_steps, ddp, 1, generator) if not is_last_rank() else None
    late = dist.get_world_size() - 1
    if error is not None:
        assert error[0] == "RuntimeError"
        assert f"has waited in synchronized backward pass 4 of this model for rank {late}," in error[1]
    assert len([each for each in from_all_ranks(error) if each is None]) == 1
