"""PowerSGD with quantized factors: precision, independence of the bucket, gradients sent with P, and checkpoints.

The laws, payloads and CUDA graphs of all options are tested elsewhere, with ``factor_wire`` among them.
"""

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, LowRankPolicy, Step, alternating_all_reduce, powersgd_all_reduce
from gradwire.hooks.powerSGD_hook import FACTOR_WIRES, PowerSGDState, powerSGD_hook
from gradwire.kernels import WIRE_FORMATS
from tests.support.bits import assert_same_bits
from tests.support.powersgd_steps import START, Fed, new_state, noise, run_steps
from tests.support.ranks import on_ranks
from tests.support.states import Ledger, errors_of
from tests.support.training import gradients, wrapped

wires = pytest.mark.parametrize("wire", FACTOR_WIRES)
# Largest error of an element relative to the largest of its block: half a step of the grid, or half an eps.
PRECISION = {"int8": 0.5 / 127 * 1.01, "int4": 0.5 / 7 * 1.01, "bf16": 2.0**-9, "fp16": 2.0**-11}


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


def low_rank_matrix(seed, rows=40, columns=70, rank=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


@wires
def test_error_memory_holds_what_quantization_of_the_factors_lost(wire):
    gradient = low_rank_matrix(0)
    results, bucket = averaged([gradient], factor_wire=WIRE_FORMATS[wire])
    error = bucket.memory["errors"]["0"]
    torch.testing.assert_close(results[0] + error, gradient, rtol=0, atol=2e-6)
    # Every element of P and of Q deviates by its precision at most, twice; the basis of P may turn by as much.
    bound = 2 * PRECISION[wire] * (4 * (40 + 70)) ** 0.5 * torch.linalg.matrix_norm(gradient, 2)
    assert 0.01 * bound < error.norm() <= bound


@pytest.mark.parametrize("algorithm", [powersgd_all_reduce, alternating_all_reduce])
def test_quantized_factors_do_not_depend_on_their_neighbors(algorithm):
    gradients = [
        low_rank_matrix(0, 40, 24),
        torch.randn(5),
        1e6 * low_rank_matrix(1, 17, 70),
        low_rank_matrix(2, 33, 9),
    ]
    options = {"factor_wire": WIRE_FORMATS["int8"], "alternating": algorithm is alternating_all_reduce}
    together, _ = averaged(gradients, 3, algorithm, names=list("abcd"), **options)
    for name, gradient, result in zip("abcd", gradients, together, strict=True):
        if gradient.dim() > 1:
            alone, _ = averaged([gradient], 3, algorithm, names=[name], **options)
            assert_same_bits(alone[0], result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_sent_with_quantized_factors_are_exact(dtype):
    gradients = [each.to(dtype) for each in (low_rank_matrix(0), torch.randn(100), torch.randn(3))]
    results, _ = averaged(gradients, factor_wire=WIRE_FORMATS["int4"])
    assert_same_bits(results[1:], gradients[1:])


def test_wire_and_dtype_of_factors_exclude_each_other():
    with pytest.raises(
        ValueError, match=r"factor_wire is 'int8' and factor_dtype is torch\.bfloat16.*factor_dtype=None"
    ):
        PowerSGDState(None, factor_wire="int8", factor_dtype=torch.bfloat16)


@on_ranks(2)
def test_factor_wire_can_change_in_training():
    values = noise(2, START + 6, [(16, 12), (9,)])
    changed = run_steps(values, changes={START + 3: {"factor_wire": "int8"}}, remember=True)
    plain, quantized = (run_steps(values, options={"factor_wire": wire}) for wire in (None, "int8"))
    for step in range(START + 3):
        assert_same_bits(changed[step].gradients, plain[step].gradients)
    assert not torch.equal(changed[-1].gradients[0], plain[-1].gradients[0])
    assert not torch.equal(changed[-1].gradients[0], quantized[-1].gradients[0])


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
