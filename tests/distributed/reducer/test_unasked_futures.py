"""On a GPU a bucket's future completes without being asked: C++ never calls the methods of Python's futures.

Each case hung the host without a timeout, on the double of a GPU as on a GPU.
"""

import pytest
import torch
import torch.distributed as dist
from torch.futures import collect_all

from gradwire.hooks import default_hooks
from tests.support.bits import assert_same_bits
from tests.support.features import Parts
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import SMALLEST, gradients, own_batches, register, wrapped

LIMIT = 20  # seconds
SKIP = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
ALL, WITHOUT_THE_FIRST = (0, 1, 2, 3, 4), (1, 2, 3, 4)  # the first layer is in the last buckets


def then(group, bucket):
    return default_hooks.fp16_compress_hook(group, bucket).then(lambda future: future.value())


def last_elsewhere(group, bucket):
    if not bucket.is_last():
        return default_hooks.fp16_compress_hook(group, bucket)
    mean = bucket.buffer() / dist.get_world_size(group)
    return dist.all_reduce(mean, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def collected(group, bucket):
    future = collect_all([default_hooks.fp16_compress_hook(group, bucket)])
    return future.then(lambda done: done.value()[0].value())


# Wrapper, its options, hook, layers in use.
CASES = {
    "pytorch, last bucket skipped": ("pytorch", SKIP, default_hooks.fp16_compress_hook, WITHOUT_THE_FIRST),
    "pytorch, last bucket skipped, then": ("pytorch", SKIP, then, WITHOUT_THE_FIRST),
    "gradwire, last bucket skipped": ("gradwire", SKIP, default_hooks.fp16_compress_hook, WITHOUT_THE_FIRST),
    "gradwire, last bucket skipped, then": ("gradwire", SKIP, then, WITHOUT_THE_FIRST),
    "pytorch, last bucket elsewhere": ("pytorch", {}, last_elsewhere, ALL),
    "gradwire, last bucket elsewhere": ("gradwire", {}, last_elsewhere, ALL),
    "pytorch, collected": ("pytorch", {}, collected, ALL),
    "gradwire, collected": ("gradwire", {}, collected, ALL),
    "pytorch, static graph, then": ("pytorch", {"static_graph": True}, then, ALL),
    "pytorch, static graph, two dtypes": ("pytorch", {"static_graph": True}, default_hooks.fp16_compress_hook, ALL),
    "gradwire, static graph, then": ("gradwire", {"static_graph": True}, then, ALL),
}


class TwoDtypes(Parts):
    """The second layer has parameters in fp64."""

    def __init__(self):
        super().__init__()
        self.parts[1].double()

    def forward(self, x, use):
        return super().forward(x, use, run=lambda part, x: part(x.to(part.weight.dtype)))


def train(name, group):
    wrapper, options, hook, layers = CASES[name]
    torch.manual_seed(0)
    model = TwoDtypes() if "two dtypes" in name else Parts()
    ddp = wrapped(wrapper, model, group=group, bucket_cap_mb=SMALLEST, **options)
    register(ddp, (group, hook))
    generator, seen = own_batches(), []
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=generator), layers).backward()
        seen.append(gradients(ddp))
    return seen


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, limit=LIMIT)
def test_unawaited_future_completes_at_the_end_of_the_backward(case):
    expected = train(case, dist.new_group())
    with gpu_on_cpu():
        assert_same_bits(train(case, dist.new_group(backend=register_backend())), expected)
