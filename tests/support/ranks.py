"""Tests whose body runs on every rank of a `harness.World`."""

import inspect
import traceback
from functools import wraps
from importlib import import_module

import pytest
import torch.distributed as dist

from tests.support.harness import CASE_LIMIT


def on_ranks(*sizes, limit=CASE_LIMIT):
    """Run a test's body on every rank of worlds of these sizes; after ``limit`` seconds their stacks are reported.

    A failed assertion reports the local variables of its rank.
    """

    def decorate(body):
        @wraps(body)
        def test(*, world, **arguments):
            world.run(run_body, limit=limit, module=body.__module__, name=body.__name__, arguments=arguments)

        signature = inspect.signature(body)
        world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), world])
        return pytest.mark.parametrize("world", sizes, indirect=True, ids=lambda size: f"{size}-ranks")(test)

    return decorate


def run_body(module, name, arguments):
    """Call the undecorated test ``name`` of ``module``."""
    try:
        getattr(import_module(module), name).__wrapped__(**arguments)
    except AssertionError as error:
        _, (frame, _), *_ = traceback.walk_tb(error.__traceback__)
        variables = [f"{variable} = {value!r}"[:200] for variable, value in frame.f_locals.items()]
        raise AssertionError("\n".join([str(error), "Local variables:", *variables])) from error


def from_all_ranks(value):
    """The value of every rank, in the order of ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def summed(tensor):
    """The sum over the ranks, in fp64."""
    total = tensor.double()
    dist.all_reduce(total)
    return total


def signals(name):
    """A store of one test's own, whose keys ranks set and wait for."""
    return dist.PrefixStore(f"signals/{name}", dist.distributed_c10d._get_default_store())
