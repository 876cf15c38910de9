"""Law 4, without a hook: gradwire's DistributedDataParallel gives PyTorch's gradients to the bit."""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.bits import assert_same_bits, differences
from tests.support.training import MODELS, SMALL, SMALLEST, WRAPPERS, Record, build, gradients, register, train
from tests.support.zoo import Probe


def with_both(model, **options):
    """The same training behind PyTorch's DDP and behind gradwire's."""
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


def evaluating_between_steps(wrapper, view):
    ddp = WRAPPERS[wrapper](build("conv"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        with torch.no_grad():
            ddp.eval()
            ddp(*ddp.module.batch(generator))
        ddp.train()
        ddp(*ddp.module.batch(generator))  # a loss that nobody differentiates
        ddp(*ddp.module.batch(generator)).backward()
        seen.append(gradients(ddp))
    return seen


def several_backwards(wrapper, view):
    """Two forwards under one backward, and one forward under two: the second backward of a forward stays local."""
    ddp = WRAPPERS[wrapper](build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        (ddp(*ddp.module.batch(generator)) + ddp(*ddp.module.batch(generator))).backward()
        seen.append(gradients(ddp))
        loss = ddp(*ddp.module.batch(generator))
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(gradients(ddp))
    return seen


def ignoring_a_parameter(wrapper, view):
    module = build("mlp")
    ignored = ["layers.2.weight", "layers.4.bias"]
    WRAPPERS[wrapper]._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return train(wrapper, module, gradient_as_bucket_view=view, bucket_cap_mb=SMALL)


def freezing_and_wrapping_anew(wrapper, view):
    """One module behind a second wrapper: the first one must not watch the parameters any more."""
    module = build("mlp")
    first = train(wrapper, module, gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    module.layers[0].requires_grad_(False)
    module.zero_grad()
    return first, train(wrapper, module, gradient_as_bucket_view=view, bucket_cap_mb=SMALLEST)


def clipping_and_keeping_gradients(wrapper, view):
    """Gradients that a user changes in place and then accumulates into."""
    ddp = WRAPPERS[wrapper](build("conv"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        ddp(*ddp.module.batch(generator)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        seen.append(gradients(ddp))
    return seen


def clearing_some_gradients(wrapper, view, hook=None):
    """Some gradients start from None and others from zero, within one bucket."""
    ddp = WRAPPERS[wrapper](build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(5):
        for index, parameter in enumerate(ddp.parameters()):
            if parameter.grad is not None:
                parameter.grad = None if (index + step) % 3 == 0 else parameter.grad.zero_()
        ddp(*ddp.module.batch(generator)).backward()
        seen.append(gradients(ddp))
    return seen


LOOPS = {
    loop.__name__: loop
    for loop in (
        evaluating_between_steps,
        several_backwards,
        ignoring_a_parameter,
        freezing_and_wrapping_anew,
        clipping_and_keeping_gradients,
        clearing_some_gradients,
    )
}


def loop_with_both(loop, view):
    return LOOPS[loop]("pytorch", view), LOOPS[loop]("gradwire", view)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("loop", LOOPS)
def test_law4_unusual_loops_match_pytorch(world, loop, view):
    assert_parity(world.run(loop_with_both, loop=loop, view=view))


def clearing_some_gradients_with_both(**options):
    return clearing_some_gradients("pytorch", **options), clearing_some_gradients("gradwire", **options)


# On two ranks, where the mean has the same bits whether a gradient is multiplied or divided.
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "fp16_of_pytorch", "scaled_bf16", "powersgd"])
def test_law4_gradients_cleared_in_part_match_pytorch_under_a_hook(worlds, hook, view):
    assert_parity(worlds(2).run(clearing_some_gradients_with_both, hook=hook, view=view))


def first_order(view, create_graph):
    ddp = WRAPPERS["gradwire"](build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # autograd's, about a reference cycle
            ddp(*ddp.module.batch(generator)).backward(create_graph=create_graph)
        seen.append(gradients(ddp))
    return seen


def with_and_without_graph(view):
    return first_order(view, create_graph=False), first_order(view, create_graph=True)


# PyTorch's own fails here as soon as a bucket has two parameters, so its gradients cannot be the oracle.
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_create_graph_leaves_the_gradients_as_without_it(world, view):
    assert_parity(world.run(with_and_without_graph, view=view))


def accumulating_under_autocast(wrapper):
    """Gradients of one dtype that were computed in another."""
    ddp = WRAPPERS[wrapper](build("conv"), bucket_cap_mb=SMALL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(*ddp.module.batch(generator))
        loss.backward()
        seen.append(gradients(ddp))
    return seen


def autocast_with_both():
    return accumulating_under_autocast("pytorch"), accumulating_under_autocast("gradwire")


def test_law4_autocast_matches_pytorch(world):
    assert_parity(world.run(autocast_with_both))


class RandomModel(nn.Module):
    """Parameters of random shapes, dtypes and layouts, some frozen, used in a random order."""

    def __init__(self, draw):
        super().__init__()
        self.weights = nn.ParameterList()
        dtypes = draw.choice([[torch.float32], [torch.float32, torch.bfloat16], [torch.float64, torch.float32]])
        for _ in range(draw.randint(1, 14)):
            shape = [draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(draw.randint(0, 4))]
            value = torch.randn(shape).to(draw.choice(dtypes))
            if value.dim() > 1 and draw.random() < 0.4:
                value = value.permute(draw.sample(range(value.dim()), value.dim()))
            self.weights.append(nn.Parameter(value))
        for weight in list(self.weights)[1:]:
            weight.requires_grad_(draw.random() < 0.85)
        self.order = draw.sample(range(len(self.weights)), len(self.weights))

    def forward(self, x):
        for index in self.order:
            weight = self.weights[index]
            x = (x * (1 + weight.to(x.dtype).sin().mean())).tanh()
        return x.square().sum()

    @staticmethod
    def batch(generator):
        return (torch.randn(17, generator=generator),)


def random_models(number):
    """The differences between both wrappers, for one random model and random options after another."""
    found = {}
    for seed in range(number):
        draw = random.Random(seed)
        options = {
            "gradient_as_bucket_view": draw.random() < 0.5,
            "set_to_none": draw.random() < 0.5,
            "accumulate": draw.choice([1, 1, 2]),
            "hook": draw.choice([None, None, "allreduce", "fp16", "scaled_fp16", "bf16_of_allreduce"]),
            "steps": 4,
            "seed": seed,
        }
        if draw.random() < 0.8:
            options["bucket_cap_mb"] = 10 ** draw.uniform(-5.5, -2)
        if draw.random() < 0.2:
            options["bucket_cap_mb_list"] = [10 ** draw.uniform(-5.5, -2) for _ in range(draw.randint(1, 4))]
        structure = draw.random()
        records = []
        for wrapper in WRAPPERS:
            torch.manual_seed(seed)
            records.append(train(wrapper, RandomModel(random.Random(structure)), **options))
        if lines := differences(records[1], records[0]):
            found[seed] = (options, lines[:5])
    return found


def test_law4_random_models_match_pytorch(world):
    for found in world.run(random_models, number=25):
        assert found == {}


def wide_enough(**options):
    """A model whose gradients need more than one block and more than one default bucket."""
    torch.manual_seed(0)
    records = []
    for wrapper in WRAPPERS:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 5000), nn.Tanh(), nn.Linear(5000, 60), nn.Tanh(), nn.Linear(60, 2))
        ddp = WRAPPERS[wrapper](module, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        steps = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randn(2, 64, generator=generator)).square().mean().backward()
            steps.append(gradients(ddp))
        records.append(Record(steps, {}))
    return differences(records[1], records[0])


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law4_default_buckets_of_a_wide_model_match_pytorch(world, view):
    assert world.run(wide_enough, gradient_as_bucket_view=view) == [[]] * world.size
