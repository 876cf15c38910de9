"""Trainings with random faults on some ranks, with and without `resynchronize`, and what must hold at their end."""

import random
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

import gradwire
from gradwire.comm import GroupTransport
from tests.support.bits import assert_same_on_all_ranks
from tests.support.training import SMALLEST, FailsInBackward, Fault, build, own_batches, register

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
