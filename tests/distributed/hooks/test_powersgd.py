"""PowerSGD: the laws, for its results and its error memory."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import transport
from gradwire.hooks.powerSGD_hook import powerSGD_hook
from tests.support.bits import assert_same_bits
from tests.support.powersgd_steps import (
    NEARLY_ONE,
    START,
    VARIANTS,
    U,
    new_state,
    noise,
    one_thread,  # noqa: F401 - an autouse fixture
    run_steps,
)
from tests.support.ranks import on_ranks
from tests.support.training import SMALL, SMALLEST, WRAPPERS, train

# --- law 1: error feedback loses nothing


CONSERVING = {
    "plain": {},
    "rank_4": {"options": {"matrix_approximation_rank": 4}},
    "alternating": {"options": {"alternating": True}},
    "alternating_from_an_odd_step": {"options": {"alternating": True, "start_powerSGD_iter": 3}},
    "cold": {"options": {"warm_start": False, "matrix_approximation_rank": 2}},
    "bf16_factors": {"options": {"factor_dtype": torch.bfloat16}},
    "int8_factors": {"options": {"factor_wire": "int8"}},
    "alternating_int4_factors": {"options": {"factor_wire": "int4", "alternating": True}},
    "fp16_with_int8_factors": {"dtype": torch.float16, "options": {"factor_wire": "int8"}},
    "batched_int8_factors": {"hook": "batched", "options": {"factor_wire": "int8"}},
    "stacks": {"options": {"stacks": {"weights.0": 3}}},
    "ranks_that_change": {"changes": {20: {"matrix_approximation_rank": 3}, 40: {"matrix_approximation_rank": 2}}},
    "batched": {"hook": "batched"},
    "batched_alternating": {"hook": "batched", "options": {"alternating": True}},
    "fp16_of_powersgd": {"hook": "fp16_of_powersgd"},
    "bf16_of_powersgd": {"hook": "bf16_of_powersgd"},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp16_with_fp32_factors": {"dtype": torch.float16, "options": {"factor_dtype": torch.float32}},
    "fp64": {"dtype": torch.float64},
    "complex": {"dtype": torch.complex64},
    "channels_last": {"channels_last": True},
    "on_pytorch": {"wrapper": "pytorch"},
    "views_on_pytorch": {"wrapper": "pytorch", "gradient_as_bucket_view": True},
    "views": {"gradient_as_bucket_view": True},
}


def real(tensor):
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def conserved(dtype=torch.float32, channels_last=False, *, steps, hook="powersgd", wrapper="gradwire", **arguments):
    """Sums of this rank's gradients and results, its last error, and the bound of their rounding."""
    shapes = [(24, 16), (8, 3, 3, 3), (33, 7), (11,), (6, 5), ()]
    values = noise(dist.get_world_size(), steps, shapes, dtype)
    if channels_last:
        for ranks in values:
            for tensors in ranks:
                tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    wire = {"fp16_of_powersgd": torch.float16, "bf16_of_powersgd": torch.bfloat16}.get(hook, dtype.to_real())
    u_of_wire = torch.finfo(wire).eps / 2
    u_of_error = 2.0**-53 if dtype == torch.float64 else U
    options = arguments.get("options", {})
    u_of_factors = u_of_error  # quantized ones are added up in fp32
    if "factor_wire" not in options:
        default = torch.bfloat16 if wire == torch.float16 else wire
        u_of_factors = torch.finfo(options.get("factor_dtype", default)).eps / 2
    run = run_steps(values, hook=hook, wrapper=wrapper, remember=True, **arguments)
    world_size = dist.get_world_size()
    totals = []
    for i in range(len(shapes)):
        name = f"weights.{i}"
        gradient = result = bound = 0
        old = torch.zeros(())
        for ranks, step in zip(values, run, strict=True):
            new = step.errors.get(name, torch.zeros(()))
            g = real(ranks[dist.get_rank()][i])
            gradient, result = gradient + g, result + real(step.gradients[i])
            # M = G + E and E = M - out round once each; the mean of what is not compressed once for each rank, twice.
            is_exact = name in step.errors and hook != "batched"
            bound = bound + u_of_error * ((g + old.double()).abs() + new.double().abs())
            bound = bound + 2.0**-53 * (gradient.abs() + result.abs())  # of these sums themselves
            if is_exact and world_size > 1:
                # The ranks' own factors, in E, add up to the received one but for the rounding of its sum. With unit
                # columns in the other factor, an element of their product is at most the norm of its column of M, or of
                # its row if P is sent.
                m = (g + old.double()).reshape(len(g), -1).square()
                norms = m.sum(0).sqrt() + m.sum(1, keepdim=True).sqrt()
                bound = bound + (world_size * u_of_factors + 8 * u_of_error) * norms.view_as(g)
            if not is_exact:
                magnitudes = sum(real(tensors[i]).abs() for tensors in ranks) / world_size
                bound = bound + (world_size + 2) * u_of_wire * magnitudes
            old = new
        totals.append((gradient, result, old.double(), bound))
    return totals, sorted(run[-1].errors)


