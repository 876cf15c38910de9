"""DDP's features under `quantization_hook`, PyTorch's two quantization hooks, and 16 bit with sums in fp32."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_hooks

from gradwire.hooks.default_hooks import CastState, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from tests.distributed.test_quantization_laws import hook_of, summed
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import FEATURES, Parts, views, wrap
from tests.support.training import SMALL, WRAPPERS, build, gradients, message_of, register, train
from tests.support.zoo import Probe

wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)

# --- features of DDP


def accumulated_and_whole(wrapper):
    """Gradients of micro-batches under ``no_sync`` and a last one, and of one backward through their sum."""
    seen = []
    for accumulate in (True, False):
        ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
        register(ddp, hook_of("int4"))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            ddp.zero_grad()
            batches = [ddp.module.batch(generator) for _ in range(3)]
            if accumulate:
                with ddp.no_sync():
                    for batch in batches[:2]:
                        ddp(*batch).backward()
                ddp(*batches[2]).backward()
            else:
                for batch in batches[:2]:
                    ddp.module(*batch).backward()
                ddp(*batches[2]).backward()
        seen.append(gradients(ddp))
    return seen


@wrappers
def test_accumulated_gradients_are_quantised_once(world, wrapper):
    for accumulated, whole in world.run(accumulated_and_whole, wrapper=wrapper):
        assert_same_bits(accumulated, whole)


def kept_errors(feature, view):
    """Of each step: errors of layer 1 before and after it, and whether the layer had a gradient."""
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), view=view, **FEATURES[feature])
    state = register(ddp, hook_of("int4"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen, error = [], torch.zeros(4, 4, dtype=torch.float64)
    for step in range(6):
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=generator), (0, 2) if step in (3, 5) else (0, 1, 2)).backward()
        before, error = error, summed(state.tensors("errors")["parts.1.weight"])
        seen.append((before, error, ddp.module.parts[1].weight.grad is not None))
    return seen


@views
@pytest.mark.parametrize("feature", ["find-unused", "skip-unused"])
def test_law1_error_of_parameter_unused_on_all_ranks_is_kept(world, feature, view):
    for steps in world.run(kept_errors, feature=feature, view=view):
        assert [has_gradient for *_, has_gradient in steps] == [step not in (3, 5) for step in range(6)]
        assert all(after.count_nonzero() for _, after, _ in steps)
        for before, after, has_gradient in steps:
            if not has_gradient:
                # What was sent is subtracted, summed, and added again: less than 8 roundings of numbers below 1.
                assert before.abs().max() < 1
                assert (after - before).abs().max() <= 8 * 2.0**-24


def join_with_inputs(lengths, joins):
    """Train on ``lengths[rank]`` inputs under ``join``; without it, on zeros for as long as any rank."""
    rank = dist.get_rank()
    ddp = wrap("gradwire", Probe((6, 5), (7,), (4, 4)))
    register(ddp, hook_of("int4"))
    generator, seen = torch.Generator().manual_seed(rank), []
    with ddp.join(enable=joins):
        for step in range(lengths[rank] if joins else max(lengths)):
            ddp.zero_grad()
            inputs = [torch.randn(shape, generator=generator) for shape in ((6, 5), (7,), (4, 4))]
            ddp(*(x * (step < lengths[rank]) for x in inputs)).backward()
            if step < lengths[rank]:
                seen.append(gradients(ddp))
    return seen


def joined_and_zero_fed(lengths):
    return join_with_inputs(lengths, joins=True), join_with_inputs(lengths, joins=False)


@pytest.mark.parametrize("lengths", [(5, 3, 1), (0, 4, 4)], ids=str)
def test_joined_rank_adds_zeros(worlds, lengths):
    for joined, fed in worlds(3).run(joined_and_zero_fed, lengths=lengths):
        assert_same_bits(joined, fed)


class Embeddings(torch.nn.Module):
    """A sparse and a dense gradient."""

    def __init__(self):
        super().__init__()
        self.sparse = torch.nn.Embedding(9, 6, sparse=True)
        self.dense = torch.nn.Linear(6, 6)

    def forward(self, words):
        return self.dense(self.sparse(words)).square().sum()


def sparse_beside_dense():
    torch.manual_seed(0)
    ddp = wrap("gradwire", Embeddings())
    local = copy.deepcopy(ddp.module)
    register(ddp, hook_of("int4"))
    words = torch.randint(9, (5,), generator=torch.Generator().manual_seed(dist.get_rank()))
    for module in (ddp, local):
        module(words).backward()
    own = local.sparse.weight.grad.to_dense() / dist.get_world_size()
    return ddp.module.sparse.weight.grad.is_sparse, ddp.module.sparse.weight.grad.to_dense(), summed(own)


def test_sparse_gradients_are_sent_whole(world):
    for is_sparse, reduced, mean in world.run(sparse_beside_dense):
        assert is_sparse
        torch.testing.assert_close(reduced.double(), mean, rtol=0, atol=world.size * 2.0**-22)


def scaled_training(wrapper):
    """The scale, the parameters and the errors after each step; rank 0's gradients overflow in step 2."""
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=25)
    state = register(ddp, hook_of("int4"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(*ddp.module.batch(generator))
        scaler.scale(loss * (torch.inf if step == 2 and dist.get_rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        parameters = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
        seen.append((scaler.get_scale(), parameters, copy.deepcopy(state.tensors("errors"))))
    return seen


@wrappers
def test_law5_grad_scaler_skips_the_step_on_all_ranks_and_errors_stay(worlds, wrapper):
    results = worlds(2).run(scaled_training, wrapper=wrapper)
    assert_same_on_all_ranks([[(scale, parameters) for scale, parameters, _ in steps] for steps in results])
    for steps in results:
        assert [scale for scale, *_ in steps] == [128, 128, 64, 64]
        assert_same_bits(steps[2][1:], steps[1][1:])
        assert any(error.count_nonzero() for error in steps[1][2].values())


# --- PyTorch's hooks

PYTORCH_HOOKS = {"pertensor": quantization_pertensor_hook, "perchannel": quantization_perchannel_hook}


def mean_and_reduced(wrapper, model, hook):
    """Of one step: the exact means, those applied, and the largest magnitude of a gradient on any rank."""
    ddp, local = WRAPPERS[wrapper](build(model), bucket_cap_mb=SMALL), build(model)
    register(ddp, (None, PYTORCH_HOOKS[hook]))
    batch = local.batch(torch.Generator().manual_seed(dist.get_rank()))
    for module in (ddp, local):
        module(*batch).backward()
    means = {name: summed(gradient) / dist.get_world_size() for name, gradient in gradients(local).items()}
    largest = torch.stack([gradient.abs().max() for gradient in gradients(local).values()]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return means, gradients(ddp), largest.item()


@pytest.mark.parametrize("hook", PYTORCH_HOOKS)
@wrappers
def test_hooks_of_pytorchs_names_average_in_8_bit(world, wrapper, hook):
    results = world.run(mean_and_reduced, wrapper=wrapper, model="mlp", hook=hook)
    assert_same_on_all_ranks([reduced for _, reduced, _ in results])
    for means, reduced, largest in results:
        for name, mean in means.items():
            # Half a step of a scale of largest / 127, in each shot; scales are rounded up by 2^-7 at most.
            assert ((reduced[name] - mean).abs() <= 2 * (1 + 2.0**-6) * largest / 127 / 2).all(), name
        assert any((reduced[name] != mean).any() for name, mean in means.items())


def outcome_of_pytorchs(hook):
    ddp = WRAPPERS["pytorch"](build("mlp"))
    ddp.register_comm_hook(dist.group.WORLD, getattr(torch_hooks, f"quantization_{hook}_hook"))
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    return message_of(lambda: ddp(*batch).backward())


@pytest.mark.slow
@pytest.mark.parametrize("hook", PYTORCH_HOOKS)
def test_pytorchs_quantization_hooks_fail_on_gloo_before_2_15(worlds, hook):
    # Documented in the docstrings and in docs/migrating.md.
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    outcomes = worlds(2).run(outcome_of_pytorchs, hook=hook)
    assert all(message is None if release >= (2, 15) else "IndexError" in message for message in outcomes)


@pytest.mark.parametrize("bucket_size", [0, 31, 48, 2048, 64.0, True, None])
def test_perchannel_hook_rejects_blocks_of_other_sizes(worlds, bucket_size):
    (message,) = worlds(1).run(perchannel_error, bucket_size=bucket_size)
    assert message.startswith(f"bucket_size is {bucket_size!r}; expected a power of two from 32 to 1024")


def perchannel_error(bucket_size):
    ddp = WRAPPERS["gradwire"](build("mlp"))
    ddp.register_comm_hook(None, lambda state, bucket: quantization_perchannel_hook(state, bucket, bucket_size))
    return message_of(lambda: ddp(*ddp.module.batch(torch.Generator())).backward())


# --- 16 bit with sums in fp32

CAST_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def reduced_probe(wrapper, hook, accumulate, value):
    """The reduced gradient where every rank's is ``value``."""
    ddp = WRAPPERS[wrapper](Probe((5, 7)))
    register(ddp, (CastState(accumulate=accumulate), CAST_HOOKS[hook]))
    ddp(torch.full((5, 7), value)).backward()
    return ddp.module.weights[0].grad


@wrappers
def test_fp16_sums_in_fp32_do_not_overflow(world, wrapper):
    # Each rank sends 65504 / n: sums of fp16 round to n equal parts, and may exceed the range on the way.
    value = 65504.0
    for reduced in world.run(reduced_probe, wrapper=wrapper, hook="fp16", accumulate="fp32", value=value):
        assert_same_bits(reduced, torch.full((5, 7), value))


def random_reduced(hook, accumulate):
    ddp = WRAPPERS["gradwire"](Probe((64, 64)))
    register(ddp, (CastState(accumulate=accumulate), CAST_HOOKS[hook]))
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp(gradient).backward()
    mean = summed(gradient) / dist.get_world_size()
    return float((ddp.module.weights[0].grad - mean).norm() / mean.norm())


@pytest.mark.parametrize("hook", CAST_HOOKS)
def test_sum_in_fp32_rounds_less_than_sum_in_16_bit(worlds, hook):
    errors = {kind: worlds(3).run(random_reduced, hook=hook, accumulate=kind)[0] for kind in ("wire", "fp32")}
    assert 0 < errors["fp32"] < errors["wire"]


def with_and_without_state(wrapper, model):
    states = (None, CastState())
    return [train(wrapper, model, hook=(state, fp16_compress_hook), bucket_cap_mb=SMALL) for state in states]


@wrappers
def test_cast_state_that_accumulates_on_the_wire_equals_a_process_group(worlds, wrapper):
    for plain, with_state in worlds(2).run(with_and_without_state, wrapper=wrapper, model="mlp"):
        assert_same_bits(with_state, plain)


@pytest.mark.parametrize("value", ["fp16", None, torch.float32, 32])
def test_cast_state_rejects_other_accumulators(value):
    with pytest.raises(ValueError, match="expected 'wire' or 'fp32'"):
        CastState(accumulate=value)


def test_cast_state_rejects_what_is_no_process_group():
    with pytest.raises(TypeError, match="process_group is 'x'"):
        CastState("x")
