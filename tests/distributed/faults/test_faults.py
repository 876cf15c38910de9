"""Faults on some ranks: no schedule of them ends in a hang, or in unequal parameters without an error."""

import random
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.comm import GroupTransport
from gradwire.hooks import _handshake
from tests.support.bits import assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    HOOKS,
    SMALLEST,
    FailsInBackward,
    Fault,
    build,
    error_of,
    message_of,
    own_batches,
    register,
)

N_STEPS = 8


def raise_fault(*_, **__):
    raise Fault


@contextmanager
def fault(ddp, where, at):
    """Let one step of this rank fail in a phase of `PHASES`; the number ``at`` chooses layer, bucket or collective."""
    layers = [module for module in ddp.module.modules() if not list(module.children())]
    layer, index = layers[at % len(layers)], at % len(ddp.reducer.buckets)
    bucket = ddp.reducer.buckets[index]
    with ExitStack() as stack:
        if where == "forward":
            stack.callback(layer.register_forward_pre_hook(raise_fault).remove)
        elif where == "backward":
            fails = layer.register_forward_hook(lambda module, inputs, output: FailsInBackward.apply(output))
            stack.callback(fails.remove)
        elif where in ("hook", "submitted"):
            hook = ddp.reducer.hook

            def failing(state, bucket_in_flight):
                if bucket_in_flight.index() != index:
                    return hook.function(state, bucket_in_flight)
                if where == "submitted":
                    hook.function(state, bucket_in_flight)
                raise Fault

            stack.enter_context(mock.patch.object(ddp.reducer, "hook", hook._replace(function=failing)))
        elif where == "collective":
            start, left = GroupTransport.start, iter(range(at % 5, -1, -1))

            def failing_start(*arguments):
                if next(left, None) == 0:
                    raise Fault
                return start(*arguments)

            # Of all transports: to look for the one of the hook would create it, before the other ranks do.
            stack.enter_context(mock.patch.object(GroupTransport, "start", failing_start))
        else:
            stack.enter_context(mock.patch.object(bucket, "finish", raise_fault))
        yield


PHASES = ["forward", "backward", "hook", "submitted", "collective", "finish"]


def schedule_of(seed, world_size):
    """For each step the faults of each rank; none in the last step, in which ranks see what went wrong before it."""
    draw = random.Random(seed)
    schedule = [{} for _ in range(N_STEPS)]
    for _ in range(draw.randint(1, 3)):
        rank, where, at = draw.randrange(world_size), draw.choice(PHASES), draw.randrange(40)
        schedule[draw.randrange(N_STEPS - 1)][rank] = (where, at)
    return schedule


def new_training(hook, model, group):
    ddp = gradwire.DistributedDataParallel(build(model), process_group=group, bucket_cap_mb=SMALLEST)
    state = register(ddp, hook, group) if hook != "none" else None
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), state


def step_of(ddp, optimizer, generator, planned):
    """Train on one batch; planned is this rank's fault or None."""
    batch = ddp.module.batch(generator)
    optimizer.zero_grad()
    with fault(ddp, *planned) if planned is not None else ExitStack():
        ddp(*batch).backward()
    optimizer.step()


def parameters_of(ddp):
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def train_without_recovery(seeds, hook, model):
    """For each seed this rank's errors, each with the number of steps applied before it, and how its training ended.

    The end is the number of all applied steps, and the parameters.
    """
    results = []
    for seed in seeds:
        group = dist.new_group()
        ddp, optimizer, _ = new_training(hook, model, group)
        generator = own_batches()
        errors, applied = [], 0
        for faults in schedule_of(seed, dist.get_world_size()):
            where, _ = planned = faults.get(dist.get_rank(), (None, 0))
            try:
                step_of(ddp, optimizer, generator, planned if where is not None else None)
                applied += 1
            except (Fault, RuntimeError) as error:
                is_own = isinstance(error, Fault) and where != "backward"
                errors.append((applied, is_own, str(error)))
        dist.destroy_process_group(group)
        results.append((errors, applied, parameters_of(ddp)))
    return results


# Hooks and seeds of schedules: a few for the most different hooks, and many for each. PyTorch's hook uses the process
# group itself, which cannot be replaced: there `resynchronize` raises as it should.
FEW = [
    *((hook, "mlp", range(1)) for hook in ("none", "scaled_fp16", "fp16_of_powersgd")),
    *((hook, "conv", range(1)) for hook in ("fp16", "powersgd")),
]
MANY = [
    pytest.param(hook, model, range(100, 160), marks=pytest.mark.slow)
    for hook in ("none", *HOOKS)
    for model in ("mlp", "conv")
]
REPLACEABLE = [case for case in MANY if case.values[0] != "fp16_of_pytorch"]


