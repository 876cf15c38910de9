"""What an error leaves behind on every rank: its own type, error memory, connections, and a state to continue from."""

import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.comm import connections_of, store_collectives
from gradwire.comm.connections import Connections
from gradwire.comm.store_collectives import POLL_SECONDS, RanksMissing, gradwire_store, store_all_gather
from gradwire.hooks._bucket import reduce_bucket
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.states import FEEDBACK, START, STATES, Ledger, Training, errors_of
from tests.support.training import SMALL, SMALLEST, WRAPPERS, Fault, build, error_of, gradients, register

DDP = gradwire.DistributedDataParallel
LIMIT = timedelta(minutes=1)
CPU = torch.device("cpu")


def signals(name):
    """A store of one test's own, whose keys ranks set and wait for."""
    return dist.PrefixStore(f"test_recovery/{name}", dist.distributed_c10d._get_default_store())


@contextmanager
def failing_hook(ddp, index):
    """Let the hook of one bucket raise on this rank, once the results of the buckets before it are there."""
    run, earlier = ddp.reducer._run_comm_hook, []

    def failing(bucket):
        if bucket.index() == index:
            for future in earlier:
                future.wait()
            raise Fault
        earlier.append(run(bucket))
        return earlier[-1]

    with mock.patch.object(ddp.reducer, "_run_comm_hook", failing):
        yield


# --- steps that only some ranks make


