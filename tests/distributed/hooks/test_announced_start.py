"""A state whose first steps are plain says once, on the first rank, when compression starts."""

import pytest
import torch.distributed as dist

from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, logged, train_steps, wrapped

HOOKS = {
    "powersgd": (lambda start: PowerSGDState(None, 1, start), powerSGD_hook),
    "powersgd_batched": (lambda start: PowerSGDState(None, 1, start), batched_powerSGD_hook),
    "int4": (lambda start: QuantizationState(None, "int4", start_iter=start), quantization_hook),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("start", "level", "first"), [(4, "WARNING", 0), (2, "INFO", 0), (4, None, 4)], ids=["late", "early", "resumed"]
)
@on_ranks(2)
def test_plain_first_steps_are_announced_once_on_the_first_rank(start, level, first, hook, wrapper):
    make, function = HOOKS[hook]
    state, counts = make(start), []
    state.iter = first
    ddp = wrapped(wrapper, hook=(state, function))
    with logged() as records:
        for _ in range(6):
            train_steps(ddp)
            counts.append(len(records))
    seen = [(record.name, record.levelname, record.getMessage()) for record in records]
    text = f"{function.__name__} compresses from step {start} on, and sends gradients in full until then."
    expected = [(function.__module__, level, text)] if level is not None and dist.get_rank() == 0 else []
    for count in (counts[0], counts[-1]):
        assert [each for each in seen[:count] if "compresses from step" in each[2]] == expected
