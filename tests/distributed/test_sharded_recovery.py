"""`Attachment.resynchronize`: a sharded model resumes after a failed step, and no gradient is lost."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.hooks.default_hooks import allreduce_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from gradwire.sharded import ReduceScatterOptions
from gradwire.sharded.exchange import ShardedExchange
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.sharded import Model, backward, gradients, mesh, norm, sharded
from tests.support.training import FailsInBackward, Fault, error_of, message_of, wrapped

FAILS_ON = 1
START = 2
WITHIN = ReduceScatterOptions(wire="int4", error_dtype=torch.float32, wires={"*.bias": "int4"})


def int4():
    return QuantizationState(wire="int4", start_iter=START, exempt=())


KINDS = {  # where, and the arguments of attach
    "replicate": ("replicate", lambda: {"state": int4()}),
    "hsdp": ("hsdp", lambda: {"state": int4()}),
    "hsdp-powersgd": ("hsdp", lambda: {"state": PowerSGDState(None, 1, start_powerSGD_iter=START)}),
    "hsdp-both": ("hsdp", lambda: {"state": int4(), "within": WITHIN}),
    "hsdp-within": ("hsdp", lambda: {"within": WITHIN}),
    "hsdp-within-scaled": ("hsdp", lambda: {"state": ScaledCastState(), "within": WITHIN}),
    "hsdp-within-plain-hook": ("hsdp", lambda: {"hook": allreduce_hook, "within": WITHIN}),
    "fsdp": ("fsdp", lambda: {"within": WITHIN}),
}


def failing(number, is_done):
    """Let one rank raise in an exchange of the next backward, before it or once ``is_done``."""
    attempt, count = ShardedExchange.attempt, itertools.count()

    def attempt_or_fail(self, group, exchange):
        def fail():
            if is_done:
                exchange()
            raise Fault("on one rank")

        attempt(self, group, fail if next(count) == number and dist.get_rank() == FAILS_ON else exchange)

    return mock.patch.object(ShardedExchange, "attempt", attempt_or_fail)


def contributions(model, step):
    """The gradients of each rank by parameter name, divided by the world size, from a model that is not sharded."""
    plain = Model()
    with torch.no_grad():
        for (name, own), (same, parameter) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == same
            own.copy_(parameter.full_tensor())
    backward(plain, step)
    by_rank = from_all_ranks({name: own.grad.double() for name, own in plain.named_parameters()})
    return {name: torch.stack([one[name] for one in by_rank]) / len(by_rank) for name in by_rank[0]}


def whole(named):
    return {name: each.full_tensor().double() for name, each in named}


def errors_of(attachment):
    """All errors of the model, by parameter name."""
    saved = attachment.state_dict()
    memory = [whole(saved[entry].items()) for entry in ("errors", "within") if entry in saved]
    return {name: sum(each[name] for each in memory) for name in memory[0]}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, limit=120)
def test_law1_over_failed_and_repeated_steps(kind):
    """A gradient of a failed step is either applied later, or lost as a whole on all ranks of a replica."""
    place, arguments = KINDS[kind]
    model = sharded(place)
    attachment = gradwire.attach(model, **arguments())
    exact = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in model.named_parameters()}
    applied = {name: each.clone() for name, each in exact.items()}

    def step(number):
        model.zero_grad()
        assert error_of(backward, model, number) is None
        for name, own in contributions(model, number).items():
            exact[name] += own.sum(0)
            applied[name] += dict(model.named_parameters())[name].grad.full_tensor()

    for number in range(START + 1):
        step(number)
    kept = []
    # Three parameter groups, each with one exchange or two; then, in HSDP, the end of the backward.
    n_exchanges = 8 if kind in ("hsdp-both", "hsdp-within-scaled", "hsdp-within-plain-hook") else 5
    n_exchanges -= 2 if place != "hsdp" else 0
    schedule = [(number, is_done) for number in range(n_exchanges) for is_done in (False, True)]
    for number, is_done in schedule[:: 2 if n_exchanges == 8 else 1]:
        with failing(number, is_done):
            assert "on one rank" in message_of(backward, model, 9)
        attachment.resynchronize()
        step(9)
        own, errors = contributions(model, 9), errors_of(attachment)
        for name, error in errors.items():
            repeated = error - (exact[name] - applied[name])
            by_replica = (own[name][:2].sum(0), own[name][2:].sum(0))
            found = [
                (first, second)
                for first, second in itertools.product((0, 1), repeat=2)
                if torch.allclose(repeated, first * by_replica[0] + second * by_replica[1], atol=1e-6, rtol=0)
            ]
            assert len(found) == 1, (name, number, is_done)
            exact[name] += found[0][0] * by_replica[0] + found[0][1] * by_replica[1]
            kept.append(found[0])
        assert_same_bits(*from_all_ranks(gradients(model))[:: 2 if place == "hsdp" else 1][:2]) if place != "fsdp" else None
    assert {(0, 0), (1, 1)} <= set(kept)
    assert kept[-1] == (1, 1)
    assert norm(list(errors.values())) > 1e-3
