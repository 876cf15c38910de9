"""Launches in Triton's interpreter with the programs of the grid in random order, and repeated.

A GPU runs programs in any order. The interpreter runs them one after another by their numbers, which would hide a
program that needs the result of another.
"""

import random
from contextlib import contextmanager
from itertools import product

import pytest


@contextmanager
def shuffled(seed, repeats=1):
    """Run every launch ``repeats`` times, each time in a new random order. Yields the orders: lists of numbers."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    set_grid_dim, set_grid_idx, launch = (
        InterpreterBuilder.set_grid_dim,
        InterpreterBuilder.set_grid_idx,
        GridExecutor.__call__,
    )
    generator, orders, programs = random.Random(seed), [], {}

    def shuffle(builder, *dimensions):
        set_grid_dim(builder, *dimensions)
        numbers = list(product(*map(range, dimensions)))
        order = generator.sample(numbers, len(numbers))
        programs.clear()
        programs.update(zip(numbers, order, strict=True))
        orders.append([number[0] for number in order])

    def repeat(executor, *arguments, **options):
        for _ in range(repeats):
            launch(executor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_dim", shuffle)
        patch.setattr(InterpreterBuilder, "set_grid_idx", lambda builder, *at: set_grid_idx(builder, *programs[at]))
        patch.setattr(GridExecutor, "__call__", repeat)
        yield orders
