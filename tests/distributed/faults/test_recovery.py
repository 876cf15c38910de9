"""The state of every rank after an error: exception type, error memory, connections, and resuming."""

import copy
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.comm import connections_of
from gradwire.exchange.hook_state import HookState, Memory, hook_for
from gradwire.exchange.memory import StateMemory
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.harness import open_sockets
from tests.support.ranks import from_all_ranks, on_ranks, signals
from tests.support.states import FEEDBACK, START, STATES, Ledger, Training, errors_of
from tests.support.training import (
    SMALLEST,
    WRAPPERS,
    Fault,
    build,
    error_of,
    failing_hook,
    gradients,
    own_batches,
    plainly_named,
    register,
    train_steps,
    wrapped,
)

DDP = gradwire.DistributedDataParallel
LIMIT = timedelta(minutes=1)


# --- steps that only some ranks make


def raise_fault(*_):
    raise Fault


@pytest.mark.parametrize("hook", [None, "fp16", "powersgd"])
@on_ranks(3, limit=90)
def test_skipped_forward_raises_in_the_next_one_and_on_the_peers(hook):
    # Else rank 0's third step would be averaged with the second of the others.
    ddp = wrapped(group=dist.new_group(), hook=hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator, rank, applied = own_batches(), dist.get_rank(), []

    def step(k):
        with ExitStack() as stack:
            if (k, rank) == (1, 0):
                stack.callback(ddp.module.layers[2].register_forward_pre_hook(raise_fault).remove)
            train_steps(ddp, 1, generator, optimizer)
        applied.append(k)

    _, (kind, text), (_, next_text), *_ = [error_of(step, k) or (None, "") for k in range(4)]
    assert applied == [0]
    if rank == 0:
        assert kind == "Fault"
        assert "the forward pass raised an exception" in next_text
    else:
        assert kind == "RuntimeError"
        assert "Step 2 failed on rank 0: the forward pass raised an exception" in text


class Normalized(nn.Module):
    """Its buffers are broadcast in every forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))

    def forward(self, x):
        return self.layers(x).square().mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(5, 6, generator=generator),)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("hook", [None, "fp16"])
@on_ranks(3, limit=60)
def test_loss_that_raises_on_one_rank_raises_on_all_despite_buffers(hook, failing):
    # One waits in a forward for buffers, the others in a backward for gradients: a deadlock.
    torch.manual_seed(0)
    ddp, generator = wrapped(model=Normalized(), group=dist.new_group(), hook=hook), own_batches()

    def step(k):
        loss = ddp(*ddp.module.batch(generator))
        if (k, dist.get_rank()) == (2, failing):
            raise Fault
        loss.backward()

    errors = [error for k in range(5) if (error := error_of(step, k)) is not None]
    if dist.get_rank() == failing:
        assert errors.pop(0)[0] == "Fault"
    kind, text = errors[0]
    assert kind == "RuntimeError"
    assert f"Rank {failing} skipped the backward pass that this rank is in and has begun" in text
    assert "resynchronize()" in text


@pytest.mark.parametrize("check_every", [None, 1])
@on_ranks(2, limit=60)
def test_resynchronized_ranks_synchronize_buffers_alike(check_every):
    # A forward under no_sync switches the next synchronization off. The forward of one rank that raises leaves it so.
    torch.manual_seed(0)
    ddp, generator = wrapped(model=Normalized(), group=dist.new_group(), check_every=check_every), own_batches()
    train_steps(ddp, 1, generator)
    with ddp.no_sync():
        train_steps(ddp, 1, generator)
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.callback(ddp.module.layers[2].register_forward_pre_hook(raise_fault).remove)
        assert error_of(train_steps, ddp, 1, generator) is not None
    ddp.resynchronize()
    seen = []
    ddp.module.layers[1].register_forward_pre_hook(lambda *_: seen.append([b.clone() for b in ddp.module.buffers()]))
    assert error_of(train_steps, ddp, 3, generator) is None
    assert_same_on_all_ranks(from_all_ranks(seen))


# --- resynchronization


def snapshot(training):
    """Copies of parameters, buffers, and what a hook's state has in common on all ranks."""
    replicated = training.state.replicated_state()
    replicated.pop("counters", None)  # elements, of this rank
    return copy.deepcopy((training.module.state_dict(), replicated))


@pytest.mark.parametrize("kind", STATES)
@on_ranks(3)
def test_resynchronization_from_rank_1_gives_all_its_model_and_state(kind):
    torch.manual_seed(0)
    training = Training(kind, model=Normalized(), group=dist.new_group(), bucket_cap_mb=SMALLEST)
    training.run(START + 2)
    with failing_hook(training.ddp, 1 if dist.get_rank() == 0 else -1):
        assert error_of(training.run, 1) is not None
    rank, state = dist.get_rank(), training.state
    with torch.no_grad():
        for tensor in training.module.state_dict().values():
            tensor.add_(rank)
    if kind == "scaled_fp16":
        state._counters[3] += 10 * rank
        for exponent in state._exponents.values():
            exponent[0] += rank
    else:
        for each in [state, *getattr(state, "_states", {}).values()]:
            each.iter += 3 * rank
        for tensor in tree_leaves(state.replicated_state()):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.mul_(1 - rank / 4)
    before = snapshot(training)
    unequal, wanted, _ = from_all_ranks(before)
    for one, other in zip(*map(tree_leaves, (unequal, wanted)), strict=True):
        assert (
            isinstance(one, bool | str | None)
            or (isinstance(one, torch.Tensor) and not one.numel())
            or differences(one, other)
        )
    training.ddp.resynchronize(from_rank=1)
    assert_same_bits(snapshot(training), wanted)
    assert error_of(training.run, 2) is None


# --- error memory


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["hook", "wrapped-hook"])
@pytest.mark.parametrize("kind", FEEDBACK)
@on_ranks(2, 3)
def test_results_of_a_failed_step_return_to_the_error_memory_of_every_rank(kind, is_wrapped, view):
    wrap = plainly_named if is_wrapped else None
    training = Training(kind, group=dist.new_group(), wrap_hook=wrap, gradient_as_bucket_view=view)
    training.run(START + 2)
    local, ledger = build("mlp"), Ledger(training.module)
    for name, error in training.state.state_dict()["errors"].items():
        ledger.lost[name] += error
    batch = local.batch(own_batches())
    training.ddp.zero_grad()
    last = training.ddp.reducer.buckets[-1]
    hook = training.ddp.reducer.hook

    def run_all_but_the_last(state, bucket):
        if bucket is not last or dist.get_rank() != 1:
            return hook.function(state, bucket)
        failed = torch.futures.Future()
        failed.set_exception(Fault())
        return failed

    with mock.patch.object(training.ddp.reducer, "hook", hook._replace(function=run_all_but_the_last)):
        error = error_of(training.ddp(*batch).backward)
    local(*batch).backward()
    ledger.add(gradients(local), dict.fromkeys(ledger.lost))
    training.ddp.resynchronize()
    compared = errors_of(training.state.state_dict()).keys() - set(last.parameter_names())
    assert error[0] == ("Fault" if dist.get_rank() == 1 else "RuntimeError")
    assert compared.intersection(ledger.close(training.state)) == set()
    assert len(compared) >= 2


