"""Law 4, without a hook: gradwire's DistributedDataParallel gives PyTorch's gradients to the bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.features import assert_parity, views
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import MODELS, SMALL, SMALLEST, WRAPPERS, build, gradients, register, train
from tests.support.zoo import Probe

clearings = pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])


@clearings
@views
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2, 3)
def test_law4_no_hook_matches_pytorch(model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    assert_parity(train, model=model, **options)


@views
@pytest.mark.parametrize("hook", [None, "fp16"])
@on_ranks(2, 3)
def test_law4_subgroups_match_pytorch(view, hook):
    partition = [[0, 2], [1]] if dist.get_world_size() == 3 else [[0], [1]]
    group, _ = dist.new_subgroups_by_enumeration(partition)
    options = {"gradient_as_bucket_view": view, "hook": hook, "bucket_cap_mb": SMALL}
    assert_parity(train, model="mlp", group=group, **options)


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2, 3)
def test_law4_buffers_match_pytorch(sync):
    ours = assert_parity(train, model="conv", forward_sync_buffers=sync)
    first, *others = from_all_ranks(ours.state["features.1.running_mean"])
    assert any(not torch.equal(mean, first) for mean in others), "each rank's last batch went into its own buffers"


def assign_odd_gradients(module):
    """Gradients as a user may leave them: transposed, with gaps, or as usual; equal on all ranks."""
    for index, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape) / 64
        if index % 3 == 0 and parameter.dim() > 1:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        elif index % 3 == 1:
            values = torch.stack([values, values], -1)[..., 0]
        parameter.grad = values


@clearings
@views
@pytest.mark.parametrize("model", ["mlp", "conv", "odd"])
@on_ranks(2, 3)
def test_law4_assigned_gradients_of_odd_strides_match_pytorch(model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    assert_parity(train, model=model, prepare=assign_odd_gradients, **options)


def identity_of_assigned_gradients(wrapper, view):
    """Whether each tensor that a user assigned still is the gradient, and whether it has its values."""
    module = build("mlp")
    ddp = WRAPPERS[wrapper](module, gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    kept = []
    for _ in range(3):
        assigned = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for parameter, gradient in zip(module.parameters(), assigned, strict=True):
            parameter.grad = gradient
        ddp(torch.ones(2, 11) * dist.get_rank()).backward()
        for parameter, gradient in zip(module.parameters(), assigned, strict=True):
            kept.append((parameter.grad is gradient, torch.equal(parameter.grad, gradient)))
    return kept


@views
@on_ranks(2, 3)
def test_law4_assigned_gradients_stay_the_users_tensors_as_in_pytorch(view):
    assert_parity(identity_of_assigned_gradients, view=view)


class Undefined(torch.autograd.Function):
    """Gives its second argument no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class UndefinedGradients(Probe):
    """The gradient of weight 1 is undefined on rank 0, that of weight 2 on all ranks."""

    def __init__(self):
        super().__init__(5, 6, 7)

    def forward(self, *inputs):
        loss = super().forward(*inputs[:1], *(0 * x for x in inputs[1:]))
        first, second, third = (weight.sum() for weight in self.weights)
        del second, third
        if dist.get_rank() == 0:
            loss = Undefined.apply(first * inputs[0].sum(), self.weights[1])
        else:
            loss = (self.weights[0] * inputs[0]).sum() + (self.weights[1] * inputs[1]).sum()
        return Undefined.apply(loss, self.weights[2])

    @staticmethod
    def batch(generator):
        return tuple(torch.randn(size, generator=generator) for size in (5, 6, 7))


def undefined_gradients(wrapper, **options):
    return train(wrapper, UndefinedGradients(), **options)


@clearings
@views
@on_ranks(2, 3)
def test_law4_undefined_gradients_match_pytorch(view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALLEST}
    assert_parity(undefined_gradients, **options)


# Steps of unusual loops: each takes the wrapped model, a function that draws a batch, and the number of the step.


def evaluating_between_steps(ddp, batch, _):
    ddp.zero_grad()
    with torch.no_grad():
        ddp.eval()
        ddp(*batch())
    ddp.train()
    ddp(*batch())  # a loss without a backward
    ddp(*batch()).backward()


def two_forwards(ddp, batch, step):
    """Two forwards under one backward, which is the only kind of several passes that PyTorch averages."""
    if step % 2 == 0:
        ddp.zero_grad()
    (ddp(*batch()) + ddp(*batch())).backward()


def clipping_and_keeping_gradients(ddp, batch, _):
    """Gradients that a user changes in place and then accumulates into."""
    ddp(*batch()).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)


def clearing_some_gradients(ddp, batch, step):
    """Some gradients start from None and others from zero, within one bucket."""
    for index, parameter in enumerate(ddp.parameters()):
        if parameter.grad is not None:
            parameter.grad = None if (index + step) % 3 == 0 else parameter.grad.zero_()
    ddp(*batch()).backward()


def under_autocast(ddp, batch, _):
    """Gradients of one dtype that were computed in another."""
    ddp.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ddp(*batch())
    loss.backward()


def run_loop(wrapper, loop, model, view, hook=None):
    """Gradients after each of six steps."""
    ddp = WRAPPERS[wrapper](build(model), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook)
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(6):
        loop(ddp, lambda: ddp.module.batch(generator), step)
        seen.append(gradients(ddp))
    return seen


@views
@pytest.mark.parametrize(
    ("loop", "model"),
    [
        (evaluating_between_steps, "conv"),
        (two_forwards, "mlp"),
        (clipping_and_keeping_gradients, "conv"),
        (clearing_some_gradients, "mlp"),
        (under_autocast, "conv"),
    ],
)
@on_ranks(2, 3)
def test_law4_unusual_loops_match_pytorch(loop, model, view):
    assert_parity(run_loop, loop=loop, model=model, view=view)


# On two ranks, where the mean has the same bits whether a gradient is multiplied or divided.
@views
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "fp16_of_pytorch", "scaled_bf16", "powersgd"])
@on_ranks(2)
def test_law4_gradients_cleared_in_part_match_pytorch_under_a_hook(hook, view):
    assert_parity(run_loop, loop=clearing_some_gradients, model="mlp", hook=hook, view=view)


def ignoring_a_parameter(wrapper, **options):
    module = build("mlp")
    WRAPPERS[wrapper]._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight", "layers.4.bias"])
    return train(wrapper, module, bucket_cap_mb=SMALL, **options)


def freezing_and_wrapping_anew(wrapper, **options):
    """One module in a second wrapper: the first one must stop watching the parameters."""
    module = build("mlp")
    first = train(wrapper, module, bucket_cap_mb=SMALL, **options)
    module.layers[0].requires_grad_(False)
    module.zero_grad()
    return first, train(wrapper, module, bucket_cap_mb=SMALLEST, **options)


@views
@pytest.mark.parametrize("training", [ignoring_a_parameter, freezing_and_wrapping_anew])
@on_ranks(2, 3)
def test_law4_unusual_wrappers_match_pytorch(training, view):
    assert_parity(training, gradient_as_bucket_view=view)
