"""`static_graph`: unused parameters, checkpoints, accumulation, changed graphs. See features.py for the oracle."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import (
    AfterAnother,
    Parts,
    assert_parity,
    reentrant,
    run_plan,
    static_plans,
    views,
    ways,
    wrap,
)
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    HOOKS,
    SMALLEST,
    Fault,
    build,
    error_of,
    gradients,
    own_batches,
    register,
    train_steps,
    wrapped,
)
from tests.support.zoo import Probe


@ways
@static_plans
@on_ranks(2, 3)
def test_law4_static_graph_matches_pytorch(plan, hook, view):
    assert_parity(run_plan, static_graph=True, plan=plan, hook=hook, view=view)


def not_reentrant(part, x):
    return checkpoint(part, x, use_reentrant=False)


@ways
@pytest.mark.parametrize("run", [reentrant, not_reentrant])
@static_plans
@on_ranks(3)
def test_law4_checkpoints_in_a_static_graph_match_pytorch(plan, run, hook, view):
    # The input of the first checkpoint needs a gradient, or a reentrant one has none for its layer.
    assert_parity(run_plan, static_graph=True, plan=plan, hook=hook, view=view, run=run, model=AfterAnother)


# PyTorch's static graph fails under no_sync. One bucket a parameter, so that sums have one order at any time.
@ways
@pytest.mark.parametrize(
    ("unused", "checkpointed"), [(False, False), (True, True)], ids=["all-plain", "unused-checkpointed"]
)
@pytest.mark.parametrize("accumulate", [(3, 1, 2, 1), (1, 2, 1, 3)], ids=["at-first", "later"])
@on_ranks(3)
def test_static_graph_accumulates_under_no_sync(accumulate, unused, checkpointed, hook, view):
    use = (0, 2, 3) if unused else range(5)
    torch.manual_seed(0)
    models = [AfterAnother(), AfterAnother()]
    models[1].load_state_dict(models[0].state_dict())
    models = [
        wrap("gradwire", models[0], hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST]),
        wrap("pytorch", models[1], hook, view, find_unused_parameters=True, bucket_cap_mb_list=[SMALLEST]),
    ]
    run = reentrant if checkpointed else lambda part, x: part(x)
    generator = own_batches()
    seen = []
    for number in accumulate:
        batches = [torch.randn(3, 4, generator=generator) for _ in range(number)]
        for ddp, how in zip(models, (run, lambda part, x: part(x)), strict=True):
            ddp.zero_grad()
            for batch in batches[:-1]:
                with ddp.no_sync():
                    ddp(batch, use, run=how).backward()
            ddp(batches[-1], use, run=how).backward()
        seen.append([gradients(ddp) for ddp in models])
    for ours, theirs in seen:
        assert_same_bits(ours, theirs)


def iterations_and_gradients(wrapper, hook):
    """Of each step with parameters of four dtypes, and of a second wrapper with the same state from step 4 on."""
    seen, generator, state = [], own_batches(), None
    module = build("mixed")
    for _ in range(2):
        ddp = wrapped(wrapper, module, static_graph=True, bucket_cap_mb=None, bucket_cap_mb_list=[SMALLEST])
        state = register(ddp, hook if state is None else (state, HOOKS[hook](None)[1]))
        for _ in range(4):
            (each,) = train_steps(ddp, 1, generator)
            seen.append((state.iter, each))
        del ddp
    return seen


# PyTorch's static graph launches all buckets of its first step with index 0, and none as the last.
@pytest.mark.parametrize("hook", ["int4", "powersgd", "powersgd_alternating", "topk", "scaled_fp16"])
@on_ranks(2, 3)
def test_law4_static_graph_of_several_dtypes_counts_each_step_once(hook):
    theirs, ours = (iterations_and_gradients(wrapper, hook) for wrapper in ("pytorch", "gradwire"))
    assert [number for number, _ in theirs] == [number for number, _ in ours]
    assert [number for number, _ in theirs[:4]] == [1, 2, 3, 4]
    for (_, their), (_, our) in zip(theirs, ours, strict=True):
        assert_same_bits(our, their)


@dataclass
class Wrapped:
    """An output that is no list, tuple or dictionary."""

    value: torch.Tensor


class WrappedProbe(Probe):
    def forward(self, *inputs):
        return Wrapped(super().forward(*inputs))


# PyTorch's static graph reduces nothing here.
@views
@on_ranks(2, 3)
def test_static_graph_with_dataclass_output_is_reduced(view):
    ddp = wrap("gradwire", WrappedProbe(3, 2), view=view, static_graph=True)
    seen = []
    for step in range(3):
        ddp.zero_grad()
        ddp(*(torch.full((size,), 6.0 * (dist.get_rank() + step)) for size in (3, 2))).value.backward()
        seen.append([weight.grad.clone() for weight in ddp.module.weights])
    for step, grads in enumerate(seen):
        mean = sum(6.0 * (rank + step) for rank in range(dist.get_world_size())) / dist.get_world_size()
        assert_same_bits(grads, [torch.full((3,), mean), torch.full((2,), mean)])


class TwoOutputs(torch.nn.Module):
    """An output for each of two numbers."""

    def __init__(self):
        super().__init__()
        self.numbers = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x):
        return [x * number for number in self.numbers]


# PyTorch's static graph counts the parameters of the second output in the first step, and raises in the third.
@on_ranks(2)
def test_static_graph_leaves_out_outputs_without_a_loss():
    ddp = wrap("gradwire", TwoOutputs(), static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.full((1,), 2.0 * (step + dist.get_rank())))[0].backward()
        first, second = (number.grad for number in ddp.module.numbers)
        assert (first.item(), second) == (2 * step + 1, None)


@on_ranks(2)
def test_gradients_of_the_inputs_alone_do_not_tell_a_static_graph_what_is_unused():
    ddp, twin = (wrap("gradwire", Parts(), static_graph=True) for _ in range(2))
    twin.module.load_state_dict(ddp.module.state_dict())
    for step in range(3):
        for model in (ddp, twin):
            model.zero_grad()
            inputs = torch.full((3, 4), 1.0 + step + dist.get_rank(), requires_grad=model is ddp)
            output = model(inputs, (0, 1))
            if model is ddp:  # as for a gradient penalty
                torch.autograd.grad(output.sum(), inputs, retain_graph=True)
            output.backward()
        assert_same_bits(gradients(ddp), gradients(twin))
        assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def raise_fault(_):
    raise Fault


@on_ranks(2)
def test_first_backward_of_a_static_graph_that_raised_early_can_be_repeated():
    ddp = wrap("gradwire", Parts(), static_graph=True)
    output = ddp(torch.full((3, 4), 1.0 + dist.get_rank()), (0, 1))
    handle = output.register_hook(raise_fault)  # before the first gradient of a parameter
    assert error_of(output.backward, retain_graph=True)[0] == "Fault"
    handle.remove()
    output.backward()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@views
@pytest.mark.parametrize("hook", ["none", "flat"])
@pytest.mark.parametrize("bad_step", [1, 3])
@pytest.mark.parametrize("change", ["unused-then-used", "used-then-unused"])
@on_ranks(3)
def test_static_graph_that_changes_raises_until_resynchronized(change, bad_step, hook, view):
    uses = ((0, 1, 2), (0, 1, 2, 3)) if change == "unused-then-used" else ((0, 1, 2, 3), (0, 1, 2))
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST])
    torch.manual_seed(0)
    reference = wrap("gradwire", Parts(), hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST])
    batch = torch.ones(3, 4) * (1 + dist.get_rank())
    errors, seen = [], []
    for step in range(bad_step + 3):
        if step == bad_step:
            errors.append(error_of(ddp(batch, uses[1]).backward))
            errors.append(error_of(ddp, batch, uses[0]))
            ddp.resynchronize()
        ddp.zero_grad()
        reference.zero_grad()
        ddp(batch, uses[0]).backward()
        reference(batch, uses[0]).backward()
        seen.append((gradients(ddp), gradients(reference)))
    results = from_all_ranks((errors, seen))
    for (backward, forward), steps in results:
        kind, text = forward if change == "used-then-unused" else backward
        assert kind == "RuntimeError"
        assert "our training graph has changed in this iteration" in text
        assert "parts.3." in text
        assert change == "unused-then-used" or "parts.2." not in text
        for ours, reference in steps:
            assert_same_bits(ours, reference)
    assert_same_on_all_ranks([steps for _, steps in results])
