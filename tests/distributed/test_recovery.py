"""The state of every rank after an error: exception type, error memory, connections, and resuming."""

import copy
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.comm import connections_of, executor, groups, store_collectives, transport
from gradwire.comm.connections import Connections
from gradwire.comm.store_collectives import POLL_SECONDS, Notices, RanksMissing, gradwire_store, store_all_gather
from gradwire.hooks._bucket import reduce_bucket
from gradwire.hooks.hook_state import HookState
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import FEEDBACK, START, STATES, Ledger, Training, errors_of
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    Fault,
    build,
    error_of,
    failing_hook,
    gradients,
    message_of,
    own_batches,
    plainly_named,
    register,
    train_steps,
    wrapped,
)

DDP = gradwire.DistributedDataParallel
LIMIT = timedelta(minutes=1)
CPU = torch.device("cpu")


def signals(name):
    """A store of one test's own, whose keys ranks set and wait for."""
    return dist.PrefixStore(f"test_recovery/{name}", dist.distributed_c10d._get_default_store())


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
            each.continue_at(each.iter + 3 * rank)
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
@pytest.mark.parametrize("kind", [kind for kind in FEEDBACK if kind != "auto"])
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
    run = training.ddp.reducer._run_comm_hook

    def run_all_but_the_last(bucket):
        if bucket is not last or dist.get_rank() != 1:
            return run(bucket)
        failed = torch.futures.Future()
        failed.set_exception(Fault())
        return failed

    with mock.patch.object(training.ddp.reducer, "_run_comm_hook", run_all_but_the_last):
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


# --- whose error


@on_ranks(2, limit=60)
def test_own_error_after_a_peers_keeps_its_type():
    group, rank = dist.new_group(), dist.get_rank()

    def hook(_, bucket):
        if rank == 0:
            raise Fault
        while connections_of(group).failure_elsewhere() is None:
            pass
        raise KeyError("of this rank")

    kind, text = error_of(train_steps, wrapped(group=group, hook=(None, hook)))
    assert kind == ("Fault" if rank == 0 else "KeyError")
    assert rank == 0 or "of this rank" in text


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, 3, limit=60)
def test_notice_of_a_peer_that_keeps_its_connections_ends_the_wait(wrapper):
    # PyTorch's DDP waits in C++, and looks for no notice.
    store, group = signals(f"stays, {wrapper}"), dist.new_group()
    ddp = wrapped(wrapper, hook="fp16", group=group)
    train_steps(ddp, 2)  # PyTorch's DDP rebuilds its buckets in the second forward
    if dist.get_rank() == 0:
        connections_of(group)._post("expected")
        store.wait([str(rank) for rank in range(1, dist.get_world_size())], LIMIT)
        return
    kind, text = error_of(train_steps, ddp)
    store.set(str(dist.get_rank()), "")
    assert kind == "RuntimeError"
    assert "expected" in text and "resynchronize()" in text


# --- connections


def open_sockets():
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


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


@on_ranks(1)
def test_abandoned_executor_touches_no_gradient_later():
    executor = connections_of(dist.new_group()).executor(CPU)
    is_running, may_end, has_returned = threading.Event(), threading.Event(), threading.Event()
    gradient = torch.zeros(3)

    async def task(_):
        is_running.set()
        may_end.wait()
        gradient.fill_(1)

    future = executor.submit(task)
    is_running.wait()

    def abandon():
        executor.abandon()
        seen.append(gradient.clone())
        has_returned.set()

    seen = []
    thread = threading.Thread(target=abandon)
    thread.start()
    returned_early = has_returned.wait(POLL_SECONDS)
    may_end.set()
    thread.join()
    error_of(future.wait)
    assert not returned_early
    assert_same_bits(seen, [torch.ones(3)])


@on_ranks(2, 3, limit=60)
def test_connections_over_a_used_store_get_a_new_generation():
    group = dist.new_group()
    first = Connections(group)
    for generation in (2, 3):
        first.transport("backward", CPU)
        dist.barrier()  # a rank that is still connecting would fail
        first.fail("expected")
        first.renew(generation)
    first.end()
    second = Connections(group)
    notice, value = second.failure_elsewhere(), torch.ones(3)
    transport = second.transport("backward", CPU)
    transport.wait(transport.start(transport.all_reduce(value))[0])
    second.end()
    generation = second.generation
    assert generation == 4
    assert notice is None
    assert_same_bits(value, torch.full((3,), float(dist.get_world_size())))


@on_ranks(2, limit=90)
def test_new_wrapper_on_the_group_of_a_failed_task_trains():
    group = dist.new_group(timeout=timedelta(seconds=30))
    old = WRAPPERS["pytorch"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)

    async def fail_on_rank_0(source, target, transport, workspace):
        if dist.get_rank() == 0:
            raise Fault
        await transport.all_reduce(torch.ones(3))

    old.register_comm_hook(None, lambda _, bucket: reduce_bucket(group, bucket, fail_on_rank_0, "failing"))
    batch = old.module.batch(own_batches())
    error = error_of(lambda: old(*batch).backward())
    assert error[0] == "RuntimeError"
    seen = train_steps(wrapped(group=group, hook="fp16"), 2)
    assert_same_on_all_ranks(from_all_ranks(seen))
    assert all(gradient.isfinite().all() for gradient in seen[1].values())


@on_ranks(2)
def test_rank_uses_a_new_group_only_after_all_ranks_have_connected():
    store, make = signals("connected"), groups.OwnGroup
    returned = []

    def slow_group(*arguments):
        """Rank 1 begins to use the group a moment after rank 0 has connected."""
        made = make(*arguments)
        with suppress(RuntimeError):
            store.wait(["rank 0 uses it"], timedelta(seconds=1))
            returned.append("too early")
        return made

    found = Connections(dist.new_group())
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(groups, "OwnGroup", slow_group))
        found.transport("backward", CPU)
        store.set(f"rank {dist.get_rank()} uses it", "")
    dist.barrier()
    found.end()
    assert returned == []


