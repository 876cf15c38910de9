"""The size of rebuilt buckets: the one passed to DistributedDataParallel, else the hook's, else PyTorch's default."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradwire.bench.shapes import SHAPES
from gradwire.hooks import powerSGD_hook
from gradwire.reducer.torch_internals import assign_buckets
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import flat_hook
from tests.support.ranks import on_ranks
from tests.support.training import HOOKS, SMALL, SMALLEST, WRAPPERS, build, register, train, train_steps
from tests.support.zoo import Probe

ROOT = Path(__file__).parents[3]
MIB = 2**20
WIDE = [(512, 1024)] * 13  # 2 MiB each
OF_HOOK = 100  # MiB, of hooks that send low-rank factors
EVERY_HOOK = HOOKS | {
    "batched_powersgd": lambda group: (
        powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2),
        powerSGD_hook.batched_powerSGD_hook,
    ),
    "powersgd_of_pytorch": lambda group: (
        torch_powersgd.PowerSGDState(group, start_powerSGD_iter=1_000),
        torch_powersgd.powerSGD_hook,
    ),
}


def logged_cap(ddp):
    return ddp._get_ddp_logging_data()["bucket_cap_bytes"] / MIB


# Hook, options of the wrapper, and in MiB the logged cap after the rebuild and the sizes of the buckets.
REBUILT = [
    *((hook, {}, OF_HOOK, [26]) for hook in ("powersgd", "powersgd_alternating", "fp16_of_powersgd")),
    *(
        (hook, {}, 25, [2, 24])
        for hook in (None, "fp16", "scaled_fp16", "int4", "batched_powersgd", "powersgd_of_pytorch")
    ),
    ("powersgd", {"bucket_cap_mb": 8}, 8, [8, 8, 8, 2]),
    ("powersgd", {"bucket_cap_mb": 25}, 25, [26]),
    ("powersgd", {"bucket_cap_mb_list": [4, 10]}, 10, [4, 10, 10, 2]),
    ("powersgd", {"find_unused_parameters": True}, 25, [24, 2]),  # never rebuilt
]


@pytest.mark.parametrize(("hook", "options", "cap", "expected"), REBUILT)
@on_ranks(2)
def test_size_of_rebuilt_buckets_is_set_by_argument_hook_or_pytorch(hook, options, cap, expected):
    ddps = [WRAPPERS["gradwire"](Probe(*WIDE), **options)]
    if hook is not None:
        register(ddps[0], EVERY_HOOK[hook](None))
    else:
        ddps.append(WRAPPERS["pytorch"](Probe(*WIDE), **options))
    if (hook, options) == ("powersgd", {}):
        ddps.append(copy.deepcopy(ddps[0]))
    for ddp in ddps:
        before = logged_cap(ddp)
        assert "bucket_cap_mb_list" in options or before == options.get("bucket_cap_mb", 25)
        for _ in range(2):
            ddp(*(torch.full((1, 1), 1.0) for _ in WIDE)).backward()
        assert logged_cap(ddp) == cap
        if isinstance(ddp, WRAPPERS["gradwire"]):
            sizes = [sum(parameter.nbytes for parameter in bucket.parameters()) / MIB for bucket in ddp.reducer.buckets]
            assert sizes == expected


def preferring(cap, steps=3, hook=flat_hook):
    """(Members of the buckets, gradients of each step) with a user's hook whose state prefers a bucket size."""
    ddp = WRAPPERS["gradwire"](build("mlp"))
    ddp.register_comm_hook(
        SimpleNamespace(preferred_bucket_cap_mb=cap[dist.get_rank()]), lambda _, bucket: hook(None, bucket)
    )
    seen = train_steps(ddp, steps)
    return [bucket.members for bucket in ddp.reducer.buckets], seen


def test_ranks_with_other_preferred_sizes_use_the_sizes_of_rank_0(worlds):
    _, reference = worlds(2).run(preferring, cap=[None, None])[0]
    caps = st.one_of(st.none(), st.just(0), st.floats(SMALLEST, 10 * SMALL))

    @given(st.lists(caps, min_size=2, max_size=2))
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    def check(cap):
        alone, both = (worlds(2).run(preferring, cap=each) for each in ([cap[0], cap[0]], cap))
        assert_same_on_all_ranks(both)
        assert_same_bits(both, alone)
        assert_same_bits(both[0][1], reference)  # two ranks: no layout changes a sum

    check()


@pytest.mark.parametrize("hook", ["powersgd", "fp16_of_powersgd"])
@on_ranks(2, 3)
def test_law4_low_rank_hook_matches_pytorchs_ddp_at_default_sizes(hook):
    theirs, ours = [train(wrapper, "transformer", hook=hook, steps=5) for wrapper in WRAPPERS]
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("model", "row"), [("gpt2-124m", "GPT-2 124M"), ("bert-base", "BERT-base"), ("resnet50", "ResNet-50")]
)
def test_all_reduces_in_the_documentation_are_two_per_bucket(model, row):
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES[model]()][::-1]
    limits = ([MIB, 25 * MIB], [OF_HOOK * MIB])
    counts = [2 * len(assign_buckets(parameters, each, [False] * len(parameters))) for each in limits]
    assert f"| {row} | {counts[0]} | {counts[1]} |" in (ROOT / "docs" / "powersgd.md").read_text()
