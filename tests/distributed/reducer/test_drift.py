"""`check_every`: parameters, buffers and hook states that differ between ranks raise on every rank."""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from gradwire.reducer.distributed import DistributedDataParallel
from gradwire.reducer.drift import WORDS_AT_ONCE, checksum
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import build, error_of, message_of, own_batches, train_steps, wrapped


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def next_float(tensor):
    """Change the first element by one unit in the last place."""
    bits = tensor.detach().view(torch.int32).view(-1)
    bits[0] += 1


def change_parameter(ddp, state):
    next_float(ddp.module.layers[2].weight)
    return "parameter layers.2.weight"


def change_frozen_parameter(ddp, state):
    next_float(ddp.module.layers[0].bias)
    return "parameter layers.0.bias"


def change_factor(ddp, state):
    name, factor = next(iter(state.memory.tensors("q").items()))
    next_float(factor)
    return f"hook state, q {name}"


def change_step_count(ddp, state):
    state.steps.ended += 1
    return "hook state, iter"


CHANGES = {
    "parameter": (change_parameter, None),
    "frozen parameter": (change_frozen_parameter, "int4"),
    "factor": (change_factor, "powersgd"),
    "step count": (change_step_count, "int4"),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, 3)
def test_drift_raises_on_every_rank_with_name_and_ranks_and_resynchronize_heals_it(change):
    alter, hook = CHANGES[change]
    module, size = build("mlp"), dist.get_world_size()
    module.layers[0].bias.requires_grad_(change != "frozen parameter")
    ddp = wrapped(model=module, hook=hook, check_every=3)
    state = ddp._comm_hooks[0][1] if hook else None
    generator = own_batches()
    train_steps(ddp, 5, generator)  # compares in the third step, and in the next
    name = alter(ddp, state) if is_last_rank() else None
    before = {key: each.clone() for key, each in module.state_dict().items()}
    kind, message = error_of(train_steps, ddp, 1, generator)
    assert kind == "RuntimeError"
    name = from_all_ranks(name)[-1]
    others = "rank 0" if size == 2 else "ranks 0, 1"
    assert (
        f"1 of {len(before) + (hook is not None)} tensors that must be equal on all ranks differ:\n  {name}: "
        in message
    )
    assert f" on {others}; " in message and message.count(f" on rank {size - 1}\n") == 1
    assert_same_on_all_ranks(from_all_ranks(message))
    assert_same_bits(dict(module.state_dict()), before)
    assert "Call resynchronize" in message_of(train_steps, ddp, 1, generator)
    ddp.resynchronize(from_rank=0)
    results = from_all_ranks((train_steps(ddp, 7, generator), dict(module.state_dict())))
    assert_same_on_all_ranks(results)


@on_ranks(2)
def test_ranks_compare_in_one_of_so_many_backwards_without_those_of_no_sync():
    ddp, generator = wrapped(check_every=3), own_batches()
    train_steps(ddp, 3, generator)
    change_parameter(ddp, None) if is_last_rank() else None
    with ddp.no_sync():
        train_steps(ddp, 3, generator)
    train_steps(ddp, 2, generator)
    assert "parameter layers.2.weight" in message_of(train_steps, ddp, 1, generator)


@on_ranks(2, 3)
def test_broadcast_buffer_that_differs_raises():
    ddp = wrapped(model="conv", check_every=1)
    broadcast = DistributedDataParallel._distributed_broadcast_coalesced
    name, buffer = next((name, each) for name, each in ddp.module.named_buffers() if each.is_floating_point())

    def broken(self, *arguments):
        broadcast(self, *arguments)
        if is_last_rank():
            next_float(buffer)

    generator = own_batches()
    train_steps(ddp, 3, generator)  # every rank's forward updates the buffers from its own batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_distributed_broadcast_coalesced", broken)
        message = message_of(train_steps, ddp, 1, generator)
    assert f"differ:\n  buffer {name}: " in message


@on_ranks(2)
def test_ranks_compare_in_the_same_step_after_one_has_counted_more():
    ddp = wrapped(check_every=2)
    generator = own_batches()
    train_steps(ddp, 1, generator)
    if dist.get_rank() == 0:
        ddp.reducer.drift._n_backwards += 1  # as if its last step had failed at its end
    ddp.resynchronize()
    train_steps(ddp, 5, generator)


@on_ranks(2)
def test_buffers_noted_before_a_restart_are_not_compared():
    ddp, generator = wrapped(check_every=1), own_batches()
    train_steps(ddp, 1, generator)
    if dist.get_rank() == 0:  # as if only this rank had begun the failed step, with a buffer that is gone
        ddp.reducer.drift.after_broadcast({"buffer": torch.ones(3)})
    ddp.resynchronize()
    train_steps(ddp, 2, generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checksum_depends_on_every_part_of_a_large_tensor(dtype):
    tensor = torch.ones(3 * WORDS_AT_ONCE * 8 // dtype.itemsize + 8 // dtype.itemsize + 1, dtype=dtype)  # 12 MiB
    before, at_once = checksum(tensor), WORDS_AT_ONCE * 8 // dtype.itemsize
    edges = [0, at_once - 1, at_once, 2 * at_once - 1, 2 * at_once, 3 * at_once - 1, 3 * at_once, tensor.numel() - 1]
    for position in edges + [at_once // 2 * k for k in (1, 3, 5)]:
        tensor[position] = 2
        assert checksum(tensor) != before, position
        tensor[position] = 1
    assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_checksum_sees_opposite_changes_of_any_two_equal_elements(dtype):
    bits = torch.zeros(19, dtype=dtype).view(
        {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    )
    before = checksum(bits)
    for first, second in combinations(range(19), 2):
        changed = bits.clone()
        changed[first] += 1
        changed[second] -= 1
        assert checksum(changed) != before, (first, second)


def test_checksum_is_independent_of_strides_and_alignment():
    tensor = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0))
    others = [tensor.t().contiguous().t(), tensor.repeat(1, 2)[:, : tensor.shape[1]]]
    for offset in range(4):
        others.append(torch.zeros(4000)[offset : offset + tensor.numel()].view_as(tensor).copy_(tensor))
    assert {int(checksum(each)) for each in (tensor, *others)} == {int(checksum(tensor))}
    assert checksum(torch.empty(0)) == 0
    for strided in (torch.randn(10)[::2], torch.randn(4)[::4], torch.randn(5, 12)[:, ::2], torch.randn(9, 1)[:, 0]):
        assert checksum(strided) == checksum(strided.clone(memory_format=torch.contiguous_format))
