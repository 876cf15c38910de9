"""The laws for `quantization_hook`: every wire format, with and without error feedback, on both DDPs."""

import copy
import io
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import Quantization, QuantizedBucket, WirePolicy, quantized_all_reduce
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.kernels import WIRE_FORMATS, as_real
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    Fault,
    build,
    error_of,
    gradients,
    plainly_named,
    register,
    train,
)
from tests.support.zoo import Probe

QUICK = ("int4", "sign")
formats = pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=() if wire in QUICK else pytest.mark.slow) for wire in WIRE_FORMATS]
)
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)
feedbacks = pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no-feedback"])


def hook_of(wire, **options):
    """The state and the hook, quantising from the first step on."""
    return QuantizationState(None, wire, **({"block_size": 32, "start_iter": 0} | options)), quantization_hook


def wrapped(wrapper, model, hook, **options):
    ddp = WRAPPERS[wrapper](build(model), **({"bucket_cap_mb": SMALL} | options))
    return ddp, register(ddp, hook)


def summed(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total


# --- an oracle of its own


def rounded(x, levels, block_size):
    """Blocks of ``x`` rounded to multiples of a scale, the largest element over the levels, rounded up to 8 bits."""
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block_size)).view(-1, block_size)
    mantissa, exponent = torch.frexp(blocks.abs().amax(1, keepdim=True) / levels)
    scale = torch.ldexp((mantissa * 256).ceil() / 256, exponent)
    multiples = (blocks * torch.where(scale > 0, 1 / scale, 0)).round() + 0.0  # no -0.0
    return (multiples * scale).flatten()[: x.numel()].view(x.shape)


def oracle(gradients_of_steps, levels, block_size):
    """The means of each step, from the gradients of all ranks: [steps][ranks][parameters]."""
    n = len(gradients_of_steps[0])
    errors = [[torch.zeros_like(g) for g in of_rank] for of_rank in gradients_of_steps[0]]
    sum_errors, means = [torch.zeros_like(g) for g in gradients_of_steps[0][0]], []
    for of_ranks in gradients_of_steps:
        means.append([])
        for k, total_error in enumerate(sum_errors):
            total = torch.zeros_like(total_error)
            for rank in range(n):
                compensated = of_ranks[rank][k] * torch.tensor(1 / n) + errors[rank][k]
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
    register(ddp, hook_of(wire, block_size=block_size, start_iter=2))  # after the buckets are rebuilt
    seen = []
    for step in range(2 + steps):
        ddp.zero_grad()
        ddp(*probe_gradients(dist.get_rank(), step)).backward()
        seen.append([weight.grad.clone() for weight in ddp.module.weights])
    return seen[2:]


@wrappers
@pytest.mark.parametrize(("wire", "levels", "block_size"), [("int8", 127, 128), ("int4", 7, 64), ("int2", 1, 32)])
@pytest.mark.parametrize("cap", [SMALLEST, 25], ids=["many-buckets", "one-bucket"])
def test_means_are_those_of_the_oracle(world, wrapper, wire, levels, block_size, cap):
    steps = 4
    expected = oracle(
        [[probe_gradients(rank, 2 + step) for rank in range(world.size)] for step in range(steps)], levels, block_size
    )
    options = {"wrapper": wrapper, "wire": wire, "block_size": block_size, "steps": steps, "cap": cap}
    for means in world.run(probe_means, **options):
        assert_same_bits(means, expected)


# --- law 1


def unapplied(wrapper, model, steps, **options):
    """Of every parameter: the sum of the exact means, minus those applied, minus the errors; and the sum of sizes."""
    ddp, state = wrapped(wrapper, model, hook_of(**options))
    local, generator = build(model), torch.Generator().manual_seed(dist.get_rank())
    missing, sizes = {}, {}
    for _ in range(steps):
        batch = local.batch(generator)
        for each in (ddp, local):
            each.zero_grad()
            each(*batch).backward()
        applied, own = gradients(ddp), gradients(local)
        for name, gradient in own.items():
            mean = summed(as_real(gradient)) / dist.get_world_size()
            missing[name] = missing.get(name, 0) + mean - as_real(applied[name])
            sizes[name] = sizes.get(name, 0) + summed(as_real(gradient).abs()) + as_real(applied[name]).abs()
    for name, error in state.tensors("errors").items():
        missing[name] = missing[name] - summed(error)
        sizes[name] = sizes[name] + summed(error.abs())
    return missing, sizes


@formats
@wrappers
@pytest.mark.parametrize("model", ["mlp", "conv", pytest.param("complex", marks=pytest.mark.slow)])
def test_law1_nothing_is_lost(world, wire, wrapper, model):
    # M, each of n additions to S, and S + E2 round once: n + 2 roundings a step, each of the sums so far at most.
    steps = 4
    bound = steps * (world.size + 2) * 2.0**-23
    for missing, sizes in world.run(unapplied, wrapper=wrapper, model=model, steps=steps, wire=wire):
        for name, lost in missing.items():
            assert (lost.abs() <= bound * sizes[name].max()).all(), name


