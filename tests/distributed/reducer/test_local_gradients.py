"""Gradients that a wrapper does not average, because its forward or autograd's hooks were passed by: a warning or an
error on every rank.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from tests.support.bits import assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import error_of, gradients, message_of, own_batches, train_steps, wrapped

WORDS = ("this rank's own gradients", "model.module(x)", "model.no_sync()")


@contextmanager
def warned():
    """The texts of the warnings about gradients of one rank, in a list that is complete at the end."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if WORDS[0] in str(each.message)]


def batch_of(ddp, generator):
    return ddp.module.batch(generator)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(2, 3)
def test_backward_without_the_wrappers_forward_warns_once_with_a_parameters_name(steps_before, options):
    ddp, generator = wrapped(group=dist.new_group(), **options), own_batches()
    train_steps(ddp, steps_before)
    with warned() as texts:
        for _ in range(3):
            ddp.zero_grad()
            ddp.module(*batch_of(ddp, generator)).backward()
    (text,) = texts
    assert all(words in text for words in WORDS)
    assert any(name in text for name, _ in ddp.module.named_parameters())
    everywhere = from_all_ranks(gradients(ddp))
    assert not torch.equal(everywhere[0]["layers.0.weight"], everywhere[1]["layers.0.weight"])
    with warned() as texts:
        assert_same_on_all_ranks(from_all_ranks(train_steps(ddp, 2)))
    assert texts == []


def local_steps(ddp, batches):
    """Each of the ways in which a rank asks for gradients of its own."""
    model = ddp.module
    with ddp.no_sync():
        ddp(*batches[0]).backward()
    with ddp.no_sync():
        loss = ddp(*batches[1])
    loss.backward()  # its forward decides
    with ddp.no_sync():
        model(*batches[2]).backward()
    with torch.no_grad():
        model(*batches[3])
    torch.autograd.grad(model(*batches[4]), list(model.parameters()))


@on_ranks(2)
def test_gradients_that_are_to_stay_on_their_rank_do_not_warn():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    with warned() as texts:
        for _ in range(2):
            local_steps(ddp, [batch_of(ddp, generator) for _ in range(5)])
            ddp(*batch_of(ddp, generator)).backward()
    assert texts == []
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@on_ranks(2)
def test_bare_module_under_no_sync_does_not_warn():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    train_steps(ddp)
    with warned() as texts, ddp.no_sync():
        ddp.module(*batch_of(ddp, generator)).backward()
    assert texts == []


@on_ranks(2)
def test_local_gradients_are_averaged_with_those_of_a_later_backward():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    first, second = batch_of(ddp, generator), batch_of(ddp, generator)
    ddp.module(*first).backward()
    ddp(*second).backward()
    local = type(ddp.module)()
    local.load_state_dict(ddp.module.state_dict())
    for batch in (first, second):
        local(*batch).backward()
    for name, gradient in gradients(ddp).items():
        mean = torch.stack([each[name] for each in from_all_ranks(gradients(local))]).mean(0)
        torch.testing.assert_close(gradient, mean)


@on_ranks(2)
def test_gradient_of_a_forward_under_no_sync_that_comes_after_the_reduction_warns():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    with ddp.no_sync():
        loss = ddp(*batch_of(ddp, generator))
    with warned() as texts:
        ddp(*batch_of(ddp, generator)).backward()
        loss.backward()
    assert len(texts) == 1


@on_ranks(2)
def test_warning_comes_also_after_a_step_with_no_sync():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    with ddp.no_sync():
        ddp(*batch_of(ddp, generator)).backward()
    ddp(*batch_of(ddp, generator)).backward()
    with warned() as texts:
        ddp.module(*batch_of(ddp, generator)).backward()
    assert len(texts) == 1


@on_ranks(2)
def test_wrappers_that_share_parameters_do_not_warn():
    trunk = nn.Linear(4, 4)
    group = dist.new_group()
    left, right = (wrapped(model=nn.Sequential(trunk, nn.Linear(4, 2)), group=group) for _ in range(2))
    batch = torch.full((3, 4), 1.0 + dist.get_rank())
    right(batch).sum().backward()
    with warned() as texts:
        for _ in range(3):
            left(batch).sum().backward()
    assert texts == []


@on_ranks(2)
def test_gradients_that_come_after_an_error_do_not_warn():
    # As those of other threads of autograd do, whose backward has raised.
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    train_steps(ddp)
    loss = ddp.module(*batch_of(ddp, generator))
    ddp.reducer.leave_for_resynchronize("a test")
    with warned() as texts:
        loss.backward()
    assert texts == []
    ddp.resynchronize()


def pipeline(schedule, microbatches=2):
    """Two stages of a pipeline, both on this rank and each wrapped, and its schedule."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    ddps = [wrapped(model=module, group=dist.new_group()) for module in modules]
    stages = [PipelineStage(ddp, i, 2, torch.device("cpu"), group=own) for i, ddp in enumerate(ddps)]
    return ddps, schedule(stages, n_microbatches=microbatches, loss_fn=nn.MSELoss(), scale_grads=False)


def pipeline_step(ddps, schedule, generator):
    for ddp in ddps:
        ddp.zero_grad()
    schedule.step(torch.randn(4, 4, generator=generator), target=torch.zeros(4, 4))
    return [gradients(ddp) for ddp in ddps]


@on_ranks(2, 3)
def test_pipeline_with_whole_backward_passes_is_averaged():
    ddps, schedule = pipeline(ScheduleInterleaved1F1B)
    generator = own_batches()
    for _ in range(3):
        inputs = torch.randn(4, 4, generator=generator)
        for ddp in ddps:
            ddp.zero_grad()
        schedule.step(inputs, target=torch.zeros(4, 4))
        local = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in ddps))
        for part, ddp in zip(local, ddps, strict=True):
            part.load_state_dict(ddp.module.state_dict())
        for chunk in inputs.chunk(2):
            local(chunk).square().mean().backward()
        for i, ddp in enumerate(ddps):
            for name, gradient in gradients(ddp).items():
                mean = torch.stack([each[f"{i}.{name}"] for each in from_all_ranks(gradients(local))]).mean(0)
                torch.testing.assert_close(gradient, mean)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("then", ["nothing", "step", "step and clear"])
@on_ranks(2, 3)
def test_pipeline_that_splits_the_backward_raises_at_the_next_forward(then, microbatches):
    ddps, schedule = pipeline(ScheduleInterleavedZeroBubble, microbatches)
    optimizer = torch.optim.SGD([parameter for ddp in ddps for parameter in ddp.parameters()], lr=0.125)
    generator = own_batches()
    pipeline_step(ddps, schedule, generator)
    if then != "nothing":
        optimizer.step()
    if then == "step and clear":
        optimizer.zero_grad()
    message = message_of(ddps[1], torch.zeros(2, 4))
    assert "zero-bubble" in message
    assert "Schedule1F1B" in message
    for ddp in ddps:
        ddp.resynchronize(from_rank=0)


@on_ranks(2)
def test_prepared_backward_that_raises_early_changes_nothing_and_training_goes_on():
    ddp, generator = wrapped(group=dist.new_group()), own_batches()
    for step in range(3):
        with ddp.no_sync():
            loss = ddp(*batch_of(ddp, generator))
        ddp.reducer.prepare_for_backward([])
        if step < 2:
            loss.register_hook(raise_fault)
            assert error_of(loss.backward)[1] == "early"
        else:
            loss.backward()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def raise_fault(_):
    raise RuntimeError("early")