@pytest.mark.parametrize(
    ("size", "variant"),
    [*((2, name) for name in CONSERVING), *((3, name) for name in ("plain", "batched", "int8_factors"))],
)
@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_law1_gradients_of_many_steps_equal_results_and_remaining_errors(worlds, size, variant, steps):
    results = worlds(size).run(conserved, steps=steps, **CONSERVING[variant])
    for _, names in results:
        assert {"weights.0", "weights.1", "weights.2"} <= set(names)
    for rank_totals in zip(*(totals for totals, _ in results), strict=True):
        gradient, result, error, bound = (sum(parts) for parts in zip(*rank_totals, strict=True))
        # Measured: up to 0.2 of the bound, because roundings seldom all point one way.
        assert ((gradient - result - error).abs() <= bound * NEARLY_ONE).all()


@pytest.mark.parametrize("variant", ["int8_factors", "alternating_int4_factors"])
@on_ranks(3)
def test_law1_holds_for_quantized_factors_in_several_pieces(variant):
    with mock.patch.object(transport, "MAX_CELL_BYTES", 64):
        assert transport.pieces_on_gloo(24 * 16, 3) > 1
        totals, _ = conserved(steps=20, **CONSERVING[variant])
    for sums in totals:
        gradient, result, error, bound = map(torch.clone, sums)
        for each in (gradient, result, error, bound):
            dist.all_reduce(each)
        assert ((gradient - result - error).abs() <= bound * NEARLY_ONE).all()


@pytest.mark.parametrize("variant", ["plain", "alternating", "int8_factors", "bf16_factors", "batched"])
@on_ranks(2)
def test_errors_of_ranks_with_different_gradients_stay_bounded(variant):
    """With the mean's factors instead of its own, a rank's errors would add up its differences from the mean."""
    generator = torch.Generator().manual_seed(0)
    values = [[[torch.randn(24, 16, generator=generator)] for _ in range(2)] for _ in range(START + 150)]
    arguments = CONSERVING[variant]
    options = {"matrix_approximation_rank": 3} | arguments.get("options", {})
    steps = run_steps(values, remember=True, **arguments | {"options": options})
    norms = [step.errors["weights.0"].norm().item() for step in steps[START:]]
    assert max(norms[100:]) <= 1.2 * max(norms[20:50])  # a random walk would be at sqrt(3) times the norm


# --- law 3: no compression, no change


OFF = {
    "not_started": {"start_powerSGD_iter": 5},
    "every_parameter_exempt": {"ranks": {"*": 0}},
    "nothing_worth_it": {"min_compression_rate": 1e6},
    "no_shrinking": {"matrix_approximation_rank": 1000, "min_compression_rate": 0.001},
}


