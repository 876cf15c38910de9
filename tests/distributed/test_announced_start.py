"""A state whose first steps are plain says once, on the first rank, when compression starts."""

import logging

import pytest
import torch.distributed as dist

from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, train_steps, wrapped

HOOKS = {
    "powersgd": (lambda start: PowerSGDState(None, 1, start), powerSGD_hook),
    "powersgd_batched": (lambda start: PowerSGDState(None, 1, start), batched_powerSGD_hook),
    "int4": (lambda start: QuantizationState(None, "int4", start_iter=start), quantization_hook),
}


def announced(hook, start, wrapper="gradwire", first=0):
    """The messages about the start, after the first and after the last of six steps, counted from ``first``."""
    make, function = HOOKS[hook]
    state, logger, seen, counts = make(start), logging.getLogger("gradwire"), [], []
    state.iter = first
    ddp, messages = wrapped(wrapper, hook=(state, function)), logging.Handler()
    messages.emit = lambda record: seen.append((record.name, record.levelname, record.getMessage()))
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    try:
        for _ in range(6):
            train_steps(ddp)
            counts.append(len(seen))
    finally:
        logger.removeHandler(messages)
        logger.setLevel(logging.NOTSET)
    return tuple([each for each in seen[:n] if "compresses from step" in each[2]] for n in (counts[0], counts[-1]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_plain_first_steps_are_announced_once_on_the_first_rank(hook, wrapper):
    _, function = HOOKS[hook]
    text = f"{function.__name__} compresses from step 4 on, and sends gradients in full until then."
    expected = [(function.__module__, "WARNING", text)] if dist.get_rank() == 0 else []
    assert announced(hook, 4, wrapper) == (expected, expected)


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(1)
def test_two_plain_steps_are_announced_at_the_level_info(hook):
    _, ((_, level, text),) = announced(hook, 2)
    assert level == "INFO"
    assert "compresses from step 2 on" in text


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_resumed_run_that_compresses_at_once_announces_nothing(hook):
    assert announced(hook, 4, first=4) == ([], [])
