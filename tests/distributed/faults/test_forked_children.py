"""Children that a rank forks and that end while it trains: its peers, its groups and its reports do not notice."""

import atexit
import gc
import multiprocessing
import os
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.testing import _check
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import gradients, own_batches, train_steps, wrapped


class Observed:
    """A model with a hook whose every step is measured. Reports go to a file, also those of children."""

    def __init__(self, wrapper, folder):
        folder.mkdir(exist_ok=True)
        self.path = folder / f"reports of rank {dist.get_rank()}"
        self.state = QuantizationState(wire="int8")
        group = dist.new_group() if wrapper == "gradwire" else None
        self.ddp = wrapped(wrapper, group=group, hook=(self.state, quantization_hook))
        self.group = group or dist.group.WORLD
        self.state.observe(every=1, report=self.report)

    def report(self, metrics):
        with self.path.open("a") as file:
            file.write(f"{metrics['step']:.0f}\n")

    def reported_steps(self):
        self.state.stop_observing()
        return self.path.read_text().split()


def exits(_):
    atexit._run_exitfuncs()


def fails(_):
    """Exit after an uncaught exception."""
    sys.last_value = ValueError("of the child")
    atexit._run_exitfuncs()


def destroys_the_group(observed):
    dist.destroy_process_group(observed.group)


def drops_the_model(observed):
    del observed.ddp, observed.state
    gc.collect()


def stops_observing(observed):
    observed.state.stop_observing()


def run_in_child(way, observed):
    """Call ``way(observed)`` in a forked child, and wait for its end. Destructors of gloo's groups do not run."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            way(observed)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0) == (child, 0)


@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
@pytest.mark.parametrize("way", [exits, fails, destroys_the_group, drops_the_model, stops_observing])
@on_ranks(2, 3)
def test_forked_child_that_ends_leaves_training_and_reports_as_they_are(way, wrapper, tmp_path):
    uninterrupted = Observed(wrapper, tmp_path / "expected")
    expected = train_steps(uninterrupted.ddp, 4)
    observed, generator = Observed(wrapper, tmp_path / "forked"), own_batches()
    got = train_steps(observed.ddp, 2, generator)
    if dist.get_rank() == 0:
        run_in_child(way, observed)
    got += train_steps(observed.ddp, 2, generator)
    assert_same_bits(got, expected)
    assert_same_on_all_ranks(from_all_ranks(got))
    reported = observed.reported_steps()
    assert len(reported) == 4
    assert reported == uninterrupted.reported_steps()


def with_children():
    """Let this rank, a daemon of the harness, start processes meanwhile."""
    return mock.patch.dict(multiprocessing.current_process()._config, daemon=False)


def message_of_forward(ddp, connection):
    try:
        ddp(*ddp.module.batch(own_batches()))
        connection.send("no error")
    except RuntimeError as error:
        connection.send(str(error))


@on_ranks(2)
def test_forward_in_a_forked_child_raises_that_it_is_a_fork():
    ddp = wrapped(group=dist.new_group(), hook="int4")
    expected = train_steps(wrapped(group=dist.new_group(), hook="int4"), 3)
    generator = own_batches()
    got = train_steps(ddp, 2, generator)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=message_of_forward, args=(ddp, theirs))
    with with_children():
        child.start()
    message = ours.recv()
    assert message.startswith(f"Process {child.pid} was forked from process {os.getpid()}")
    assert "spawn or forkserver" in message
    child.join()
    assert_same_bits(got + train_steps(ddp, 1, generator), expected)


@pytest.mark.parametrize("wrapper", ["gradwire", "pytorch"])
@on_ranks(2, 3)
def test_forked_workers_of_a_data_loader_come_and_go_while_ranks_train(wrapper):
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(24, 11))
    seen = {}
    for workers in (0, 2):
        context = "fork" if workers else None
        loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)
        ddp = wrapped(wrapper, hook="int4", group=dist.new_group() if wrapper == "gradwire" else None)
        seen[workers] = []
        for _ in range(2):
            with with_children():
                batches = iter(loader)
            for (batch,) in batches:
                ddp.zero_grad()
                ddp(batch).backward()
                seen[workers].append(gradients(ddp))
    assert len(seen[2]) == 12
    assert_same_bits(seen[2], seen[0])
    assert_same_on_all_ranks(from_all_ranks(seen[2]))


def process():
    return os.getpid()


def test_ranks_of_check_laws_outlive_a_forked_child():
    with mock.patch.object(atexit, "register") as register:
        world = _check._world.__wrapped__(2)
    try:
        before = world.run(process)
        run_in_child(lambda _: [call.args[0](*call.args[1:]) for call in register.call_args_list], None)
        assert world.run(process) == before
    finally:
        world.close()
