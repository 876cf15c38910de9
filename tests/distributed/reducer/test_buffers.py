"""Buffers that change after the model was wrapped: those that differ between ranks raise, equal ones train on."""

import copy
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

import gradwire
from gradwire.comm import shared_facts
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import error_of, gradients, register, train_steps, wrapped

DDP = gradwire.DistributedDataParallel


class Cached(nn.Module):
    """A layer with some buffers, the first of which every forward changes."""

    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        for buffer in list(self.buffers())[:1]:
            buffer += 1 + dist.get_rank()
        return self.layer(x).square().sum()


def caches():
    return {"first": torch.ones(4), "second": torch.ones(2, 3), "third": torch.ones(6)}


def set_second(buffer):
    def change(module):
        module.second = buffer

    return change


def reorder(module):
    module.register_buffer("second", module._buffers.pop("second"))


def replace_data(module):
    module.second.data = module.second.double()


def rename(module):
    """In place: the layouts keep their order."""
    buffers = {"renamed" if name == "second" else name: each for name, each in module._buffers.items()}
    module._buffers.clear()
    module._buffers.update(buffers)


SECOND = "(2, 3) torch.float32 on cpu"
# A change on one rank; the fact that differs, on the other ranks and on this one.
CHANGES = {
    "grown": (set_second(torch.ones(5, 3)), "second", SECOND, "(5, 3) torch.float32 on cpu"),
    "other shape": (set_second(torch.ones(3, 2)), "second", SECOND, "(3, 2) torch.float32 on cpu"),
    "other dtype": (set_second(torch.ones(2, 3).int()), "second", SECOND, "(2, 3) torch.int32 on cpu"),
    "resized in place": (lambda module: module.second.resize_(1), "second", SECOND, "(1,) torch.float32 on cpu"),
    "data replaced": (replace_data, "second", SECOND, "(2, 3) torch.float64 on cpu"),
    "reordered": (reorder, "order", "first, second, third", "first, third, second"),
    "added": (
        lambda module: module.register_buffer("mask", torch.ones(1)),
        "mask",
        "nothing",
        "(1,) torch.float32 on cpu",
    ),
    "removed": (lambda module: delattr(module, "second"), "second", SECOND, "nothing"),
    "emptied": (set_second(None), "second", SECOND, "nothing"),
    "renamed": (rename, "renamed", "nothing", SECOND),
    "all removed": (lambda module: module._buffers.clear(), "second", SECOND, "nothing"),
}


def step(ddp):
    ddp.zero_grad()
    ddp(torch.full((4, 3), 1.0 + dist.get_rank())).backward()


def assert_trains(ddp, module):
    """Two steps have the exact mean, and buffers of rank 0."""
    for _ in range(2):
        step(ddp)
    local = Cached()
    local.layer.load_state_dict(module.layer.state_dict())
    local(torch.full((4, 3), 1.0 + dist.get_rank())).backward()
    for name, gradient in gradients(ddp).items():
        mean = sum(each[name] for each in from_all_ranks(gradients(local))) / dist.get_world_size()
        torch.testing.assert_close(gradient, mean)
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def state_of(module):
    return [
        {name: each.detach().clone() for name, each in named}
        for named in (module.named_parameters(), module.named_buffers())
    ]


def assert_differ(error, name, elsewhere, here, rank):
    """Every rank has raised that the fact ``name`` of this ``rank`` differs from that of the others, and the remedy."""
    (kind, text), others = error, [str(each) for each in range(dist.get_world_size()) if each != rank]
    assert kind == "RuntimeError"
    assert text.startswith("The buffers differ between ranks:") or "Step " in text
    assert f"\n  {name}: " in text
    assert f"{elsewhere} on rank{'s' * (len(others) > 1)} {', '.join(others)}" in text
    assert f"{here} on rank {rank}" in text
    assert "or name it in module._ddp_params_and_buffers_to_ignore before you wrap the model" in text
    assert "forward_sync_buffers=False" in text


