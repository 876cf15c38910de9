"""Ranks that raise or die while FSDP2, HSDP, `replicate` or a DDP on nodes of two ranks trains: all ranks end."""

import os
import pickle
import signal
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.comm import GroupTransport
from gradwire.exchange import hook_state
from gradwire.exchange.hook_state import HookState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.reducer.bucket import DenseBucket
from gradwire.sharded import ReduceScatterOptions
from gradwire.sharded.all_reduce import ShardBucket
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter
from tests.support import sharded as models
from tests.support.bits import differences
from tests.support.fault_schedules import check_recovered, check_silent, train_with_recovery, train_without_recovery
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALLEST, FailsInBackward, Fault, Scaler, error_of, own_batches, wrapped

VICTIM = 3  # in HSDP it is rank 1 of both of its groups
GOOD_STEPS = 2
PLACES = {  # where the model is sharded, whether a hook averages between replicas, and whether `within` is given
    "fsdp": ("fsdp", False, True),
    "hsdp": ("hsdp", True, False),
    "hsdp within": ("hsdp", False, True),
    "hsdp both": ("hsdp", True, True),
    "replicate": ("replicate", True, False),
}


class Sharded:
    """A model sharded by FSDP2, whose gradients are compressed to int4 in some places."""

    def __init__(self, place):
        where, averages, within = PLACES[place]
        self.model = models.sharded(where)
        self.layer = self.model.first
        state = QuantizationState(wire="int4", start_iter=0) if averages else None
        self.attachment = gradwire.attach(
            self.model, state, within=ReduceScatterOptions(wire="int4") if within else None
        )

    def loss(self, step):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return self.model(torch.randn(5, 9, generator=generator)).square().mean()

    def parameters(self):
        """This rank's shards, wherever FSDP2 has the whole parameters at present."""
        parameters = [each for group in self.attachment._groups for each in group.parameters.values()]
        return [each.sharded_param.to_local().clone() for each in parameters]

    def memory(self):
        """Copies of this rank's errors."""
        state, scattered = self.attachment.state, self.attachment._with_errors
        own = state.__getstate__()["memory"]["errors"] if state is not None else {}
        within = {name: error.clone() for each in scattered for name, error in each._errors.items()}
        return [own, within]

    def save(self):
        return self.attachment.state_dict()


class OnNodes:
    """A DDP on two nodes of two ranks."""

    def __init__(self):
        self.state = QuantizationState(wire="int4", block_size=32, start_iter=0, local_size=2)
        self.model = wrapped(bucket_cap_mb=SMALLEST)
        gradwire.attach(self.model, self.state)
        self.layer, self._generator = self.model.module.layers[0], own_batches()

    def loss(self, step):
        return self.model(*self.model.module.batch(self._generator))

    def parameters(self):
        return [each.detach().clone() for each in self.model.parameters()]

    def memory(self):
        return self.state.__getstate__()["memory"]["errors"]

    def save(self):
        return self.state.state_dict()


def plant(phase, fail, layer, stack):
    """Call ``fail`` in a phase of the next step, if it is one inside of forward or backward."""

    def patch(owner, name, replacement=fail):
        stack.enter_context(mock.patch.object(owner, name, replacement))

    if phase == "forward":
        stack.callback(layer.register_forward_pre_hook(fail).remove)
    elif phase == "hook":
        patch(HookState, "run")
    elif phase == "reduce-scatter":
        patch(QuantizedReduceScatter, "_reduce")
    elif phase.startswith("collective"):
        start, left = GroupTransport.start, iter(range(int(phase[-1]), -1, -1))

        def failing_start(*arguments):
            if next(left, None) == 0:
                fail()
            return start(*arguments)

        patch(GroupTransport, "start", failing_start)
    elif phase == "finish":
        patch(ShardBucket, "finish")
        patch(DenseBucket, "finish")
    elif phase == "backward":  # of the first layer, when all other gradients are reduced

        class Fails(FailsInBackward):
            @staticmethod
            def backward(context, gradient):
                fail()

        stack.callback(layer.register_forward_hook(lambda module, inputs, output: Fails.apply(output)).remove)