@pytest.mark.parametrize(
    ("wrapper", "view"),
    [("pytorch", False), ("gradwire", False), ("gradwire", True)],
    ids=["pytorch", "gradwire", "gradwire-views"],
)
@pytest.mark.parametrize("model", ["mixed", "odd"])
@pytest.mark.parametrize("off", OFF)
@on_ranks(2, 3)
def test_law3_powersgd_that_is_off_equals_plain_all_reduce(off, model, wrapper, view):
    options = {"steps": 5, "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    state = new_state(**OFF[off])
    compressed = train(wrapper, model, hook=(state, powerSGD_hook), **options)
    assert not state.memory.tensors("errors")
    assert_same_bits(compressed, train(wrapper, model, hook="allreduce", **options))


# --- law 4: other buckets and the other DDP


@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(2)
def test_law4_result_depends_neither_on_the_ddp_nor_on_the_buckets(variant):
    # On two ranks, whose sums do not depend on the place in a message; and with factors of multiples of 64 bytes, on
    # whose alignment the rounding of a BLAS may depend.
    values = noise(2, START + 6, [(64, 32), (48, 16), (16,), (32, 4, 2, 2), (16, 128), (5,)])
    arguments = {"options": VARIANTS[variant], "remember": True}
    sizes = (SMALLEST, 0.003, 100)
    first, *others = (
        [run_steps(values, wrapper=wrapper, bucket_cap_mb=size, **arguments) for size in sizes] for wrapper in WRAPPERS
    )
    for other in others:
        assert_same_bits(other, first)
    if variant == "int8_factors":  # the rank that sums up a block, which depends on the bucket, keeps its rounding
        return
    for other in first[1:]:
        assert_same_bits(other, first[0])


# --- law 5: no new NaN; a non-finite step leaves errors and factors unchanged


BAD_STEP, BAD = START + 3, 1  # the step, and the parameter
MEMORIES = {
    "plain": {},
    "no_feedback": {"options": {"use_error_feedback": False}},
    "bf16_factors": {"options": {"factor_dtype": torch.bfloat16}},
    "int8_factors": {"options": {"factor_wire": "int8"}},
    "rank_3": {"options": {"matrix_approximation_rank": 3}},
    "fp16_of_powersgd": {"hook": "fp16_of_powersgd"},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "on_pytorch": {"wrapper": "pytorch"},
}


def memory_of(step, name):
    return [memory.get(name) for memory in (step.errors, step.q, step.p)]


def with_bad_element(values, bad, culprit, step=BAD_STEP, parameter=BAD):
    """Copies of ``values``, in one of which one element of one rank is bad."""
    values = [[[tensor.clone() for tensor in tensors] for tensors in ranks] for ranks in values]
    values[step][culprit][parameter][-1, 2] = bad
    return values


@pytest.mark.parametrize(
    ("variant", "bad"), [("plain", math.nan), ("plain", -math.inf), *((variant, math.inf) for variant in MEMORIES)]
)
@on_ranks(2, 3)
def test_law5_nonfinite_matrix_becomes_nan_and_changes_nothing_else(variant, bad):
    arguments, name = {"remember": True} | MEMORIES[variant], f"weights.{BAD}"
    shapes, size = [(16, 12), (20, 16), (9,), (8, 3, 2, 2)], dist.get_world_size()
    good = noise(size, START + 8, shapes, arguments.pop("dtype", torch.float32))
    undisturbed = run_steps(good, **arguments)
    disturbed = run_steps(with_bad_element(good, bad, culprit=size - 1), **arguments)
    skipped = run_steps(good[:BAD_STEP] + good[BAD_STEP + 1 :], **arguments)
    assert disturbed[BAD_STEP].gradients[BAD].isnan().all()
    assert_same_bits(memory_of(disturbed[BAD_STEP], name), memory_of(disturbed[BAD_STEP - 1], name))
    for step in range(len(good)):
        for i in {0, 1, 2, 3} - {BAD}:
            assert_same_bits(disturbed[step].gradients[i], undisturbed[step].gradients[i])
    for step in range(BAD_STEP + 1, len(good)):
        assert_same_bits(disturbed[step].gradients[BAD], skipped[step - 1].gradients[BAD])
        assert_same_bits(memory_of(disturbed[step], name), memory_of(skipped[step - 1], name))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_step", [BAD_STEP, BAD_STEP + 1], ids=["odd", "even"])
@on_ranks(2, 3)
def test_law5_alternating_after_nonfinite_matrix_continues(bad_step, bad):
    good, name = noise(dist.get_world_size(), START + 8, [(16, 12), (20, 16), (9,)]), f"weights.{BAD}"
    bad_values = with_bad_element(good, bad, culprit=0, step=bad_step)
    undisturbed, disturbed = (
        run_steps(values, options={"alternating": True}, remember=True) for values in (good, bad_values)
    )
    assert_same_bits(memory_of(disturbed[bad_step], name), memory_of(disturbed[bad_step - 1], name))
    assert disturbed[bad_step].gradients[BAD].isnan().all()
    for step in range(len(good)):
        for i in (0, 2):
            assert_same_bits(disturbed[step].gradients[i], undisturbed[step].gradients[i])
        assert step == bad_step or disturbed[step].gradients[BAD].isfinite().all()


@on_ranks(2, 3)
def test_law5_batched_bucket_with_nonfinite_element_keeps_its_memory():
    size = dist.get_world_size()
    good = noise(size, START + 8, [(16, 12), (9,)])
    skipped = run_steps(good[:BAD_STEP] + good[BAD_STEP + 1 :], hook="batched")
    values = with_bad_element(good, math.nan, culprit=size - 1, parameter=0)
    steps = run_steps(values, hook="batched", remember=True)
    # 201 elements are a matrix of 13 x 15, and 6 that remain.
    assert sum(gradient.isnan().sum() for gradient in steps[BAD_STEP].gradients) == 13 * 15
    assert_same_bits(steps[BAD_STEP].errors, steps[BAD_STEP - 1].errors)
    assert_same_bits(steps[BAD_STEP].q, steps[BAD_STEP - 1].q)
    for step in range(BAD_STEP + 1, len(values)):
        assert_same_bits(steps[step].gradients, skipped[step - 1].gradients)


@on_ranks(2, 3)
def test_matrix_with_overflowing_products_is_skipped_as_nonfinite():
    # A sum over a row of 1e38s leaves fp32's range, although each of them is in it.
    values = noise(dist.get_world_size(), START + 4, [(16, 16), (12, 10)])
    for tensors in values[START + 2]:
        tensors[0] = torch.full((16, 16), 3e38)
    *_, before, bad, after = run_steps(values, remember=True)
    assert bad.gradients[0].isnan().all()
    assert_same_bits(memory_of(bad, "weights.0"), memory_of(before, "weights.0"))
    assert bad.gradients[1].isfinite().all()
    assert after.gradients[0].isfinite().all()
