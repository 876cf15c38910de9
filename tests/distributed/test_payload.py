"""`payload_bytes` of each algorithm, hook and collective, to the byte."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm import GroupTransport, Workspace
from gradwire.compress import (
    BucketScale,
    DelayedScaling,
    Gradients,
    LowRankBucket,
    alternating_all_reduce,
    cast_all_reduce,
    powersgd_all_reduce,
    scaled_cast_all_reduce,
    sparse_all_reduce,
)
from gradwire.compress.policy import MatrixShape
from gradwire.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import SegmentTable
from tests.support.training import WRAPPERS, register, sent_bytes

# Rank 2: 2 x 24 and 2 x 16 elements of factors, both multiples of 16, to which factors are padded.
ROWS, COLUMNS, RANK, BIAS = 24, 16, 2, 7
NUMEL = ROWS * COLUMNS + BIAS  # 391
P, Q = RANK * ROWS, RANK * COLUMNS  # 48, 32


class Done:
    """A collective, and its future, that is over."""

    def get_future(self):
        return self

    def then(self, _):
        return self


@pytest.fixture
def transport(monkeypatch):
    """Of two ranks; nothing is sent."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: None)
    return GroupTransport(SimpleNamespace(size=lambda: 2, rank=lambda: 0, allreduce=lambda *_: Done()))


def drive(transport, steps):
    """Hand each collective of an algorithm to the transport; returns the bytes that it counts."""
    before = transport.payload_bytes
    for collective in steps.__await__():
        transport.start(collective)
    return transport.payload_bytes - before


def bucket_of(dtype=torch.float32):
    tensors = [torch.ones(ROWS, COLUMNS, dtype=dtype), torch.ones(BIAS, dtype=dtype)]
    return Gradients(tensors, SegmentTable(tensors))


@pytest.mark.parametrize(
    ("dtype", "wire", "expected"),
    [
        (torch.float32, torch.float32, 1564),
        (torch.float32, torch.float16, 782),
        (torch.float32, torch.bfloat16, 782),
        (torch.float64, torch.float64, 3128),
        (torch.complex64, torch.float32, 3128),
        (torch.bfloat16, torch.bfloat16, 782),
    ],
    ids=str,
)
def test_payload_of_a_cast_is_its_elements_in_the_wire_dtype(transport, dtype, wire, expected):
    bucket = bucket_of(dtype)
    for _ in range(2):
        assert (
            drive(transport, cast_all_reduce(bucket, bucket, wire, transport, Workspace(torch.device("cpu"))))
            == expected
        )
    assert transport.payload_bytes == 2 * expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_payload_of_a_scaled_cast_is_2_bytes_per_element_plus_12_bytes_in_the_first_step(transport, dtype):
    bucket = bucket_of()
    scale = BucketScale(torch.zeros(2, dtype=torch.int32))
    rest = (DelayedScaling(dtype=dtype), scale, torch.zeros(4, dtype=torch.int64), True, transport)
    sent = [
        drive(transport, scaled_cast_all_reduce(bucket, bucket, *rest, Workspace(torch.device("cpu"))))
        for _ in range(3)
    ]
    assert sent == [794, 782, 782]


@pytest.mark.parametrize(
    ("factors", "both", "alternating"),
    [
        # (48 + 7) + 32 elements of 4 bytes; alternating, 48 + 7 and then 32 + 7.
        (None, 348, [220, 156, 220]),
        # Factors of 2 bytes, and 7 elements of 4.
        (torch.bfloat16, 188, [124, 92, 124]),
    ],
    ids=["fp32", "bf16"],
)
def test_payload_of_powersgd_is_its_factors_and_its_uncompressed_gradients(transport, factors, both, alternating):
    bucket = bucket_of()
    shapes = [MatrixShape(1, ROWS, COLUMNS, RANK), None]
    workspace = Workspace(torch.device("cpu"))
    for is_alternating, expected in ((False, [both] * 3), (True, alternating)):
        low_rank = LowRankBucket(
            bucket.tensors, shapes, error_feedback=False, factor_dtype=factors, alternating=is_alternating
        )
        sent = []
        for i in range(3):
            if is_alternating:
                steps = alternating_all_reduce(low_rank, bucket.tensors, bucket.tensors, i, transport, workspace)
            else:
                steps = powersgd_all_reduce(low_rank, bucket.tensors, bucket.tensors, i, transport, workspace)
            sent.append(drive(transport, steps))
        assert sent == expected


def test_payload_of_a_sparse_gradient_is_its_values_and_indices(transport):
    gradient = torch.sparse_coo_tensor([[0, 5, 9]], torch.ones(3, 4), (10, 4), check_invariants=True).coalesce()
    assert drive(transport, sparse_all_reduce(gradient, transport, 2)) == 3 * 4 * 4 + 3 * 8


def test_payload_of_a_collective_is_counted_once_by_run_and_by_start(transport):
    tensor = torch.ones(5)
    transport.run(transport.all_reduce(tensor))
    assert transport.payload_bytes == 20
    transport.run(transport.all_reduce_max(tensor))
    assert transport.payload_bytes == 40
    transport.start(transport.all_reduce(tensor, tensor[:2], tensor.double()))
    assert transport.payload_bytes == 40 + 20 + 8 + 40
    assert drive(transport, only(transport.all_reduce(tensor))) == 20


async def only(collective):
    await collective


HOOKS = {
    "none": (lambda: (None, allreduce_hook), [1564] * 5),
    "fp16": (lambda: (None, fp16_compress_hook), [782] * 5),
    "bf16": (lambda: (None, bf16_compress_hook), [782] * 5),
    "scaled": (lambda: (ScaledCastState(), scaled_cast_hook), [794] * 2 + [782] * 3),  # buckets change once
    "powersgd": (lambda: (PowerSGDState(None, RANK, 2), powerSGD_hook), [1564] * 2 + [348] * 3),
    "powersgd, bf16 factors": (
        lambda: (PowerSGDState(None, RANK, 2, factor_dtype=torch.bfloat16), powerSGD_hook),
        [1564] * 2 + [188] * 3,
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_payload_of_each_hook_step_is_exact(world_of_one, hook, wrapper):
    make, expected = HOOKS[hook]
    model = nn.Linear(COLUMNS, ROWS)
    model.bias = nn.Parameter(torch.zeros(BIAS))
    model.forward = lambda x: (x @ model.weight.t()).sum() + model.bias.sum()
    ddp = WRAPPERS[wrapper](model)
    register(ddp, make())
    sent = []
    for _ in expected:
        before = sent_bytes()
        ddp(torch.ones(2, COLUMNS)).backward()
        sent.append(sent_bytes() - before)
    assert sent == expected
