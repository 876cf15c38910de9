"""Gradients and error memory have the strides of their parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import HOOKS, SMALL, WRAPPERS, register

CHANNELS_LAST = {"memory_format": torch.channels_last}
# The gradient of a parameter with gaps has none, and lies in row-major order.
LAYOUTS = {
    "row_major": lambda: torch.zeros(6, 9),
    "transposed": lambda: torch.zeros(9, 6).t(),
    "channels_last": lambda: torch.zeros(8, 3, 3, 2).to(**CHANNELS_LAST),
    "channels_last_3d": lambda: torch.zeros(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.zeros(4, 6, 5).permute(2, 0, 1),
    "reversed": lambda: torch.zeros(3, 4, 5).permute(2, 1, 0),
    "vector": lambda: torch.zeros(7),
    "gappy": lambda: torch.zeros(6, 14)[:, ::2],
}
UNUSED = ("transposed", "channels_last", "vector")  # by rank 1, in the last step
START, ASSIGNED, LAST = 2, 4, 5  # steps


def low_rank(rank, hook=powerSGD_hook, **options):
    options |= {"matrix_approximation_rank": rank, "start_powerSGD_iter": START, "min_compression_rate": 1}
    return lambda group: (PowerSGDState(group, **options), hook)


EXACT = {
    "none": None,
    **{name: HOOKS[name] for name in ("allreduce", "fp16", "bf16", "fp16_of_pytorch", "scaled_fp16")},
}
LOSSY = {
    "powersgd": low_rank(1),
    "powersgd_alternating": low_rank(2, alternating=True),
    "powersgd_batched": low_rank(1, batched_powerSGD_hook),
}


class Layouts(nn.Module):
    """A parameter in every layout, whose gradients are the inputs; without an input one is unused."""

    def __init__(self):
        super().__init__()
        for name, make in LAYOUTS.items():
            self.register_parameter(name, nn.Parameter(make()))

    def forward(self, **inputs):
        return sum((getattr(self, name) * x).sum() for name, x in inputs.items())


def inputs_of(rank, step):
    """Whole numbers of one digit, which travel in 16 bits without rounding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = {name: torch.randint(-8, 9, make().shape, generator=generator).float() for name, make in LAYOUTS.items()}
    is_left_out = (lambda name: name in UNUSED) if (rank, step) == (1, LAST) else (lambda name: False)
    return {name: x for name, x in inputs.items() if not is_left_out(name)}


def steps_with(hook, wrapper, view):
    """Gradients and errors of each step; all are in the strides of their parameters."""
    module, state = Layouts(), None
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL, gradient_as_bucket_view=view, find_unused_parameters=True)
    if (EXACT | LOSSY)[hook] is not None:
        state, function = (EXACT | LOSSY)[hook](None)
        if isinstance(state, PowerSGDState):
            state.bind(module)
        register(ddp, (state, function))
    expected = {name: torch.empty_like(parameter).stride() for name, parameter in module.named_parameters()}
    steps = []
    for step in range(LAST + 1):
        ddp.zero_grad()
        if step == ASSIGNED:
            for parameter in module.parameters():
                parameter.grad = torch.zeros(parameter.shape)  # in row-major order
        ddp(**inputs_of(dist.get_rank(), step)).backward()
        memory = state.memory.tensors("errors") if hook in LOSSY else {}
        errors = {name: error.clone() for name, error in memory.items()}
        if wrapper == "gradwire" or step != ASSIGNED:  # PyTorch's leaves an assigned gradient as it lies
            for name, parameter in module.named_parameters():
                assert parameter.grad.stride() == expected[name]
                assert name not in errors or errors[name].stride() == expected[name]
        steps.append(({name: parameter.grad.clone() for name, parameter in module.named_parameters()}, errors))
    return steps


def mean_input(step, name):
    zeros = torch.zeros(LAYOUTS[name]().shape)
    return sum(inputs_of(rank, step).get(name, zeros) for rank in range(2)) / 2


@pytest.mark.parametrize("hook", EXACT | LOSSY)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_gradients_and_errors_keep_the_strides_of_their_parameters(hook, wrapper, view):
    """Gradient + old error == result + new error, each element in its place, in the mean over the ranks."""
    steps = from_all_ranks(steps_with(hook, wrapper, view))
    for name, layout in LAYOUTS.items():
        old = torch.zeros(layout().shape)
        for step in range(LAST + 1):
            new = sum(rank_steps[step][1].get(name, torch.zeros(layout().shape)) for rank_steps in steps) / 2
            assert hook in EXACT or step < START or name == "vector" or new.abs().max() > 0, (step, name)
            kept = mean_input(step, name) + old - new
            bound = 0 if hook in EXACT else 1e-3
            torch.testing.assert_close(steps[0][step][0][name], kept, rtol=0, atol=bound, msg=f"step {step}, {name}")
            old = new
