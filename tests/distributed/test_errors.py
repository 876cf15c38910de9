"""Errors: what raises, with which words, and that the model trains on afterwards."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.comm import GroupTransport
from gradwire.hooks import default_hooks
from gradwire.hooks._bucket import reduce_bucket
from gradwire.reducer.model_sync import broadcast_coalesced
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    FailsInBackward,
    Fault,
    build,
    error_of,
    gradients,
    register,
)

DDP = gradwire.DistributedDataParallel


class FaultyHook:
    """Reduces as ours do; ``fault`` and ``at``, a bucket's index, choose what goes wrong."""

    def __init__(self):
        self.fault = None
        self.at = 0

    def __call__(self, state, bucket):
        if self.fault is None or bucket.index() != self.at:
            return default_hooks.allreduce_hook(state, bucket)
        return getattr(self, self.fault)(state, bucket)

    def raises(self, state, bucket):
        raise Fault("from the hook")

    def raises_after_submitting(self, state, bucket):
        default_hooks.allreduce_hook(state, bucket)
        raise Fault("from the hook")

    def returns_a_tensor(self, state, bucket):
        return bucket.buffer()

    def returns_nothing(self, state, bucket):
        return None

    def returns_too_little(self, state, bucket):
        return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value()[:-1])

    def returns_too_much(self, state, bucket):
        return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value().repeat(2))

    def future_fails(self, state, bucket):
        future = torch.futures.Future()
        future.set_exception(Fault("from the future"))
        return future

    def callback_fails(self, state, bucket):
        def callback(future):
            raise Fault("from the callback")

        return default_hooks.allreduce_hook(state, bucket).then(callback)

    def algorithm_fails(self, state, bucket):
        async def algorithm(source, target, transport, workspace):
            raise Fault("from the worker")

        return reduce_bucket(state, bucket, algorithm, "test_hook")

    def future_holds_nonsense(self, state, bucket):
        future = torch.futures.Future()
        future.set_result("a string")
        return future


TEXTS = {
    "raises": "from the hook",
    "raises_after_submitting": "from the hook",
    "returns_a_tensor": "callback must return a torch.futures.Future object, but got",
    "returns_nothing": "callback must return a torch.futures.Future object, but got",
    "returns_too_little": "elements",
    "returns_too_much": "elements",
    "future_fails": "from the future",
    "callback_fails": "from the callback",
    "algorithm_fails": "from the worker",
    "future_holds_nonsense": "",
}


def train_through_a_fault(fault, at, bad_step, view):
    """Gradients of every step, those of PyTorch's DDP, the errors of the bad step and of the forward before the ranks
    resynchronize, and whether parameters were kept."""
    hook = FaultyHook()
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALLEST, gradient_as_bucket_view=view)
    register(ddp, (None, hook))
    reference = WRAPPERS["pytorch"](build("mlp"), bucket_cap_mb=SMALLEST, gradient_as_bucket_view=view)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, reference)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen, wanted, error, refusal, unchanged = [], [], None, None, None
    for step in range(6):
        (batch,) = ddp.module.batch(generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == bad_step:
            hook.fault, hook.at = fault, min(at, len(ddp.reducer.buckets) - 1)
            before = [parameter.detach().clone() for parameter in ddp.parameters()]
            loss = ddp(batch)
            error = error_of(loss.backward)
            unchanged = all(torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True))
            hook.fault = None
            refusal = error_of(ddp, batch)
            ddp.resynchronize()
            continue
        ddp(batch).backward()
        reference(batch).backward()
        seen.append(gradients(ddp))
        wanted.append(gradients(reference))
        for optimizer in optimizers:
            optimizer.step()
    return seen, wanted, error, refusal, unchanged


def assert_refused(refusal, bad_step):
    """The forward after a failed step tells what failed, in which step, and what to do."""
    assert refusal[0] == "RuntimeError"
    assert f"Step {bad_step + 1} failed on rank" in refusal[1]
    assert "resynchronize()" in refusal[1]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize(("at", "bad_step"), [(0, 0), (3, 2), (100, 2)], ids=["first-step", "middle", "last"])
