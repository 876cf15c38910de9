"""DDP's features under `quantization_hook`, PyTorch's two quantization hooks, and 16 bit with sums in fp32."""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_hooks

from gradwire.hooks.default_hooks import CastState, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.ranks import from_all_ranks, on_ranks, summed
from tests.support.training import WRAPPERS, build, gradients, message_of, own_batches, register, train_steps, wrapped
from tests.support.zoo import Probe

wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)

# --- PyTorch's hooks

PYTORCH_HOOKS = {"pertensor": quantization_pertensor_hook, "perchannel": quantization_perchannel_hook}


@on_ranks(2)
def test_stateless_hooks_on_one_group_keep_their_formats_and_block_sizes():
    def of_blocks(size):
        return None, lambda state, bucket: quantization_perchannel_hook(state, bucket, size)

    hooks = {
        "blocks of 32": of_blocks(32),
        "blocks of 512": of_blocks(512),
        "per tensor": (None, quantization_pertensor_hook),
        "bf16": (CastState(None, accumulate="fp32"), bf16_compress_hook),
        "fp16": (CastState(None, accumulate="fp32"), fp16_compress_hook),
    }
    # One model, so that all of them meet the same parameters.
    current, results = "per tensor", {}
    ddp = wrapped(hook=(None, lambda _, bucket: hooks[current][1](hooks[current][0], bucket)))
    train_steps(ddp)
    for current in (*hooks, *reversed(hooks)):
        (found,) = train_steps(ddp)
        assert_same_bits(found, results.setdefault(current, found))
    for one, other in combinations(results.values(), 2):
        assert differences(one, other)


@pytest.mark.parametrize("hook", PYTORCH_HOOKS)
@wrappers
@on_ranks(2, 3)
def test_hooks_of_pytorchs_names_average_in_8_bit(wrapper, hook):
    ddp, local = wrapped(wrapper, hook=(None, PYTORCH_HOOKS[hook])), build("mlp")
    batch = local.batch(own_batches())
    for module in (ddp, local):
        module(*batch).backward()
    own, reduced = gradients(local), gradients(ddp)
    largest = torch.stack([gradient.abs().max() for gradient in own.values()]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    means = {name: summed(gradient) / dist.get_world_size() for name, gradient in own.items()}
    for name, mean in means.items():
        # A step of a scale of largest / 128, in each shot; scales are rounded up by 2^-7 at most.
        assert ((reduced[name] - mean).abs() <= 2 * (1 + 2.0**-6) * largest / 128).all(), name
    assert any((reduced[name] != mean).any() for name, mean in means.items())
    assert_same_on_all_ranks(from_all_ranks(reduced))


@pytest.mark.slow
@pytest.mark.parametrize("hook", PYTORCH_HOOKS)
@on_ranks(2)
def test_pytorchs_quantization_hooks_fail_on_gloo_before_2_15(hook):
    # Documented in the docstrings and in docs/migrating.md.
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    ddp = WRAPPERS["pytorch"](build("mlp"))
    ddp.register_comm_hook(dist.group.WORLD, getattr(torch_hooks, f"quantization_{hook}_hook"))
    message = message_of(train_steps, ddp)
    assert message is None if release >= (2, 15) else "IndexError" in message


@pytest.mark.parametrize("bucket_size", [0, 31, 48, 2048, 64.0, True, None])
@on_ranks(1)
def test_perchannel_hook_rejects_blocks_of_other_sizes(bucket_size):
    ddp = WRAPPERS["gradwire"](build("mlp"))
    ddp.register_comm_hook(None, lambda state, bucket: quantization_perchannel_hook(state, bucket, bucket_size))
    message = message_of(train_steps, ddp)
    assert message.startswith(f"bucket_size is {bucket_size!r}; expected a power of two from 32 to 1024")


# --- 16 bit with sums in fp32

CAST_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


@wrappers
@on_ranks(2, 3)
def test_fp16_sums_in_fp32_do_not_overflow(wrapper):
    # Each rank sends 65504 / n: sums of fp16 round to n equal parts, and may exceed the range on the way.
    value = 65504.0
    ddp = WRAPPERS[wrapper](Probe((5, 7)))
    register(ddp, (CastState(accumulate="fp32"), CAST_HOOKS["fp16"]))
    ddp(torch.full((5, 7), value)).backward()
    reduced = ddp.module.weights[0].grad
    assert_same_bits(reduced, torch.full((5, 7), value))


# --- random numbers


def error_of_the_first_shot(**options):
    """The error memory after a step with the same gradient on all ranks: of the gradient, or of this rank's shard."""
    ddp = wrapped(model=Probe((6000,)))
    state = register(ddp, (QuantizationState(None, "int4", start_iter=0, exempt=(), **options), quantization_hook))
    ddp(torch.randn(6000, generator=torch.Generator().manual_seed(0))).backward()
    ((_, bucket),) = state.memory.buckets.values()
    errors = getattr(bucket, "shard", bucket).memory["errors"]
    return torch.cat([error.flatten().double() for error in errors.values()])


@pytest.mark.parametrize("local_size", [1, 2])
@on_ranks(4)
def test_errors_of_errors_in_bf16_average_out_over_the_ranks(local_size):
    error = error_of_the_first_shot(local_size=local_size, error_dtype=torch.bfloat16)
    error -= error_of_the_first_shot(local_size=local_size)  # the same on all ranks
    errors = torch.stack(from_all_ranks(error))
    # On nodes of two ranks, ranks 0 and 2 quantize the first shard, ranks 1 and 3 the second.
    for same in (errors,) if local_size == 1 else (errors[::2], errors[1::2]):
        share = same.mean(0).square().mean() / same.square().mean()
        assert abs(share * len(same) - 1) < 0.15, "the mean of n independent errors has 1 / n of their variance"