@pytest.mark.parametrize("place", [0, -1], ids=["rank 0", "last rank"])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, 3, limit=60)
def test_buffers_changed_on_one_rank_raise_on_every_rank_with_names_and_layouts(change, place):
    alter, *fact = CHANGES[change]
    rank = place % dist.get_world_size()
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    for _ in range(2):
        step(ddp)
    if dist.get_rank() == rank:
        alter(module)
    parameters, buffers = state_of(module)
    assert_differ(error_of(step, ddp), *fact, rank)
    assert_same_bits(state_of(module)[0], parameters)
    if dist.get_world_size() == 2:  # else one whose buffers did not change may have those of rank 0
        assert_same_bits(state_of(module)[1], buffers)
    module._buffers.clear()
    for name, buffer in caches().items():
        module.register_buffer(name, buffer)
    ddp.resynchronize()
    assert_trains(ddp, module)


@contextmanager
def counted_comparisons():
    """The number of comparisons of this rank through the store, in a list."""
    with mock.patch.object(
        shared_facts, "differences_between_ranks", side_effect=shared_facts.differences_between_ranks
    ) as compare:
        yield lambda: compare.call_count


@on_ranks(2, 3)
def test_buffers_are_compared_only_in_the_step_after_they_have_changed():
    module = Cached(**caches())
    with counted_comparisons() as count:
        ddp = DDP(module)
        for _ in range(3):
            step(ddp)
        with torch.no_grad():
            ddp(torch.ones(4, 3))
        assert count() == 0
        module.second = torch.full((5, 3), float(dist.get_rank()))
        module.first = module.first.double() + dist.get_rank()
        for _ in range(3):
            step(ddp)
        assert count() == 1
    assert from_all_ranks(module.second.unique().tolist()) == [[0.0]] * dist.get_world_size()
    assert_trains(ddp, module)


@on_ranks(2, 3)
def test_buffers_that_each_rank_sizes_by_its_own_data_raise_on_every_rank_at_once():
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    step(ddp)
    module.second = torch.ones(3 + dist.get_rank(), 3)
    before = state_of(module), gradients(module)
    errors = from_all_ranks(error_of(ddp, torch.ones(4, 3)))
    assert_same_bits((state_of(module), gradients(module)), before)
    shapes = "; ".join(f"({3 + rank}, 3) torch.float32 on cpu on rank {rank}" for rank in range(dist.get_world_size()))
    for kind, text in errors:
        assert kind == "RuntimeError"
        assert f"The buffers differ between ranks:\n  second: {shapes}\nNothing was sent." in text


REMEDIES = {
    "ignored": {},
    "not synchronized": {"forward_sync_buffers": False},
}


@pytest.mark.parametrize("remedy", REMEDIES)
@on_ranks(2, 3)
def test_remedy_trains_with_buffers_that_each_rank_sizes_by_its_own_data(remedy):
    module = Cached(**caches())
    if remedy == "ignored":
        module._ddp_params_and_buffers_to_ignore = ["second"]
    ddp = DDP(module, **REMEDIES[remedy])
    for number in range(3):
        module.second = torch.full((number + 3 + dist.get_rank(), 3), float(dist.get_rank()))
        step(ddp)
    assert_same_bits(module.second, torch.full((5 + dist.get_rank(), 3), float(dist.get_rank())))
    if remedy == "ignored":  # rank 0 has added 1 in each of three forwards, then this rank its own number
        assert_same_bits(module.first, torch.full((4,), 3.0 + 1 + dist.get_rank()))
    assert_trains(ddp, module)


@on_ranks(2, 3)
def test_first_buffer_that_appears_after_wrapping_is_broadcast():
    module = Cached()
    ddp = DDP(module)
    step(ddp)
    if dist.get_rank() == 0:  # alone, which a model without buffers allows
        with torch.no_grad():
            ddp(torch.ones(4, 3))
    step(ddp)
    module.register_buffer("first", torch.full((4,), 10.0 * dist.get_rank()))
    step(ddp)
    assert_same_bits(module.first, torch.full((4,), 1.0 + dist.get_rank()))
    assert_trains(ddp, module)


