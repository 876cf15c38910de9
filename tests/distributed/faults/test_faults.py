"""Faults on some ranks: no schedule of them ends in a hang, or in unequal parameters without an error."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange import handshake
from tests.support.bits import assert_same_on_all_ranks
from tests.support.fault_schedules import (
    check_recovered,
    check_silent,
    new_training,
    parameters_of,
    step_of,
    train_with_recovery,
    train_without_recovery,
)
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import HOOKS, Fault, error_of, message_of, own_batches

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
    generator, compare = own_batches(), handshake.compare_settings

    def compare_and_fail(*arguments):
        compare(*arguments)
        raise Fault

    with mock.patch.object(handshake, "compare_settings", compare_and_fail if dist.get_rank() == 0 else compare):
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
