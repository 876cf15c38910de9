"""Host work of a step of one bucket of GPT-2: calls that gradwire makes, launches, and tensors that it allocates.

Counts, unlike seconds, are the same on every machine. A GPU that does nothing takes the launches.
"""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradwire
from gradwire.bench.shapes import buckets, gpt2
from gradwire.compress import Quantization
from tests.kernels.support.algorithm_steps import cast, powersgd, quantized
from tests.kernels.support.empty_driver import empty_gpu

FOLDERS = tuple(str(Path(path).resolve()) for path in gradwire.__path__)
CREATING = {"empty", "empty_strided", "new_empty", "zeros", "full", "ones", "clone", "_to_copy"}


class Allocations(TorchDispatchMode):
    """Counts the operators that allocate a tensor."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::")
        self.counts[name] += name in CREATING
        return function(*arguments, **keywords or {})


def calls_of(work):
    """How many functions gradwire's code calls, in Python or C, gradwire's own among them."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller is not None and is_ours(caller.f_code.co_filename):
            count += 1

    gc.collect()
    gc.disable()  # a finalizer or a weak reference's callback would count as a call of ours
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def is_ours(filename):
    return filename.startswith(FOLDERS)


def run(algorithm):
    with pytest.raises(StopIteration):
        algorithm.send(None)


# Measured, and rounded up by about 3 %: calls, launches, tensors allocated. A change that needs more must be worth it.
BUDGETS = {
    "cast": (lambda bucket: cast(bucket, torch.bfloat16), (57, 2, 0)),
    "powersgd": (lambda bucket: powersgd(bucket, 4, None), (190, 7, 3)),
    "quantized": (lambda bucket: quantized(bucket, "int4", Quantization()), (136, 7, 0)),
}


@pytest.mark.parametrize("hook", BUDGETS)
def test_step_of_a_bucket_keeps_to_its_budget(hook):
    make, budgets = BUDGETS[hook]
    tensors = [torch.empty(shape) for shape in buckets(gpt2, 25 << 20)[5]]
    with empty_gpu() as driver:
        step = make([tensors])
        for number in range(3):
            run(*step(number))
        driver.launches.clear()
        (third,), (fourth,) = step(3), step(4)
        with Allocations() as allocations:
            run(third)
        launches = len(driver.launches)
        calls = calls_of(lambda: run(fourth))
    assert calls > launches > 0, "the counters see nothing"
    spent = (calls, launches, allocations.counts.total())
    assert all(actual <= budget for actual, budget in zip(spent, budgets, strict=True)), spent
