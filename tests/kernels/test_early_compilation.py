"""Triton compiles the kernels of a compressor in the plain steps before it: the first compressed step compiles none.

A GPU that does nothing takes the launches, so gradients are wrong here, and nothing looks at them.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.kernels.launch import Kernel
from tests.kernels.support.ahead_of_time import kernel_modules
from tests.kernels.support.empty_driver import empty_gpu
from tests.support.training import SMALLEST, WRAPPERS, build, own_batches, register

pytest.importorskip("triton")
START = 2
STATES = {
    "int4": (partial(QuantizationState, start_iter=START), quantization_hook),
    "int8, bf16 errors": (
        partial(QuantizationState, wire="int8", start_iter=START, error_dtype=torch.bfloat16),
        quantization_hook,
    ),
    "powersgd": (partial(PowerSGDState, start_powerSGD_iter=START, min_compression_rate=1), powerSGD_hook),
    "alternating": (
        partial(PowerSGDState, start_powerSGD_iter=START, min_compression_rate=1, alternating=True),
        powerSGD_hook,
    ),
    "batched": (partial(PowerSGDState, start_powerSGD_iter=START, factor_wire="int8"), batched_powerSGD_hook),
}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", STATES)
def test_first_compressed_steps_compile_nothing(kind, wrapper):
    make, hook = STATES[kind]
    launched = [each for module in kernel_modules() for each in vars(module).values() if isinstance(each, Kernel)]
    kernels = [kernel.jitted for kernel in launched]
    for kernel in kernels:
        kernel.device_caches.clear()
    counts = []
    with empty_gpu():
        state = make(None)
        ddp, generator = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALLEST), own_batches()
        register(ddp, (state, hook))
        for _ in range(START + 2):
            ddp.zero_grad()
            ddp(*ddp.module.batch(generator)).backward()
            counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert counts[0] <= 2 and counts[1] > 3, "step 0 has only the kernels of the plain all-reduce"
    assert counts[START:] == [counts[START - 1]] * 2
