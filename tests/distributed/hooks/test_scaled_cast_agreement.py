"""Scales that ranks agree on when they remember different ones, and the limit that keeps sums from overflow."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import Transport, Workspace
from gradwire.compress import BucketScale, DelayedScaling, Step, scaled_cast_all_reduce
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.testing._many_ranks import run_in_lockstep
from tests.support.bits import assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALLEST, WRAPPERS, gradients, register
from tests.support.zoo import Probe

CPU = torch.device("cpu")


def first_step(scales, values):
    """One step of a bucket: rank r holds ``scales[r]`` and the gradient ``values[r]``, which becomes the mean."""
    transport, algorithms = Transport(len(scales)), []
    for scale, value in zip(scales, values, strict=True):
        each = Step.of(None, [value], [value], 0, transport, Workspace(CPU))
        counters = torch.zeros(4, dtype=torch.int64)
        algorithms.append(scaled_cast_all_reduce(each, DelayedScaling(), scale, counters, True))
    run_in_lockstep(algorithms)


def remembered(*ranks):
    """A bucket's scale on each rank, from (exponent, whether it was derived from a gradient)."""
    return [BucketScale(torch.tensor(pair, dtype=torch.int32)) for pair in ranks]


# What the ranks remember, and what they agree on: the smallest exponent that any of them derived from a gradient, and
# if none did, the smallest of all.
AGREEMENTS = {
    "the first is smaller": ([(-7, 1), (3, 1)], [-7, 1]),
    "the second is smaller": ([(3, 1), (-7, 1)], [-7, 1]),
    "both are positive": ([(40, 1), (20, 1), (30, 1)], [20, 1]),
    "both are negative": ([(-40, 1), (-20, 1), (-30, 1)], [-40, 1]),
    "the ends of the range": ([(100, 1), (-100, 1)], [-100, 1]),
    "equal": ([(12, 1)] * 3, [12, 1]),
    "one has lost its state": ([(5, 1), (0, 0)], [5, 1]),
    "one has lost its state, at the end of the range": ([(0, 0), (100, 1)], [100, 1]),
    "two have lost their state": ([(0, 0), (-20, 1), (0, 0)], [-20, 1]),
    "a smaller one is not derived from a gradient": ([(5, 1), (-20, 0), (9, 1)], [5, 1]),
    "none remembers": ([(0, 0), (0, 0)], [0, 0]),
    "one has risen without a gradient": ([(0, 0), (17, 0)], [0, 0]),
    "both have risen without a gradient": ([(32, 0), (17, 0), (20, 0)], [17, 0]),
}


@pytest.mark.parametrize("case", AGREEMENTS)
def test_ranks_with_different_scales_agree_on_the_smallest(case):
    # A step whose gradient is not finite leaves the scale as agreed.
    ranks, agreed = AGREEMENTS[case]
    scales = remembered(*ranks)
    first_step(scales, [torch.full((3,), torch.inf) for _ in ranks])
    assert [scale.exponent.tolist() for scale in scales] == [agreed] * len(ranks)


@pytest.mark.parametrize("exponents", [(9, -2, 5), (None, -2, 5)], ids=["all-loaded", "rank-0-without"])
@pytest.mark.parametrize("cap", [25, SMALLEST], ids=["one-bucket", "two-buckets"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_ranks_with_different_loaded_states_agree_on_the_smallest(wrapper, cap, exponents):
    state, module, own = ScaledCastState(), Probe((3,), (5,)), exponents[dist.get_rank()]
    if own is not None:
        saved = torch.tensor([[own, 1], [own + 1, 1]], dtype=torch.int32)
        names = ["weights.0", "weights.1"]
        state.load_state_dict({"names": names, "exponents": saved, "counters": torch.zeros(4, dtype=torch.int64)})
    state.bind(module)
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=cap)
    register(ddp, (state, scaled_cast_hook))
    steps = []
    for factor in (torch.inf, 1.0):
        ddp.zero_grad()
        ddp(torch.full((3,), factor), torch.full((5,), factor)).backward()
        steps.append((state.exponents(), gradients(ddp)))
    (agreed, _), (_, reduced) = steps  # a step that is not finite leaves the scale as agreed
    assert agreed["weights.0"] == -2
    assert agreed["weights.1"] == -2 or (cap == SMALLEST and agreed["weights.1"] == -1)
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in reduced.values())
    assert_same_on_all_ranks(from_all_ranks(steps))


LARGEST = {torch.float16: (2**11 - 1) * 2**5, torch.bfloat16: (2**8 - 1) * 2**120}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100, 128, 129, 1000, 1024, 1025, 2**17])
@pytest.mark.parametrize("dtype", LARGEST)
def test_saturation_limit_leaves_room_for_any_sum_over_ranks(dtype, world_size):
    limit = Fraction(DelayedScaling(dtype=dtype).limit(world_size))
    assert limit == Fraction(LARGEST[dtype], 2 * 2 ** (world_size - 1).bit_length())
    assert limit * world_size * 2 <= LARGEST[dtype], "half the range is left for the rounding of partial sums"
    assert limit * world_size * 4 > LARGEST[dtype], "and no more than a binade is given away"
