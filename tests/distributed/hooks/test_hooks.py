"""Law 4 for hooks written for PyTorch, the same bits on both DDPs; bytes and memory of gradwire's hooks."""

import functools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from gradwire.comm.connections import connections_of, executor_for
from gradwire.hooks import default_hooks
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    WRAPPERS,
    build,
    error_of,
    own_batches,
    sent_bytes,
    train,
    train_steps,
    wrapped,
)


def in_place_halving_hook(state, bucket):
    """Halves the gradients through `gradients()`, then averages them."""
    for gradient in bucket.gradients():
        gradient.mul_(0.5)
    return torch_hooks.allreduce_hook(state, bucket)


def other_dtype_hook(state, bucket):
    """Returns fp64, or fp32 where the bucket is fp64."""
    other = torch.float32 if bucket.buffer().dtype == torch.float64 else torch.float64
    tensor = bucket.buffer().to(other).div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


def scaled_then_hook(state, bucket):
    """Works on what gradwire's hook returns."""
    return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value() * 3)


@functools.wraps(default_hooks.fp16_compress_hook)
def wrapping_hook(state, bucket):
    """As many users write a wrapper: with everything copied from the wrapped function."""
    return default_hooks.fp16_compress_hook(state, bucket).then(lambda future: future.value() * 3)


def set_buffer_hook(state, bucket):
    """Lets the hook inside work on a buffer of its own."""
    bucket.set_buffer(bucket.buffer() * 2)
    return default_hooks.fp16_compress_hook(state, bucket)


def alone():
    """A group of this rank only."""
    return dist.new_subgroups(group_size=1)[0]


WRITTEN_FOR_PYTORCH = {
    "allreduce": lambda: (None, torch_hooks.allreduce_hook),
    "fp16": lambda: (None, torch_hooks.fp16_compress_hook),
    "bf16": lambda: (None, torch_hooks.bf16_compress_hook),
    "fp16_wrapper": lambda: (None, torch_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)),
    "noop": lambda: (None, torch_debugging.noop_hook),
    "post_local_sgd": lambda: (PostLocalSGDState(None, alone(), start_localSGD_iter=2), post_localSGD_hook),
    "zero_copy": lambda: (None, in_place_halving_hook),
    "other_dtype": lambda: (None, other_dtype_hook),
    "then": lambda: (None, scaled_then_hook),
    "wraps": lambda: (None, wrapping_hook),
    "set_buffer": lambda: (None, set_buffer_hook),
    "pytorchs_wrapper_of_ours": lambda: (None, torch_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "our_wrapper_of_a_users": lambda: (None, default_hooks.bf16_compress_wrapper(in_place_halving_hook)),
    "our_wrapper_of_our_wrapper": lambda: (
        None,
        default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ),
}


views = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def assert_law4(hook, model="mlp", **options):
    """Both DDPs train with the same bits."""
    theirs, ours = (train(wrapper, model, hook=hook(), **options) for wrapper in WRAPPERS)
    assert_same_bits(ours, theirs)


@views
@pytest.mark.parametrize("hook", WRITTEN_FOR_PYTORCH)
@on_ranks(2, 3)
def test_law4_hook_written_for_pytorch_matches_pytorch(hook, view):
    assert_law4(WRITTEN_FOR_PYTORCH[hook], "mixed", gradient_as_bucket_view=view, bucket_cap_mb=SMALL)


@views
@pytest.mark.parametrize("rank", [1, 3])
@on_ranks(2, 3)
def test_law4_pytorchs_power_sgd_matches_pytorch(rank, view):
    def hook():
        return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=3), powerSGD_hook

    # One bucket: with several, PyTorch's hook mixes up its own collectives on gloo.
    assert_law4(hook, gradient_as_bucket_view=view, bucket_cap_mb=100, steps=6)


@views
@on_ranks(2, 3)
def test_law4_fused_optimizer_matches_pytorch(view):
    # PyTorch's own hook takes the optimizer's steps, bucket by bucket.
    results = []
    for wrapper in WRAPPERS.values():
        ddp = wrapper(build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        generator = own_batches()
        for _ in range(4):
            ddp(*ddp.module.batch(generator)).backward()
            ddp.zero_grad()
        results.append([parameter.detach().clone() for parameter in ddp.parameters()])
    assert_same_bits(*results)


def build_of_pytorch(with_nccl):
    """Lets PyTorch look like a build with or without CUDA and NCCL."""
    patches = ExitStack()
    patches.enter_context(mock.patch.object(torch.version, "cuda", "12.8" if with_nccl else None))
    patches.enter_context(mock.patch.object(torch.version, "hip", None))
    patches.enter_context(mock.patch.object(dist, "is_nccl_available", lambda: with_nccl))
    patches.enter_context(mock.patch.object(dist, "is_xccl_available", lambda: False))
    patches.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 3)))
    return patches


