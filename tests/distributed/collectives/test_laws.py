"""The laws of docs/guarantees.md for the functions of `gradwire.collectives`, called by hooks."""

from types import NoneType

import pytest
import torch.distributed as dist
from torch.futures import Future

from gradwire.collectives import Memory, all_reduce, all_reduce_coalesced, reduce_scatter_tensor
from gradwire.exchange.names import parameter_names, registered_wrappers
from gradwire.kernels.layouts import gradient_layout
from gradwire.testing import check_laws

# "sums fit" simulates many ranks for hooks that pass an algorithm to `HookState.run`.
SKIPPED = ["sums fit"]
EXAMPLES = pytest.mark.parametrize("examples", [2, pytest.param(50, marks=pytest.mark.slow)])


def done(bucket):
    future = Future()
    future.set_result(bucket.buffer())
    return future


def averaged(bucket, wire):
    gradients = [gradient for gradient in bucket.gradients() if gradient.numel() > 0]
    if gradients:
        all_reduce_coalesced(gradients, wire=wire)
    return done(bucket)


def fp32_hook(state, bucket):
    return averaged(bucket, "fp32")


def bf16_hook(state, bucket):
    return averaged(bucket, "bf16")


def int8_hook(state, bucket):
    return averaged(bucket, "int8")


class MemoryState:
    """A `Memory` with an entry for each parameter."""

    def __init__(self):
        self.memory, self._shapes = Memory(), {}

    def gradients(self, bucket):
        (wrapper,) = registered_wrappers(self, bucket.parameters())
        names = parameter_names(wrapper.module)
        self._shapes = {name: parameter.shape for parameter, name in names.items()}
        found = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            layout = gradient_layout(parameter)  # the views of PyTorch's bucket have no strides of their own
            if gradient.numel() > 0:
                found.append((self.memory[names[parameter]], gradient.as_strided(layout.shape, layout.stride())))
        return found

    def state_dict(self):
        saved = self.memory.state_dict()
        for name, entry in saved.items():
            if name in self._shapes:  # those of a reduce-scatter are flat, with the padding of this world size
                shape, error = self._shapes[name], entry["errors"][name].flatten()
                entry["errors"] = {name: error[: shape.numel()].view(shape)}
        return saved

    def load_state_dict(self, saved):
        self.memory.load_state_dict(saved)


def int4_hook(state, bucket):
    for entry, gradient in state.gradients(bucket):
        all_reduce(gradient, wire="int4", memory=entry)
    return done(bucket)


def scattered_int4_hook(state, bucket):
    size = dist.get_world_size()
    for entry, gradient in state.gradients(bucket):
        part = gradient.new_empty(-(-gradient.numel() // size))
        padded = gradient.new_zeros(part.numel() * size)
        padded[: gradient.numel()] = gradient.flatten()
        reduce_scatter_tensor(part, padded, wire="int4", memory=entry)
        dist.all_gather_into_tensor(padded, part)
        gradient.copy_(padded[: gradient.numel()].view(gradient.shape))
    return done(bucket)


@pytest.mark.parametrize("hook", [fp32_hook, bf16_hook, int8_hook])
@EXAMPLES
def test_laws_hold_for_compressed_all_reduces(hook, examples):
    check_laws(NoneType, hook, skip=SKIPPED, max_examples=examples)


@pytest.mark.parametrize("hook", [pytest.param(int4_hook, marks=pytest.mark.slow), scattered_int4_hook])
@EXAMPLES
def test_laws_hold_for_collectives_with_memory(hook, examples):
    check_laws(MemoryState, hook, skip=SKIPPED, max_examples=examples)
