"""Bytes that a rank sends per step: `gradwire advise`, its printed code, telemetry and the demo count the same."""

import io
from dataclasses import replace
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.nn import functional

import gradwire
from gradwire.bench import tasks
from gradwire.bench.implementations import GRADWIRE
from gradwire.cli.advise import print_advice
from gradwire.kernels import HEADER_BYTES
from gradwire.planner import link_probe, probe
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import Job
from gradwire.planner.recommend import advise
from tests.support.ranks import on_ranks
from tests.support.training import sent_bytes

CPU = torch.device("cpu")
STEPS = 4  # the last two are compressed, in their final buckets; an alternating hook sends P in one, Q in the other


def batch():
    return torch.rand(8, 1, 8, 8), torch.arange(8)


def loss(model):
    images, labels = batch()
    return functional.cross_entropy(model(images), labels)


def printed_code(measured, advice, hook):
    """The lines below the recommendation, if it were this hook."""
    console = Console(file=io.StringIO(), width=80)
    print_advice(measured, replace(advice, recommended=hook), 1.0, console)
    return console.file.getvalue().partition(f"\nUse {hook}: ")[2].partition("\n\n")[2]


@pytest.mark.slow
@on_ranks(3)
def test_printed_code_sends_the_predicted_bytes_and_all_counts_agree():
    task = tasks.Digits()
    names = [name for name in HOOKS if name not in ("none", "noop")]
    small = {"SIZES": (1 << 8, 1 << 12)}, {"MODEL_BUDGET": 0.0, "HOOK_BUDGET": 0.0}
    with mock.patch.multiple(link_probe, **small[0]), mock.patch.multiple(probe, **small[1]):
        measured = probe.measure(lambda device: Job(task.make_model(), loss), names, CPU)
    advice = advise(measured)
    predicted = {each.hook: each.payload_bytes for each in advice.predictions}
    numbers = {}
    for name in names:
        ddp = gradwire.DistributedDataParallel(task.make_model())
        program = {"torch": torch, "model": ddp}
        exec(printed_code(measured, advice, name), program)
        if "state" in program:
            program["state"].observe(every=1)
        training = tasks.Training(task, name, GRADWIRE, seed=0, start=2)
        transport, telemetry = [], []
        for _ in range(STEPS):
            before = sent_bytes()
            ddp.zero_grad()
            loss(ddp).backward()
            transport.append(sent_bytes() - before)
            telemetry += [program["state"].metrics()["sent_bytes"]] if "state" in program else []
            training.step(batch())
        counts = {"transport": transport, "telemetry": telemetry, "demo": training.sent_bytes}
        numbers[name] = {each: sum(steps[-2:]) / 2 for each, steps in counts.items() if steps}
        numbers[name]["advise"] = predicted[name]
        if name.startswith("powersgd") and name.endswith("int8"):
            # `advise` measures every hook in two buckets; with PowerSGD, DDP makes one, which sends fewer headers.
            numbers[name]["advise"] -= 2 * 3 * HEADER_BYTES
    plain = predicted["none"]
    assert plain == 4 * sum(p.numel() for p in task.make_model().parameters())
    assert numbers["fp16"]["advise"] == plain / 2
    for name, counts in numbers.items():
        assert len(set(counts.values())) == 1, (name, counts)
        assert ("telemetry" in counts) == ("state" in HOOKS[name].code)
        assert name == "allreduce" or counts["advise"] < 0.6 * plain, "compresses"
