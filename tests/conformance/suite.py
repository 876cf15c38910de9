"""PyTorch's own tests of DistributedDataParallel, as its wheel ships them, and the class they are run against."""

import ast
import inspect
import os
import re
import sys
import unittest
from types import SimpleNamespace

BACKEND = "gloo"
ABOUT_DDP = re.compile("ddp|DistributedDataParallel", re.IGNORECASE)


def load(against, world_size):
    """PyTorch's module of tests, such that they train with the class named by ``against``.

    A process can do this once: on import, the tests bind the class and evaluate the conditions of their decorators.
    """
    os.environ |= {"BACKEND": BACKEND, "WORLD_SIZE": str(world_size), "GRADWIRE_KERNELS": "torch"}
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # how to repeat a failure in PyTorch's checkout
    # The base of PyTorch's test classes derives from this package's, for a method that no test about DDP calls.
    sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase)
    import cpu
    import torch
    import torch._dynamo  # every DDP imports it; the ranks inherit it

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    cpu.pretend()
    if against == "gradwire":
        import gradwire  # derives from PyTorch's class, so before that changes its name

        torch.nn.parallel.DistributedDataParallel = gradwire.DistributedDataParallel
    from torch.testing._internal.distributed import distributed_test

    assert distributed_test.DistributedDataParallel is torch.nn.parallel.DistributedDataParallel
    return distributed_test


def about_ddp(module):
    """The names of the tests that mention DDP, themselves or in a method that they use."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    base = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase")
    methods = {node.name: node for node in base.body if isinstance(node, ast.FunctionDef)}

    def used_by(name):
        return {node.attr for node in ast.walk(methods[name]) if isinstance(node, ast.Attribute)} & methods.keys()

    def mentions_ddp(name):
        seen, ahead = set(), {name}
        while ahead:
            seen.add(method := ahead.pop())
            if ABOUT_DDP.search("\n".join(lines[methods[method].lineno - 1 : methods[method].end_lineno])):
                return True
            ahead |= used_by(method) - seen
        return False

    return [name for name in methods if name.startswith("test_") and mentions_ddp(name)]