@pytest.mark.parametrize("fault", TEXTS)
def test_failing_hook_raises_and_resynchronized_training_continues(worlds, fault, at, bad_step, view):
    # On two ranks, where the mean has the same bits whether a gradient is multiplied or divided.
    results = worlds(2).run(train_through_a_fault, fault=fault, at=at, bad_step=bad_step, view=view)
    for seen, wanted, error, refusal, unchanged in results:
        assert error is not None
        assert TEXTS[fault] in error[1]
        assert_refused(refusal, bad_step)
        assert unchanged
        assert_same_bits(seen, wanted)
    assert_same_on_all_ranks([seen for seen, *_ in results])


@pytest.mark.parametrize("fault", TEXTS)
def test_failing_hook_raises_on_three_ranks(worlds, fault):
    results = worlds(3).run(train_through_a_fault, fault=fault, at=2, bad_step=3, view=False)
    for seen, wanted, error, refusal, unchanged in results:
        assert error is not None
        assert TEXTS[fault] in error[1]
        assert_refused(refusal, 3)
        assert unchanged
        for step, reference in zip(seen, wanted, strict=True):
            for name, gradient in reference.items():
                torch.testing.assert_close(step[name], gradient)
    assert_same_on_all_ranks([seen for seen, *_ in results])


class Branches(nn.Module):
    """Uses one of its layers only if asked to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)

    def forward(self, x, skip=False):
        x = self.first(x)
        return self.last(x if skip else self.sometimes(x)).square().sum()


def skip_a_layer(wrapper, skip_at, cap):
    torch.manual_seed(0)
    ddp = WRAPPERS[wrapper](Branches(), bucket_cap_mb=cap)
    batch = torch.ones(2, 5) * (1 + dist.get_rank())
    for _ in range(skip_at):
        ddp(batch).backward()
    ddp(batch, skip=True).backward()
    error = error_of(ddp, batch)
    after = []
    if wrapper == "gradwire":
        ddp.resynchronize()
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch).backward()
            after.append(gradients(ddp))
    return error, after


def gradients_of_branches():
    torch.manual_seed(0)
    ddp = WRAPPERS["pytorch"](Branches(), bucket_cap_mb=100)
    ddp(torch.ones(2, 5) * (1 + dist.get_rank())).backward()
    return gradients(ddp)


@pytest.mark.parametrize("cap", [SMALLEST, 100], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("skip_at", [0, 1, 3])
def test_parameter_without_gradient_raises_pytorchs_error_at_the_next_forward(world, skip_at, cap):
    for name, text in [error for error, _ in world.run(skip_a_layer, wrapper="pytorch", skip_at=skip_at, cap=cap)]:
        assert name == "RuntimeError"
        assert "Expected to have finished reduction in the prior iteration" in text
    results = world.run(skip_a_layer, wrapper="gradwire", skip_at=skip_at, cap=cap)
    wanted = world.run(gradients_of_branches)[0]
    for (name, text), after in results:
        assert name == "RuntimeError"
        for part in (
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "passing the keyword argument `find_unused_parameters=True`",
            "`forward` function outputs participate in calculating loss",
            "sometimes.weight",
            "sometimes.bias",
        ):
            assert part in text
        assert "first.weight" not in text
        assert "last.weight" not in text
        for step in after:
            for parameter, gradient in step.items():
                torch.testing.assert_close(gradient, wanted[parameter])
    assert_same_on_all_ranks([after for _, after in results])


def backward_that_fails(where, view):
    """The errors of a backward that fails at some point and of the next forward, and the gradients of later steps."""
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALLEST, gradient_as_bucket_view=view)
    batch = torch.ones(2, 11) * (1 + dist.get_rank())
    errors, after = [], []
    ddp(batch).backward()
    handle = None
    if where == "before":
        loss = FailsInBackward.apply(ddp(batch))
    elif where == "middle":
        handle = ddp.module.layers[4].register_forward_hook(lambda module, args, out: FailsInBackward.apply(out))
        loss = ddp(batch)
    else:
        loss = ddp(FailsInBackward.apply(batch.clone().requires_grad_()))
    errors.append(error_of(loss.backward))
    if handle is not None:
        handle.remove()
    errors.append(error_of(ddp, batch))
    ddp.resynchronize()
    for _ in range(3):
        ddp.zero_grad()
        ddp(batch).backward()
        after.append(gradients(ddp))
    return errors, after


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("where", ["before", "middle", "after"])
def test_training_resynchronized_after_failed_backward_continues(world, where, view):
    results = world.run(backward_that_fails, where=where, view=view)
    wanted = world.run(mean_gradients)[0]
    for (at_once, next_forward), after in results:
        assert at_once == ("Fault", "from autograd")
        if where == "middle":
            assert "layers.4.weight" in next_forward[1]
            assert "layers.6.weight" not in next_forward[1]
        elif where == "after":
            assert next_forward is None or "receive grad for rank 0: \n" not in next_forward[1]
        for step in after:
            for parameter, gradient in step.items():
                torch.testing.assert_close(gradient, wanted[parameter])
    assert_same_on_all_ranks([after for _, after in results])


def static_graph_whose_first_backward_fails(view):
    """The error, the gradients of later steps, and those of PyTorch's class, for which no backward failed."""
    options = {"bucket_cap_mb": SMALLEST, "gradient_as_bucket_view": view, "static_graph": True}
    ddp, reference = DDP(build("mlp"), **options), WRAPPERS["pytorch"](build("mlp"), **options)
    batch = torch.ones(2, 11) * (1 + dist.get_rank())
    handle = ddp.module.layers[4].register_forward_hook(lambda module, args, out: FailsInBackward.apply(out))
    error = error_of(ddp(batch).backward)
    handle.remove()
    after = []
    for _ in range(4):
        for model in (ddp, reference):
            model.zero_grad()
            model(batch).backward()
        after.append((gradients(ddp), gradients(reference)))
    return error, after


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_static_graph_with_failed_first_backward_counts_gradients_again(worlds, view):
    for error, after in worlds(2).run(static_graph_whose_first_backward_fails, view=view):
        assert error == ("Fault", "from autograd")
        for ours, reference in after:
            assert_same_bits(ours, reference)


