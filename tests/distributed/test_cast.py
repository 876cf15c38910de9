"""The divisor of `cast_all_reduce`, of `sparse_all_reduce`, and of the reduction without a hook that uses them."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.comm import LocalTransport, Transport, Workspace, run_algorithm
from gradwire.compress import Gradients, cast_all_reduce, sparse_all_reduce
from gradwire.kernels import SegmentTable
from gradwire.reducer import reducer
from gradwire.reducer.bucket import BucketSpec, DenseBucket
from tests.support.bits import assert_same_bits
from tests.support.lockstep import run_in_lockstep

N_RANKS = 3


def drawn(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in ((5, 7), (11,), ())]


def targets_of(gradients, kind):
    """Where the result goes, and the tensors to read it from: in place, in other tensors, or in one flat one."""
    if kind == "flat":
        flat = torch.empty(sum(each.numel() for each in gradients))
        return Gradients([flat], SegmentTable([flat])), SegmentTable(gradients).views(flat)
    tensors = gradients if kind == "in place" else [torch.empty_like(each) for each in gradients]
    return Gradients(tensors, SegmentTable(tensors)), tensors


@pytest.mark.parametrize("kind", ["in place", "others", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divisor", [None, 1, 2, 3, 5])
def test_cast_all_reduce_divides_by_the_divisor_before_the_cast(divisor, dtype, kind):
    scale = torch.tensor(1 / (divisor or N_RANKS))
    ranks = [drawn(rank) for rank in range(N_RANKS)]
    expected = [
        torch.stack([(gradient * scale).to(dtype) for gradient in rank_gradients]).sum(0, dtype=dtype).float()
        for rank_gradients in zip(*ranks, strict=True)
    ]
    algorithms, results = [], []
    for rank, gradients in enumerate(ranks):
        source = Gradients(gradients, SegmentTable(gradients))
        target, result = targets_of(gradients, kind)
        results.append(result)
        transport, workspace = Transport(N_RANKS, rank), Workspace(torch.device("cpu"))
        algorithms.append(cast_all_reduce(source, target, dtype, transport, workspace, divisor))
    run_in_lockstep(algorithms)
    for result in results:
        assert_same_bits(list(result), expected)


@pytest.mark.parametrize("divisor", [1, 2, 3, 5])
def test_sparse_all_reduce_divides_by_the_divisor(divisor):
    dense, transport = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), LocalTransport()
    result = run_algorithm(sparse_all_reduce(dense.to_sparse(1), transport, divisor), transport)
    assert result.is_sparse
    assert_same_bits(result.to_dense(), dense / divisor)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_default_reduction_outside_cpus_divides_by_bucket_divisor(monkeypatch, view):
    # In `join`, that is the number of ranks with inputs left.
    submitted = []
    monkeypatch.setattr(reducer, "reduce_bucket", lambda *arguments, **_: submitted.append(arguments[2]))
    gradients = drawn(0)
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    names = [str(i) for i in range(len(parameters))]
    spec = BucketSpec(index=0, is_last=True, members=[0, 1, 2], parameters=parameters, names=names)
    bucket, transport = DenseBucket(spec, as_view=view), LocalTransport()
    bucket.divisor = 5
    bucket.collect(zero_copy=True)
    reducer.default_reduction(SimpleNamespace(process_group=None, has_streams=True), bucket)
    (algorithm,), workspace = submitted, Workspace(torch.device("cpu"))
    run_algorithm(algorithm(bucket.source(), bucket.target(), transport, workspace), transport)
    bucket.finish(bucket.target().tensors[0], 1, {})
    assert_same_bits([each.grad for each in parameters], [each * torch.tensor(1 / 5) for each in gradients])