@on_ranks(2, limit=90)
def test_failed_task_of_pytorchs_ddp_raises_on_connected_peer():
    group = dist.new_group(timeout=timedelta(seconds=60))
    ddp = WRAPPERS["pytorch"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)

    async def fail_on_rank_0(source, target, transport, workspace):
        await transport.all_reduce(torch.ones(3))
        if dist.get_rank() == 0:
            raise Fault("from the algorithm")
        await transport.all_reduce(torch.ones(3))

    ddp.register_comm_hook(None, lambda _, bucket: reduce_bucket(group, bucket, fail_on_rank_0, "failing"))
    batch, open_groups = ddp.module.batch(own_batches()), []

    def keep_open(last):
        open_groups.extend(last)
        last.clear()

    with ExitStack() as stack:
        for module in (executor, transport):
            stack.enter_context(mock.patch.object(module, "destroy", keep_open))
        message = message_of(lambda: ddp(*batch).backward())
        dist.barrier()
    assert "from the algorithm" in message
    if dist.get_rank() == 1:
        assert "A gradient exchange failed on rank 0" in message


@on_ranks(3)
def test_notices_have_ranks_of_the_default_group():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 2:
        connections_of(group)._post_failure_of_task(Fault("planted"))
    if dist.get_rank() > 0:
        dist.barrier(group)
        assert connections_of(group).failure_elsewhere() == "A gradient exchange failed on rank 2: planted"


# --- requests and meetings in the store


def test_request_without_an_answer_blocks_neither_itself_nor_later_ones():
    is_back, made = threading.Event(), []
    notices = Notices(None)

    def request(store, number):
        made.append(number)
        if number == 1:
            is_back.wait()
        return number

    assert notices.ask(lambda store: request(store, 0)) == 0
    assert notices.ask(lambda store: request(store, 1), seconds=0.01) is None
    assert notices.ask(lambda store: request(store, 2)) is None
    notices.tell(lambda store: request(store, 3))
    assert made == [0, 1]
    is_back.set()
    while 3 not in made or notices.is_stuck:
        pass
    assert notices.ask(lambda store: request(store, 4)) == 4
    assert made == [0, 1, 3, 4]


def test_request_that_the_store_refuses_has_no_answer():
    def refuse(store):
        raise RuntimeError

    assert Notices(None).ask(refuse) is None
    notices = Notices(dist.HashStore())
    notices.tell(lambda store: store.set("key", "text"))
    assert notices.ask(lambda store: store.get("key")) == b"text"


@pytest.mark.parametrize("outcome", ["met", "failed"])
@on_ranks(2)
def test_store_gather_has_the_outcome_of_the_first_rank_on_all_ranks(outcome):
    expected = ["of rank 0", "of rank 1"] if outcome == "met" else "RanksMissing"
    store, group, rank = signals(outcome), dist.new_group(), dist.get_rank()
    decided = [f"meet/{outcome}/1/outcome"]

    def see_nobody(*_):
        """Give up; where the ranks meet, only once the other has seen all."""
        if outcome == "met":
            gradwire_store(group).wait(decided, LIMIT)
        else:
            store.wait(["other is here"], LIMIT)
        return [1 - rank]

    def see_all(*_):
        if outcome == "failed":
            store.set("other is here", "")
            gradwire_store(group).wait(decided, LIMIT)
        return []

    with ExitStack() as stack:
        if outcome == "failed" or rank == 0:
            wait = see_nobody if rank == 0 else see_all
            stack.enter_context(mock.patch.object(store_collectives, "wait_for_ranks", wait))
        try:
            first = store_all_gather(group, outcome, f"of rank {rank}", timeout=timedelta(seconds=10))
        except RanksMissing:
            first = "RanksMissing"
    assert (first, store_all_gather(group, outcome, f"again {rank}")) == (expected, ["again 0", "again 1"])


@pytest.mark.parametrize("hook", ["int4", "powersgd", "topk"])
@on_ranks(2)
def test_errors_of_a_checkpoint_that_one_rank_has_used_before_an_error_are_not_lost(hook):
    ddp = wrapped(hook=hook)
    state = ddp._comm_hooks[0][1]
    train_steps(ddp, 4)
    saved = state.state_dict()
    state.load_state_dict(saved)
    last = len(ddp.reducer.buckets) - 1
    with failing_hook(ddp, last if dist.get_rank() == 1 else -1):  # before it takes its share of that bucket
        assert error_of(train_steps, ddp, 1) is not None
    ddp.resynchronize()
    train_steps(ddp, 3)
    assert_same_on_all_ranks(from_all_ranks(state.iter))
    assert state.state_dict()["errors"].keys() == saved["errors"].keys()


@pytest.mark.parametrize("hook", ["scaled_fp16", "int4", "powersgd", "topk", "auto"])
@on_ranks(2)
def test_ranks_that_were_a_step_apart_continue_with_one_step_count(hook):
    ddp = wrapped(hook=hook)
    state = ddp._comm_hooks[0][1]
    train_steps(ddp, 3)
    state._iter += dist.get_rank()  # a peer failed at the end of its step
    ddp.resynchronize()
    train_steps(ddp, 3)
    assert from_all_ranks(state.iter) == [6, 6]


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
    make = HookState.new_bucket

    def new_bucket(state, *arguments):
        if dist.get_rank() == 0:
            store.wait(["made"], LIMIT)
            raise Fault
        made = make(state, *arguments)
        store.set("made", "")
        return made

    with mock.patch.object(HookState, "new_bucket", new_bucket):
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
