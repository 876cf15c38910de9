"""Laws 2 and 3: bitwise equal gradients on every rank, and hooks that are off equal the plain all-reduce."""

import pytest
import torch
import torch.distributed as dist

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, same_bits
from tests.support.training import HOOKS, SMALL, SMALLEST, WRAPPERS, build, gradients, train


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [None, *HOOKS])
def test_law2_gradients_are_bitwise_equal_on_all_ranks(world, hook, wrapper, view):
    options = {"wrapper": wrapper, "hook": hook, "gradient_as_bucket_view": view, "steps": 5}
    assert_same_on_all_ranks(world.run(train, model="mixed", bucket_cap_mb=SMALLEST, **options))


def hooked_and_plain(wrapper, hook, model, **options):
    return train(wrapper, model, hook=hook, **options), train(wrapper, model, **options)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "mixed", "odd"])
def test_law3_allreduce_hook_equals_the_plain_all_reduce(world, model, wrapper, view):
    options = {"wrapper": wrapper, "model": model, "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for hooked, plain in world.run(hooked_and_plain, hook="allreduce", **options):
        assert_same_bits(hooked, plain)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law3_allreduce_hook_equals_the_plain_all_reduce_of_accumulated_gradients(worlds, wrapper, view):
    # On two ranks: there the mean rounds the same, whether gradients are multiplied by 1 / n or views divided by n.
    options = {"wrapper": wrapper, "model": "conv", "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for hooked, plain in worlds(2).run(hooked_and_plain, hook="allreduce", accumulate=2, set_to_none=False, **options):
        assert_same_bits(hooked, plain)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("model", "hook"),
    [("half", "fp16"), ("half", "fp16_of_allreduce"), ("brain", "bf16"), ("brain", "bf16_of_allreduce")],
)
def test_law3_16_bit_hook_on_gradients_of_that_dtype_equals_the_plain_all_reduce(world, model, hook, wrapper, view):
    options = {"wrapper": wrapper, "model": model, "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for hooked, plain in world.run(hooked_and_plain, hook=hook, **options):
        assert_same_bits(hooked, plain)


def noop_and_local(model, **options):
    """Every rank on its own, from equal parameters."""
    options |= {"forward_sync_buffers": False}
    kept = {name: options[name] for name in ("set_to_none", "seed") if name in options}
    return [train(wrapper, model, hook="noop", **options) for wrapper in WRAPPERS], train(None, model, **kept)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("model", ["mlp", "conv", "mixed", "odd"])
def test_law3_noop_hook_leaves_local_gradients_unchanged(world, model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    for with_noop, local in world.run(noop_and_local, model=model, **options):
        for record in with_noop:
            assert_same_bits(record, local)


def reduced_and_local(model):
    """DDP's gradients of one step, and what every rank computes by itself."""
    reduced = train("gradwire", model, steps=1).gradients[0]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, train(None, model, steps=1).gradients[0])
    return reduced, gathered


@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "frozen"])
def test_gradients_are_the_mean_of_local_gradients(world, model):
    # With u = 2^-24: 1/n and each product round once, each of n - 1 sums once: (n + 1) u mean|g|, to first order.
    bound = (world.size + 1) * 2.0**-24 * (1 + 2.0**-20)
    for reduced, local in world.run(reduced_and_local, model=model):
        for name, gradient in reduced.items():
            if gradient is not None:
                ranks = torch.stack([gradients[name].double() for gradients in local])
                assert ((gradient.double() - ranks.mean(0)).abs() <= bound * ranks.abs().mean(0)).all(), name


def no_sync_gradients(hook, view):
    ddp = WRAPPERS["gradwire"](build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    local = build("mlp")
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [local.batch(generator) for _ in range(3)]
    with ddp.no_sync():
        for batch in batches:
            ddp(*batch).backward()
            local(*batch).backward()
    return gradients(ddp), gradients(local)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law3_no_sync_leaves_local_gradients_unchanged(world, view):
    results = world.run(no_sync_gradients, hook="fp16", view=view)
    for ours, local in results:
        assert_same_bits(ours, local)
    assert not same_bits(results[0][0]["layers.0.weight"], results[1][0]["layers.0.weight"])