@pytest.mark.parametrize("kind", FEEDBACK)
@on_ranks(2)
def test_infinite_result_of_a_failed_step_stays_out_of_the_error_memory(kind):
    training = Training(kind, group=dist.new_group())
    training.run(START + 2)
    if dist.get_rank() == 0:
        parameter = training.ddp.reducer.buckets[0].parameters()[0]
        parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
    with failing_hook(training.ddp, 1 if dist.get_rank() == 1 else -1):
        error = error_of(training.run, 1)
    training.ddp.resynchronize()
    memory = errors_of(training.state.state_dict())
    are_finite = [bool(error.isfinite().all()) for error in memory.values()]
    assert error[0] == ["RuntimeError", "Fault"][dist.get_rank()]
    assert are_finite and all(are_finite)


# --- connections


@pytest.mark.parametrize("during", ["forward", "backward"])
@on_ranks(2, 3)
def test_stored_exception_holds_no_connection_open(during):
    group = dist.new_group()
    dist.barrier(group)
    before = open_sockets()
    torch.manual_seed(0)
    ddp = DDP(Normalized(), process_group=group, bucket_cap_mb=SMALLEST, init_sync=False)
    register(ddp, "fp16", group)
    batch = ddp.module.batch(torch.Generator())
    for _ in range(2):
        ddp(*batch).backward()
    kept = None
    try:
        if during == "forward" and dist.get_rank() == 0:
            connections_of(group).fail("expected")
            raise Fault
        loss = ddp(*batch)
        with failing_hook(ddp, 1 if dist.get_rank() == 0 else -1):
            loss.backward()
    except (Fault, RuntimeError) as error:
        kept = error
    assert kept.__traceback__ is not None
    deadline = time.monotonic() + 10  # gloo's thread closes them
    while (after := open_sockets()) > before and time.monotonic() < deadline:
        pass
    assert type(kept).__name__ == ("Fault" if dist.get_rank() == 0 else "RuntimeError")
    assert after == before


