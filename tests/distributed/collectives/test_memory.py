"""`Memory`: process groups that are made anew, checkpoints, names, and entries that are dropped."""

import itertools
import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire import collectives
from gradwire.collectives import Memory, all_reduce, all_reduce_coalesced, calls, memory, reduce_scatter_tensor
from gradwire.collectives.calls import calls_on
from gradwire.comm.connections import connections_of
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.worker import leave_group


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def summed(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total


def step(memory, number, group, size):
    """A step's all-reduce and reduce-scatter; returns what was applied and what should have been, over all ranks."""
    tensor, source, output = drawn(96, seed=number), drawn(96 * size, seed=100 + number), torch.empty(96)
    exact = [summed(tensor) / size, summed(source) / size]
    all_reduce(tensor, group=group, wire="int4", memory=memory["reduced"])
    reduce_scatter_tensor(output, source, group=group, wire="int4", memory=memory["scattered"])
    parts = [torch.empty(96) for _ in range(size)]
    dist.all_gather(parts, output)
    return [tensor.double(), torch.cat(parts).double()], exact


def assert_nothing_is_lost(kept, size, group_of):
    """Over six steps, on the groups that ``group_of(step)`` returns, errors are what the results lack."""
    left = [0.0, 0.0]
    for number in range(6):
        group = group_of(number)
        applied, exact = step(kept, number, group, size)
        left = [before + e - a for before, a, e in zip(left, applied, exact, strict=True)]
    saved = kept.state_dict()
    for lost, name in zip(left, ("reduced", "scattered"), strict=True):
        assert torch.allclose(lost, saved[name]["errors"][name].double(), atol=1e-5), name
        assert float(lost.norm()) > 0
        assert saved[name]["iter"] == 6


@on_ranks(2, 3)
def test_errors_go_on_on_a_new_process_group():
    groups = []

    def group_of(number):
        if number in (0, 3):
            for group in groups:
                dist.destroy_process_group(group)
            groups[:] = [dist.new_group()]
        return groups[0]

    assert_nothing_is_lost(Memory(), dist.get_world_size(), group_of)


def train_in_two_default_groups():
    """On ranks of their own."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(minutes=2))

    def group_of(number):
        if number in (0, 3):
            if number == 3:
                leave_group(store, "first")
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=size)

    assert_nothing_is_lost(Memory(), size, group_of)


def test_errors_go_on_in_a_new_default_group(worlds):
    outcomes = worlds(2).run_fresh(train_in_two_default_groups)
    assert [outcome.how for outcome in outcomes] == ["returned"] * 2, outcomes


@on_ranks(2)
def test_memory_is_saved_after_its_process_group_was_destroyed():
    group, kept = dist.new_group(), Memory()
    for number in range(2):
        step(kept, number, group, 2)
    saved = kept.state_dict()
    dist.destroy_process_group(group)
    assert_same_bits(kept.state_dict(), saved)
    assert kept.nbytes > 0


BAD = {
    "huge": (ValueError, "3.3", lambda entry: entry["errors"]["b"].fill_(1e300)),
    "nan": (ValueError, "finite", lambda entry: entry["errors"]["b"].fill_(float("nan"))),
    "dtype": (ValueError, "float", lambda entry: entry["errors"].update(b=torch.zeros(96, dtype=torch.int64))),
    "shape": (ValueError, "has 96|elements|shape", lambda entry: entry["errors"].update(b=torch.ones(1000))),
    "names": (ValueError, "are of c; expected b", lambda entry: entry.update(errors={"c": torch.zeros(96)})),
    "iter": (ValueError, "iter", lambda entry: entry.update(iter=-1)),
    "missing": (ValueError, "errors", lambda entry: entry.pop("errors")),
}


@pytest.mark.parametrize("problem", BAD)
@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter"])
@on_ranks(2)
def test_bad_checkpoint_is_refused_before_anything_changes(problem, collective):
    kept = Memory()

    def reduce(name, seed):
        if collective == "all-reduce":
            all_reduce(drawn(96, seed=seed), wire="int4", memory=kept[name])
        else:
            reduce_scatter_tensor(torch.empty(48), drawn(96, seed=seed), wire="int4", memory=kept[name])

    for name, seed in itertools.product("ab", range(2)):
        reduce(name, seed)
    before = kept.state_dict()
    bad = {name: {"iter": 7, "errors": {name: torch.ones(96, dtype=torch.float64)}} for name in "ab"}
    error, text, spoil = BAD[problem]
    spoil(bad["b"])
    with pytest.raises(error, match=text):
        kept.load_state_dict(bad)
    assert_same_bits(kept.state_dict(), before)
    reduce("a", 5)


@pytest.mark.parametrize("used", [True, False])
@on_ranks(2)
def test_checkpoint_that_one_rank_has_not_loaded_raises_on_every_rank(used):
    kept = Memory()
    all_reduce(drawn(96), wire="int4", memory=kept["a"])
    saved = kept.state_dict()
    if not used:
        kept = Memory()
    if dist.get_rank() == 0:
        kept.load_state_dict(saved)
    tensor, before = drawn(96, seed=1), drawn(96, seed=1)
    with pytest.raises(RuntimeError, match=r"errors: of a loaded memory, digest \w+ on rank 0|which is new"):
        all_reduce(tensor, wire="int4", memory=kept["a"])
    assert_same_bits(tensor, before)
    collectives.resynchronize(None, kept)
    kept.load_state_dict(saved)
    all_reduce(tensor, wire="int4", memory=kept["a"])
    assert_same_on_all_ranks(from_all_ranks(tensor))


@on_ranks(2)
def test_loaded_entries_that_no_call_has_used_are_named_once():
    kept = Memory()
    for name in ("a", "b", "c"):
        all_reduce(drawn(40), wire="int4", memory=kept[name])
    all_reduce_coalesced([drawn(3), drawn(4)], wire="int4", memory=kept["d", "e"])
    saved, restored = kept.state_dict(), Memory()
    restored.load_state_dict(saved)
    with mock.patch.object(memory.logger, "warning") as warning:
        for number in range(3):
            all_reduce(drawn(40, seed=number), wire="int4", memory=restored["b"])
            assert warning.call_count == (number > 0)
    (text, names), *_ = [call.args for call in warning.call_args_list]
    assert "that no call has used" in text and names == '["d", "e"], a, c'
    assert_same_bits(
        {name: entry for name, entry in restored.state_dict().items() if name != "b"},
        {name: entry for name, entry in saved.items() if name != "b"},
    )


@on_ranks(2)
def test_keys_of_a_checkpoint_tell_names_apart():
    kept, lists = Memory(), [("a", "b"), ("a\nb",), ('["a", "b"]',), ("a", "b", "c"), ("[",)]
    for seed, names in enumerate(lists):
        all_reduce_coalesced([drawn(20, seed=seed) for _ in names], wire="int4", memory=kept[names])
    saved, restored = kept.state_dict(), Memory()
    assert len(saved) == len(lists)
    restored.load_state_dict(saved)
    assert_same_bits(restored.state_dict(), saved)
    for names in lists:
        all_reduce_coalesced([drawn(20, seed=9) for _ in names], wire="int4", memory=restored[names])
    later = restored.state_dict()
    assert later.keys() == saved.keys()
    assert [entry["iter"] for entry in later.values()] == [2] * len(lists)


@on_ranks(2)
def test_entry_whose_first_call_failed_keeps_its_loaded_errors():
    kept = Memory()
    for number in range(3):
        all_reduce(drawn(96, seed=number), wire="int4", memory=kept["a"])
    saved, restored = kept.state_dict(), Memory()
    restored.load_state_dict(saved)
    tensor = drawn(96, seed=3)
    fails = mock.patch.object(calls.Calls, "know", side_effect=MemoryError if dist.get_rank() == 1 else None)
    with fails, pytest.raises((MemoryError, RuntimeError)):
        all_reduce(tensor, wire="int4", memory=restored["a"])
    collectives.resynchronize(None, restored)
    all_reduce(tensor, wire="int4", memory=restored["a"])
    expected, again = drawn(96, seed=3), Memory()
    again.load_state_dict(saved)
    all_reduce(expected, wire="int4", memory=again["a"])
    assert_same_bits(tensor, expected)


@on_ranks(2)
def test_ranks_with_other_entries_cannot_save():
    kept, group = Memory(), [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    all_reduce(drawn(40), wire="int4", memory=kept["a"])
    alone = Memory()
    alone._used = {("mine",) if dist.get_rank() else ("yours",): kept._used["a",]}
    assert group.size() == 1
    with pytest.raises(RuntimeError, match=r"other entries of a Memory; on rank \d: (mine|yours)\."):
        alone.state_dict()


@on_ranks(2)
def test_least_recently_used_compressor_leaves_first():
    group, tensors = dist.new_group(), [torch.ones(n + 1) for n in range(4)]
    with mock.patch.object(calls, "MOST_COMPRESSORS", 3):
        for i in (0, 1, 2, 0, 3):  # the last one is one too many
            all_reduce(tensors[i], group=group)
        kept = [site.layouts[0][0].numel() for site in calls_on(connections_of(group))._compressors]
    assert kept == [3, 1, 4]