def mean_gradients():
    ddp = WRAPPERS["pytorch"](build("mlp"))
    ddp(torch.ones(2, 11) * (1 + dist.get_rank())).backward()
    return gradients(ddp)


class Reentrant(nn.Module):
    """The same layer in several reentrant checkpoints, each of whose backwards marks it ready."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.sum()


def marked_twice(wrapper):
    torch.manual_seed(0)
    ddp = WRAPPERS[wrapper](Reentrant())
    reference = WRAPPERS["pytorch"](Reentrant())
    reference.load_state_dict(ddp.state_dict())
    batch = torch.ones(2, 4) * (1 + dist.get_rank())
    error = error_of(ddp(batch, 2).backward)
    after = []
    if wrapper == "gradwire":
        ddp.resynchronize()
    for _ in range(3 if wrapper == "gradwire" else 0):
        for model in (ddp, reference):
            model.zero_grad()
            model(batch, 1).backward()
        after.append((gradients(ddp), gradients(reference)))
    return error, after


def test_parameter_marked_twice_raises_pytorchs_error(world):
    for wrapper in WRAPPERS:
        for error, after in world.run(marked_twice, wrapper=wrapper):
            assert error is not None
            assert error[0] == "RuntimeError"
            assert "Expected to mark a variable ready only once." in error[1]
            if wrapper == "gradwire":
                assert "with name layer." in error[1]
            for ours, reference in after:
                for name, gradient in reference.items():
                    torch.testing.assert_close(ours[name], gradient)


def registrations():
    """What each wrapper says to bad hooks."""

    def wrong_bucket(state, bucket: int):
        return None

    def wrong_return(state, bucket: dist.GradBucket) -> torch.Tensor:
        return None

    def right(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(state, bucket)

    def register_twice(model):
        model.register_comm_hook(None, right)
        model.register_comm_hook(None, right)

    def register_both_kinds(model):
        model.register_comm_hook(None, right)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    actions = {
        "not callable": lambda model: model.register_comm_hook(None, 1),
        "bucket": lambda model: model.register_comm_hook(None, wrong_bucket),
        "return": lambda model: model.register_comm_hook(None, wrong_return),
        "right": lambda model: model.register_comm_hook(None, right),
        "twice": register_twice,
        "both kinds": register_both_kinds,
    }
    return {
        (kind, name): error_of(action, wrapper(build("mlp")))
        for kind, action in actions.items()
        for name, wrapper in WRAPPERS.items()
    }


def test_bad_registrations_raise_pytorchs_errors(world):
    parts = {
        "not callable": "Communication hook must be callable.",
        "bucket": "bucket annotation should be dist.GradBucket.",
        "return": "return annotation should be torch.futures.Future[torch.Tensor].",
        "twice": "register_comm_hook or register_builtin_comm_hook can only be called once.",
        "both kinds": "can only be called once.",
    }
    for outcomes in world.run(registrations):
        assert outcomes["right", "pytorch"] is None
        assert outcomes["right", "gradwire"] is None
        for kind, part in parts.items():
            theirs, ours = outcomes[kind, "pytorch"], outcomes[kind, "gradwire"]
            assert ours[0] == theirs[0], kind
            assert part in theirs[1], kind
            assert part in ours[1], kind


def string_annotations():
    namespace = {"torch": torch, "dist": dist, "ours": default_hooks}
    exec(
        "from __future__ import annotations\n"
        "def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:\n"
        "    return ours.allreduce_hook(state, bucket)\n",
        namespace,
    )
    models = {name: wrapper(build("mlp")) for name, wrapper in WRAPPERS.items()}
    return {name: error_of(model.register_comm_hook, None, namespace["hook"]) for name, model in models.items()}


def test_hooks_with_string_annotations_are_accepted(world):
    for outcomes in world.run(string_annotations):
        assert outcomes["gradwire"] is None
        assert outcomes["pytorch"][0] == "ValueError"


def hook_with_other_arguments():
    def one(bucket):
        return None

    def three(state, bucket, more):
        return None

    return [error_of(DDP(build("mlp")).register_comm_hook, None, hook) for hook in (one, three)]


def test_hook_of_another_number_of_arguments_raises(world):
    for one, three in world.run(hook_with_other_arguments):
        assert one[0] == three[0] == "ValueError"
        assert "takes (bucket)" in one[1]
        assert "takes (state, bucket, more)" in three[1]


def failed_registration_is_forgotten():
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL)
    errors = [error_of(ddp.register_comm_hook, None, 1)]
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    errors.append(error_of(ddp.register_comm_hook, None, default_hooks.allreduce_hook))
    return errors, [hook.__name__ for hook, _ in ddp._comm_hooks], ddp._get_ddp_logging_data()["comm_hook"]


def test_failed_registration_leaves_no_trace(world):
    for errors, hooks, logged in world.run(failed_registration_is_forgotten):
        assert None not in errors
        assert hooks == ["fp16_compress_hook"]
        assert logged == "fp16_compress_hook"


def unsupported():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return error_of(DDP, build("mlp"))


def test_python_reducer_raises_not_implemented_error(world):
    for kind, text in world.run(unsupported):
        assert kind == "NotImplementedError"
        assert "gradwire.DistributedDataParallel does not support" in text
        assert "Leave" in text, "the remedy"


def as_pytorch_refuses():
    frozen = build("mlp").requires_grad_(False)
    lazy = nn.Sequential(nn.LazyLinear(3))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.group.WORLD
    actions = {
        "frozen": lambda ddp: ddp(frozen),
        "lazy": lambda ddp: ddp(lazy),
        "device ids": lambda ddp: ddp(build("mlp"), device_ids=[0]),
        "mesh and group": lambda ddp: ddp(build("mlp"), device_mesh=mesh, process_group=group),
        "sync batch norm": lambda ddp: ddp(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
    }
    return {name: tuple(error_of(action, wrapper) for wrapper in WRAPPERS.values()) for name, action in actions.items()}


def test_constructor_refuses_what_pytorch_refuses(world):
    for outcomes in world.run(as_pytorch_refuses):
        for name, (theirs, ours) in outcomes.items():
            assert theirs is not None, name
            assert ours == theirs, name


def different_models():
    module = nn.Linear(3, 3, bias=dist.get_rank() > 0)
    return [error_of(wrapper, module) for wrapper in WRAPPERS.values()]


def test_models_that_differ_between_ranks_are_refused_as_by_pytorch(world):
    for theirs, ours in world.run(different_models):
        assert ours[0] == theirs[0] == "RuntimeError"
        assert theirs[1].startswith("DDP expects same model across all ranks")
        # Where three ranks count differently, either may name any other.
        assert ours[1].startswith(theirs[1].split(", while")[0])


def models_of_other_layouts():
    is_last = dist.get_rank() == dist.get_world_size() - 1
    weights = {
        "shape": torch.zeros(3, 4 + is_last),
        "strides": torch.zeros(4, 4).t() if is_last else torch.zeros(4, 4),
        "dtype": torch.zeros(3, dtype=torch.float64 if is_last else torch.float32),
    }
    errors = {}
    for what, weight in weights.items():
        module = nn.Module()
        module.first = nn.Parameter(torch.zeros(2))
        module.weight = nn.Parameter(weight)
        errors[what] = error_of(DDP, module)
    return errors


def test_parameters_of_another_layout_are_refused_on_every_rank_at_once(world):
    # PyTorch's class raises on the rank that differs and leaves rank 0 waiting; it does not compare dtypes.
    results = world.run(models_of_other_layouts)
    for errors in results:
        assert errors == results[0]
        for what, (kind, message) in errors.items():
            assert kind == "RuntimeError", what
            assert "params[1], weight" in message
            assert "appears not to match sizes/strides of the same param in process 0" in message


def synced_states():
    torch.manual_seed(dist.get_rank())
    module = nn.Module()
    dtypes = (torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float16)
    for i, dtype in enumerate(dtypes):
        module.register_parameter(f"parameter{i}", nn.Parameter(torch.randn(3, 2).to(dtype)))
    for i, dtype in enumerate((torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn)):
        module.register_buffer(f"buffer{i}", torch.full((3, 2), dist.get_rank()).to(dtype))
    module.empty = nn.Parameter(torch.zeros(0))
    module.register_buffer("scalar", torch.tensor(5 * dist.get_rank()))
    module.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    module.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    own = as_bytes(module)
    DDP(module)
    return own, as_bytes(module)


def as_bytes(module):
    return {
        name: (str(tensor.dtype), tensor.stride(), tensor.reshape(-1).view(torch.uint8).tolist())
        for name, tensor in module.state_dict().items()
    }


def test_construction_gives_every_rank_the_state_of_rank_0(world):
    results = world.run(synced_states)
    wanted = results[0][0]
    for _, state in results:
        assert state == wanted
    assert results[1][0]["conv.weight"] != wanted["conv.weight"]


def coalesced_messages():
    messages = []
    transport = GroupTransport(dist.group.WORLD)

    def noted(tensor, source):
        messages.append(tensor.nbytes)
        return GroupTransport.broadcast(transport, tensor, source)

    tensors = [torch.full((100,), dist.get_rank() + i) for i in range(7)]  # of 800 bytes
    with mock.patch.object(transport, "broadcast", noted):
        broadcast_coalesced(tensors, transport, 2000)
    return messages, [tensor.unique().tolist() for tensor in tensors]


def test_broadcast_sends_a_message_once_it_reaches_its_limit(world):
    for messages, values in world.run(coalesced_messages):
        assert messages == [2400, 2400, 800]
        assert values == [[i] for i in range(7)]


def ask_for_wide_gradients():
    ddp = DDP(nn.Linear(3, 2).bfloat16())
    for parameter in ddp.parameters():
        parameter.grad_dtype = torch.float32
    return error_of(lambda: ddp(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_gradients_of_another_dtype_than_their_parameters_are_refused(world):
    for kind, text in world.run(ask_for_wide_gradients):
        assert kind == "ValueError"
        assert "is torch.float32" in text and "it was torch.bfloat16" in text


def cast_after_wrapping(hook, back):
    """The errors of two forwards of a model that was cast after it was wrapped; of one after `resynchronize`."""
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook)
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    error_before = error_of(lambda: ddp(*batch).backward())
    ddp.double()
    if back:
        ddp.float()
    errors = [error_of(ddp, *batch) for _ in range(2)]
    ddp.resynchronize()
    return error_before, *errors, error_of(ddp, *batch)


@pytest.mark.parametrize("back", [False, True], ids=["cast", "cast-back"])
@pytest.mark.parametrize("hook", [None, "int4"])
def test_model_cast_after_wrapping_raises_on_every_rank(world, hook, back):
    for before, first, second, resynchronized in world.run(cast_after_wrapping, hook=hook, back=back):
        assert before is None
        assert first[0] == resynchronized[0] == "RuntimeError"
        assert "was cast to another dtype or moved to another device after the model was wrapped" in first[1]
        assert "resynchronize()" in second[1]