def train_until_an_error(place, phase, how, folder):
    """Train until the victim fails in the phase, and write what became of this rank; end like an uncaught error."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    is_victim = dist.get_rank() == VICTIM
    training = OnNodes() if place == "nodes" else Sharded(place)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    n_applied, seen = 0, None

    def fail(*_, **__):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Fault("planted")

    def step(planted):
        nonlocal n_applied, seen
        optimizer.zero_grad()
        seen = training.parameters(), training.memory()
        with ExitStack() as stack:
            if planted:
                plant(phase, fail, training.layer, stack)
            loss = training.loss(n_applied)
            if planted and phase == "loss":
                fail()
            loss.backward()
        if planted and phase == "optimizer":
            fail()
        optimizer.step()
        n_applied += 1
        seen = training.parameters(), training.memory()

    def rest():
        if phase == "state_dict":
            if is_victim:
                fail()
            with mock.patch.object(hook_state, "STATE_DICT_TIMEOUT", timedelta(seconds=3)):
                training.save()
        while n_applied < GOOD_STEPS + 3:
            step(is_victim and n_applied == GOOD_STEPS)

    for _ in range(GOOD_STEPS):
        step(False)
    error = error_of(rest)
    now = training.parameters(), training.memory()
    kept = [not differences(after, before) for before, after in zip(seen, now, strict=True)]
    (Path(folder) / str(dist.get_rank())).write_bytes(pickle.dumps((error, n_applied, *kept)))
    os._exit(0)


OUTSIDE = ["forward", "loss", "backward", "optimizer", "state_dict"]
ATTACHED = {
    "fsdp": ["reduce-scatter", "collective 0"],
    "hsdp": ["hook", "collective 0", "collective 1", "finish"],
    "hsdp within": ["reduce-scatter", "collective 0"],
    "hsdp both": ["reduce-scatter", "hook", "collective 1", "collective 2", "finish"],
    "replicate": ["hook", "collective 0", "collective 1", "finish"],
    "nodes": ["hook", "collective 0", "collective 1", "collective 3", "finish"],
}
RAISED = [(place, phase, "raised") for place, phases in ATTACHED.items() for phase in phases]
KILLED = [(place, phase, "killed") for place, phases in ATTACHED.items() for phase in [*phases, *OUTSIDE]]
QUICK = [
    ("hsdp both", "reduce-scatter", "raised"),
    ("hsdp within", "reduce-scatter", "raised"),
    ("hsdp", "hook", "raised"),
    ("nodes", "collective 1", "killed"),
    ("hsdp both", "collective 1", "killed"),
    ("fsdp", "backward", "killed"),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (*RAISED, *KILLED) if case not in QUICK]


@pytest.mark.parametrize(("place", "phase", "how"), [*QUICK, *SLOW])
def test_fault_on_one_rank_ends_all_soon_with_parameters_as_they_were(worlds, tmp_path, place, phase, how):
    outcomes = worlds(4).run_fresh(
        train_until_an_error, place=place, phase=phase, how=how, folder=str(tmp_path), limit=120
    )
    codes = [outcome.exit_code for outcome in outcomes]
    assert codes == [0, 0, 0, -signal.SIGKILL if how == "killed" else 0], [outcome.output for outcome in outcomes]
    for rank in range(4 if how == "raised" else 3):
        (kind, text), n_applied, are_parameters_kept, is_memory_kept = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert are_parameters_kept, "parameters have changed since the last step that raised no error"
        assert kind == ("Fault" if rank == VICTIM else "RuntimeError"), text
        if phase == "optimizer":  # the others have the gradients
            assert n_applied == GOOD_STEPS + (rank != VICTIM)
        elif how == "raised" or phase not in ("backward", "finish"):
            assert n_applied == GOOD_STEPS
        # The other replica reduces its first gradients before it misses the victim.
        goes_on = place in ("hsdp within", "hsdp both") and rank // 2 != VICTIM // 2
        is_before = phase == "state_dict" or (phase in ("forward", "loss") and not goes_on)
        is_first = phase == "reduce-scatter" or (phase == "hook" and place != "hsdp both")
        if is_before or (rank == VICTIM and is_first):
            assert is_memory_kept, "errors of an exchange that has not been made"
        if how == "raised":
            assert "planted" in text
        if how == "raised" and rank != VICTIM:
            assert f"on rank {VICTIM}" in text
        if how == "raised" and rank != VICTIM and place != "nodes" and phase in ("reduce-scatter", "hook"):
            name = "in int4" if phase == "reduce-scatter" else "by quantization_hook"
            assert f"more parameters {name} failed on rank {VICTIM}: planted" in text


SEEDS = [range(3), pytest.param(range(100, 160), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_skipped_faults_on_nodes_never_leave_unequal_parameters_without_an_error(worlds, seeds):
    results = worlds(4).run(train_without_recovery, limit=600, seeds=seeds, hook="int4_on_nodes", model="mlp")
    for ranks in zip(*results, strict=True):
        check_silent(ranks)


@pytest.mark.parametrize("seeds", SEEDS)
def test_training_on_nodes_resynchronized_after_faults_continues_with_equal_ranks(worlds, seeds):
    results = worlds(4).run(train_with_recovery, limit=600, seeds=seeds, hook="int4_on_nodes", model="mlp")
    for ranks in zip(*results, strict=True):
        check_recovered(ranks)


@pytest.mark.parametrize("steps", [0, GOOD_STEPS])
@pytest.mark.parametrize("place", ["hsdp", "replicate"])
@on_ranks(4, limit=60)
def test_scales_that_differ_raise_on_every_rank_of_a_sharded_model(place, steps):
    case, scaler = Sharded(place), Scaler(1024.0)
    case.attachment.state.follow_scaler(scaler)
    for step in range(steps):
        case.loss(step).backward()
    if dist.get_rank() == VICTIM:
        scaler.scale = 2048.0
    errors = from_all_ranks(error_of(case.loss(steps).backward))
    assert all("The loss scales differ between ranks:\n  scale: 1024.0 on rank" in text for _, text in errors)
    assert all("2048.0 on rank 3" in text for _, text in errors)
    scaler.scale = 2048.0
    case.attachment.resynchronize()
    case.loss(steps).backward()
    assert from_all_ranks(case.attachment.state.iter) == [steps + 1] * 4
