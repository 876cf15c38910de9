"""The GPU path of hooks and reducer, on CPU tensors, issues only collectives that NCCL accepts."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm import GroupTransport, torch_internals
from gradwire.comm.connections import executor_for
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.hooks import powerSGD_hook
from tests.support import zoo
from tests.support.bits import assert_same_bits
from tests.support.harness import CaseFailed
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import HOOKS, SMALL, train


class HalfAndBias(nn.Module):
    """fp16 matrices that PowerSGD compresses, with biases and norms that it sends as they are, in the same bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)).half()
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float16))

    def forward(self, x):
        return self.layers(x).float().square().mean() + (x.sum() * self.empty).float().sum()

    @staticmethod
    def batch(generator):
        return (torch.randn(4, 24, generator=generator).half(),)


class SparseTable(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5, sparse=True)

    def forward(self, words):
        return self.table(words).square().sum()

    @staticmethod
    def batch(generator):
        return (torch.randint(11, (3,), generator=generator),)


# Every dtype, several of them in one model, empty, 0-d and oddly laid out parameters. PyTorch's own class broadcasts
# complex parameters as they are, which NCCL allows; ours does not rely on that.
MODELS = {"gradwire": ("mixed", "half and bias", "odd", "complex"), "pytorch": ("mixed", "half and bias")}
MORE_HOOKS = {
    "powersgd_bf16_factors": {"factor_dtype": torch.bfloat16},
    "powersgd_alternating_bf16_factors": {"factor_dtype": torch.bfloat16, "alternating": True},
}


def hook_of(name, group):
    """The name of a hook of the list that all laws are tested with, or a pair of state and hook."""
    if name not in MORE_HOOKS:
        return name
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1} | MORE_HOOKS[name]
    return powerSGD_hook.PowerSGDState(group, **options), powerSGD_hook.powerSGD_hook


def model_of(name):
    torch.manual_seed(0)
    return HalfAndBias() if name == "half and bias" else zoo.MODELS[name]()


def compared_with_the_worker(hook, wrapper):
    """Trains every model behind the double and behind plain gloo; the calls that the double saw."""
    calls = []
    for name in MODELS[wrapper]:
        group = dist.new_group(backend=register_backend())
        expected = train(wrapper, model_of(name), hook=hook_of(hook, None), steps=4, bucket_cap_mb=SMALL)
        with gpu_on_cpu():
            options = {"hook": hook_of(hook, group), "group": group, "steps": 4, "bucket_cap_mb": SMALL}
            record = train(wrapper, model_of(name), **options)
            assert isinstance(executor_for(group, torch.device("cpu")), StreamExecutor)
        assert_same_bits(record, expected)
        calls.append(group.calls)
        dist.destroy_process_group(group)
    return calls


@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
@pytest.mark.parametrize("hook", [None, *HOOKS, *MORE_HOOKS])
def test_every_collective_of_a_hook_obeys_nccl_rules(worlds, hook, wrapper):
    first, second = worlds(2).run(compared_with_the_worker, hook=hook, wrapper=wrapper)
    assert first == second
    assert all(first)


def sparse_gradients(wrapper):
    group = dist.new_group(backend=register_backend())
    with gpu_on_cpu():
        train(wrapper, SparseTable(), hook="allreduce", group=group)


# PyTorch's class cannot either.
@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
def test_sparse_gradients_raise_the_error_of_nccl(worlds, wrapper):
    with pytest.raises(CaseFailed) as failure:
        worlds(2).run(sparse_gradients, wrapper=wrapper)
    for rank in range(2):
        assert "NCCL does not support all_reduce with sparse tensors" in str(failure.value.errors[rank])


def all_reduce(*tensors, op=dist.ReduceOp.SUM):
    def call(group):
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
            for tensor in tensors:
                dist.all_reduce(tensor, op, group=group)

    def single(group):
        dist.all_reduce(tensors[0], op, group=group)

    return call if len(tensors) > 1 else single


def all_to_all(received, sent):
    return lambda group: torch_internals.all_to_all(received, sent, group, is_async=False)


def all_gather(gathered, own):
    return lambda group: torch_internals.all_gather(gathered, own, group, is_async=False)


