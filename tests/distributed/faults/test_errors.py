"""Errors: what raises, with which words, and that the model trains on afterwards."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.comm import connections_of
from gradwire.comm.connections import Connections
from gradwire.exchange.bucket import Bucket
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import settings_of
from gradwire.hooks import default_hooks
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import FEATURES, Parts, wrap
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    SMALLEST,
    WRAPPERS,
    FailsInBackward,
    Fault,
    build,
    error_of,
    gradients,
    message_of,
    own_batches,
    train_steps,
    wrapped,
)

DDP = gradwire.DistributedDataParallel


def raise_fault(where):
    raise Fault(where)


def failed(state, bucket):
    future = torch.futures.Future()
    future.set_exception(Fault("from the future"))
    return future


def with_nonsense(state, bucket):
    future = torch.futures.Future()
    future.set_result("a string")
    return future


async def failing_algorithm(step):
    raise_fault("from the worker")


def failing_hook(state, bucket):
    return reduce_bucket(connections_of(state), Bucket.of(bucket), failing_algorithm, settings_of("test_hook"))


def reduced(change):
    """A hook that passes its future to ``change``."""
    return lambda state, bucket: default_hooks.allreduce_hook(state, bucket).then(change)


NO_FUTURE = "callback must return a torch.futures.Future object, but got"
# Hooks that fail, and words of the error.
FAULTS = {
    "raises": (lambda state, bucket: raise_fault("from the hook"), "from the hook"),
    "raises after submitting": (
        lambda state, bucket: raise_fault("from the hook") if default_hooks.allreduce_hook(state, bucket) else None,
        "from the hook",
    ),
    "returns a tensor": (lambda state, bucket: bucket.buffer(), NO_FUTURE),
    "returns nothing": (lambda state, bucket: None, NO_FUTURE),
    "returns too little": (reduced(lambda future: future.value()[:-1]), "elements"),
    "returns too much": (reduced(lambda future: future.value().repeat(2)), "elements"),
    "future fails": (failed, "from the future"),
    "callback fails": (reduced(lambda future: raise_fault("from the callback")), "from the callback"),
    "algorithm fails": (lambda state, bucket: failing_hook(state, bucket), "from the worker"),
    "future holds nonsense": (with_nonsense, ""),
}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("feature", ["none", *FEATURES])
@pytest.mark.parametrize(("at", "bad_step"), [(0, 0), (3, 2), (100, 2)], ids=["first-step", "middle", "last"])
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2, 3)
def test_failing_hook_raises_and_resynchronized_training_continues(fault, at, bad_step, feature, view):
    (failing, text), fails_at, models = FAULTS[fault], None, []

    def hook(state, bucket):
        return (failing if bucket.index() == fails_at else default_hooks.allreduce_hook)(state, bucket)

    for function in (hook, default_hooks.allreduce_hook):
        torch.manual_seed(0)
        options = {"bucket_cap_mb_list": [SMALLEST], **FEATURES.get(feature, {})}
        models.append(wrap("gradwire", Parts(), view=view, **options))
        models[-1].register_comm_hook(None, function)
    ddp, reference = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    generator = own_batches()
    for step in range(6):
        use = (0, 1, 3) if feature == "static" else range(5) if feature == "none" or step == bad_step else (0, 1, 4)
        batch = torch.randn(3, 4, generator=generator), use
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == bad_step:
            fails_at = min(at, len(ddp.reducer.buckets) - 1)
            before, loss = [parameter.detach().clone() for parameter in ddp.parameters()], ddp(*batch)
            assert text in message_of(loss.backward)
            assert_same_bits([parameter.detach() for parameter in ddp.parameters()], before)
            fails_at = None
            # The forward after a failed step tells what failed, in which step, and what to do.
            kind, message = error_of(ddp, *batch)
            assert kind == "RuntimeError"
            assert f"Step {bad_step + 1} failed on rank" in message
            assert "resynchronize()" in message
            ddp.resynchronize()
            continue
        for model, optimizer in zip(models, optimizers, strict=True):
            model(*batch).backward()
            optimizer.step()
        assert_same_bits(gradients(ddp), gradients(reference))
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def assert_trains_as_pytorchs(ddp, module, *inputs, **options):
    """A few steps give the gradients of PyTorch's class around an equal module."""
    reference = WRAPPERS["pytorch"](module, bucket_cap_mb=SMALLEST, **options)
    for _ in range(3):
        for model in (ddp, reference):
            model.zero_grad()
            model(*inputs).backward()
        if dist.get_world_size() == 2:  # where the mean has the same bits whether a gradient is multiplied or divided
            assert_same_bits(gradients(ddp), gradients(reference))
        for name, gradient in gradients(reference).items():
            torch.testing.assert_close(gradients(ddp)[name], gradient)
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def new(model):
    torch.manual_seed(0)
    return model()


