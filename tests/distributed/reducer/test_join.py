"""`join`: training on unequal numbers of inputs. See features.py for the oracle."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import Step
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.reducer import bucket as buckets
from gradwire.reducer.bucket import BucketSpec, DenseBucket
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import UNDER_HOOKS, Parts, assert_parity, over, views, wrap, zero_grad
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALLEST, error_of, gradients, wrapped
from tests.support.zoo import Probe


def join_with_inputs(wrapper, hook, view, lengths, divide, clear="to-none", joins=True, find_unused=False, **options):
    """Train on ``lengths[rank]`` inputs under ``join``; without it, on inputs of zeros for as long as any rank.

    The gradients of `Probe` are its inputs, whatever its parameters are.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(6, 5), (7,), (4, 4), (3,)]
    ddp = wrap(wrapper, Probe(*shapes), hook, view, find_unused_parameters=find_unused, **options)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide, enable=joins):
        for step in range(lengths[rank] if joins else max(lengths)):
            zero_grad(ddp, clear)
            inputs = [torch.randint(-8, 9, shape, generator=generator) * (step < lengths[rank]) for shape in shapes]
            ddp(*(12.0 * x for x in inputs)).backward()
            live = sum(length > step for length in lengths)
            gradient = gradients(ddp)
            if not joins and not divide:
                gradient = {name: g * (size / live) for name, g in gradient.items()}
            if step < lengths[rank]:
                seen.append(gradient)
    return seen, [p.detach().clone() for p in ddp.parameters()]


divisions = pytest.mark.parametrize("divide", [True, False], ids=["by-all", "by-the-rest"])
uneven = pytest.mark.parametrize("lengths", [(5, 3, 1), (0, 4, 4), (2, 6, 3)], ids=str)


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@views
@divisions
@uneven
@pytest.mark.parametrize("find_unused", [False, True], ids=["all-used", "find-unused"])
@on_ranks(3)
def test_law4_join_matches_pytorch(find_unused, lengths, divide, view, clear):
    options = {"lengths": lengths, "divide": divide, "find_unused": find_unused}
    _, parameters = assert_parity(join_with_inputs, hook="none", view=view, clear=clear, **options)
    assert_same_on_all_ranks(from_all_ranks(parameters))


@over([*UNDER_HOOKS, ("int4", False)])
@divisions
@uneven
@on_ranks(3)
def test_joined_rank_adds_zeros_under_a_hook(lengths, divide, hook, view):
    # PyTorch's DDP divides by the number of all ranks under a hook, whatever is asked for.
    options = {"lengths": lengths, "divide": divide, "hook": hook, "view": view}
    joined, fed = (join_with_inputs("gradwire", joins=joins, **options)[0] for joins in (True, False))
    assert_same_bits(joined, fed)


def end_early(wrapper, lengths):
    """The steps taken and the error of training that ends with the first rank's inputs; then a step that goes well."""
    ddp = wrap(wrapper, Probe(3))
    steps = []

    def train_on():
        with ddp.join(throw_on_early_termination=True):
            for step in range(lengths[dist.get_rank()]):
                ddp(torch.ones(3)).backward()
                steps.append(step)

    error = error_of(train_on)
    ddp.zero_grad()
    ddp(torch.full((3,), 6.0 * dist.get_rank())).backward()
    return steps, error, gradients(ddp)


@uneven
@on_ranks(2, 3)
def test_law4_join_with_early_termination_error_matches_pytorch(lengths):
    lengths = lengths[: dist.get_world_size()]
    steps, error, _ = assert_parity(end_early, lengths=lengths)
    assert len(steps) == min(lengths)
    rank = dist.get_rank()
    is_first = lengths[rank] == min(lengths)
    assert (f"Rank {rank} exhausted all inputs" if is_first else "Detected at least one rank that exhausted") in error[
        1
    ]


@views
def test_default_reduction_outside_cpus_divides_by_bucket_divisor(monkeypatch, view):
    submitted = []
    monkeypatch.setattr(buckets, "reduce_bucket", lambda *arguments, **_: submitted.append(arguments[2]))
    local = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 7), (11,), ())]
    parameters = [nn.Parameter(torch.zeros_like(each)) for each in local]
    names = [str(i) for i in range(len(parameters))]
    spec = BucketSpec(index=0, is_last=True, members=[0, 1, 2], parameters=parameters, names=names)
    bucket, transport = DenseBucket(spec, as_view=view), LocalTransport()
    for parameter, gradient in zip(parameters, local, strict=True):
        parameter.grad = gradient.clone()
    bucket.divisor = 5
    bucket.collect(zero_copy=True)
    buckets.default_reduction(SimpleNamespace(connections=None, has_streams=True), bucket)
    (algorithm,), workspace = submitted, Workspace(torch.device("cpu"))
    run_algorithm(algorithm(Step(*bucket.work()[:2], None, 0, transport, workspace)), transport)
    bucket.finish(bucket.work().result, 1, {})
    assert_same_bits([each.grad for each in parameters], [each * torch.tensor(1 / 5) for each in local])


@on_ranks(2)
def test_bucket_that_a_step_before_join_skipped_is_in_the_steps_of_join():
    state = QuantizationState(None, wire="int4")
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrapped(model=Parts(), hook=(state, quantization_hook), bucket_cap_mb=SMALLEST, **skipping)
    ddp(torch.ones(2, 4), (3, 4)).backward()  # skips the last buckets
    with ddp.join():
        for _ in range(1 + dist.get_rank()):
            ddp(torch.ones(2, 4), range(5)).backward()
    assert from_all_ranks(state.iter) == [3, 3]
