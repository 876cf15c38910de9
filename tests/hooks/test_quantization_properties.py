"""Properties of a quantized all-reduce over shapes, magnitudes, formats, ranks and steps; all ranks in one process.

Each case runs a bucket of random gradients for a few steps. The exact means are summed in fp64.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gradwire.comm import Transport, Workspace
from gradwire.compress import Quantization, QuantizedBucket, Step, quantized_all_reduce
from gradwire.kernels import WIRE_FORMATS
from gradwire.testing._cases import Case, parameters
from gradwire.testing._laws import lost
from gradwire.testing._many_ranks import run_in_lockstep
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks

CPU = torch.device("cpu")
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
MANY = settings(FEW, max_examples=300)
SLOW = ("fp8", "int2", "bf16", "fp32")
formats = pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=[pytest.mark.slow] * (wire in SLOW)) for wire in WIRE_FORMATS]
)


class SimulatedTransport(Transport):
    """Rank ``rank`` of ``world_size``, which cuts every message into ``pieces``."""

    def __init__(self, world_size, rank, pieces):
        super().__init__(world_size, rank)
        self._pieces = pieces

    def pieces(self, nbytes):
        return self._pieces


@st.composite
def cases(draw, **fixed):
    # Up to 1e37: a few steps' sums stay within fp32. Down to 1e-38, where fp32 has fewer bits.
    exponent = st.integers(-4, 2) | st.integers(-38, 37)
    parameter = st.builds(replace, parameters(is_moderate=False), dtype=st.just(torch.float32), exponent=exponent)
    training = Case(
        draw(st.lists(parameter, min_size=1, max_size=4).map(tuple)),
        steps=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10**6)),
    )
    options = {
        "world_size": draw(st.integers(1, 4)),
        "pieces": draw(st.integers(1, 3)),
        "block_size": draw(st.sampled_from((32, 64, 256))),
        "feedback": draw(st.booleans()),
    }
    return training, options | fixed


class Run:
    """The bucket of every rank, and its steps."""

    def __init__(self, case, wire, *, world_size, pieces, block_size, feedback):
        self._case, self._ranks = case, range(world_size)
        self._transports = [SimulatedTransport(world_size, rank, pieces) for rank in self._ranks]
        options = Quantization(block_size=block_size, error_dtype=torch.float32 if feedback else None)
        layouts, formats = self.gradients(0)[0], [WIRE_FORMATS[wire]] * len(case.parameters)
        self._buckets = [
            QuantizedBucket(layouts, formats, transport, options, names=case.names) for transport in self._transports
        ]
        self._workspaces = [Workspace(CPU) for _ in self._ranks]

    def gradients(self, number):
        """Of every rank, in a step, with the strides of the parameters."""
        layouts = [torch.empty_like(parameter.new().detach()) for parameter in self._case.parameters]
        ranks = [self._case.gradients(rank, number).values() for rank in self._ranks]
        return [[torch.empty_like(layout).copy_(g) for layout, g in zip(layouts, own, strict=True)] for own in ranks]

    def step(self, number, gradients=None):
        """The results of every rank, in tensors of their own."""
        gradients = gradients or self.gradients(number)
        results = [
            [torch.full_like(gradient, torch.nan) for gradient in rank_gradients] for rank_gradients in gradients
        ]
        parts = zip(self._buckets, gradients, results, self._transports, self._workspaces, strict=True)
        run_in_lockstep(
            [
                quantized_all_reduce(Step.of(bucket, own, result, number, transport, workspace))
                for bucket, own, result, transport, workspace in parts
            ]
        )
        return results

    def errors(self):
        """Of every rank, by parameter name."""
        return [bucket.folded()["errors"] for bucket in self._buckets]


def check_conservation(case, wire):
    """Laws 1 and 2: the sum of the exact means is what was applied, plus the errors of all ranks; all ranks agree."""
    training, options = case
    run, applied = Run(training, wire, **options), []
    for number in range(training.steps):
        results = run.step(number)
        assert_same_on_all_ranks(results)
        assert all(result.isfinite().all() for result in results[0])
        applied.append(dict(zip(training.names, results[0], strict=True)))
    if options["feedback"]:
        errors = {name: sum(errors[name].double() for errors in run.errors()) for name in training.names}
        assert lost(training, options["world_size"], range(training.steps), applied, errors, {}) is None


@formats
@FEW
@given(case=cases())
def test_laws_1_and_2_hold_for_any_bucket(wire, case):
    check_conservation(case, wire)


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRE_FORMATS)
@MANY
@given(case=cases())
def test_laws_1_and_2_hold_for_many_buckets(wire, case):
    check_conservation(case, wire)


@formats
@FEW
@given(case=cases(feedback=True), data=st.data())
def test_law5_non_finite_element_reaches_all_ranks_and_no_error_changes(wire, case, data):
    training, options = case
    run = Run(training, wire, **options)
    for number in range(training.steps):
        run.step(number)
    before = run.errors()
    gradients = run.gradients(training.steps)
    rank_gradients = data.draw(st.sampled_from(gradients), label="rank")
    sized = [k for k, gradient in enumerate(rank_gradients) if gradient.numel() > 0]
    assume(sized)
    parameter = data.draw(st.sampled_from(sized), label="parameter")
    element = data.draw(st.integers(0, rank_gradients[parameter].numel() - 1), label="element")
    place = tuple(index.item() for index in torch.unravel_index(torch.tensor(element), rank_gradients[parameter].shape))
    rank_gradients[parameter][place] = data.draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)), label="value")
    results = run.step(training.steps, gradients)
    assert_same_on_all_ranks(results)
    assert not results[0][parameter][place].isfinite()
    for k, result in enumerate(results[0]):
        assert k == parameter or result.isfinite().all()
    assert_same_bits(run.errors(), before)