@pytest.mark.parametrize("cap", [SMALLEST, 100], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("skip_at", [0, 1, 3])
@on_ranks(2, 3)
def test_parameter_without_gradient_raises_at_next_forward(skip_at, cap):
    batch = torch.ones(2, 4) * (1 + dist.get_rank())
    for wrapper in WRAPPERS.values():
        ddp = wrapper(new(Parts), bucket_cap_mb=cap)
        for _ in range(skip_at):
            ddp(batch, range(5)).backward()
        ddp(batch, (0, 2, 3, 4)).backward()
        kind, text = error_of(ddp, batch, range(5))
        assert kind == "RuntimeError"
        assert "Expected to have finished reduction in the prior iteration before starting a new one." in text
    assert (
        [i for i in range(5) if f"parts.{i}.weight" in text]
        == [i for i in range(5) if f"parts.{i}.bias" in text]
        == [1]
    )
    ddp.resynchronize()
    assert_trains_as_pytorchs(ddp, new(Parts), batch, range(5))


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("where", ["before", "middle", "after"])
@on_ranks(2, 3)
def test_training_resynchronized_after_failed_backward_continues(where, view):
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALLEST, gradient_as_bucket_view=view)
    batch = torch.ones(2, 11) * (1 + dist.get_rank())
    ddp(batch).backward()
    handle = None
    if where == "before":
        loss = FailsInBackward.apply(ddp(batch))
    elif where == "middle":
        handle = ddp.module.layers[4].register_forward_hook(lambda module, args, out: FailsInBackward.apply(out))
        loss = ddp(batch)
    else:
        loss = ddp(FailsInBackward.apply(batch.clone().requires_grad_()))
    assert error_of(loss.backward) == ("Fault", "from autograd")
    if handle is not None:
        handle.remove()
    next_forward = error_of(ddp, batch)
    if where == "middle":
        assert "layers.4.weight" in next_forward[1]
        assert "layers.6.weight" not in next_forward[1]
    elif where == "after":
        assert next_forward is None or "receive grad for rank 0: \n" not in next_forward[1]
    ddp.resynchronize()
    assert_trains_as_pytorchs(ddp, build("mlp"), batch)


@on_ranks(2, 3)
def test_python_reducer_raises_not_implemented_error():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        kind, text = error_of(DDP, build("mlp"))
    assert kind == "NotImplementedError"
    assert "gradwire.DistributedDataParallel does not support" in text
    assert "Leave" in text, "the remedy"


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
@on_ranks(2, 3)
def test_gradients_of_another_dtype_than_their_parameters_are_refused():
    ddp = DDP(nn.Linear(3, 2).bfloat16())
    for parameter in ddp.parameters():
        parameter.grad_dtype = torch.float32
    kind, text = error_of(lambda: ddp(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward())
    assert kind == "ValueError"
    assert "is torch.float32" in text and "it was torch.bfloat16" in text


@pytest.mark.parametrize("back", [False, True], ids=["cast", "cast-back"])
@pytest.mark.parametrize("hook", [None, "int4"])
@on_ranks(2, 3)
def test_model_cast_after_wrapping_raises_on_every_rank(hook, back):
    ddp = wrapped(hook=hook)
    train_steps(ddp)
    ddp.double()
    if back:
        ddp.float()
    (kind, text), second = (error_of(train_steps, ddp) for _ in range(2))
    assert kind == "RuntimeError"
    assert "was cast to another dtype or moved to another device after the model was wrapped" in text
    assert "resynchronize()" in second[1]
    ddp.resynchronize()
    assert error_of(train_steps, ddp)[0] == "RuntimeError"


@on_ranks(2)
def test_error_of_a_peer_is_named_if_its_connection_closes_before_its_notice_arrives():
    asked, fail, key = Connections.failure_elsewhere, Connections.fail, "rank 0 has asked"
    store, is_victim, fails_at = dist.distributed_c10d._get_default_store(), dist.get_rank() == 1, None

    def ask(connections, *arguments, **options):
        store.set(key, "")
        return asked(connections, *arguments, **options)

    def fail_later(connections, reason):
        store.wait([key])
        fail(connections, reason)

    def hook(state, bucket):
        if bucket.index() == fails_at:
            return failing_hook(state, bucket)
        return default_hooks.fp16_compress_hook(state, bucket)

    ddp = wrapped(hook=(None, hook), bucket_cap_mb=SMALLEST)
    train_steps(ddp)
    fails_at = 1 if is_victim else None
    replaced = ("fail", fail_later) if is_victim else ("failure_elsewhere", ask)
    with mock.patch.object(Connections, *replaced):
        assert "from the worker" in message_of(train_steps, ddp)