# What breaks a rule, and the message.
BROKEN = {
    "two dtypes in one call": (
        lambda rank: all_reduce(torch.ones(2), torch.ones(2).half()),
        "Tensors must have identical type",
    ),
    "strided": (lambda rank: all_reduce(torch.ones(4)[::2]), "Tensors must be contiguous"),
    "strided in one call": (
        lambda rank: all_reduce(torch.ones(2), torch.ones(4)[::2]),
        "Tensors must be contiguous",
    ),
    "complex": (
        lambda rank: lambda group: group.allreduce([torch.ones(2) * 1j]),
        "not supported for NCCL process group: torch.complex64",
    ),
    "int16": (lambda rank: all_reduce(torch.ones(2).short()), "not supported for NCCL process group: torch.int16"),
    "a sum of bools": (lambda rank: all_reduce(torch.ones(2).bool()), "A sum of bools over NCCL"),
    "other sizes": (lambda rank: all_reduce(torch.ones(2 + rank)), "differs between ranks"),
    "other dtypes": (lambda rank: all_reduce(torch.ones(2, dtype=(torch.half, torch.int)[rank])), "differs between"),
    "an all-to-all of unequal parts": (
        lambda rank: all_to_all(torch.ones(3), torch.ones(3)),
        "Tensor's dim 0 does not divide equally across group size",
    ),
    "an all-to-all without room": (
        lambda rank: all_to_all(torch.ones(2), torch.ones(4)),
        "output tensor size must be equal to input tensor size",
    ),
    "a strided all-to-all": (
        lambda rank: all_to_all(torch.ones(4), torch.ones(8)[::2]),
        "Tensors must be contiguous",
    ),
    "an all-to-all of two dtypes": (
        lambda rank: all_to_all(torch.ones(4), torch.ones(4).half()),
        "Tensors must have identical type",
    ),
    "an all-gather without room": (
        lambda rank: all_gather(torch.ones(3), torch.ones(2)),
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "a strided all-gather": (
        lambda rank: all_gather(torch.ones(8)[::2], torch.ones(2)),
        "Tensors must be contiguous",
    ),
    "an all-gather of two dtypes": (
        lambda rank: all_gather(torch.ones(4), torch.ones(2).half()),
        "Tensors must have identical type",
    ),
    "an all-gather of other sizes": (
        lambda rank: all_gather(torch.ones(2 * (1 + rank)), torch.ones(1 + rank)),
        "differs between ranks",
    ),
    "an all-gather against an all-to-all": (
        lambda rank: all_gather(torch.ones(4), torch.ones(2)) if rank else all_to_all(torch.ones(4), torch.ones(4)),
        "differs between ranks",
    ),
    "another collective": (
        lambda rank: (lambda group: dist.barrier(group)) if rank else all_reduce(torch.ones(2)),
        "differs between ranks",
    ),
}


def messages_of_broken_rules():
    group = dist.new_group(backend=register_backend())
    messages = {}
    for name, (make, _) in BROKEN.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            make(dist.get_rank())(group)
        messages[name] = str(error.value)
    tensor = torch.ones(3)
    all_reduce(tensor, torch.ones(2))(group)  # one dtype
    dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.MAX, group=group)
    GroupTransport(group).run(GroupTransport(group).all_reduce(tensor, torch.ones(2).half(), torch.empty(0)))
    dist.destroy_process_group(group)
    return messages, tensor


def test_nccl_double_refuses_on_every_rank_what_nccl_refuses(worlds):
    for messages, tensor in worlds(2).run(messages_of_broken_rules):
        assert tensor.tolist() == [4.0] * 3
        for name, (_, expected) in BROKEN.items():
            assert re.search(re.escape(expected), messages[name]), (name, messages[name])


def shots_behind_double(pieces):
    """Both shots of two buckets on the path of a GPU: this rank's results, and the calls that the double saw."""
    group = dist.new_group(backend=register_backend())
    rank, n = dist.get_rank(), dist.get_world_size()

    async def two_shots(transport, value):
        sent = torch.full((pieces, n, 48), value + rank, dtype=torch.uint8)
        received, gathered = torch.empty_like(sent), torch.empty_like(sent)
        await transport.all_to_all(received, sent)
        await transport.all_gather(gathered, received.sum(1, dtype=torch.uint8))
        return gathered

    with gpu_on_cpu():
        executor = executor_for(group, torch.device("cpu"))
        assert executor.transport.pieces(1 << 30) == 1
        futures = [executor.submit(lambda _, k=k: two_shots(executor.transport, k)) for k in (1, 2)]
        results = [future.wait() for future in futures]
    calls = [name for name, *_ in group.calls]
    dist.destroy_process_group(group)
    return results, calls


@pytest.mark.parametrize("pieces", [1, 3])
def test_two_shots_obey_nccl_rules(world, pieces):
    n = world.size
    for results, calls in world.run(shots_behind_double, pieces=pieces):
        # The first shot of the second task comes before the second shot of the first.
        assert calls == ["alltoall_base"] * (2 * pieces) + ["_allgather_base"] * (2 * pieces)
        for k, gathered in zip((1, 2), results, strict=True):
            assert (gathered == n * k + n * (n - 1) // 2).all()
