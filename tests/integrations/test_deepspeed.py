"""DeepSpeed's ZeRO with `gradwire.collectives.compressed_group` as the data-parallel group."""

import os
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.collectives import compressed_group
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

STEPS = 5
NOTHING = 2**40  # more elements than any tensor has
CONFIG = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
BUCKET_NUMEL = 150_000  # two buckets, each larger than the smallest compressed tensor


class Parallelism:
    """What DeepSpeed asks of ``mpu``: data parallelism on ``group``, and no model parallelism."""

    def __init__(self, group):
        self.group, self.alone = group, dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def get_data_parallel_group(self):
        return self.group

    def get_data_parallel_rank(self):
        return self.group.rank()

    def get_data_parallel_world_size(self):
        return self.group.size()

    def get_model_parallel_group(self):
        return self.alone

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1


def train(stage, group):
    """Losses and final weights of a few steps; without a group, on DeepSpeed's own."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=CONFIG | {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET_NUMEL}},
        mpu=None if group is None else Parallelism(group),
    )
    losses, batches = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(8, 256, generator=batches)
        loss = nn.functional.cross_entropy(engine(inputs), inputs[:, :10].argmax(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def trainings(stage):
    """A plain training, one on a group that compresses nothing, and a compressed one, with the bytes on its group."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    import deepspeed

    dist.init_process_group("gloo")
    # Collectives in shared memory, for inference only, which it would compile for minutes.
    with mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}):
        plain = train(stage, None)
        passed_on = train(stage, compressed_group(wire="int8", min_numel=NOTHING))
        group = compressed_group(wire="int8")
        compressed = train(stage, group)
    return plain, passed_on, compressed, dict(group.compressed), dict(group.passed)


@pytest.mark.parametrize(
    ("stage", "operation"), [(1, "all_reduce"), (2, "all_reduce"), (3, "reduce_scatter_tensor")], ids=str
)
def test_zero_compresses_the_gradients_and_nothing_else(run_on_two_ranks, stage, operation):
    results = run_on_two_ranks(trainings, stage=stage)
    for plain, passed_on, (losses, weights), compressed, passed in results:
        assert passed_on[0] == plain[0]
        assert_same_bits(passed_on[1], plain[1])
        assert losses != plain[0]
        assert losses == pytest.approx(plain[0], abs=5e-3)
        nbytes = sum(weight.nbytes for weight in weights)
        assert compressed == {operation: STEPS * nbytes}
        assert passed["broadcast"] % nbytes == 0, "the parameters, at the start"
        assert passed["all_reduce"] <= 8 * STEPS, "the norm for gradient clipping"
        gathered = sum(count for name, count in passed.items() if "gather" in name)
        assert gathered >= STEPS * nbytes, "the parameters, after each step"
    assert_same_on_all_ranks([weights for _, _, (_, weights), _, _ in results])
