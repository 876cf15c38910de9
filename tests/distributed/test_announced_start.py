"""A state whose first steps are plain says once, on the first rank, when compression starts."""

import logging

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.training import SMALL, WRAPPERS, build, register

HOOKS = {
    "powersgd": (lambda start: PowerSGDState(None, 1, start), powerSGD_hook),
    "powersgd_batched": (lambda start: PowerSGDState(None, 1, start), batched_powerSGD_hook),
    "int4": (lambda start: QuantizationState(None, "int4", start_iter=start), quantization_hook),
}


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append((record.name, record.levelname, record.getMessage()))


def announced(hook, start, wrapper="gradwire", first=0):
    """The messages about the start after the first and after the last of six steps, counted from ``first``."""
    make, function = HOOKS[hook]
    state = make(start)
    state.iter = first
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, function))
    messages, logger = Messages(), logging.getLogger("gradwire")
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    after_steps = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    try:
        for _ in range(6):
            ddp.zero_grad()
            ddp(*ddp.module.batch(generator)).backward()
            after_steps.append([message for message in messages.seen if "compresses from step" in message[2]])
    finally:
        logger.removeHandler(messages)
        logger.setLevel(logging.NOTSET)
    return after_steps[0], after_steps[-1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_plain_first_steps_are_announced_once_on_the_first_rank(worlds, hook, wrapper):
    first, second = worlds(2).run(announced, hook=hook, start=4, wrapper=wrapper)
    _, function = HOOKS[hook]
    text = f"{function.__name__} compresses from step 4 on, and sends gradients in full until then."
    assert first == ([(function.__module__, "WARNING", text)],) * 2
    assert second == ([], [])


@pytest.mark.parametrize("hook", HOOKS)
def test_two_plain_steps_are_announced_at_the_level_info(worlds, hook):
    (_, ((_, level, text),)), _ = worlds(2).run(announced, hook=hook, start=2)
    assert level == "INFO"
    assert "compresses from step 2 on" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_resumed_run_that_compresses_at_once_announces_nothing(worlds, hook):
    assert worlds(2).run(announced, hook=hook, start=4, first=4) == [([], [])] * 2
