"""Law 4 for hooks written for PyTorch: the same bits on both DDPs; and what gradwire's hooks send and keep."""

import functools
import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import gradwire
from gradwire.comm.connections import connections_of, executor_for
from gradwire.hooks import _bucket, default_hooks
from tests.support.bits import assert_same_bits
from tests.support.training import HOOKS, SMALL, WRAPPERS, build, register, sent_bytes, train


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


def in_place_then_hook(state, bucket):
    """Changes what gradwire's hook returns, and returns a view of it."""
    return default_hooks.fp16_compress_hook(state, bucket).then(lambda future: future.value().add_(1).view(-1))


def set_buffer_hook(state, bucket):
    """Lets the hook inside work on a buffer of its own."""
    bucket.set_buffer(bucket.buffer() * 2)
    return default_hooks.fp16_compress_hook(state, bucket)


def reading_hook(state, bucket):
    """Only looks at everything that a bucket offers."""
    assert len(bucket.gradients()) == len(bucket.parameters())
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape
    total = sum(gradient.numel() for gradient in bucket.gradients())
    assert total == bucket.buffer().numel()
    return torch_debugging.noop_hook(state, bucket)


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
    "in_place_then": lambda: (None, in_place_then_hook),
    "set_buffer": lambda: (None, set_buffer_hook),
    "reading": lambda: (None, reading_hook),
    "pytorchs_wrapper_of_ours": lambda: (None, torch_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "our_wrapper_of_a_users": lambda: (None, default_hooks.bf16_compress_wrapper(in_place_halving_hook)),
    "our_wrapper_of_our_wrapper": lambda: (
        None,
        default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ),
}


def users_hook_on_both(hook, **options):
    return tuple(train(wrapper, hook=WRITTEN_FOR_PYTORCH[hook](), **options) for wrapper in WRAPPERS)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", WRITTEN_FOR_PYTORCH)
def test_law4_hook_written_for_pytorch_matches_pytorch(world, hook, view):
    options = {"model": "mixed", "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for on_pytorch, on_gradwire in world.run(users_hook_on_both, hook=hook, **options):
        assert_same_bits(on_gradwire, on_pytorch)


def power_sgd_on_both(rank, **options):
    # One bucket: with several, PyTorch's hook mixes up its own collectives on gloo.
    records = []
    for wrapper in WRAPPERS:
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=3)
        records.append(train(wrapper, "mlp", hook=(state, powerSGD_hook), bucket_cap_mb=100, steps=6, **options))
    return records


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("rank", [1, 3])
def test_law4_pytorchs_power_sgd_matches_pytorch(world, rank, view):
    for on_pytorch, on_gradwire in world.run(power_sgd_on_both, rank=rank, gradient_as_bucket_view=view):
        assert_same_bits(on_gradwire, on_pytorch)


def fused_optimizer(view):
    """Parameters after steps that PyTorch's own hook takes, bucket by bucket."""
    results = []
    for wrapper in WRAPPERS.values():
        ddp = wrapper(build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            ddp(*ddp.module.batch(generator)).backward()
            ddp.zero_grad()
        results.append([parameter.detach().clone() for parameter in ddp.parameters()])
    return results


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_fused_optimizer_matches_pytorch(world, view):
    for theirs, ours in world.run(fused_optimizer, view=view):
        assert_same_bits(ours, theirs)


def channels_last_gradients(wrapper):
    """Whether `gradients()` has the elements of each gradient in their places, and the parameter's strides."""
    found = []

    def hook(state, bucket):
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            found.append(torch.equal(gradient, parameter.grad) and gradient.stride() == parameter.stride())
        return torch_debugging.noop_hook(state, bucket)

    ddp = WRAPPERS[wrapper](build("conv"), bucket_cap_mb=SMALL)
    register(ddp, (None, hook))
    for _ in range(2):
        ddp(*ddp.module.batch(torch.Generator())).backward()
        ddp.zero_grad()
    return all(found)


def test_bucket_gradients_have_layout_of_their_parameters(world):
    assert world.run(channels_last_gradients, wrapper="gradwire") == [True] * world.size


def test_pytorchs_bucket_gradients_ignore_channels_last(world):
    # Why hooks of gradwire never read `gradients()` of PyTorch's bucket. If this fails, PyTorch has fixed it.
    assert world.run(channels_last_gradients, wrapper="pytorch") == [False] * world.size


def wrapped_future(hook, wrapper):
    """What the wrapped hook was given, and what the wrapper's future holds: dtypes, size, and the values' mean."""
    seen = []
    state, wrapped = HOOKS[hook](None)

    def recording_hook(state, bucket):
        future = wrapped(state, bucket)
        value = future.wait()
        seen.append((value.dtype, value.numel() == bucket.buffer().numel()))
        return future

    train(wrapper, "mlp", hook=(state, recording_hook), bucket_cap_mb=SMALL, steps=2)
    train(wrapper, "brain", hook=(state, recording_hook), bucket_cap_mb=SMALL, steps=2)
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["fp16_of_allreduce", "bf16_of_allreduce", "fp16_of_pytorch", "fp16", "bf16"])
def test_futures_hold_dtype_of_gradients(world, hook, wrapper):
    for seen in world.run(wrapped_future, hook=hook, wrapper=wrapper):
        dtypes = [dtype for dtype, _ in itertools.groupby(dtype for dtype, _ in seen)]
        assert dtypes == [torch.float32, torch.bfloat16]
        assert all(has_size for _, has_size in seen)


