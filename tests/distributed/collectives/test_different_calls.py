"""Ranks that make different calls: every rank raises, nothing is modified, and after `resynchronize` all is well.

All call sites are known before the difference: each rank would start to exchange at once.
"""

import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire import collectives
from gradwire.collectives import Memory, all_reduce, all_reduce_coalesced, reduce_scatter_tensor
from gradwire.collectives.calls import calls_on
from gradwire.comm.connections import connections_of
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


class Loop:
    """The calls that a training loop may make, on tensors of its own."""

    def __init__(self, group):
        self.group, self.memory = group, Memory()
        numel = 120 * group.size()
        self.tensors = {
            name: drawn(numel, seed=seed)
            for seed, name in enumerate(["a", "b", "mean", "sum", "source", "int4", "fp32", "fp16", "row", "column"])
        }
        self.tensors["row"] = self.tensors["row"].view(2, -1)
        self.tensors["column"] = self.tensors["column"].view(-1, 2).t()
        self.tensors["tiny"], self.tensors["huge"] = drawn(3, seed=21), drawn(300_000, seed=22)
        self.tensors["output"] = torch.zeros(120)

    def __call__(self, name):
        tensor, group = self.tensors.get(name), self.group
        if name in ("a", "b"):
            all_reduce(tensor, group=group, wire="int4", memory=self.memory[name])
        elif name == "scatter":
            reduce_scatter_tensor(self.tensors["output"], self.tensors["source"], group=group)
        elif name == "list":
            all_reduce_coalesced([self.tensors["mean"], self.tensors["tiny"]], group=group)
        else:
            wire = name if name in ("int4", "fp32", "fp16") else "int8"
            all_reduce(tensor, SUM if name == "sum" else AVG, group, wire=wire)

    def learn(self):
        """Make every call once, so that no call site is new."""
        for name in [*(each for each in self.tensors if each not in ("source", "output")), "scatter", "list"]:
            self(name)


PAIRS = [
    ("a", "b"),  # entries of a memory
    ("a", "int4"),  # with and without memory
    ("mean", "sum"),
    ("mean", "scatter"),
    ("sum", "scatter"),
    ("mean", "int4"),
    ("mean", "fp32"),
    ("fp16", "fp32"),
    ("row", "column"),  # equal shapes, other strides
    ("row", "mean"),  # equal numbers of elements
    ("mean", "tiny"),
    ("tiny", "huge"),
    ("fp32", "huge"),
    ("list", "mean"),
]


@pytest.mark.parametrize("pair", [*PAIRS, *(pair[::-1] for pair in PAIRS)], ids="-".join)
@on_ranks(2, 3)
def test_known_calls_that_differ_raise_on_every_rank(pair):
    different_calls(pair, dist.new_group())


def different_calls(pair, group, odd_ranks=(1,)):
    loop = Loop(group)
    loop.learn()
    kept = {name: tensor.clone() for name, tensor in loop.tensors.items()}
    errors = loop.memory.state_dict()
    mine = pair[dist.get_rank() in odd_ranks]
    with pytest.raises(RuntimeError) as raised:
        loop(mine)
    assert re.search(
        r"in different calls of gradwire\.collectives: rank \d in call \d+, .* and rank \d in call \d+, ",
        str(raised.value),
    ), raised.value
    assert_same_bits(loop.tensors, kept)
    with pytest.raises(RuntimeError, match=r"gradwire\.collectives"):
        loop("mean")
    collectives.resynchronize(group, loop.memory)
    assert_same_bits(loop.memory.state_dict(), errors)
    loop.learn()
    del loop.tensors["source"]  # not reduced
    if dist.get_world_size() == 2:
        del loop.tensors["output"]
    results = from_all_ranks({name: tensor for name, tensor in loop.tensors.items() if name != "output"})
    assert_same_on_all_ranks(results)


