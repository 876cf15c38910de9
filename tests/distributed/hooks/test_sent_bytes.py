"""Bytes that a rank sends per step: `gradwire advise`, its printed code, telemetry and the demo count the same."""

import io
from dataclasses import replace
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

import gradwire
from gradwire.bench import tasks
from gradwire.bench.implementations import GRADWIRE
from gradwire.cli.advice_report import print_advice
from gradwire.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import HEADER_BYTES
from gradwire.planner import link_probe, measurement
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import Job
from gradwire.planner.recommend import advise
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, register, sent_bytes

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
    with mock.patch.multiple(link_probe, **small[0]), mock.patch.multiple(measurement, **small[1]):
        measured = measurement.measure(lambda device: Job(task.make_model(), loss), names, CPU)
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


# Rank 2: 2 x 24 and 2 x 16 elements of factors, both multiples of 16, to which factors are padded.
ROWS, COLUMNS, RANK, BIAS = 24, 16, 2, 7


def low_rank(**options):
    return PowerSGDState(None, RANK, 2, **options), powerSGD_hook


PAYLOADS = {
    "none": (lambda: (None, allreduce_hook), [1564] * 5),
    "fp16": (lambda: (None, fp16_compress_hook), [782] * 5),
    "bf16": (lambda: (None, bf16_compress_hook), [782] * 5),
    "scaled": (lambda: (ScaledCastState(), scaled_cast_hook), [794] * 2 + [782] * 3),  # buckets change once
    "scaled in bf16": (lambda: (ScaledCastState(dtype=torch.bfloat16), scaled_cast_hook), [794] * 2 + [782] * 3),
    "powersgd": (low_rank, [1564] * 2 + [348] * 3),
    # (48 + 7) + 32 elements of 4 bytes, or factors of 2 bytes and 7 elements of 4; alternating, 48 + 7 and then 32 + 7.
    "powersgd, bf16 factors": (lambda: low_rank(factor_dtype=torch.bfloat16), [1564] * 2 + [188] * 3),
    # A header of 16 bytes, scales padded to 16, and a block of 64 codes; next to P also 7 elements in a block of fp32.
    "powersgd, int8 factors": (lambda: low_rank(factor_wire="int8"), [1564] * 2 + [352 + 96] * 3),
    "alternating": (lambda: low_rank(alternating=True), [1564] * 2 + [220, 156, 220]),
    "alternating, bf16 factors": (
        lambda: low_rank(alternating=True, factor_dtype=torch.bfloat16),
        [1564] * 2 + [124, 92, 124],
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", PAYLOADS)
def test_payload_of_each_hook_step_is_exact(world_of_one, hook, wrapper):
    make, expected = PAYLOADS[hook]
    model = nn.Linear(COLUMNS, ROWS)
    model.bias = nn.Parameter(torch.zeros(BIAS))
    model.forward = lambda x: (x @ model.weight.t()).sum() + model.bias.sum()
    ddp = WRAPPERS[wrapper](model)
    register(ddp, make())
    sent = []
    for _ in expected:
        before = sent_bytes()
        ddp(torch.ones(2, COLUMNS)).backward()
        sent.append(sent_bytes() - before)
    assert sent == expected