def skip_a_failed_forward(hook):
    """The errors and numbers of applied steps, where rank 0's second forward raises and its loop goes on."""
    ddp = DDP(build("mlp"), process_group=dist.new_group(), bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook, ddp.process_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator, errors, applied = torch.Generator().manual_seed(dist.get_rank()), [], []

    def step(k):
        optimizer.zero_grad()
        with ExitStack() as stack:
            if (k, dist.get_rank()) == (1, 0):
                stack.callback(ddp.module.layers[2].register_forward_pre_hook(raise_fault).remove)
            ddp(*ddp.module.batch(generator)).backward()
        optimizer.step()
        applied.append(k)

    for k in range(4):
        errors.append(error_of(step, k))
    return errors, applied


def raise_fault(*_):
    raise Fault


@pytest.mark.parametrize("hook", [None, "fp16", "powersgd"])
def test_forward_that_raised_and_was_skipped_raises_in_the_next_forward_and_on_the_peers(worlds, hook):
    # Else rank 0's third step would be averaged with the second of the others.
    skipping, *peers = worlds(3).run(skip_a_failed_forward, hook=hook, limit=90)
    errors, applied = skipping
    assert applied == [0]
    assert errors[1][0] == "Fault"
    assert "the forward pass raised an exception" in errors[2][1]
    for errors, applied in peers:
        assert applied == [0]
        assert errors[1][0] == "RuntimeError"
        assert "Step 2 failed on rank 0: the forward pass raised an exception" in errors[1][1]


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


def skip_a_failed_loss(failing, hook):
    """The first errors in a loop that goes on when the loss raises on one rank."""
    torch.manual_seed(0)
    ddp = DDP(Normalized(), process_group=dist.new_group(), bucket_cap_mb=SMALL)
    if hook is not None:
        register(ddp, hook, ddp.process_group)
    generator, errors = torch.Generator().manual_seed(dist.get_rank()), []

    def step(k):
        loss = ddp(*ddp.module.batch(generator))
        if (k, dist.get_rank()) == (2, failing):
            raise Fault
        loss.backward()

    for k in range(5):
        if (error := error_of(step, k)) is not None:
            errors.append(error)
    return errors


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("hook", [None, "fp16"])
def test_loss_that_raises_on_one_rank_of_a_model_with_buffers_raises_on_all(worlds, hook, failing):
    # One waits in a forward for buffers, the others in a backward for gradients: nobody would come.
    results = worlds(3).run(skip_a_failed_loss, failing=failing, hook=hook, limit=60)
    assert results[failing][0][0] == "Fault"
    for rank, errors in enumerate(results):
        kind, text = errors[int(rank == failing)]
        assert kind == "RuntimeError"
        assert f"Rank {failing} skipped the backward pass that this rank is in and has begun" in text
        assert "resynchronize()" in text


# --- resynchronization


def resynchronize_unequal_ranks(kind):
    """What rank 1 had before the ranks resynchronized from it, and what each of them has afterwards."""
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
        for factor in factors_of(state):
            factor.mul_(1 - rank / 4)
    before = snapshot(training)
    training.ddp.resynchronize(from_rank=1)
    return before, snapshot(training), error_of(training.run, 2)


def factors_of(state):
    replicated = state.replicated_state()
    found = []

    def visit(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value)
        for each in value.values() if isinstance(value, dict) else ():
            visit(each)

    visit(replicated)
    return found


def snapshot(training):
    """Copies of parameters, buffers, and what a hook's state has in common on all ranks."""
    model = {name: tensor.clone() for name, tensor in training.module.state_dict().items()}
    replicated = training.state.replicated_state()
    replicated.pop("counters", None)  # elements, of this rank
    return model, copied(replicated)


def copied(value):
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_different(one, other):
    """That no tensor and no number in nested dictionaries is equal."""
    if isinstance(one, dict | tuple):
        values = (each.values() if isinstance(each, dict) else each for each in (one, other))
        for pair in zip(*values, strict=True):
            assert_different(*pair)
    elif isinstance(one, torch.Tensor):
        assert one.numel() == 0 or not torch.equal(one, other)
    elif isinstance(one, int) and not isinstance(one, bool):
        assert one != other


@pytest.mark.parametrize("kind", STATES)
def test_resynchronization_from_rank_1_gives_all_ranks_its_parameters_buffers_and_state(worlds, kind):
    results = worlds(3).run(resynchronize_unequal_ranks, kind=kind)
    wanted = results[1][0]
    assert_different(results[0][0], wanted)
    for _, after, error in results:
        assert_same_bits(after, wanted)
        assert error is None


# --- error memory


def fail_at_the_last_bucket(kind, wrapper):
    """Names of the parameters that lost more than by rounding, around a step whose last bucket fails on rank 1.

    All buckets before it were reduced, and those results are discarded with the step. Parameters without error memory
    are left out.
    """
    training = Training(kind, wrapper, group=dist.new_group())
    training.run(START + 2)
    local, ledger = build("mlp"), Ledger(training.module)
    for name, error in training.state.state_dict()["errors"].items():
        ledger.lost[name] += error
    batch = local.batch(torch.Generator().manual_seed(dist.get_rank()))
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
    return error[0], compared.intersection(ledger.close(training.state)), len(compared)


@pytest.mark.parametrize("kind", [kind for kind in FEEDBACK if kind != "auto"])
def test_results_of_a_failed_step_return_to_the_error_memory_of_every_rank(worlds, kind):
    (peer, *_), (failing, *_), _ = results = worlds(3).run(fail_at_the_last_bucket, kind=kind, wrapper="gradwire")
    assert (peer, failing) == ("RuntimeError", "Fault")
    for _, lost, compared in results:
        assert lost == set()
        assert compared >= 2


def fail_after_infinite_gradients(kind):
    """Whether the errors are finite after a step with an infinite gradient in bucket 0 and a failure in bucket 1."""
    training = Training(kind, group=dist.new_group())
    training.run(START + 2)
    if dist.get_rank() == 0:
        parameter = training.ddp.reducer.buckets[0].parameters()[0]
        parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
    with failing_hook(training.ddp, 1 if dist.get_rank() == 1 else -1):
        error = error_of(training.run, 1)
    training.ddp.resynchronize()
    memory = errors_of(training.state.state_dict())
    return error[0], {name: bool(error.isfinite().all()) for name, error in memory.items()}


@pytest.mark.parametrize("kind", FEEDBACK)
def test_infinite_result_of_a_failed_step_stays_out_of_the_error_memory(worlds, kind):
    for (error, are_finite), expected in zip(
        worlds(2).run(fail_after_infinite_gradients, kind=kind), ["RuntimeError", "Fault"], strict=True
    ):
        assert error == expected
        assert are_finite and all(are_finite.values())


# --- whose error


def fail_after_a_peer():
    """Rank 1's hook raises once rank 0 has left with an error; both errors."""
    ddp = DDP(build("mlp"), process_group=dist.new_group(), bucket_cap_mb=SMALL)
    group, rank = ddp.process_group, dist.get_rank()

    def hook(_, bucket):
        if rank == 0:
            raise Fault
        while connections_of(group).failure_elsewhere() is None:
            pass
        raise KeyError("of this rank")

    ddp.register_comm_hook(None, hook)
    return error_of(ddp(*ddp.module.batch(torch.Generator())).backward)


def test_own_error_after_a_peers_keeps_its_type(worlds):
    (first, _), (second, text) = worlds(2).run(fail_after_a_peer, limit=60)
    assert (first, second) == ("Fault", "KeyError")
    assert "of this rank" in text


def wait_for_a_peer_that_stays(wrapper):
    """Rank 0 announces that it leaves, but keeps its connections; what the others' backward raises."""
    store, group = signals(f"stays, {wrapper}"), dist.new_group()
    ddp = WRAPPERS[wrapper](build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    register(ddp, "fp16", group)
    batch = ddp.module.batch(torch.Generator())
    for _ in range(2):  # PyTorch's DDP rebuilds its buckets in the second forward
        ddp(*batch).backward()
    if dist.get_rank() == 0:
        connections_of(group)._post("expected")
        store.wait([str(rank) for rank in range(1, dist.get_world_size())], LIMIT)
        return None
    error = error_of(lambda: ddp(*batch).backward())
    store.set(str(dist.get_rank()), "")
    return error


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_notice_of_a_peer_that_keeps_its_connections_ends_the_wait(world, wrapper):
    # PyTorch's DDP waits in C++, and looks for no notice.
    _, *others = world.run(wait_for_a_peer_that_stays, wrapper=wrapper, limit=60)
    for kind, text in others:
        assert kind == "RuntimeError"
        assert "expected" in text and "resynchronize()" in text


# --- connections


def keep_a_traceback(during):
    """Sockets of this process before its first exchange of gradients, and while it holds the error that ended them."""
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
    return type(kept).__name__, before, after


def open_sockets():
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_kept_traceback_keeps_no_connection(world, during):
    for rank, (kind, before, after) in enumerate(world.run(keep_a_traceback, during=during)):
        assert kind == ("Fault" if rank == 0 else "RuntimeError")
        assert after == before


def abandon_during_a_task():
    """Whether `abandon` had returned before the task in flight could end, and had not before it did."""
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
    return returned_early, seen, error_of(future.wait)


def test_abandoned_executor_touches_no_gradient_later(worlds):
    ((returned_early, (seen,), _),) = worlds(1).run(abandon_during_a_task)
    assert not returned_early
    assert_same_bits(seen, torch.ones(3))


def begin_again_over_the_same_store():
    """Generations of connections on one store, where those of rank 0 started again once more; a sum over the last."""
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
    return second.generation, notice, value


def test_connections_over_a_used_store_are_of_a_generation_of_their_own(world):
    for generation, notice, value in world.run(begin_again_over_the_same_store, limit=60):
        assert generation == 4
        assert notice is None
        assert_same_bits(value, torch.full((3,), float(world.size)))


def wrap_after_a_failed_task():
    """The error of PyTorch's DDP, whose reducer does not tell gradwire, and gradients of a new wrapper on its group."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    old = WRAPPERS["pytorch"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)

    async def fail_on_rank_0(source, target, transport, workspace):
        if dist.get_rank() == 0:
            raise Fault
        await transport.all_reduce(torch.ones(3))

    old.register_comm_hook(None, lambda _, bucket: reduce_bucket(group, bucket, fail_on_rank_0, "failing"))
    batch = old.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    error = error_of(lambda: old(*batch).backward())
    ddp = DDP(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    register(ddp, "fp16", group)
    for _ in range(2):
        ddp.zero_grad()
        ddp(*batch).backward()
    return error[0], gradients(ddp)


def test_new_wrapper_on_the_group_of_a_failed_task_trains(worlds):
    results = worlds(2).run(wrap_after_a_failed_task, limit=90)
    assert {error for error, _ in results} == {"RuntimeError"}
    assert_same_on_all_ranks([seen for _, seen in results])
    assert all(gradient.isfinite().all() for gradient in results[0][1].values())


# --- meetings in the store


def meet_after_the_decision(outcome):
    """What two ranks get from a meeting that rank 0 decides before rank 1, or rank 1 before rank 0, saw all keys."""
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
    return first, store_all_gather(group, outcome, f"again {rank}")


@pytest.mark.parametrize("outcome", ["met", "failed"])
def test_meeting_ends_alike_on_a_rank_that_saw_less_than_the_one_that_decided(worlds, outcome):
    expected = ["of rank 0", "of rank 1"] if outcome == "met" else "RanksMissing"
    assert worlds(2).run(meet_after_the_decision, outcome=outcome) == [(expected, ["again 0", "again 1"])] * 2
