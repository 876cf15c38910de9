"""The ordinary lane runs every pair of a test's parameter values; cases that add no pair to it are slow.

If more than `MOST_CASES` remain, it runs every value, not every pair; the values of a parameter take turns. World sizes
count alone: every test runs in each, but not every hook in each.
"""

from collections import Counter, defaultdict
from itertools import combinations
from operator import itemgetter


def mark_surplus_cases(items):
    """Mark as slow what the ordinary lane leaves out of each test's cases; GPU cases are counted in neither lane."""
    tests = defaultdict(list)
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if hasattr(item, "callspec") and not markers & {"slow", "gpu"}:
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        for index in surplus([case.callspec.params for case in cases]):
            cases[index].add_marker("slow")


WORLD = "world"
MOST_CASES = 12  # of a test, for pairs


def surplus(cases):
    """Indices of the cases, given as dictionaries of parameters, whose values or pairs of values are in the others."""
    values, pairs = [_values_of(case) for case in cases], [_pairs_of(case) for case in cases]
    chosen = _covering([own | own_pairs for own, own_pairs in zip(values, pairs, strict=True)], values)
    if len(chosen) > MOST_CASES:
        chosen = _covering(values, values)
    return sorted(set(range(len(cases))) - chosen)


def _values_of(parameters):
    return {(name, type(value), _hashable(value)) for name, value in parameters.items()}


def _pairs_of(parameters):
    """The pairs of values, without the world size."""
    return set(
        combinations(sorted(_values_of({n: v for n, v in parameters.items() if n != WORLD}), key=itemgetter(0)), 2)
    )


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _covering(sets, values):
    """Indices of sets that together cover all elements. Greedy: take the set with the most missing elements; break ties
    by the values that were chosen least often so far, so that values take turns, then by order.
    """
    missing, chosen, counts = set().union(*sets), set(), Counter()
    while missing:
        best = max(
            range(len(sets)),
            key=lambda index: (len(sets[index] & missing), -sum(counts[value] for value in values[index])),
        )
        chosen.add(best)
        counts.update(values[best])
        missing -= sets[best]
    return chosen