@pytest.mark.parametrize(("hook", "model", "seeds"), [*FEW, *MANY])
def test_skipped_faults_never_leave_unequal_parameters_without_an_error(worlds, hook, model, seeds):
    results = worlds(3).run(train_without_recovery, limit=600, seeds=seeds, hook=hook, model=model)
    for ranks in zip(*results, strict=True):
        check_silent(ranks)


def check_silent(ranks):
    """Ranks without an error have applied the same steps; after a fault, no rank applies more than that step.

    A backward may raise before it has exchanged anything: then training continues with the next batch.
    """
    errors, applied, parameters = zip(*ranks, strict=True)
    are_equal = all(all(map(torch.equal, parameters[0], others)) for others in parameters[1:])
    assert (are_equal and len(set(applied)) == 1) or all(errors), errors
    for rank, before in [(rank, before) for rank, own in enumerate(errors) for before, is_own, _ in own if is_own]:
        assert applied[rank] == before
        assert max(applied) <= before + 1


def train_with_recovery(seeds, hook, model):
    """For each seed this rank's errors, and its parameters and hook state at the end."""
    results = []
    group = dist.new_group()
    for seed in seeds:
        ddp, optimizer, state = new_training(hook, model, group)
        generator = own_batches()
        schedule = schedule_of(seed, dist.get_world_size())
        step, errors = 0, []
        while step < N_STEPS:
            try:
                step_of(ddp, optimizer, generator, schedule[step].pop(dist.get_rank(), None))
                step += 1
            except (Fault, RuntimeError) as error:
                errors.append(str(error))
                recover(ddp)
                step = highest(step + 1)
        replicated = state.replicated_state() if hasattr(state, "replicated_state") else {}
        replicated.pop("counters", None)
        results.append((errors, parameters_of(ddp), replicated))
    dist.destroy_process_group(group)
    return results


def recover(ddp):
    """Agree to go on; from rank 1 where some ranks have applied the failed step."""
    try:
        ddp.resynchronize()
    except RuntimeError as error:
        assert "The parameters differ between the ranks" in str(error)
        ddp.resynchronize(from_rank=1)


def highest(step):
    """The number of the next step: after an error ranks may be one step apart."""
    shared = torch.tensor(step)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def check_recovered(ranks):
    assert_same_on_all_ranks([(parameters, replicated) for _, parameters, replicated in ranks])
    assert len({bool(errors) for errors, *_ in ranks}) == 1, "an error on one rank reaches all"
    assert all(parameter.isfinite().all() for _, parameters, _ in ranks for parameter in parameters)


@pytest.mark.parametrize(("hook", "model", "seeds"), [*FEW, *REPLACEABLE])
def test_training_resynchronized_after_faults_continues_with_equal_ranks(worlds, hook, model, seeds):
    results = worlds(3).run(train_with_recovery, limit=600, seeds=seeds, hook=hook, model=model)
    for ranks in zip(*results, strict=True):
        check_recovered(ranks)


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
@on_ranks(2, limit=90)
def test_failed_handshake_is_repeated_after_resynchronization(hook):
    # Rank 1 has agreed with rank 0, but not the other way round: alone, rank 0 would wait for the second handshake.
    group = dist.new_group()
    ddp, optimizer, _ = new_training(hook, "mlp", group)
    generator, compare = own_batches(), _handshake.compare_settings

    def compare_and_fail(*arguments):
        compare(*arguments)
        raise Fault

    with mock.patch.object(_handshake, "compare_settings", compare_and_fail if dist.get_rank() == 0 else compare):
        error = error_of(step_of, ddp, optimizer, generator, None)
    ddp.resynchronize()
    for _ in range(2):
        step_of(ddp, optimizer, generator, None)
    dist.destroy_process_group(group)
    errors, parameters = zip(*from_all_ranks((error[0], parameters_of(ddp))), strict=True)
    assert errors == ("Fault", "RuntimeError")
    assert_same_on_all_ranks(parameters)


@on_ranks(2)
def test_resynchronize_with_stuck_process_group_raises_on_all_ranks():
    group = dist.new_group(timeout=timedelta(seconds=20))
    ddp, optimizer, _ = new_training("fp16_of_pytorch", "mlp", group)
    planned = ("hook", 3) if dist.get_rank() == 1 else None
    error = error_of(step_of, ddp, optimizer, torch.Generator().manual_seed(0), planned)
    errors, messages = zip(*from_all_ranks((error[0], message_of(ddp.resynchronize))), strict=True)
    assert errors == ("RuntimeError", "Fault")
    for message in messages:
        assert "The ranks have issued different numbers of collectives on the process group itself" in message
