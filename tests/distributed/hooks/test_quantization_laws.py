"""`quantization_hook` against an oracle; law 1 with errors in bf16, other buckets, and buckets in one process."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import LocalTransport
from gradwire.compress import Quantization, QuantizedBucket
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.kernels import WIRE_FORMATS
from gradwire.sharded import ReduceScatterOptions
from tests.support.bits import assert_same_bits, differences
from tests.support.ranks import on_ranks, summed
from tests.support.states import Ledger
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, register, train, train_steps
from tests.support.zoo import Probe

SLOW = ("int8", "int6", "fp8", "int2", "bf16", "fp16", "fp32")  # the others share their code or represent them
formats = pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=[pytest.mark.slow] * (wire in SLOW)) for wire in WIRE_FORMATS]
)
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def hook_of(wire, **options):
    """The state and the hook, quantizing from the first step on."""
    return QuantizationState(None, wire, **({"block_size": 32, "start_iter": 0} | options)), quantization_hook


def wrapped(wrapper, model, hook, **options):
    ddp = WRAPPERS[wrapper](build(model), **({"bucket_cap_mb": SMALL} | options))
    return ddp, register(ddp, hook)


# --- an oracle of its own


def rounded(x, levels, block_size):
    """Blocks of ``x`` in integers from -levels to levels - 1 times a scale that makes the largest element -levels."""
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block_size)).view(-1, block_size)
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    mantissa, exponent = torch.frexp(torch.maximum(-low, high) / levels)
    scale = torch.ldexp((mantissa * 256).ceil() / 256, exponent) * torch.where(high > -low, -1, 1)  # 8 bits, rounded up
    multiples = (blocks * torch.where(scale != 0, 1 / scale, 0)).round().clamp(max=levels - 1) + 0.0  # no -0.0
    return (multiples * scale).flatten()[: x.numel()].view(x.shape)


def oracle(gradients_of_steps, levels, block_size):
    """The means of each step, from the gradients of all ranks: [steps][ranks][parameters]."""
    n = len(gradients_of_steps[0])
    errors = [[torch.zeros_like(g) for g in own_gradients] for own_gradients in gradients_of_steps[0]]
    sum_errors, means = [torch.zeros_like(g) for g in gradients_of_steps[0][0]], []
    for rank_gradients in gradients_of_steps:
        means.append([])
        for k, total_error in enumerate(sum_errors):
            total = torch.zeros_like(total_error)
            for rank in range(n):
                compensated = rank_gradients[rank][k] * torch.tensor(1 / n) + errors[rank][k]
                sent = rounded(compensated, levels, block_size)
                errors[rank][k] = compensated - sent
                total += sent
            total += total_error
            means[-1].append(rounded(total, levels, block_size))
            sum_errors[k] = total - means[-1][-1]
    return means


SHAPES = [(13, 11), (64, 32), (1, 1), (40, 7)]


def probe_gradients(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (k - 2) for k, shape in enumerate(SHAPES)]


def probe_means(wrapper, wire, block_size, steps, cap):
    ddp = WRAPPERS[wrapper](Probe(*SHAPES), bucket_cap_mb=cap)
    options = {"block_size": block_size, "use_error_feedback": True}
    register(ddp, hook_of(wire, **options, start_iter=2))  # after the buckets are rebuilt
    seen = []
    for step in range(2 + steps):
        ddp.zero_grad()
        ddp(*probe_gradients(dist.get_rank(), step)).backward()
        seen.append([weight.grad.clone() for weight in ddp.module.weights])
    return seen[2:]


@wrappers
@pytest.mark.parametrize(("wire", "levels", "block_size"), [("int8", 128, 128), ("int6", 32, 32), ("int4", 8, 64)])
@pytest.mark.parametrize("cap", [SMALLEST, 25], ids=["many-buckets", "one-bucket"])
def test_means_equal_the_oracle(world, wrapper, wire, levels, block_size, cap):
    steps = 4
    expected = oracle(
        [[probe_gradients(rank, 2 + step) for rank in range(world.size)] for step in range(steps)], levels, block_size
    )
    options = {"wrapper": wrapper, "wire": wire, "block_size": block_size, "steps": steps, "cap": cap}
    for means in world.run(probe_means, **options):
        assert_same_bits(means, expected)


# --- law 1


def unaccounted(wire, steps, **options):
    """The names of the parameters of which `Ledger` misses more than the rounding of errors in bf16."""
    ddp, state = wrapped("gradwire", "mlp", hook_of(wire, **options))
    local, generator = build("mlp"), torch.Generator().manual_seed(dist.get_rank())
    ledger = Ledger(local)
    for _ in range(steps):
        ledger.step(ddp, local, local.batch(generator))
    return ledger.close(state, precision=2.0**-8)


@pytest.mark.parametrize("wire", ["int4", "int8"])
def test_law1_holds_with_errors_in_bf16_up_to_their_rounding(worlds, wire):
    options = {"use_error_feedback": True, "error_dtype": torch.bfloat16}
    assert worlds(2).run(unaccounted, wire=wire, steps=4, **options) == [[], []]


# --- law 4


def train_quantized(wrapper, model, options, **training):
    return train(wrapper, model, hook=hook_of(**options), steps=4, **training)


def on_both_ddps(caps, **arguments):
    return [train_quantized(wrapper, bucket_cap_mb=cap, **arguments) for wrapper in WRAPPERS for cap in caps]


@formats
@pytest.mark.parametrize("errors", [torch.float32, torch.bfloat16])  # bf16 is rounded at random
@pytest.mark.parametrize("model", ["transformer", pytest.param("conv", marks=pytest.mark.slow)])
def test_law4_result_depends_neither_on_the_ddp_nor_on_the_buckets(worlds, wire, errors, model):
    options = {"wire": wire, "error_dtype": errors}
    for first, *others in worlds(2).run(on_both_ddps, caps=[SMALL, SMALLEST, 25], model=model, options=options):
        for other in others:
            assert_same_bits(other, first)


# --- one process


@pytest.mark.parametrize("shape", [(5,), (8, 4), (32,), (2, 2, 8)], ids=str)
def test_bucket_rejects_an_error_of_another_shape(shape):
    gradients, formats = [torch.ones(4, 8)], [WIRE_FORMATS["int4"]]
    memory = {"errors": {"w": torch.zeros(shape)}}
    with pytest.raises(ValueError, match=re.escape(f"error memory of w has shape {shape}, its gradient (4, 8)")):
        QuantizedBucket(gradients, formats, LocalTransport(), Quantization(), names=["w"], memory=memory)


# --- options


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("layer.weight", (4, 4), torch.float32, "int4"),
        ("layer.bias", (4,), torch.float32, "bf16"),
        ("layer.scale", (4,), torch.float16, "fp16"),
        ("layer.scale", (4,), torch.bfloat16, "bf16"),
        ("norm1.weight", (4, 4), torch.float32, "bf16"),
        ("scalar", (), torch.float64, "bf16"),
        ("head.weight", (4, 4), torch.float32, "int8"),
        ("head.bias", (4,), torch.float32, "int8"),
        ("complex", (4,), torch.complex64, "bf16"),
    ],
)
def test_wire_format_of_a_parameter(name, shape, dtype, expected):
    state = QuantizationState(None, "int4", wires={"head.*": "int8"})
    assert state.options.wire_format(name, torch.empty(shape, dtype=dtype)) is WIRE_FORMATS[expected]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *(({"wire": wire}, wire not in ("int8", "int6")) for wire in WIRE_FORMATS),
        ({"wire": "int8", "wires": {"head.*": "bf16"}}, False),
        ({"wire": "bf16", "wires": {"head.*": "int6"}}, False),
        ({"wire": "int8", "wires": {"head.*": "int2"}}, True),
        ({"wire": "int6", "use_error_feedback": True}, True),
        ({"wire": "int4", "use_error_feedback": False}, False),
    ],
    ids=str,
)
def test_errors_are_kept_by_default_unless_the_narrowest_format_is_int8_or_int6(options, expected):
    for made in (QuantizationState(**options).options, ReduceScatterOptions(**options)):
        assert made.keeps_errors == expected
        assert (made.quantization().error_dtype is not None) == expected


# --- memory


def trained(wrapper="gradwire", steps=3, model="mlp", **options):
    ddp, state = wrapped(wrapper, model, hook_of(**({"wire": "int4"} | options)))
    train_steps(ddp, steps)
    return ddp, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_law1_errors_of_both_shots_survive_new_buckets(dtype):
    # Errors summed over ranks before and after the buckets of a state are cut anew, without a step between.
    _, state = trained(error_dtype=dtype)
    before = {name: summed(error) for name, error in state.memory.tensors("errors").items()}
    state.memory.drop_buckets(tuple(before))
    assert not state.memory.buckets
    assert_same_bits({name: summed(error) for name, error in state.memory.tensors("errors").items()}, before)


@pytest.mark.parametrize("wire", ["int8", "int6"])
@on_ranks(2)
def test_stateless_format_has_no_error_memory_and_saves_none(wire):
    ddp, state = trained(wire=wire)
    assert state.error_memory_bytes == 0
    assert state.state_dict() == {"iter": 3, "errors": {}}
    state.options = replace(state.options, wire="int4")
    train_steps(ddp, 1)
    assert state.error_memory_bytes > 0, "the default follows the format"


@on_ranks(2)
def test_stateless_state_keeps_errors_of_a_checkpoint_until_feedback_is_on():
    _, earlier = trained(wire="int8", use_error_feedback=True)
    saved = earlier.state_dict()
    ddp, state = trained(wire="int8", steps=0)
    state.load_state_dict(saved)
    train_steps(ddp, 2)
    kept = state.state_dict()["errors"]
    assert_same_bits(kept, saved["errors"])
    assert any(error.count_nonzero() > 0 for error in kept.values())
    state.options = replace(state.options, use_error_feedback=True)
    train_steps(ddp, 1)
    assert differences(state.state_dict()["errors"], kept)


@on_ranks(1)
def test_pickle_of_an_earlier_version_loads():
    _, state = trained(steps=3)
    now = state.__getstate__()
    memory = dict(now["memory"])
    iteration = memory.pop("iter")
    for earlier in (
        {"options": now["options"], "iter": iteration, "memory": memory, "loaded": now["loaded"]},
        {"options": now["options"], "memory": now["memory"]},
    ):
        again = QuantizationState.__new__(QuantizationState)
        again.__setstate__(earlier)
        assert again.iter == state.iter and repr(again) == repr(state)
        assert_same_bits(again.memory.tensors("errors"), state.memory.tensors("errors"))
