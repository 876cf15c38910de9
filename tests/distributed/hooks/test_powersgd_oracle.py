"""PowerSGD against an oracle in fp64, with its options and with quantized factors."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, LowRankPolicy, Step, powersgd_all_reduce
from gradwire.hooks.powerSGD_hook import FACTOR_WIRES, powerSGD_hook
from gradwire.kernels import WIRE_FORMATS, Matrix, MatrixTable, bound_low_rank, random_key
from tests.support.bits import assert_same_bits, same_bits
from tests.support.powersgd_steps import (
    START,
    VARIANTS,
    Fed,
    matrix,
    new_state,
    noise,
    one_thread,  # noqa: F401 - an autouse fixture
    run_steps,
)
from tests.support.ranks import on_ranks
from tests.support.states import Ledger, errors_of
from tests.support.training import gradients, wrapped

# --- the oracle: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
# Optimization", NeurIPS 2019, for one matrix, all ranks in one process; only random numbers are the product's


def random_q(name, columns, rank, step, dtype=torch.float32):
    """The Q, m x r, that the product draws in ``step`` for the parameter ``name``."""
    matrix = Matrix(columns, columns, rank, random_key(0, f"{name}/0"))
    table = MatrixTable([matrix], dtype, torch.device("cpu"))
    q = torch.empty(table.q.numel, dtype=dtype)
    bound_low_rank(table).draw(table.q, table.keys, torch.tensor([step]), q)
    return table.q.views(q)[0].t()


def gram_schmidt(p):
    """Orthonormal columns with the same span: modified Gram-Schmidt."""
    p = p.clone()
    for c in range(p.shape[1]):
        p[:, c] /= p[:, c].norm()
        p[:, c + 1 :] -= torch.outer(p[:, c], p[:, c] @ p[:, c + 1 :])
    return p


def powersgd(steps, first, drawn, feedback=True, warm_start=True, alternating=False):
    """The decompressed means of algorithms 1 and 2, or of ACP-SGD (ICDCS 2023, algorithm 2) if ``alternating``.

    Args:
        steps: for each step, an n x m gradient in fp64 for each rank.
        first: number of the first step.
        drawn: function of a step's number that returns a random Q, m x r.
    """
    q, p, errors, results = drawn(first).double(), None, [0.0] * len(steps[0]), []
    for number, ranks in enumerate(steps, first):
        corrected = [gradient + error for gradient, error in zip(ranks, errors, strict=True)]
        mean = sum(corrected) / len(corrected)
        if not warm_start:
            q = drawn(number).double()
        if not alternating:
            p = gram_schmidt(mean @ q)
            q = mean.t() @ p
        elif number % 2 == 0:
            q = gram_schmidt(q)
            p = mean @ q
        else:
            p = gram_schmidt(p)
            q = mean.t() @ p
        results.append(p @ q.t())
        if feedback:
            errors = [matrix - results[-1] for matrix in corrected]
    return results


SHAPES = [(40, 60), (24, 5, 3, 3), (33, 57), (96, 80)]
RANKS = (1, 2, 4, 32)
BY_NAME = {f"weights.{i}": rank for i, rank in enumerate(RANKS)}


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "int8_factors"])
@on_ranks(1, 2, 3)
def test_fifty_steps_match_oracle(variant):
    values = noise(dist.get_world_size(), START + 50, SHAPES, torch.float64)
    steps = run_steps(values, options={"ranks": BY_NAME} | VARIANTS[variant])
    options = {"feedback": False} if variant == "no_feedback" else VARIANTS[variant]
    for i, (shape, rank) in enumerate(zip(SHAPES, RANKS, strict=True)):
        drawn = partial(random_q, f"weights.{i}", math.prod(shape[1:]), rank, dtype=torch.float64)
        expected = powersgd(
            [[matrix(tensors[i]) for tensors in ranks] for ranks in values[START:]], START, drawn, **options
        )
        for step, (found, result) in enumerate(zip(steps[START:], expected, strict=True)):
            off = (matrix(found.gradients[i]) - result).norm() / result.norm()
            # Rounding is amplified by the conditioning of P, and from step to step. Measured: up to 2e-11.
            assert off <= 1e-9, (step, rank, off)


# --- options


def test_rank_changed_in_training_applies_from_next_step(world):
    values = {"world_size": world.size, "steps": 12, "shapes": [(20, 16), (9,)]}
    changes = {5: {"matrix_approximation_rank": 3}, 8: {"ranks": {"*": 2}}, 10: {"use_error_feedback": False}}
    for steps in world.run(run_steps, values=values, changes=changes, remember=True):
        found = [torch.linalg.matrix_rank(step.gradients[0].double(), rtol=1e-5).item() for step in steps[START:]]
        assert found == [1] * 3 + [3] * 3 + [2] * 4
        assert not same_bits(steps[9].errors["weights.0"], steps[8].errors["weights.0"])
        assert same_bits(steps[11].errors["weights.0"], steps[9].errors["weights.0"])


# --- quantized factors


wires = pytest.mark.parametrize("wire", FACTOR_WIRES)
# Error of an element relative to the largest of its block: half a step of the grid, which few exceed, or half an eps.
PRECISION = {"int8": 0.5 / 128 * 1.01, "int4": 0.5 / 8 * 1.01, "bf16": 2.0**-9, "fp16": 2.0**-11}


def averaged(gradients, steps=1, algorithm=powersgd_all_reduce, **options):
    """The results of steps on the same gradients in a world of one, and the bucket."""
    shapes = LowRankPolicy(rank=4, min_compression_rate=1).matrix_shapes(gradients)
    names = options.pop("names", None)
    bucket = LowRankBucket(gradients, shapes, names=names, **options)
    workspace, transport = Workspace(torch.device("cpu")), LocalTransport()
    results = [torch.full_like(each, torch.nan) for each in gradients]
    for step in range(steps):
        run_algorithm(algorithm(Step.of(bucket, gradients, results, step, transport, workspace)), transport)
    return results, bucket


def low_rank_matrix(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 4, generator=generator) @ torch.randn(4, 70, generator=generator)


@wires
def test_error_memory_holds_what_quantization_of_the_factors_lost(wire):
    gradient = low_rank_matrix(0)
    results, bucket = averaged([gradient], factor_wire=WIRE_FORMATS[wire])
    error = bucket.memory["errors"]["0"]
    torch.testing.assert_close(results[0] + error, gradient, rtol=0, atol=2e-6)
    # Every element of P and of Q deviates by its precision at most, twice; the basis of P may turn by as much.
    bound = 2 * PRECISION[wire] * (4 * (40 + 70)) ** 0.5 * torch.linalg.matrix_norm(gradient, 2)
    assert 0.01 * bound < error.norm() <= bound


@on_ranks(2)
def test_checkpoint_of_plain_factors_resumes_with_quantized_ones():
    values = noise(2, START + 8, [(16, 12), (9,)])
    saved, loaded = (new_state(factor_wire=wire) for wire in (None, "int8"))
    ddp = wrapped(model=Fed(values[0][0]), hook=(saved, powerSGD_hook))
    for ranks in values[:-4]:
        ddp.zero_grad()
        ddp(*ranks[dist.get_rank()]).backward()
    other = wrapped(model=Fed(values[0][0]), hook=(loaded, powerSGD_hook))
    loaded.load_state_dict(saved.state_dict())
    assert_same_bits(loaded.state_dict(), saved.state_dict())
    ledger = Ledger(Fed(values[0][0]))
    for name, error in errors_of(saved.state_dict()).items():
        ledger.lost[name] += error
    for ranks in values[-4:]:
        own = dict(zip(ledger.lost, ranks[dist.get_rank()], strict=True))
        other.zero_grad()
        other(*ranks[dist.get_rank()]).backward()
        ledger.add(own, gradients(other))
    assert not ledger.close(loaded)


def test_other_seed_draws_other_random_columns(world):
    values = {"world_size": world.size, "steps": START + 1, "shapes": [(12, 10)]}
    first, again, other = (world.run(run_steps, values=values, options={"random_seed": seed})[0] for seed in (3, 3, 4))
    assert_same_bits(first, again)
    assert not same_bits(first[START].gradients[0], other[START].gradients[0])