@pytest.mark.parametrize("place", [0, -1], ids=["rank 0", "last rank"])
@on_ranks(2, 3, limit=60)
def test_first_buffer_that_appears_on_one_rank_raises_on_every_rank(place):
    rank, module = place % dist.get_world_size(), Cached()
    ddp = DDP(module, process_group=dist.new_group())
    step(ddp)
    if dist.get_rank() == 0:
        with torch.no_grad():
            ddp(torch.ones(4, 3))
    step(ddp)
    if dist.get_rank() == rank:
        module.register_buffer("first", torch.ones(4))
    assert_differ(error_of(step, ddp), "first", "nothing", "(4,) torch.float32 on cpu", rank)


@pytest.mark.parametrize("hook", ["int4", "powersgd", "fp16"])
@on_ranks(3, limit=60)
def test_buffers_changed_on_one_rank_raise_under_a_hook(hook):
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    register(ddp, hook)
    for _ in range(3):
        step(ddp)
    if dist.get_rank() == 1:
        module.second = torch.ones(5, 3)
    assert_differ(error_of(step, ddp), "second", SECOND, "(5, 3) torch.float32 on cpu", 1)


@on_ranks(2, 3, limit=60)
def test_rank_that_has_not_come_to_a_question_does_not_answer_it():
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    for _ in range(2):
        step(ddp)
    connections, number = ddp.reducer.exchange.connections, ddp.reducer.exchange.buffers._number
    if dist.get_rank() > 0:  # late: as if it still waited in the step before
        connections._store.wait([f"{connections.generation}/{number}/asks"], timedelta(seconds=40))
        connections.check_peers()
    module.second = torch.full((5, 3), float(dist.get_rank()))
    step(ddp)
    assert_same_bits(module.second, torch.zeros(5, 3))
    assert_trains(ddp, module)


@on_ranks(3, limit=60)
def test_ranks_that_wait_with_another_model_answer():
    first, second = (Cached(**caches()) for _ in range(2))
    group = dist.new_group()
    models = [DDP(each, process_group=group) for each in (first, second)]

    def train_both():
        for each in models:
            each.zero_grad()
        outputs = [each(torch.ones(4, 3)) for each in models]
        sum(outputs).backward()

    train_both()
    if dist.get_rank() == 2:
        first.second = torch.ones(5, 3)
    assert_differ(error_of(train_both), "second", SECOND, "(5, 3) torch.float32 on cpu", 2)


def average_buffers(state, buffers):
    """A buffer hook: starts to average all buffers."""
    works = [dist.all_reduce(each.div_(dist.get_world_size()), async_op=True) for each in buffers.values()]
    return [work.get_future() for work in works]


LOCATIONS = {each.name: each for each in _BufferCommHookLocation}


@pytest.mark.parametrize("location", LOCATIONS)
@on_ranks(2, 3)
def test_buffers_that_differ_raise_before_a_buffer_hook(location):
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    ddp._register_buffer_comm_hook(None, average_buffers, LOCATIONS[location])
    for _ in range(2):
        step(ddp)
    ranks = torch.arange(dist.get_world_size())
    if location == "POST_FORWARD":
        assert_same_bits(module.first, torch.full((4,), 1 + 2 * float((1 + ranks).float().mean())))
    module.second = torch.ones(3 + dist.get_rank(), 3)
    errors = from_all_ranks(error_of(step, ddp))
    for rank, (kind, text) in enumerate(errors):
        assert kind == "RuntimeError"
        assert "\n  second: (3, 3) torch.float32 on cpu on rank 0; (4, 3) torch.float32 on cpu on rank 1" in text, rank


# The rank that changes a buffer in `join`, and after how many of its steps; rank r makes 2 + 2 r steps. None: all.
IN_JOIN = {
    "before others join": (-1, 0),
    "in its last forward before it joins": (0, 2),
    "after others have joined": (-1, 3),
    "in the last forward of all": (-1, None),
}


