"""The GPU path of hooks and reducer, on CPU tensors, issues only collectives that NCCL accepts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm.connections import executor_for
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.hooks import powerSGD_hook
from tests.support import zoo
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import HOOKS, SMALL, message_of, train
from tests.support.zoo import SparseTable


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


class SparseWords(SparseTable):
    def __init__(self):
        super().__init__(has_dense_layer=False)

    @staticmethod
    def batch(generator):
        return (torch.randint(64, (3,), generator=generator),)


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


ALL = (None, *HOOKS, *MORE_HOOKS)


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [
        *((hook, "gradwire") for hook in ALL),
        *(pytest.param(hook, "pytorch", marks=[pytest.mark.slow] * (i % 3 > 0)) for i, hook in enumerate(ALL)),
    ],
)
@on_ranks(2)
def test_every_collective_of_a_hook_obeys_nccl_rules(hook, wrapper):
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
    first, second = from_all_ranks(calls)
    assert first == second
    assert all(first)


# PyTorch's class cannot either.
@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
@on_ranks(2)
def test_sparse_gradients_raise_the_error_of_nccl(wrapper):
    group = dist.new_group(backend=register_backend())
    with gpu_on_cpu():
        message = message_of(train, wrapper, SparseWords(), hook="allreduce", group=group)
    assert "NCCL does not support all_reduce with sparse tensors" in message
