"""The reduction of large parameter grids in `make test`."""

from collections import Counter
from itertools import combinations, product

import pytest

from tests.support.pairwise import MOST_CASES, surplus


def product_of(**axes):
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairs(cases):
    """The pairs of values, without world sizes."""
    axes = [[axis for axis in case.items() if axis[0] != "world"] for case in cases]
    return [pair for each in axes for pair in combinations(each, 2)]


@pytest.mark.parametrize(
    "axes",
    [
        {"hook": ["fp16", "bf16", "powersgd"], "world": [2, 3], "view": [False, True]},
        {"world": [2, 3], "n": [0, 1], "flag": [False, True], "options": [[], {}], "dtype": ["half", "float"]},
    ],
    ids=["3-axes", "5-axes"],
)
def test_reduced_grid_covers_every_pair_in_half_the_cases(axes):
    cases = product_of(**axes)
    left_out = surplus(cases)
    kept = [case for index, case in enumerate(cases) if index not in left_out]
    assert all(pair in pairs(kept) for pair in pairs(cases))
    assert 2 * len(kept) <= len(cases)
    counts = Counter(case["world"] for case in kept)
    assert counts.keys() == {2, 3}
    assert abs(counts[2] - counts[3]) <= 1


def test_grid_with_too_many_pairs_holds_every_value():
    cases = product_of(a=[0, False, 0.5, None, "0"], b=[1, 2, 3])
    kept = [case for index, case in enumerate(cases) if index not in surplus(cases)]
    assert len(kept) == 5 < MOST_CASES < len(cases)
    for name in "ab":
        assert {repr(case[name]) for case in kept} == {repr(case[name]) for case in cases}
