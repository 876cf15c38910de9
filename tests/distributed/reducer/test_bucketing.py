"""The assignment of parameters to buckets, against PyTorch's own, without a DistributedDataParallel."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.comm import GroupTransport
from gradwire.reducer.bucketing import BucketOptions, assign_first_buckets, rebuild_buckets, rebuilt_limits
from tests.support.ranks import on_ranks

PYTORCHS = dist._compute_bucket_assignment_by_size


def options_of(parameters, sparse=None, **changes):
    options = {
        "parameters": parameters,
        "names": [f"layer{i}.weight" for i in range(len(parameters))],
        "sparse": sparse or [False] * len(parameters),
        "first_limits": [64, 256],
        "rebuilt_limits": [128],
        "hook_may_choose": True,
        "gradient_as_bucket_view": False,
        "frees_buffers": True,
    }
    return BucketOptions(**options | changes)


@st.composite
def models(draw):
    """Parameters of both dtypes, some with sparse gradients, and limits in bytes."""
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    sparse = [draw(st.integers(0, 5)) == 0 for _ in sizes]
    limits = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    parameters = [torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    return options_of(parameters, sparse, first_limits=limits, rebuilt_limits=limits)


def assert_buckets_are_full_and_uniform(options, assignment):
    """Every parameter is in one bucket; buckets have one dtype, and end with the parameter that reaches the limit."""
    assert sorted(i for bucket in assignment for i in bucket) == list(range(len(options.parameters)))
    for bucket in assignment:
        members = [options.parameters[i] for i in bucket]
        assert len({member.dtype for member in members}) == 1
        assert len(bucket) == 1 or not any(options.sparse[i] for i in bucket)
        assert sum(member.nbytes for member in members[:-1]) < max(options.first_limits)


@settings(deadline=None)
@given(models())
def test_first_buckets_are_those_of_pytorchs_ddp(options):
    assignment = assign_first_buckets(options)
    theirs, _ = PYTORCHS(options.parameters, options.first_limits, options.sparse)
    assert assignment == list(
        reversed(theirs)
    )  # as torch.nn.parallel.DistributedDataParallel passes them to its reducer
    assert_buckets_are_full_and_uniform(options, assignment)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=models(), data=st.data())
def test_rebuilt_buckets_are_those_of_pytorchs_reducer(world_of_one, options, data):
    order = data.draw(st.permutations(range(len(options.parameters))))
    transport = GroupTransport(dist.group.WORLD)
    assignment = rebuild_buckets(options, options.rebuilt_limits, order, transport)
    theirs, _ = PYTORCHS([options.parameters[i] for i in order], options.rebuilt_limits, options.sparse, order)
    assert assignment == theirs
    assert_buckets_are_full_and_uniform(options, assignment)


@on_ranks(3)
def test_rebuilt_buckets_of_all_ranks_follow_the_order_of_rank_0():
    options = options_of([torch.zeros(size) for size in (3, 20, 5, 40, 1, 7)])
    orders = [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [2, 0, 5, 1, 4, 3]]
    order = orders[dist.get_rank()]
    assignment = rebuild_buckets(options, options.rebuilt_limits, order, GroupTransport(dist.group.WORLD))
    theirs, _ = PYTORCHS([options.parameters[i] for i in orders[0]], [128], options.sparse, orders[0])
    assert assignment == theirs and len(assignment) > 1


def test_state_of_a_hook_chooses_the_bucket_size_unless_the_user_does():
    state = SimpleNamespace(preferred_bucket_cap_mb=0.5)
    options = options_of([torch.zeros(1)])
    assert rebuilt_limits(options, state) == [2**19]
    assert rebuilt_limits(options, SimpleNamespace(preferred_bucket_cap_mb=0)) == [0]
    for other in (None, SimpleNamespace(), SimpleNamespace(preferred_bucket_cap_mb=None)):
        assert rebuilt_limits(options, other) == [128]
    assert rebuilt_limits(options_of([torch.zeros(1)], hook_may_choose=False), state) == [128]
    with pytest.raises(ValueError, match=r"preferred_bucket_cap_mb of the hook's state, a SimpleNamespace, is -1"):
        rebuilt_limits(options, SimpleNamespace(preferred_bucket_cap_mb=-1))
