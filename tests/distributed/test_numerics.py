"""Law 5 and accuracy: extreme gradients, error bounds against the exact mean, gradient scalers."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from tests.support.bits import assert_same_on_all_ranks
from tests.support.training import HOOKS, SMALL, SMALLEST, WRAPPERS, build, gradients, register, train
from tests.support.zoo import Probe

EXTREMES = (0.0, 1e-45, 1e-30, -1e-30, 1.0, 1e30, -1e30, 3e38)
BUILT_IN_PYTORCH = {"pytorchs_fp16": (None, torch_hooks.fp16_compress_hook)}


def reduce(values, hook, wrapper="gradwire", steps=1, **options):
    """The gradients after ``steps`` steps whose gradient on rank r is ``values[r]``, a list of tensors."""
    mine = values[dist.get_rank()]
    ddp = WRAPPERS[wrapper](Probe(*(value.shape for value in mine)), **options)
    if hook is not None:
        register(ddp, BUILT_IN_PYTORCH.get(hook, hook))
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*mine).backward()
    return list(gradients(ddp).values())


def on_one_rank(world, value, elsewhere, culprit=0):
    """Gradients of one element: ``value`` on one rank, ``elsewhere`` on the others."""
    return [[torch.full((1,), value if rank == culprit else elsewhere)] for rank in range(world.size)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [name for name in HOOKS if not name.startswith("fp16_of")])
def test_law5_representable_mean_survives_an_unrepresentable_gradient(world, hook, wrapper):
    values = on_one_rank(world, 5e4 * world.size, 0.0)
    for (mean,) in world.run(reduce, values=values, hook=hook, wrapper=wrapper):
        assert math.isclose(mean.item(), 5e4, rel_tol=2.0**-8)
    assert all(mean.isinf() for (mean,) in world.run(reduce, values=values, hook="pytorchs_fp16", wrapper=wrapper))


def test_fp16_hook_overflows_only_where_the_mean_does(world):
    for (mean,) in world.run(reduce, values=on_one_rank(world, 1e5, 1e5), hook="fp16"):
        assert mean.item() == math.inf


@pytest.mark.parametrize("hook", ["bf16", "bf16_of_allreduce", "scaled_fp16", "scaled_bf16"])
def test_hooks_with_wide_range_do_not_overflow(world, hook):
    for (mean,) in world.run(reduce, values=on_one_rank(world, 1e30, 1e30), hook=hook, steps=2):
        assert math.isclose(mean.item(), 1e30, rel_tol=2.0**-7)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_law5_finite_gradients_never_give_nan(world, hook, wrapper, view):
    # Every combination of extremes over the ranks, in one bucket, and each extreme in a bucket of its own.
    together = torch.tensor(list(itertools.product(EXTREMES, repeat=world.size))).unbind(1)
    values = [[together[rank], *(torch.full((3,), x) for x in EXTREMES)] for rank in range(world.size)]
    options = {"wrapper": wrapper, "gradient_as_bucket_view": view, "bucket_cap_mb": SMALLEST, "steps": 4}
    results = world.run(reduce, values=values, hook=hook, **options)
    assert_same_on_all_ranks(results)
    for tensor in results[0]:
        assert not tensor.isnan().any()
    assert torch.equal(results[0][1], torch.zeros(3)), "all zero on all ranks"


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [None, *HOOKS])
def test_law5_nonfinite_gradient_of_one_rank_reaches_every_rank(world, hook, wrapper):
    bad = (math.nan, math.inf, -math.inf)
    columns = [(x, culprit) for x in bad for culprit in range(world.size)]
    values = [[torch.tensor([x if rank == culprit else 0.5]) for x, culprit in columns] for rank in range(world.size)]
    for means in world.run(reduce, values=values, hook=hook, wrapper=wrapper, bucket_cap_mb=SMALLEST, steps=2):
        for (x, _), mean in zip(columns, means, strict=True):
            assert mean.isnan() if math.isnan(x) else mean.item() == x


def scaled_training(hook, wrapper):
    """Loss scale and parameters after each step with a gradient scaler; step 2 is bad on the last rank."""
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps = []
    for step in range(5):
        optimizer.zero_grad()
        (batch,) = ddp.module.batch(generator)
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            batch[0, 0] = math.inf
        scaler.scale(ddp(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append((scaler.get_scale(), [parameter.detach().clone() for parameter in ddp.parameters()]))
    return steps


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_gradient_scaler_skips_the_same_steps_on_all_ranks(world, hook, wrapper):
    results = world.run(scaled_training, hook=hook, wrapper=wrapper)
    assert_same_on_all_ranks(results)
    scales = [scale for scale, _ in results[0]]
    assert scales == [2.0**7] * 2 + [2.0**6] * 3
    weights = [parameters[0] for _, parameters in results[0]]
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == [False, True, False, False]


def reduced_and_local(hook, model, **options):
    """The hook's gradients of one step, and what every rank computes by itself."""
    reduced = train("gradwire", model, hook=hook, steps=1, **options).gradients[0]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, train(None, model, steps=1).gradients[0])
    return reduced, gathered


def real(tensor):
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "complex", "frozen"])
@pytest.mark.parametrize("hook", [None, *HOOKS])
def test_hooks_are_within_their_error_bound_of_the_exact_mean(world, hook, model):
    # Each of n contributions is rounded to the wire once, and so is each of the n - 1 sums: n u mean|g| to first order,
    # where u is half a unit in the last place: 2^-11 for fp16, 2^-8 for bf16, 2^-24 for fp32. The wrappers round once
    # more, before the division. Arithmetic in fp32 around it adds two roundings of 2^-24, and the factor 1 / n one
    # where nothing is cast. Below fp16's normal range
    # a contribution is off by up to 2^-25 instead; scaled, by 2^-25 / scale, with scale >= 2^7 / max|g| over all ranks.
    is_cast = hook not in (None, "allreduce")
    roundings = world.size + (is_cast and "_of_" in hook)
    u = 2.0**-24 if not is_cast else 2.0**-8 if "bf16" in hook else 2.0**-11
    for reduced, local in world.run(reduced_and_local, hook=hook, model=model):
        largest = max(real(g).abs().max() for rank in local for g in rank.values() if g is not None)
        floor = {"scaled_fp16": 2.0**-25 * 2.0**-7 * largest}.get(hook, 2.0**-25 if u == 2.0**-11 else 0.0)
        for name, gradient in reduced.items():
            if gradient is None:  # of a frozen parameter
                continue
            ranks = torch.stack([real(gradients_of_rank[name]) for gradients_of_rank in local])
            bound = (roundings * u * (1 + 4 * u) + 2.0 ** (-23 if is_cast else -24)) * ranks.abs().mean(
                0
            ) + roundings * floor
            assert ((real(gradient) - ranks.mean(0)).abs() <= bound).all(), name
