"""Tensors of calls: shared memory, gaps, inference mode, sums in place, and ranks outside of the group."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import collectives
from gradwire.collectives import Memory, all_reduce, all_reduce_coalesced, reduce_scatter_tensor
from gradwire.collectives.call_site import CallSite, check_separate
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "mean"])
@pytest.mark.parametrize("shared", ["twice", "overlap", "expanded"])
@on_ranks(2)
def test_shared_memory_is_refused_and_nothing_is_modified(op, shared):
    whole = drawn(40)
    tensors = {
        "twice": [whole, drawn(3), whole],
        "overlap": [whole[:30], whole[20:]],
        "expanded": [drawn(1).expand(5)],
    }[shared]
    kept = [tensor.clone() for tensor in tensors]
    with pytest.raises(ValueError, match=r"share memory|are the same memory"):
        all_reduce_coalesced(tensors, op)
    assert_same_bits(tensors, kept)
    collectives.resynchronize()


@on_ranks(2, 3)
def test_separate_views_of_one_memory_are_reduced_like_tensors_of_their_own():
    whole = drawn(60)
    views = [whole[:30], whole[30:40], whole[40::2], whole[41::2]]  # the last two alternate
    own = [view.clone() for view in views]
    for op in (AVG, SUM):
        all_reduce_coalesced(views, op)
        all_reduce_coalesced(own, op)
        assert_same_bits(views, own)


VIEWS = st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))


@settings(deadline=None, derandomize=True)
@given(st.lists(VIEWS, min_size=1, max_size=4))
def test_shared_elements_are_found_exactly(views):
    storage = torch.zeros(200)
    tensors = [storage.as_strided((rows, columns), (step, stride), at) for at, rows, columns, step, stride in views]
    seen = torch.zeros(200, dtype=torch.int64)
    for tensor in tensors:
        elements = seen.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for i in range(elements.shape[0]):
            for j in range(elements.shape[1]):
                elements[i, j] += 1
    site = CallSite.of("all_reduce", SUM, "int8", tensors)
    if seen.max() > 1:
        with pytest.raises(ValueError, match=r"share memory|are the same memory"):
            site.check_layouts()
            check_separate(tensors)
    else:
        site.check_layouts()
        check_separate(tensors)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8", "sign"])
@on_ranks(2, 4)
def test_sum_is_the_world_size_times_the_mean(wire):
    """The world size is a power of two, so that no product rounds; scales and codes are those of the mean."""
    mean, total = drawn(6, 50), drawn(6, 50)
    all_reduce(mean, AVG, wire=wire)
    all_reduce(total, SUM, wire=wire)
    assert_same_bits(total, mean * dist.get_world_size())


@on_ranks(2)
def test_sum_with_memory_keeps_what_it_loses():
    memory, applied, exact = Memory(), torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for step in range(20):
        tensor = drawn(300, seed=step)
        total = tensor.double()
        dist.all_reduce(total)
        exact += total
        all_reduce(tensor, SUM, wire="int4", memory=memory["a"])
        applied += tensor
    left = memory.state_dict()["a"]["errors"]["a"].double()
    assert torch.allclose(exact - applied, left, atol=1e-4)
    assert float(left.norm()) > 0


@on_ranks(2)
def test_sums_whose_handles_are_dropped_arrive_on_streams():
    def reduced(group):
        tensors = [drawn(300, seed=seed) for seed in range(4)]
        for tensor in tensors:
            all_reduce(tensor, SUM, group, async_op=True)  # and its handle is gone
        all_reduce(drawn(300, seed=9), SUM, group)
        return tensors

    expected = [drawn(300, seed=seed) for seed in range(4)]
    for tensor in expected:
        all_reduce(tensor, AVG)
        tensor *= 2
    with gpu_on_cpu():
        assert_same_bits(reduced(dist.new_group(backend=register_backend())), expected)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@on_ranks(2)
def test_tensors_with_gaps_keep_what_lies_between_their_elements(wire):
    whole, memory = drawn(30, 8), Memory()
    expected = whole.clone()
    part = expected[:, 2:5].contiguous()
    view = whole[:, 2:5]
    options = {"wire": wire} if wire == "fp32" else {"wire": "int4", "memory": memory["a"]}
    other = {"wire": wire} if wire == "fp32" else {"wire": "int4", "memory": Memory()["a"]}
    for _ in range(2):
        all_reduce(view, **options)
    for _ in range(2):
        all_reduce(part, **other)
        if "memory" in other:
            other["memory"] = other["memory"].memory["a"]
    expected[:, 2:5] = part
    assert_same_bits(whole, expected)


@on_ranks(2)
def test_inference_tensors_are_reduced():
    normal, source, output = drawn(5, 7), drawn(2, 40), torch.zeros(40)
    expected, scattered = normal.clone(), torch.zeros(40)
    all_reduce(expected)
    reduce_scatter_tensor(scattered, source)
    with torch.inference_mode():
        tensor, transposed = drawn(5, 7), drawn(5, 7).t()
        all_reduce(tensor)
        all_reduce(transposed)
        output = torch.zeros(40)
        reduce_scatter_tensor(output, drawn(2, 40))
    assert tensor.is_inference()
    assert_same_bits([tensor, transposed.t(), output], [expected, expected, scattered])
    outside = tensor.clone()
    all_reduce(tensor)  # outside of inference mode
    all_reduce(outside)
    assert_same_bits(tensor, outside)


@on_ranks(2)
def test_output_of_a_reduce_scatter_may_be_a_part_of_its_input():
    source, expected = drawn(80), torch.zeros(40)
    reduce_scatter_tensor(expected, source)
    part = source.chunk(2)[dist.get_rank()]
    reduce_scatter_tensor(part, source)
    assert_same_bits(part, expected)


@on_ranks(2, 3)
def test_ranks_outside_of_the_group_get_none():
    group, tensor = dist.new_group([0]), drawn(5)
    kept, output = tensor.clone(), torch.zeros(5)
    works = [all_reduce(tensor, group=group, async_op=True), all_reduce_coalesced([tensor], group=group, async_op=True)]
    works.append(reduce_scatter_tensor(output, tensor, group=group, async_op=True))
    if dist.get_rank() == 0:
        for work in works:
            work.wait()
    else:
        assert works == [None, None, None]
        assert_same_bits([tensor, output], [kept, torch.zeros(5)])
    assert collectives.resynchronize(group) is None


@on_ranks(2)
def test_nothing_keeps_tensors_with_gaps_of_a_call_that_has_ended():
    whole = drawn(30, 8)
    all_reduce(whole[:, :3])
    kept = weakref.ref(whole.untyped_storage())
    del whole
    for _ in range(20):  # then the threads that have exchanged it have gone on
        all_reduce(torch.ones(3))
    gc.collect()
    assert kept() is None


@on_ranks(2)
def test_future_of_a_tensor_with_gaps_waits_for_the_copy():
    whole = drawn(30, 8)
    exact = whole[:, :3].contiguous()
    all_reduce(exact)
    (written,) = all_reduce(whole[:, :3], async_op=True).get_future().wait()
    assert_same_bits([whole[:, :3], written], [exact, exact])