@pytest.mark.parametrize("wire", ["int4", "int8"])
def test_law1_holds_with_errors_in_bf16_up_to_their_rounding(worlds, wire):
    # bf16 has 8 significant bits. Each of 4 steps rounds the errors once, and they are no larger than the gradients.
    options = {"wrapper": "gradwire", "model": "mlp", "steps": 4, "error_dtype": torch.bfloat16}
    for missing, sizes in worlds(2).run(unapplied, wire=wire, **options):
        for name, lost in missing.items():
            assert (lost.abs() <= 4 * 2.0**-7 * sizes[name].max()).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRE_FORMATS)
@wrappers
def test_laws_1_and_2_hold_on_4_ranks(worlds, wire, wrapper):
    steps, world = 4, worlds(4)
    for missing, sizes in world.run(unapplied, wrapper=wrapper, model="mlp", steps=steps, wire=wire):
        for name, lost in missing.items():
            assert (lost.abs() <= steps * (world.size + 2) * 2.0**-23 * sizes[name].max()).all(), name
    training = {"model": "mixed", "bucket_cap_mb": SMALLEST, "options": {"wire": wire}}
    assert_same_on_all_ranks(world.run(train_quantized, wrapper=wrapper, **training))


def errors_around_a_failed_step(is_wrapped, view):
    """Sums over the ranks of errors before and after a step that fails at its last bucket, and of its gradients."""
    state, function = hook_of("int4")
    ddp, _ = wrapped(
        "gradwire", "mlp", (state, plainly_named(function) if is_wrapped else function), gradient_as_bucket_view=view
    )
    local, generator = build("mlp"), torch.Generator().manual_seed(dist.get_rank())

    def step():
        batch = local.batch(generator)
        for each in (local, ddp):
            each.zero_grad()
            each(*batch).backward()

    for _ in range(3):
        step()
    before = {name: summed(error) for name, error in state.tensors("errors").items()}
    run = ddp.reducer._run_comm_hook

    def run_up_to_the_last(bucket):
        if bucket.is_last():
            raise Fault
        future = run(bucket)
        future.wait()
        return future

    with mock.patch.object(ddp.reducer, "_run_comm_hook", run_up_to_the_last):
        error_of(step)
    of_last = ddp.reducer.buckets[-1].parameter_names()
    after = {name: summed(error) for name, error in state.tensors("errors").items()}
    means = {name: summed(gradient) / dist.get_world_size() for name, gradient in gradients(local).items()}
    ddp.resynchronize()
    return before, after, means, of_last


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["hook", "wrapped-hook"])
def test_law1_results_of_a_failed_step_return_to_the_error_memory(world, is_wrapped, view):
    for before, after, means, of_last in world.run(errors_around_a_failed_step, is_wrapped=is_wrapped, view=view):
        assert before.keys() == after.keys() > set(of_last)
        for name, error in after.items():
            expected = before[name] + (0 if name in of_last else means[name])
            size = before[name].abs().max() + means[name].abs().max()
            assert ((error - expected).abs() <= 8 * 2.0**-23 * size).all(), name


# --- laws 2, 3 and 4


def train_quantized(wrapper, model, options, **training):
    return train(wrapper, model, hook=hook_of(**options), steps=4, **training)


@formats
@feedbacks
@wrappers
def test_law2_gradients_are_bitwise_equal_on_all_ranks(world, wire, feedback, wrapper):
    options = {"wire": wire, "use_error_feedback": feedback}
    training = {"model": "mixed", "bucket_cap_mb": SMALLEST}
    assert_same_on_all_ranks(world.run(train_quantized, wrapper=wrapper, options=options, **training))


def late_and_plain(wrapper, model, **options):
    late = train(wrapper, model, hook=hook_of("int4", start_iter=3), **options)
    return late, train(wrapper, model, hook="allreduce", **options)


@wrappers
@pytest.mark.parametrize("model", ["mlp", "odd"])
def test_law3_steps_before_the_start_equal_the_plain_all_reduce(world, wrapper, model):
    for late, plain in world.run(late_and_plain, wrapper=wrapper, model=model, steps=3, bucket_cap_mb=SMALL):
        assert_same_bits(late, plain)


def on_both_ddps(caps, **arguments):
    return [train_quantized(wrapper, bucket_cap_mb=cap, **arguments) for wrapper in WRAPPERS for cap in caps]


@formats
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("model", ["transformer", pytest.param("conv", marks=pytest.mark.slow)])
def test_law4_result_depends_neither_on_the_ddp_nor_on_the_buckets(worlds, wire, rounding, model):
    options = {"wire": wire, "stochastic_rounding": rounding == "stochastic"}
    for first, *others in worlds(2).run(on_both_ddps, caps=[SMALL, SMALLEST, 25], model=model, options=options):
        for other in others:
            assert_same_bits(other, first)


# --- law 5


def poisoned_step(wrapper, value, **options):
    """The gradients and errors of a step in which rank 1 has one bad element, and the errors before."""
    ddp, state = wrapped(wrapper, "mlp", hook_of(**options), bucket_cap_mb=25)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        ddp.zero_grad()
        before = copy.deepcopy(state.tensors("errors"))
        loss = ddp(*build("mlp").batch(generator))
        if step == 2 and dist.get_rank() == 1:
            loss = loss + ddp.module.layers[2].weight[3, 5] * value
        loss.backward()
    return gradients(ddp), before, state.tensors("errors")


