"""Law 4, without a hook: gradwire's DistributedDataParallel gives PyTorch's gradients to the bit."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.bits import assert_same_bits, differences
from tests.support.training import MODELS, SMALL, SMALLEST, WRAPPERS, build, gradients, register, train
from tests.support.zoo import Probe


def with_both(model, **options):
    """The same training in PyTorch's DDP and in gradwire's."""
    return train("pytorch", model, **options), train("gradwire", model, **options)


def assert_parity(results):
    for theirs, ours in results:
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("model", MODELS)
def test_law4_no_hook_matches_pytorch(world, model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    assert_parity(world.run(with_both, model=model, **options))


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("model", ["conv", "lstm", "mixed", "odd"])
def test_law4_accumulation_under_no_sync_matches_pytorch(world, model, view):
    options = {"gradient_as_bucket_view": view, "accumulate": 3, "bucket_cap_mb": SMALL}
    assert_parity(world.run(with_both, model=model, **options))


@pytest.mark.parametrize(
    "caps",
    [
        {},
        {"bucket_cap_mb": SMALLEST},
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb_list": [SMALLEST, SMALL]},
        {"bucket_cap_mb_list": [SMALL, SMALLEST, 1]},
    ],
    ids=["default", "smallest", "huge", "small-list", "list"],
)
@pytest.mark.parametrize("model", ["mlp", "mixed"])
def test_law4_any_bucket_cap_matches_pytorch(world, model, caps):
    assert_parity(world.run(with_both, model=model, **caps))


def bucket_layouts(wrapper, model, **options):
    """What a hook is shown of every bucket, step by step."""
    seen = []

    def hook(state, bucket):
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), str(bucket.buffer().dtype), shapes))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    train(wrapper, model, hook=(None, hook), **options)
    return seen


def bucket_layouts_of_both(**options):
    return bucket_layouts("pytorch", **options), bucket_layouts("gradwire", **options)


@pytest.mark.parametrize(
    "caps", [{}, {"bucket_cap_mb": SMALL}, {"bucket_cap_mb_list": [SMALLEST, SMALL]}], ids=["default", "cap", "list"]
)
@pytest.mark.parametrize("model", ["mlp", "lstm", "mixed", "frozen", "odd"])
def test_law4_hooks_are_shown_pytorchs_buckets(world, model, caps):
    for theirs, ours in world.run(bucket_layouts_of_both, model=model, **caps):
        assert ours == theirs


def in_subgroup(model, partition, **options):
    group, _ = dist.new_subgroups_by_enumeration(partition)
    return with_both(model, group=group, **options)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", [None, "fp16"])
def test_law4_subgroups_match_pytorch(world, view, hook):
    partition = [[0, 2], [1]] if world.size == 3 else [[0], [1]]
    options = {"gradient_as_bucket_view": view, "hook": hook, "bucket_cap_mb": SMALL}
    assert_parity(world.run(in_subgroup, model="mlp", partition=partition, **options))


@pytest.mark.parametrize("sync", [True, False])
def test_law4_buffers_match_pytorch(world, sync):
    results = world.run(with_both, model="conv", forward_sync_buffers=sync)
    assert_parity(results)
    means = [ours.state["features.1.running_mean"] for _, ours in results]
    assert any(not torch.equal(mean, means[0]) for mean in means), "each rank's last batch went into its own buffers"


def assign_odd_gradients(module):
    """Gradients as a user may leave them: transposed, with gaps, or as usual; equal on all ranks."""
    for index, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape) / 64
        if index % 3 == 0 and parameter.dim() > 1:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        elif index % 3 == 1:
            values = torch.stack([values, values], -1)[..., 0]
        parameter.grad = values


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("model", ["mlp", "conv", "odd"])
def test_law4_assigned_gradients_of_odd_strides_match_pytorch(world, model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    assert_parity(world.run(with_both, model=model, prepare=assign_odd_gradients, **options))


def identity_of_assigned_gradients(wrapper, view):
    """Which of the tensors that a user assigned are still the gradients, and which of them hold their values."""
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


def identity_with_both(view):
    return identity_of_assigned_gradients("pytorch", view), identity_of_assigned_gradients("gradwire", view)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_assigned_gradients_stay_the_users_tensors_as_in_pytorch(world, view):
    assert_parity(world.run(identity_with_both, view=view))


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


def undefined_gradients(**options):
    return tuple(train(wrapper, UndefinedGradients(), **options) for wrapper in WRAPPERS)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_undefined_gradients_match_pytorch(world, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALLEST}
    assert_parity(world.run(undefined_gradients, **options))


# Steps of unusual loops: each takes the wrapped model, a function that draws a batch, and the number of the step.


def evaluating_between_steps(ddp, batch, _):
    ddp.zero_grad()
    with torch.no_grad():
        ddp.eval()
        ddp(*batch())
    ddp.train()
    ddp(*batch())  # a loss that nobody differentiates
    ddp(*batch()).backward()


def several_backwards(ddp, batch, step):
    """Two forwards under one backward, and one forward under two: the second backward of a forward stays local."""
    if step % 2 == 0:
        ddp.zero_grad()
        (ddp(*batch()) + ddp(*batch())).backward()
    else:
        loss = ddp(*batch())
        loss.backward(retain_graph=True)
        loss.backward()


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


def with_a_graph(ddp, batch, _, create_graph=True):
    ddp.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # autograd's, about a reference cycle
        ddp(*batch()).backward(create_graph=create_graph)


def without_a_graph(*arguments):
    with_a_graph(*arguments, create_graph=False)


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


def loop_with_both(**options):
    return run_loop("pytorch", **options), run_loop("gradwire", **options)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize(
    ("loop", "model"),
    [
        (evaluating_between_steps, "conv"),
        (several_backwards, "mlp"),
        (clipping_and_keeping_gradients, "conv"),
        (clearing_some_gradients, "mlp"),
        (under_autocast, "conv"),
    ],
)
def test_law4_unusual_loops_match_pytorch(world, loop, model, view):
    assert_parity(world.run(loop_with_both, loop=loop, model=model, view=view))


# On two ranks, where the mean has the same bits whether a gradient is multiplied or divided.
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "fp16_of_pytorch", "scaled_bf16", "powersgd"])
def test_law4_gradients_cleared_in_part_match_pytorch_under_a_hook(worlds, hook, view):
    options = {"loop": clearing_some_gradients, "model": "mlp", "hook": hook, "view": view}
    assert_parity(worlds(2).run(loop_with_both, **options))


def with_and_without_graph(**options):
    return [run_loop("gradwire", loop, "mlp", **options) for loop in (without_a_graph, with_a_graph)]


# PyTorch's own fails here as soon as a bucket has two parameters, so its gradients cannot be the oracle.
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_create_graph_leaves_gradients_unchanged(world, view):
    assert_parity(world.run(with_and_without_graph, view=view))


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


def training_with_both(training, view):
    return [training(wrapper, gradient_as_bucket_view=view) for wrapper in WRAPPERS]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("training", [ignoring_a_parameter, freezing_and_wrapping_anew])
def test_law4_unusual_wrappers_match_pytorch(world, training, view):
    assert_parity(world.run(training_with_both, training=training, view=view))


def wide_enough(wrapper, **options):
    """A model whose gradients need more than one block and more than one default bucket."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 5000), nn.Tanh(), nn.Linear(5000, 60), nn.Tanh(), nn.Linear(60, 2))
    ddp = WRAPPERS[wrapper](module, **options)
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(2, 64, generator=generator)).square().mean().backward()
        seen.append(gradients(ddp))
    return seen


def differences_of_wide_ones(**options):
    return differences(wide_enough("gradwire", **options), wide_enough("pytorch", **options))


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_default_buckets_of_a_wide_model_match_pytorch(world, view):
    assert world.run(differences_of_wide_ones, gradient_as_bucket_view=view) == [[]] * world.size
