"""A rank on a host of its own: bytes of a step as telemetry counts them, and as the network interface does."""

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.bench import namespaces
from gradwire.bench.record import Record
from gradwire.hooks.default_hooks import CastState
from gradwire.planner.hook_registry import HOOKS

STEPS = 4  # the last two are compressed, in their final buckets


def main(settings, device):
    records = []
    for name in settings["hooks"]:
        group = dist.new_group()
        ddp = gradwire.DistributedDataParallel(nn.Linear(1024, 1024, bias=False), process_group=group)
        state, hook = HOOKS[name].make(group, 2)
        state = CastState(group) if state is group else state
        ddp.register_comm_hook(state, hook)
        state.observe(every=1)
        for _ in range(STEPS):
            ddp.zero_grad()
            dist.barrier()
            before = namespaces.sent_bytes()
            ddp(torch.randn(2, 1024)).square().sum().backward()
            dist.barrier()
            counts = {"interface": namespaces.sent_bytes() - before, "telemetry": state.metrics()["sent_bytes"]}
        hook_case = {
            "bench": "test",
            "case": {"hook": name},
            "implementation": "gradwire",
            "ranks": dist.get_world_size(),
        }
        records += [Record(**hook_case, metric=metric, p50=count) for metric, count in counts.items()]
    return records
