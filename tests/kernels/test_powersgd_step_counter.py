"""The step of a bucket's random columns, in device memory: what a CUDA graph replays must count on."""

import pytest
import torch

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, Step, alternating_all_reduce, powersgd, powersgd_all_reduce
from gradwire.compress.policy import MatrixShape
from tests.kernels.exact import assert_same_bits


def factors_after(kind, iterations):
    """The factors after steps with these numbers, of a gradient of zeros, whose columns are all drawn anew."""
    gradient, shapes = [torch.zeros(8, 12)], [MatrixShape(1, 8, 12, 2)]
    bucket = LowRankBucket(gradient, shapes, names=["a"], iteration=10, alternating=kind == "alternating")
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    for i in iterations:
        step = Step.of(bucket, gradient, gradient, i, transport, workspace)
        if kind == "alternating":
            algorithm = alternating_all_reduce(step)
        else:
            warm_start = kind == "warm"
            algorithm = powersgd_all_reduce(step, warm_start=warm_start)
        run_algorithm(algorithm, transport)
    return bucket.q, bucket.counter.item()


@pytest.mark.parametrize("kind", ["warm", "cold", "alternating"])
def test_captured_step_continues_from_previous_step(kind, monkeypatch):
    eager, after = factors_after(kind, [10, 11, 12])
    assert after == 13
    monkeypatch.setattr(powersgd, "is_capturing", lambda _: True)
    # A replay does again what the capture did, with its number; of an alternating step there is a graph for each side.
    captured, after = factors_after(kind, [10, 11, 10] if kind == "alternating" else [10, 10, 10])
    assert after == 13
    assert_same_bits(captured, eager, "the factors of the next step")


def test_eager_step_uses_the_hosts_number():
    first, _ = factors_after("warm", [10, 11, 500])
    second, step = factors_after("warm", [500])
    assert step == 501
    assert_same_bits(first, second, "the random columns of step 501")
