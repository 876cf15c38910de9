"""`find_unused_parameters` and `skip_all_reduce_unused_params`. See features.py for the oracle."""

import copy

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks import default_hooks
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import (
    CAP,
    FEATURES,
    Parts,
    assert_parity,
    clearings,
    features,
    hooks,
    plans,
    run_plan,
    under_hooks,
    views,
    wrap,
    zero_grad,
)
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import FEEDBACK, START, STATES, Ledger, Training, errors_of
from tests.support.training import SMALLEST, WRAPPERS, gradients, own_batches, wrapped


@clearings
@views
@plans
@on_ranks(2, 3)
def test_law4_find_unused_matches_pytorch(plan, view, clear):
    # On three ranks PyTorch rounds a kept view that no rank uses: a third of it, thrice.
    if dist.get_world_size() == 2 or (plan, view, clear) != ("used by nobody at times", True, "kept"):
        assert_parity(run_plan, find_unused_parameters=True, plan=plan, clear=clear, view=view)


@under_hooks
@plans
@on_ranks(3)
def test_law4_find_unused_under_a_hook_matches_pytorch(plan, hook, view):
    # With PyTorch's DDP, PowerSGD's memory loses what is not applied because no rank uses the parameter.
    steps = 2 if hook == "powersgd" and plan.endswith("at times") else 5
    ours = assert_parity(run_plan, find_unused_parameters=True, plan=plan, hook=hook, view=view, steps=steps)
    assert_same_on_all_ranks(from_all_ranks(ours))


@views
@hooks
@features
@on_ranks(2)
def test_gradient_unused_on_all_ranks_is_unchanged(feature, hook, view):
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), hook, view, **FEATURES[feature])
    batch = torch.ones(3, 4) * (1 + dist.get_rank())
    part = ddp.module.parts[4]
    for step in range(6):
        if step % 3 == 0:
            part.zero_grad()
        elif step % 3 == 1:
            part.weight.grad = torch.full((4, 4), 1.0 + dist.get_rank())
        before, held = gradients(part), part.weight.grad
        ddp(batch, (0, 1, 2)).backward()
        assert_same_bits(gradients(part), before)
        assert view or part.weight.grad is held


def skip_unused(wrapper, hook, view):
    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrap(wrapper, Parts(), hook, view, **options)
    generator = own_batches()
    seen = []
    for use in ((0, 1), (0, 1, 2, 3, 4), (4,), (0, 3), (2, 3)):
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=generator), use).backward()
        seen.append(gradients(ddp))
    return seen


# With views that are kept, PyTorch divides the gradients of a bucket that it skips.
@views
@hooks
@on_ranks(2)
def test_law4_skipping_unused_buckets_matches_pytorch(hook, view):
    assert_parity(skip_unused, hook=hook, view=view)


@pytest.mark.parametrize(("cap", "skips", "expected"), [(SMALLEST, True, 2), (100, True, 10), (SMALLEST, False, 10)])
@on_ranks(2, 3)
def test_bucket_without_used_parameters_is_skipped(cap, skips, expected):
    seen = []

    def hook(group, bucket):
        seen.extend(bucket.parameter_names())
        return default_hooks.allreduce_hook(group, bucket)

    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skips}
    ddp = wrapped(model=Parts(), hook=(None, hook), bucket_cap_mb=cap, **options)
    ddp(torch.ones(2, 4), (0,)).backward()
    assert len(seen) == expected
    assert expected == 10 or sorted(seen) == ["parts.0.bias", "parts.0.weight"]


# The first step that uses each layer: the first, the second, or one in which the others are compressed already.
FIRST_USED = (0, 1, 0, START + 2, 1)


class LateParts(Parts):
    """Layers that come into use one after another."""

    def batch(self, generator, step):
        return torch.randn(3, 4, generator=generator), [i for i in range(5) if step >= FIRST_USED[i]]


def train_late_parts(wrapper, kind, feature):
    """Gradients of each step, the parameters of which something was lost, and those with an entry in a checkpoint."""
    torch.manual_seed(0)
    module = LateParts()
    local, training = copy.deepcopy(module), Training(kind, wrapper, module, bucket_cap_mb=CAP, **FEATURES[feature])
    generator, ledger, seen = own_batches(), Ledger(module), []
    for step in range(START + 4):
        ledger.step(training.ddp, local, module.batch(generator, step))
        seen.append(gradients(module))
    if kind == "scaled_fp16":
        return seen, [], sorted(training.state.exponents())
    return seen, ledger.close(training.state), sorted(errors_of(training.state.state_dict()))


@pytest.mark.parametrize("feature", ["find-unused", pytest.param("skip-unused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", STATES)
@on_ranks(3)
def test_parameter_first_used_in_a_later_step_is_reduced_like_others(kind, feature):
    names = sorted(name for name, _ in LateParts().named_parameters())
    theirs, ours = (train_late_parts(wrapper, kind, feature) for wrapper in WRAPPERS)
    for steps, _, known in (theirs, ours):
        assert [steps[0][name] is None for name in names] == [FIRST_USED[int(name[6])] > 0 for name in names]
        assert all(steps[-1][name].any() for name in names)
        assert known == [name for name in names if name.endswith("weight") or not kind.startswith("powersgd")]
    assert ours[1] == []
    # Of a matrix of a whole bucket, PyTorch's DDP loses the part that belongs to an unused parameter.
    if kind != "batched_powersgd":
        assert_same_bits(theirs, ours)
    assert_same_on_all_ranks(from_all_ranks(ours))


# In the last step but one, layers 1, 3 and 4 are unused; PyTorch's DDP loses their errors.
@clearings
@views
@pytest.mark.parametrize("feature", ["find-unused", "skip-unused"])
@pytest.mark.parametrize("kind", FEEDBACK)
@on_ranks(3)
def test_law1_holds_if_parameters_are_unused_on_all_ranks(kind, feature, view, clear):
    torch.manual_seed(0)
    module, rank = Parts(), dist.get_rank()
    local = copy.deepcopy(module)
    options = {"bucket_cap_mb": CAP, "gradient_as_bucket_view": view, **FEATURES[feature]}
    training = Training(kind, model=module, **options)
    generator, ledger = own_batches(), Ledger(module)
    for step in range(START + 6):
        used = (0, 1, 2, 3, 4) if step % 3 else (0, 2)
        zero_grad(module, clear)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and int(name[6]) not in used:
                parameter.grad += 1 + rank  # what is kept may differ between ranks
        for mine, theirs in zip(local.parameters(), module.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        batch, before = torch.randn(3, 4, generator=generator), gradients(module)
        for each in (local, training.ddp):
            each(batch, used).backward()
        own, applied = gradients(local), gradients(module)
        for name in applied:
            if int(name[6]) not in used:
                assert_same_bits(applied[name], before[name])
                own[name] = applied[name] = None
        ledger.add(own, applied)
    assert ledger.close(training.state) == []
    assert errors_of(training.state.state_dict())["parts.1.weight"].any()
