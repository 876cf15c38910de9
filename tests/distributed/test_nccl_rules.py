"""The GPU path of hooks and reducer, on CPU tensors, issues only collectives that NCCL accepts."""

import re

import pytest
import torch
import torch.distributed as dist
import zoo
from bits import assert_same_bits
from harness import CaseFailed
from torch import nn
from training import HOOKS, SMALL, train

from gradwire.bench.rehearsal import gpu_on_cpu, register_backend
from gradwire.comm import GroupTransport
from gradwire.comm.connections import executor_for
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.hooks import powerSGD_hook


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