@pytest.mark.parametrize("pair", [("a", "b"), ("mean", "huge"), ("fp32", "mean")], ids="-".join)
@pytest.mark.parametrize("odd_ranks", [(1,), (2, 3), (1, 3)], ids=["one rank", "one node", "one place on each node"])
@on_ranks(4)
def test_known_calls_that_differ_on_nodes_raise_on_every_rank(pair, odd_ranks):
    with mock.patch("gradwire.comm.connections.node_name", lambda: f"node {dist.get_rank() // 2}"):
        group = dist.new_group()
        different_calls(pair, group, odd_ranks)
        assert connections_of(group).executor(torch.device("cpu")).transport.local_size == 2


@pytest.mark.parametrize("memory", [False, True], ids=["stateless", "memory"])
@on_ranks(2, 3)
def test_rank_that_skips_a_call_is_noticed_in_the_next_one(memory):
    group, entries = dist.new_group(), Memory()
    tensors = [drawn(500), drawn(400)]

    def reduce(i):
        entry = {"memory": entries["ab"[i]], "wire": "int4"} if memory else {}
        all_reduce(tensors[i], group=group, **entry)

    reduce(0)
    reduce(1)
    kept = [tensor.clone() for tensor in tensors]
    if dist.get_rank() != 0:
        with pytest.raises(RuntimeError) as raised:
            reduce(0)
    else:  # skips it
        with pytest.raises(RuntimeError) as raised:
            reduce(1)
    for size in ("500", "400"):
        assert re.search(
            rf"in different calls .* rank \d in call 3, all_reduce \(AVG\) of torch.float32 \[{size}\]",
            str(raised.value),
        )
    assert_same_bits(tensors, kept)


@on_ranks(2)
def test_swapped_calls_in_flight_raise_on_both_ranks():
    group = dist.new_group()
    first, second = drawn(700), drawn(700, seed=1).view(7, 100)
    for tensor in (first, second):
        all_reduce(tensor, group=group)
    kept = first.clone(), second.clone()
    order = [first, second] if dist.get_rank() == 0 else [second, first]
    works = [all_reduce(tensor, group=group, async_op=True) for tensor in order]
    with pytest.raises(RuntimeError, match="in different calls"):
        works[0].wait()
    with pytest.raises(RuntimeError):
        works[1].wait()
    assert_same_bits((first, second), kept)
    collectives.resynchronize(group)


@on_ranks(2)
def test_futures_of_known_calls_fail_if_another_rank_makes_a_new_one():
    group = dist.new_group()
    all_reduce(drawn(500), group=group)
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"Rank 1 is in call 2 of .* \[7\] .*, which is new, and rank 0 in .* \[500\] "
        ):
            all_reduce(drawn(500), group=group, async_op=True).get_future().wait()
    else:
        with pytest.raises(RuntimeError, match="which is new"):
            all_reduce(drawn(7), group=group)
    collectives.resynchronize(group)


@on_ranks(2)
def test_call_that_a_rank_never_makes_names_the_call_and_the_rank():
    group = dist.new_group(timeout=timedelta(seconds=3))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            all_reduce(drawn(50), group=group)
        assert re.search(
            r"Rank 0 is in call 1 of gradwire\.collectives, all_reduce \(AVG\) of torch\.float32 \[50\] in int8, but "
            r"there was no such call on rank 1 within 0:00:03\. .* Make the same calls in the same order on every rank",
            str(raised.value),
        ), raised.value
        assert "hook" not in str(raised.value)
    dist.barrier()


@on_ranks(2)
def test_stamp_depends_on_the_number_of_the_call():
    """A rank that has missed a call is found even if it makes an equal one."""
    group, tensor = dist.new_group(), drawn(500)
    all_reduce(tensor, group=group)
    calls_on(connections_of(group)).count += dist.get_rank()
    kept = tensor.clone()
    with pytest.raises(RuntimeError, match=r"in call 2, .* in call 3, |in call 3, .* in call 2, "):
        all_reduce(tensor, group=group)
    assert_same_bits(tensor, kept)