# --- checkpoints and step counts


@pytest.mark.parametrize("hook", ["int4", "int4_on_nodes", "powersgd", "topk"])
@on_ranks(2, 3)
def test_errors_of_a_checkpoint_that_one_rank_has_used_before_an_error_are_not_lost(hook):
    training = Training(hook, group=dist.new_group())
    training.run(START + 2)
    state, ddp, module, generator = training.state, training.ddp, training.module, own_batches(1)
    saved, ledger, last = state.state_dict(), Ledger(module), ddp.reducer.buckets[-1]
    for name, error in errors_of(saved).items():
        ledger.lost[name] += error

    def step():
        """This rank's gradients."""
        batch = module.batch(generator)
        own = torch.autograd.grad(module(*batch), list(module.parameters()))
        ddp.zero_grad()
        error = error_of(lambda: ddp(*batch).backward())
        return dict(zip(ledger.lost, own, strict=True)), error

    state.load_state_dict(saved)
    # Rank 1 fails before it takes its share of the last bucket. The gradients of the others return to the errors.
    with failing_hook(ddp, last.index() if dist.get_rank() == 1 else -1):
        own, error = step()
    assert error is not None
    ddp.resynchronize()
    ledger.add(own | dict.fromkeys(last.parameter_names()), dict.fromkeys(own))
    compared = errors_of(saved).keys()
    if hook == "powersgd":  # which adds a gradient to its error before it sends anything
        compared -= set(last.parameter_names())
    assert compared.isdisjoint(ledger.close(state))
    assert len(compared) >= 2
    ledger = Ledger(module)
    for name, error in errors_of(state.state_dict()).items():
        ledger.lost[name] += error
    for _ in range(2):
        own, error = step()
        assert error is None
        ledger.add(own, gradients(ddp))
    assert_same_on_all_ranks(from_all_ranks(state.iter))
    assert ledger.close(state) == []
    assert errors_of(state.state_dict()).keys() == errors_of(saved).keys()


@pytest.mark.parametrize("hook", FEEDBACK)
@on_ranks(2)
def test_failed_first_compressed_step_leaves_states_that_agree(hook):
    # The other rank has made the error memory of some buckets.
    training = Training(hook, group=dist.new_group())
    training.run(START)
    with failing_hook(training.ddp, 0 if dist.get_rank() == 0 else -1):
        assert error_of(training.run, 1) is not None
    training.ddp.resynchronize()
    training.run(2)
    assert_same_on_all_ranks(from_all_ranks(gradients(training.ddp)))


