"""Kernels replayed in CUDA graphs give the bits of eager steps of PowerSGD and quantization, with a double of graphs.

In Triton's interpreter the double records launches, whose kernels read the addresses of gradients in device memory.
"""

import itertools
from functools import partial

import pytest
import torch

from gradwire.comm import LocalTransport, Workspace, graphs, run_algorithm
from gradwire.comm.graphs import PiecewiseGraphs
from gradwire.compress import (
    LowRankBucket,
    LowRankPolicy,
    Quantization,
    QuantizedBucket,
    Step,
    WirePolicy,
    alternating_all_reduce,
    powersgd,
    powersgd_all_reduce,
    quantized_all_reduce,
)
from gradwire.compress.policy import MatrixShape
from gradwire.kernels import WIRE_FORMATS
from tests.kernels.exact import assert_same_bits
from tests.support.graph_on_cpu import graphs_on_cpu

SHAPES = [(24, 40), (24,), (33, 18), (7,)]
STEPS = 4  # eager, captured, replayed twice
CASES = {
    "rank 2": (powersgd_all_reduce, 2, torch.float32, {}),
    "rank 10": (powersgd_all_reduce, 10, torch.float32, {}),
    "fp16": (powersgd_all_reduce, 2, torch.float16, {}),
    "int8 factors": (powersgd_all_reduce, 2, torch.float16, {"factor_wire": WIRE_FORMATS["int8"]}),
    "no feedback": (powersgd_all_reduce, 2, torch.float32, {"error_feedback": False}),
    "alternating": (alternating_all_reduce, 2, torch.float32, {"alternating": True}),
}


QUANTIZED = {
    "int4": ("int4", torch.float32, Quantization()),
    "int8, bf16 errors": ("int8", torch.float16, Quantization(error_dtype=torch.bfloat16)),
}


def new_bucket(case, transport):
    """The algorithm, a bucket, and the dtype of its gradients."""
    if case in QUANTIZED:
        wire, dtype, quantization = QUANTIZED[case]
        layouts = [torch.empty(shape, dtype=dtype) for shape in SHAPES]
        formats = WirePolicy(wire=wire).wire_formats(layouts)
        return quantized_all_reduce, QuantizedBucket(layouts, formats, transport, quantization), dtype
    algorithm, rank, dtype, options = CASES[case]
    layouts = [torch.empty(shape, dtype=dtype) for shape in SHAPES]
    shapes = LowRankPolicy(rank=rank, min_compression_rate=1).matrix_shapes(layouts)
    return algorithm, LowRankBucket(layouts, shapes, **options), dtype


def run(case, in_place, cuda_graphs):
    """The results of every step, and all memory at the end."""
    workspace, transport = Workspace(torch.device("cpu"), PiecewiseGraphs()), LocalTransport()
    algorithm, bucket, dtype = new_bucket(case, transport)
    generator = torch.Generator().manual_seed(0)
    kept, seen, period = [], [], 1 + (algorithm is alternating_all_reduce)
    for iteration in range(STEPS * period):
        source = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        target = source if in_place else [torch.full_like(each, torch.nan) for each in source]
        kept.append((source, target))  # so that every step has other addresses
        steps = partial(algorithm, Step.of(bucket, source, target, iteration, transport, workspace))
        if cuda_graphs:
            refresh = partial(bucket.refresh, source, target, iteration)
            run_algorithm(workspace.graphs.run(bucket, iteration % period, steps, refresh), transport)
        else:
            run_algorithm(steps(), transport)
        seen.append([each.clone() for each in target])
    return seen, [tensor for tensors in bucket.memory.values() for tensor in tensors.values()]


SLOW = [
    *((case, True) for case in ("rank 10", "fp16", "alternating", "no feedback")),
    *((case, False) for case in [*CASES, *QUANTIZED] if case != "int4"),
]


@pytest.mark.parametrize(
    ("case", "in_place"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair in SLOW))
        for pair in itertools.product([*CASES, *QUANTIZED], (True, False))
    ],
)
def test_replays_give_the_bits_of_eager_steps(monkeypatch, case, in_place):
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    expected, expected_memory = run(case, in_place, cuda_graphs=False)
    with graphs_on_cpu() as double:
        results, memory = run(case, in_place, cuda_graphs=True)
        assert double.replays == 3 * double.captures > 0
    for step, (mine, eager) in enumerate(zip(results, expected, strict=True)):
        for a, b in zip(mine, eager, strict=True):
            assert torch.equal(a, b), f"step {step}, {tuple(a.shape)}"
    assert all(torch.equal(a, b) for a, b in zip(memory, expected_memory, strict=True))


def test_refresh_uploads_the_addresses_of_the_step():
    layouts = [torch.empty(6, 4, 5), torch.empty(3)]
    bucket = LowRankBucket(
        layouts, LowRankPolicy(rank=1, min_compression_rate=1, stacks={"0": 3}).matrix_shapes(layouts, ["0", "1"])
    )
    source, target = ([torch.ones_like(each) for each in layouts] for _ in range(2))
    seen, kernels = [], bucket.kernels

    def watched(operands, *rest):
        seen.append(operands.addresses)
        kernels.project(operands, *rest)

    bucket.kernels = kernels._replace(project=watched)
    workspace, transport = Workspace(torch.device("cpu")), LocalTransport()
    run_algorithm(powersgd_all_reduce(Step.of(bucket, source, target, 0, transport, workspace)), transport)
    bucket.refresh(source, target, 1)
    assert len(seen[0]) == 9
    assert seen[0] == bucket.table._uploaded.numbers


# --- the number of the step, in device memory


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
