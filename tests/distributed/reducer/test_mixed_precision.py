"""PyTorch's native mixed precision: the gradients, the dtypes, and what it does not go with.

It asks for streams, so these cases run with streams that do nothing, as PyTorch's own tests do in `make conformance`.
"""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks import default_hooks
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import MixedPrecision, no_streams
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, WRAPPERS, error_of, failing_hook, gradients, own_batches

DDP = WRAPPERS["gradwire"]

# (param_dtype, reduce_dtype)
DTYPES = {
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-in-fp32": (torch.bfloat16, torch.float32),
    "fp32-in-bf16": (torch.float32, torch.bfloat16),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
views = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Net(nn.Module):
    """Layers of which one may be left out, one is used under two names, and one is frozen; with a buffer."""

    def __init__(self, tied=False):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7)
        self.other = nn.Linear(7, 7)
        if tied:
            self.other.weight = self.first_of_tied = nn.Parameter(self.other.weight.detach().clone())
            self.sometimes.weight = self.other.weight
        self.conv = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(2 * 6, 2)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x, skip=False):
        x = self.frozen(self.first(x)).tanh()
        if not skip:
            x = self.sometimes(x).tanh()
        x = self.other(x * self.scale)
        x = self.conv(torch.stack([x, x], 1).unsqueeze(1))
        return self.last(x.flatten(1)).float().square().sum()


def wrap(wrapper, module, dtype, **options):
    config = MixedPrecision(*DTYPES[dtype], DTYPES[dtype][0])
    return WRAPPERS[wrapper](module, mixed_precision=config, bucket_cap_mb=SMALL, **options)


def steps_of(
    wrapper, dtype, *, tied=False, accumulate=1, set_to_none=True, skip=(), twice=False, evaluate=False, **options
):
    """The gradients of four steps; without a wrapper, this rank's own, of a module in ``param_dtype``.

    The parameters stay what they are, as PyTorch's class averages old memory in its first steps. Ranks in
    ``skip`` leave a layer out; ``twice`` has one backward over two forwards.
    """
    torch.manual_seed(0)
    module = Net(tied)
    model = module.to(DTYPES[dtype][0]) if wrapper is None else wrap(wrapper, module, dtype, **options)
    generator = own_batches()
    seen = []
    for _ in range(4):
        model.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(accumulate):
            batches = [torch.randn(4, 5, generator=generator) for _ in range(1 + twice)]
            if wrapper is None:
                batches = [batch.to(DTYPES[dtype][0]) for batch in batches]
            elif evaluate:
                with torch.no_grad():
                    model(batches[0])
                assert {p.dtype for p in model.parameters()} == {torch.float32}
            local = wrapper is not None and micro_batch < accumulate - 1
            with model.no_sync() if local else nullcontext():
                sum(model(batch, dist.get_rank() in skip) for batch in batches).backward()
        seen.append(gradients(module))
    if wrapper is not None:
        tensors = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        assert module.scale.dtype == DTYPES[dtype][0]
    return seen


# PyTorch's class reduces memory that nothing was written to until it has rebuilt its buckets. With views it reduces the
# first rebuilt buckets' gradients again in every later step.
@views
@pytest.mark.parametrize("dtype", ["fp16", "bf16-in-fp32"])
@pytest.mark.parametrize("static_graph", [False, True], ids=["dynamic", "static"])
@on_ranks(2, 3)
def test_law4_mixed_precision_matches_pytorch_in_rebuilt_buckets(dtype, view, static_graph):
    rebuilt = 2 if static_graph else 1
    meaningful = slice(rebuilt, rebuilt + 1 if view else None)
    options = {"dtype": dtype, "gradient_as_bucket_view": view, "static_graph": static_graph}
    with no_streams():
        theirs, ours = (steps_of(wrapper, **options) for wrapper in WRAPPERS)
    assert_same_bits(ours[meaningful], theirs[meaningful])


def mean(rank_gradients, dtype):
    """None counts as zeros, unless all are None."""
    if all(gradient is None for gradient in rank_gradients):
        return None
    return (
        sum(gradient.to(dtype) for gradient in rank_gradients if gradient is not None).div(len(rank_gradients)).float()
    )


FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
# Options of the loop, and of the wrapper.
LOOPS = {
    "plain": ({}, {}),
    "to-zero": ({"set_to_none": False}, {}),
    "accumulating": ({"accumulate": 3}, {}),
    "unused": ({"skip": (0, 1)}, FIND),
    "unused-on-rank-0": ({"skip": (0,)}, FIND),
    "unused-on-rank-1": ({"skip": (1,)}, FIND),
    "unused-on-rank-1-to-zero": ({"skip": (1,), "set_to_none": False}, FIND),
    "all-used": ({}, FIND),
    "static": ({}, STATIC),
    "static-unused": ({"skip": (0, 1)}, STATIC),
    "tied": ({"tied": True}, {}),
    "two-forwards": ({"twice": True}, {}),
    "evaluating": ({}, {"evaluate": True}),
}


@views
@pytest.mark.parametrize(
    ("loop", "dtype"), [*((loop, "fp16") for loop in LOOPS), *(("plain", dtype) for dtype in DTYPES if dtype != "fp16")]
)
@on_ranks(2)
def test_gradients_are_the_mean_in_reduce_dtype_from_the_first_step_on(loop, dtype, view):
    # Summed in ``reduce_dtype``, divided there, then cast.
    plain, wrapped = LOOPS[loop]
    with no_streams():
        ours = steps_of("gradwire", dtype, gradient_as_bucket_view=view, **plain, **wrapped)
    local = from_all_ranks(steps_of(None, dtype, **plain))
    _, reduce_dtype = DTYPES[dtype]
    for step, ranks in zip(ours, zip(*local, strict=True), strict=True):
        assert_same_bits(step, {name: mean([rank[name] for rank in ranks], reduce_dtype) for name in step})


@on_ranks(2)
def test_resynchronization_brings_full_precision_back():
    with no_streams():
        torch.manual_seed(0)
        ddp, generator = wrap("gradwire", Net(), "bf16"), own_batches()
        for fails in (False, True, False):
            ddp.zero_grad()
            with failing_hook(ddp, 0) if fails and dist.get_rank() == 0 else nullcontext():
                loss = ddp(torch.randn(4, 5, generator=generator))
                assert (error_of(loss.backward) is not None) == fails
            if fails:
                ddp.resynchronize(from_rank=0)
            assert {p.dtype for p in ddp.module.parameters()} == {torch.float32}
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


HOOK, BUILTIN = default_hooks.fp16_compress_hook, dist.BuiltinCommHookType.ALLREDUCE
INCOMPATIBLE = {
    "hook": (lambda ddp: ddp.register_comm_hook(None, HOOK), "can only be called once. mixed_precision has a hook of"),
    "builtin": (
        lambda ddp: ddp._register_builtin_comm_hook(BUILTIN),
        "hook or register_comm_hook can only be called once",
    ),
    "join": (lambda ddp: ddp.join(), "torch.autocast"),
    "copy": (copy.deepcopy, "wrap the copy"),
    "pickle": (pickle.dumps, "wrap the copy"),
}


@pytest.mark.parametrize("what", INCOMPATIBLE)
def test_action_incompatible_with_mixed_precision_raises(world_of_one, what):
    action, text = INCOMPATIBLE[what]
    with no_streams():
        kind, message = error_of(action, wrap("gradwire", Net(), "bf16"))
    assert kind == ("RuntimeError" if what in ("hook", "builtin") else "NotImplementedError")
    assert text in message


def test_hook_of_the_environment_leaves_mixed_precision_as_it_is(world_of_one, monkeypatch):
    monkeypatch.setenv("GRADWIRE_HOOK", "int4")
    with (
        no_streams(),
        pytest.warns(UserWarning, match="GRADWIRE_HOOK=int4 is not used for this Net: mixed_precision has"),
    ):
        (hook, _), *others = wrap("gradwire", Net(), "bf16")._comm_hooks
    assert hook.__module__.startswith("torch.") and others == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@on_ranks(2)
def test_machine_without_accelerator_raises_before_module_is_changed():
    module = Net()
    kind, text = error_of(DDP, module, mixed_precision=MixedPrecision(*[torch.bfloat16] * 3))
    assert kind == "RuntimeError"
    assert "mixed_precision needs an accelerator" in text
    assert module.scale.dtype == torch.float32 and not any(hasattr(p, "_mp_param") for p in module.parameters())