def fail_once_a_peer_has_a_bucket(training, store):
    """A step in which rank 1 makes a bucket of a state, and rank 0 fails before it makes one."""
    make = StateMemory._new_bucket

    def new_bucket(memory, *arguments):
        if dist.get_rank() == 0:
            store.wait(["made"], LIMIT)
            raise Fault
        made = make(memory, *arguments)
        store.set("made", "")
        return made

    with mock.patch.object(StateMemory, "_new_bucket", new_bucket):
        assert error_of(training.run, 1) is not None


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", FEEDBACK)
@on_ranks(2, limit=30)
def test_checkpoint_after_failed_first_compressed_step_is_equal_on_all_ranks(hook, wrapper):
    group = dist.new_group()
    training = Training(hook, wrapper, group=group)
    training.run(START)
    fail_once_a_peer_has_a_bucket(training, signals(f"first compressed step, {hook}, {wrapper}"))
    if wrapper == "pytorch":
        connections_of(group).fail("expected")  # ends the peer's wait in C++
        training.state.process_group = dist.new_group()
        # Without `resynchronize`, numbers of steps and factors may differ.
        assert_same_on_all_ranks(from_all_ranks(errors_of(training.state.state_dict())))
        return
    training.ddp.resynchronize()
    assert_same_on_all_ranks(from_all_ranks(training.state.state_dict()))
    training.run(2)
    assert_same_on_all_ranks(from_all_ranks(gradients(training.ddp)))


@dataclass(frozen=True)
class Start:
    start_iter: int = START


class CountingState(HookState):
    """Memory in shapes of its own, to which every step adds a number that depends on the rank."""

    def __init__(self, hook, process_group=None, options=None):
        memory = {
            "sums": Memory(merge="sum", shape=lambda gradient: (2, gradient.dim())),
            "means": Memory(merge="mean", dtype=torch.float64),
        }
        super().__init__(hook, process_group, options, memory)


@hook_for(CountingState)
def counting_hook(state, bucket):
    async def all_reduce(step):
        size, rank = step.transport.world_size, step.transport.rank
        for gradient, result in zip(step.gradients, step.results, strict=True):
            mean = (gradient / size).contiguous()
            await step.transport.all_reduce(mean)
            result.copy_(mean)
        for tensor in (*step.memory["sums"], *step.memory["means"]):
            tensor += size * (rank + 1)

    return state.run(bucket, all_reduce)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3, limit=30)
def test_memory_in_own_shapes_is_saved_on_all_ranks_after_an_error_on_one(wrapper):
    group, size, steps = dist.new_group(), dist.get_world_size(), 0
    training = Training((CountingState("counting_hook", group, Start()), counting_hook), wrapper, group=group)
    training.run(START)
    fail_once_a_peer_has_a_bucket(training, signals(f"own shapes, {wrapper}, {size}"))

    def check():
        total, saved = steps * size * size * (size + 1) / 2, training.state.state_dict()
        for name, p in training.module.named_parameters():
            assert_same_bits(saved["sums"].pop(name), torch.full((2, p.dim()), total))
            assert_same_bits(saved["means"].pop(name), torch.full(p.shape, total / size, dtype=torch.float64))
        assert (saved["sums"], saved["means"]) == ({}, {})

    if wrapper == "pytorch":
        connections_of(group).fail("expected")  # ends the peer's wait in C++
        training.state.process_group = dist.new_group()
        check()
        return
    training.ddp.resynchronize()
    check()
    steps = 2
    training.run(steps)
    check()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("hook", FEEDBACK)
@on_ranks(2, limit=30)
def test_checkpoint_after_failed_first_step_is_equal_on_all_ranks(hook, failing):
    # PowerSGD's state learns from the first step whether the hook is batched_powerSGD_hook.
    training = Training(hook, group=dist.new_group())
    with failing_hook(training.ddp, 0 if dist.get_rank() == failing else -1):
        assert error_of(training.run, 1) is not None
    training.ddp.resynchronize()
    assert_same_on_all_ranks(from_all_ranks(training.state.state_dict()))


@pytest.mark.parametrize("hook", FEEDBACK)
@on_ranks(2, limit=30)
def test_loaded_errors_are_saved_unchanged_after_a_failed_step(hook):
    # One rank has them in the strides of the gradients, the other as they were loaded.
    training = Training(hook, model="odd", group=dist.new_group())
    training.run(START + 2)
    saved = training.state.state_dict()
    training.state.load_state_dict(saved)
    fail_once_a_peer_has_a_bucket(training, signals(f"loaded errors, {hook}"))
    training.ddp.resynchronize()
    assert_same_bits(errors_of(training.state.state_dict()), errors_of(saved))