@pytest.mark.parametrize("with_nccl", [False, True], ids=["build-without-nccl", "build-with-nccl"])
@pytest.mark.parametrize("hook", ["bf16", "bf16_of_allreduce"])
@on_ranks(2)
def test_bf16_hooks_without_nccl_raise_on_pytorchs_ddp_only(hook, with_nccl):
    # The group is one of gloo in all cases, and sums bf16.
    for wrapper in WRAPPERS:
        ddp = wrapped(wrapper)
        with build_of_pytorch(with_nccl):
            error = error_of(ddp.register_comm_hook, *HOOKS[hook](None))
        if wrapper == "pytorch" and not with_nccl:
            assert error[0] == "TypeError" and "BF16 all reduce communication hook required" in error[1]
        else:
            assert error is None
            train_steps(ddp)


class CallableHook:
    def __call__(self, state, bucket):
        return default_hooks.fp16_compress_hook(state, bucket)

    def method(self, state, bucket):
        return default_hooks.fp16_compress_hook(state, bucket)


def three_argument_hook(factor, state, bucket):
    return default_hooks.fp16_compress_hook(state, bucket)


@pytest.mark.parametrize(
    "hook",
    [
        CallableHook(),
        CallableHook().method,
        functools.partial(three_argument_hook, 2.0),
        functools.partial(default_hooks.fp16_compress_hook),
        lambda state, b: default_hooks.fp16_compress_hook(state, b),
    ],
    ids=["object", "method", "partial", "partial-of-ours", "lambda"],
)
def test_any_callable_is_accepted_as_hook(world_of_one, hook):
    expected, record = (
        train("gradwire", "mlp", hook=(None, each), bucket_cap_mb=SMALL)
        for each in (default_hooks.fp16_compress_hook, hook)
    )
    assert_same_bits(record, expected)


CASTS = ("fp16", "bf16", "fp16_of_allreduce", "bf16_of_allreduce", "scaled_fp16", "scaled_bf16")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["allreduce", *CASTS])
@on_ranks(2, 3)
def test_16_bit_hooks_send_half_the_bytes(hook, wrapper):
    ddp = wrapped(wrapper, hook=hook)
    train_steps(ddp, 2)  # in other buckets than all that follow
    before = sent_bytes()
    train_steps(ddp)
    n_parameters = sum(parameter.numel() for parameter in ddp.parameters())
    assert sent_bytes() - before == (4 if hook == "allreduce" else 2) * n_parameters


@pytest.mark.parametrize("hook", ["fp16", "bf16", "scaled_fp16", "scaled_bf16", "fp16_of_allreduce"])
@on_ranks(2, 3)
def test_hook_on_gradwires_ddp_has_no_flat_copy_and_small_workspace(hook):
    ddp, generator, sizes = wrapped(hook=hook), torch.Generator(), []
    workspaces = executor_for(None, torch.device("cpu")).workspaces
    for _ in range(8):
        train_steps(ddp, 1, generator)
        assert not any(bucket._buffer is not None for bucket in ddp.reducer.buckets)
        sizes.append(max(workspace.nbytes for workspace in workspaces))
    numels = [sum(p.numel() for p in bucket.parameters()) for bucket in ddp.reducer.buckets]
    assert len(numels) > 1
    if hook != "fp16_of_allreduce":  # which casts into tensors of its own
        assert sizes[0] >= 2 * sum(numels)  # before the buckets are rebuilt, there is one
        assert sizes[-1] == 2 * max(numels)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3)
def test_plain_all_reduce_on_a_cpu_takes_no_executor_and_frees_workspaces(wrapper):
    group, sizes = dist.new_group(), []
    for hook in ("allreduce", "fp16", "allreduce"):
        train(wrapper, "mlp", hook=hook, group=group, bucket_cap_mb=SMALL, steps=6)
        executors = connections_of(group)._executors.values()
        sizes.append([workspace.nbytes for executor in executors for workspace in executor.workspaces])
    dist.destroy_process_group(group)
    first, casting, last = sizes
    assert first == []
    assert max(casting) > 0
    assert last == [0, 0]
