"""The reduction of large parameter grids in `make test`."""

from itertools import combinations, product

import pytest

from tests.support.pairwise import surplus


def product_of(**axes):
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairs(cases):
    return [pair for case in cases for pair in combinations(case.items(), 2)]


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


@pytest.mark.parametrize("names", ["a", "ab"])
def test_ordinary_lane_of_one_or_two_axes_holds_every_case(names):
    assert surplus(product_of(**{name: [0, False, 0.5, None, "0"] for name in names})) == []