def build_of_pytorch(with_nccl):
    """Lets PyTorch look like a build with or without CUDA and NCCL."""
    patches = ExitStack()
    patches.enter_context(mock.patch.object(torch.version, "cuda", "12.8" if with_nccl else None))
    patches.enter_context(mock.patch.object(torch.version, "hip", None))
    patches.enter_context(mock.patch.object(dist, "is_nccl_available", lambda: with_nccl))
    patches.enter_context(mock.patch.object(dist, "is_xccl_available", lambda: False))
    patches.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 3)))
    return patches


def registering_bf16(with_nccl):
    outcomes = {}
    hooks = {
        "hook": default_hooks.bf16_compress_hook,
        "wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    }
    for name, hook in hooks.items():
        for wrapper, ddp_class in WRAPPERS.items():
            ddp = ddp_class(build("mlp"))
            with build_of_pytorch(with_nccl):
                try:
                    ddp.register_comm_hook(None, hook)
                except TypeError as error:
                    outcomes[wrapper, name] = str(error)
                    continue
            ddp(*ddp.module.batch(torch.Generator())).backward()
            outcomes[wrapper, name] = "trains"
    return outcomes


@pytest.mark.parametrize("with_nccl", [False, True], ids=["build-without-nccl", "build-with-nccl"])
def test_bf16_hooks_without_nccl_raise_on_pytorchs_ddp_only(world, with_nccl):
    # The group is one of gloo in all cases, and sums bf16.
    for outcomes in world.run(registering_bf16, with_nccl=with_nccl):
        for name in ("hook", "wrapper"):
            assert outcomes["gradwire", name] == "trains"
            if with_nccl:
                assert outcomes["pytorch", name] == "trains"
            else:
                assert "BF16 all reduce communication hook required" in outcomes["pytorch", name]


class CallableHook:
    def __init__(self):
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        return default_hooks.fp16_compress_hook(state, bucket)

    def method(self, state, bucket):
        self.calls += 1
        return default_hooks.fp16_compress_hook(state, bucket)


def three_argument_hook(factor, state, bucket):
    return default_hooks.fp16_compress_hook(state, bucket)


def callables_of_many_kinds():
    hook = CallableHook()
    kinds = {
        "function": default_hooks.fp16_compress_hook,
        "object": hook,
        "method": hook.method,
        "partial": functools.partial(three_argument_hook, 2.0),
        "partial of ours": functools.partial(default_hooks.fp16_compress_hook),
        "lambda": lambda state, b: default_hooks.fp16_compress_hook(state, b),
    }
    return {kind: train("gradwire", "mlp", hook=(None, hook), bucket_cap_mb=SMALL) for kind, hook in kinds.items()}


def test_any_callable_is_accepted_as_hook(world):
    for records in world.run(callables_of_many_kinds):
        for record in records.values():
            assert_same_bits(record, records["function"])


def builtin_hooks():
    results = []
    for ddp_class in WRAPPERS.values():
        for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
            ddp = ddp_class(build("mlp"))
            ddp._register_builtin_comm_hook(kind)
            ddp(torch.ones(2, 11) * (1 + dist.get_rank())).backward()
            results.append(ddp.module.layers[0].weight.grad)
    return results


def test_builtin_hooks_match_pytorch(world):
    # PyTorch's divide by n after the cast, gradwire's multiply by 1/n before it: some roundings are at other places.
    for all_reduce, fp16, our_all_reduce, our_fp16 in world.run(builtin_hooks):
        largest = all_reduce.abs().max()
        assert (our_all_reduce - all_reduce).abs().max() <= (world.size + 1) * 2.0**-24 * largest
        assert (our_fp16 - fp16).abs().max() <= (world.size + 1) * 2.0**-11 * largest
        assert not torch.equal(fp16, all_reduce), "one of the two was in 16 bit"


def payload(hook, wrapper):
    """Bytes of the third step: the first two have other buckets than all that follow."""
    sent = []
    for steps in (2, 3):
        before = sent_bytes()
        train(wrapper, "mlp", hook=hook, bucket_cap_mb=SMALL, steps=steps)
        sent.append(sent_bytes() - before)
    return sent[1] - sent[0]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_16_bit_hooks_send_half_the_bytes(world, wrapper):
    parameters = sum(parameter.numel() for parameter in build("mlp").parameters())
    assert world.run(payload, hook="allreduce", wrapper=wrapper) == [4 * parameters] * world.size
    for hook in ("fp16", "bf16", "fp16_of_allreduce", "bf16_of_allreduce", "scaled_fp16", "scaled_bf16"):
        assert world.run(payload, hook=hook, wrapper=wrapper) == [2 * parameters] * world.size, hook


def memory_of_buckets(hook, model):
    """Which buckets hold a flat buffer, after each step, and the largest workspace then."""
    module = build(model)
    ddp = gradwire.DistributedDataParallel(module, bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook)
    workspaces = executor_for(None, torch.device("cpu")).workspaces
    generator = torch.Generator().manual_seed(0)
    flat = []
    sizes = []
    for _ in range(8):
        ddp(*module.batch(generator)).backward()
        ddp.zero_grad()
        flat.append([bucket._buffer is not None for bucket in ddp.reducer.buckets])
        sizes.append(max(workspace.nbytes for workspace in workspaces))
    largest = max(sum(p.numel() for p in bucket.parameters()) for bucket in ddp.reducer.buckets)
    return flat, sizes, largest


@pytest.mark.parametrize("hook", ["fp16", "bf16", "scaled_fp16", "scaled_bf16", "fp16_of_allreduce"])
def test_hook_on_gradwires_ddp_allocates_no_flat_copy_of_gradients(world, hook):
    for flat, _, _ in world.run(memory_of_buckets, hook=hook, model="mlp"):
        assert len(flat[-1]) > 1
        assert not any(itertools.chain.from_iterable(flat))


@pytest.mark.parametrize(("hook", "itemsize"), [("fp16", 2), ("scaled_fp16", 2)])
def test_workspace_after_rebuild_shrinks_to_largest_bucket(world, hook, itemsize):
    for _, sizes, largest in world.run(memory_of_buckets, hook=hook, model="mlp"):
        assert sizes[0] >= itemsize * sum(parameter.numel() for parameter in build("mlp").parameters())
        assert sizes[-1] == itemsize * largest


def workspaces_after(wrapper, hooks):
    """The sizes of all workspaces of a process group after a run with each of the hooks."""
    group, sizes = dist.new_group(), []
    for hook in hooks:
        train(wrapper, "mlp", hook=hook, group=group, bucket_cap_mb=SMALL, steps=6)
        executors = connections_of(group)._executors.values()
        sizes.append([workspace.nbytes for executor in executors for workspace in executor.workspaces])
    dist.destroy_process_group(group)
    return sizes


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_plain_all_reduce_on_a_cpu_takes_no_executor_and_frees_workspaces(world, wrapper):
    for first, casting, last in world.run(workspaces_after, wrapper=wrapper, hooks=["allreduce", "fp16", "allreduce"]):
        assert first == []
        assert max(casting) > 0
        assert last == [0, 0]


def buffers_of_buckets(uses):
    """In each step, which buckets hold a flat buffer; the hook asks for it in some steps."""
    step = 0

    def hook(group, bucket):
        run = default_hooks.allreduce_hook if uses[step] else default_hooks.fp16_compress_hook
        return run(group, bucket)

    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(None, _bucket.zero_copy(hook))
    generator, seen = torch.Generator().manual_seed(0), []
    for step in range(len(uses)):  # noqa: B007 - the hook reads it
        ddp(*ddp.module.batch(generator)).backward()
        seen.append({bucket._buffer is not None for bucket in ddp.reducer.buckets})
    return seen


def test_flat_buffers_are_freed_once_no_hook_uses_them(world):
    for seen in world.run(buffers_of_buckets, uses=[True, True, True, False, False]):
        assert seen == [{True}, {True}, {True}, {True}, {False}], "freed after a step without use"