@formats
@wrappers
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_law5_non_finite_element_reaches_all_ranks_and_leaves_the_errors(world, wire, wrapper, value):
    if world.size == 1:
        pytest.skip("needs rank 1")
    results = world.run(poisoned_step, wrapper=wrapper, value=value, wire=wire)
    assert_same_on_all_ranks([reduced for reduced, _, _ in results])
    for reduced, before, after in results:
        assert not reduced["layers.2.weight"].isfinite().all()
        assert reduced["layers.4.weight"].isfinite().all(), "another block is not harmed"
        assert_same_bits(after, before)


# --- law 7


def saved(wrapper, steps, **options):
    """A checkpoint's bytes, and the sum of all ranks' errors."""
    ddp, state = wrapped(wrapper, "conv", hook_of(**options))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    return buffer.getvalue(), {name: summed(error) for name, error in state.tensors("errors").items()}


def resumed(wrapper, checkpoint, **options):
    """The sum of all ranks' errors before and after a step, the applied gradients and the means."""
    ddp, state = wrapped(wrapper, "conv", hook_of(**options))
    state.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
    iteration = state.iter
    before = {name: summed(error) for name, error in state.tensors("errors").items()}
    local = build("conv")
    batch = local.batch(torch.Generator().manual_seed(dist.get_rank()))
    ddp(*batch).backward()
    local(*batch).backward()
    means = {name: summed(gradient) / dist.get_world_size() for name, gradient in gradients(local).items()}
    after = {name: summed(error) for name, error in state.tensors("errors").items()}
    return iteration, before, after, gradients(ddp), means


@wrappers
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 1)], ids=lambda sizes: f"{sizes[0]}-to-{sizes[1]}-ranks")
def test_law7_checkpoint_resumes_on_another_number_of_ranks_without_loss(worlds, wrapper, sizes):
    old, new = map(worlds, sizes)
    (checkpoint, errors), *_ = old.run(saved, wrapper=wrapper, steps=4, wire="int4")
    assert any(error.abs().max() > 0 for error in errors.values())
    for iteration, before, after, applied, means in new.run(
        resumed, wrapper=wrapper, checkpoint=checkpoint, wire="int4"
    ):
        assert iteration == 4
        assert before.keys() == errors.keys()
        for name, error in errors.items():
            scale = error.abs().max() + means[name].abs().max()
            assert (before[name] - error).abs().max() <= 8 * 2.0**-24 * scale
            lost = before[name] + means[name] - applied[name] - after[name]
            assert lost.abs().max() <= 16 * 2.0**-24 * scale, name


# --- one process


def local_step(bucket, gradients, results, iteration=0):
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    algorithm = quantized_all_reduce(bucket, gradients, results, iteration, transport, workspace)
    run_algorithm(algorithm, transport)
    return transport.payload_bytes


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_payload_is_scales_codes_and_one_header(wire):
    gradients = [torch.randn(96, 64), torch.randn(64)]
    bucket = QuantizedBucket(gradients, WirePolicy(wire=wire).wire_formats(gradients), LocalTransport(), Quantization())
    blocks, of_bias = 96, 64 * 2
    expected = 16 + blocks * WIRE_FORMATS[wire].block_bytes(64) + of_bias
    assert local_step(bucket, gradients, [torch.empty_like(each) for each in gradients]) == expected


def test_new_bucket_continues_from_folded_errors():
    gradients = [torch.randn(40, 50, generator=torch.Generator().manual_seed(0)), torch.ones(7)]
    formats = WirePolicy(wire="int2").wire_formats(gradients)
    first = QuantizedBucket(gradients, formats, LocalTransport(), Quantization(), names=["w", "b"])
    results = [torch.empty_like(gradient) for gradient in gradients]
    local_step(first, gradients, results)
    folded = first.folded_errors()
    for name, gradient, result in zip(["w", "b"], gradients, results, strict=True):
        torch.testing.assert_close(folded[name] + result, gradient, rtol=0, atol=4e-7)
    before = copy.deepcopy(folded)
    second = QuantizedBucket(
        gradients, formats, LocalTransport(), Quantization(), names=["w", "b"], memory={"errors": folded}
    )
    assert_same_bits(folded, before)
    assert_same_bits(second.folded_errors(), before)


@pytest.mark.parametrize("shape", [(5,), (8, 4), (32,), (2, 2, 8)], ids=str)
def test_bucket_rejects_an_error_of_another_shape(shape):
    gradients, formats = [torch.ones(4, 8)], [WIRE_FORMATS["int4"]]
    memory = {"errors": {"w": torch.zeros(shape)}}
    with pytest.raises(ValueError, match=re.escape(f"error memory of w has shape {shape}, its gradient (4, 8)")):
        QuantizedBucket(gradients, formats, LocalTransport(), Quantization(), names=["w"], memory=memory)