@pytest.mark.parametrize("when", IN_JOIN)
@on_ranks(2, 3, limit=60)
def test_buffers_that_differ_in_join_raise_on_every_rank(when):
    module, rank = Cached(**caches()), dist.get_rank()
    ddp = DDP(module, process_group=dist.new_group())
    place, number = IN_JOIN[when]
    changed, n_steps = place % dist.get_world_size(), 2 + 2 * rank

    def train_on():
        with ddp.join():
            for i in range(n_steps + 1):
                if rank == changed and i == (n_steps if number is None else number):
                    module.second = torch.ones(5, 3)
                if i < n_steps:
                    step(ddp)

    assert_differ(error_of(train_on), "second", SECOND, "(5, 3) torch.float32 on cpu", changed)


@on_ranks(2, 3)
def test_join_trains_with_buffers_that_change_alike():
    module, rank = Cached(**caches()), dist.get_rank()
    ddp = DDP(module)
    with ddp.join():
        for number in range(2 + rank):
            if number == 1:
                module.second = torch.full((5, 3), float(rank))
            step(ddp)
    assert_same_on_all_ranks(from_all_ranks(state_of(module)))
    assert_trains(ddp, module)


@on_ranks(2, 3)
def test_resynchronize_from_a_rank_with_other_buffers_raises_and_changes_nothing():
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group())
    step(ddp)
    module.second = torch.ones(3 + dist.get_rank(), 3)
    error_of(step, ddp)
    before = state_of(module)
    kind, text = error_of(ddp.resynchronize, from_rank=0)
    assert kind == "RuntimeError"
    assert "second: (3, 3) torch.float32 on cpu on rank 0; (4, 3) torch.float32 on cpu on rank 1" in text
    assert_same_bits(state_of(module), before)
    module.second = torch.full((7, 3), float(dist.get_rank()))
    ddp.resynchronize(from_rank=0)
    assert_same_bits(module.second, torch.zeros(7, 3))
    assert_trains(ddp, module)


COPIES = {"copied": copy.deepcopy, "not compared at construction": lambda ddp: DDP(ddp.module, init_sync=False)}


@pytest.mark.parametrize("kind", COPIES)
@on_ranks(2, 3)
def test_wrapper_that_has_compared_no_buffers_does_so_in_its_first_forward(kind):
    ddp = COPIES[kind](DDP(Cached(**caches())))
    ddp.module.second = torch.ones(3 + dist.get_rank(), 3)
    assert "\n  second: (3, 3) torch.float32 on cpu on rank 0; (4, 3)" in error_of(step, ddp)[1]


@on_ranks(2, limit=60)
def test_rank_that_gets_no_answer_raises_after_half_of_the_timeout():
    module = Cached(**caches())
    ddp = DDP(module, process_group=dist.new_group(timeout=timedelta(seconds=8)))
    step(ddp)
    with mock.patch.object(shared_facts.SharedFacts, "watch"):  # as on NCCL, where no host waits
        if dist.get_rank() == 1:
            module.second = torch.ones(5, 3)
        kind, text = error_of(step, ddp)
    assert kind == "RuntimeError"
    words = "This rank compares its buffers, which have changed: rank 0 did not compare its own within 0:00:04"
    assert words in text
    assert "module._ddp_params_and_buffers_to_ignore" in text


@on_ranks(2, 3)
def test_frozen_parameter_added_on_one_rank_raises_in_the_comparison():
    ddp = wrapped(check_every=2, group=dist.new_group())
    train_steps(ddp, 2)
    if dist.get_rank() == 0:
        ddp.module.extra = nn.Parameter(torch.ones(3), requires_grad=False)
    kind, text = error_of(train_steps, ddp, 2)
    others = "rank 1" if dist.get_world_size() == 2 else "ranks 1, 2"
    assert kind == "RuntimeError"
    assert f"\n  parameter extra: there on rank 0; nothing on {others}\n" in text
