"""The recommendation, from made-up costs; and the code that it hands out."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Metric, load
from gradwire.cli.advice_report import print_advice, to_json
from gradwire.planner.accuracy import LOSS_GAPS, TOLERATED_GAP, LossGap, is_aggressive
from gradwire.planner.hook_registry import DEFAULT_CAP_MB, HOOKS
from gradwire.planner.measurement import Measurement
from gradwire.planner.recommend import WORTHWHILE, advise, larger_buckets
from gradwire.planner.step_model import (
    BETWEEN_NODES,
    IN_NODE,
    BucketCost,
    HookCost,
    Link,
    Message,
    MessageCost,
    ModelCost,
    Overlap,
)

KIND = "all-reduce float32"


def hook(name, nbytes, compute):
    bucket = BucketCost(0.0, (compute, 0.0), (Message(KIND, nbytes),), 0.0)
    return HookCost(name=name, buckets=(bucket,), memory_bytes=nbytes)


def measured(bandwidth, *hooks):
    model = ModelCost(forward=0.1, backward=0.2, ready=(0.2,), gradient_bytes=10**8, overlap=Overlap.EVERYTHING)
    link = Link(world_size=2, bandwidth=bandwidth, costs={KIND: MessageCost(1e-4, 8 / bandwidth)})
    return Measurement(model=model, hooks=hooks, link=link, threads=1, is_link_measured=True)


def all_hooks():
    return (
        hook("none", 10**8, 0.0),
        hook("bf16", 5 * 10**7, 0.01),
        hook("int4", 10**7, 0.1),
        hook("powersgd-r16", 5 * 10**6, 0.1),
    )


def test_tie_recommends_hook_with_most_bytes():
    advice = advise(measured(2e9, *all_hooks(), hook("int8", 2 * 10**7, 0.04)))
    times = {each.hook: each.speed_up for each in advice.predictions}
    assert times["int8"] == pytest.approx(times["powersgd-r16"])
    assert advice.recommended == "int8"


def test_bf16_is_recommended_if_no_hook_is_faster():
    advice = advise(measured(5e9, *all_hooks()))
    assert advice.recommended == "bf16"
    assert "no other hook is 5 % faster than bf16" in advice.reason
    assert "The accuracy of" not in told(measured(5e9, *all_hooks()))
    assert "bf16 ended at a training loss -0.001 nats" in told(measured(5e9, *all_hooks()))


@pytest.mark.parametrize(
    ("seconds", "recommended"),
    [
        ({"bf16": 0.96, "int8": 0.96}, "none"),
        ({"bf16": 0.95, "int8": 0.91}, "bf16"),
        ({"bf16": 0.95, "int8": 0.90}, "int8"),
        ({"bf16": 0.99, "int8": 0.95}, "int8"),  # bf16 is not worthwhile
        ({"bf16": 1.2, "int4": 0.95, "int8": 0.99}, "int4"),  # int8 is near the fastest, and not worthwhile
        ({"bf16": 1.2, "int8": 1.3}, "none"),
        ({"bf16": 1.2, "powersgd-r16": 0.80, "powersgd-r32-int8": 0.83}, "powersgd-r32-int8"),  # a smaller loss gap
        ({"bf16": 1.2, "powersgd-r16": 0.80, "powersgd-r32-int8": 0.85}, "powersgd-r16"),  # not near the fastest
    ],
    ids=str,
)
def test_recommended_hook_makes_a_step_five_percent_faster(seconds, recommended):
    model = ModelCost(forward=0, backward=0, ready=(0,), gradient_bytes=1, overlap=Overlap.EVERYTHING)
    nbytes = {"none": 8, "bf16": 4, "int8": 2, "int4": 1, "powersgd-r16": 1, "powersgd-r32-int8": 0.5}
    hooks = [hook(name, nbytes[name], each) for name, each in {"none": 1.0, **seconds}.items()]
    link = Link(world_size=2, bandwidth=1e9, costs={KIND: MessageCost(0, 1e-13)})
    advice = advise(Measurement(model=model, hooks=hooks, link=link, threads=1, is_link_measured=True))
    assert advice.recommended == recommended
    assert "the best is no hook" not in advice.reason


def test_bytes_on_nodes_are_those_that_leave_them():
    """16 ranks on two nodes: each sends 400 bytes in its node, and 24 bytes, of an eighth, to its peer."""
    on_nodes = (Message("all-to-all" + IN_NODE, 400), Message("all-to-all" + BETWEEN_NODES, 24))
    int4 = HookCost(name="int4", buckets=(BucketCost(0.0, (0.0, 0.0, 0.0), on_nodes, 0.0),), memory_bytes=0)
    case = measured(1e9, hook("none", 800, 0.0), hook("bf16", 400, 0.0))
    link = replace(case.link, world_size=16, ranks_per_node=8)
    costs = {**link.costs, **{message.kind: MessageCost(0, 1e-13) for message in on_nodes}}
    case = replace(case, hooks=(*case.hooks, int4), link=replace(link, costs=costs))
    plain, _, own = advise(case).predictions
    assert own.payload_bytes == 24
    assert own.bytes_kept == 24 * 8
    assert own.network_bytes == 24 * 16
    assert plain.payload_bytes == plain.bytes_kept == 800
    assert plain.network_bytes == 2 * 2 * 800 * 15 / 16  # a ring of 16 ranks leaves each node once


def test_thresholds_in_the_docs_are_those_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "advise.md").read_text()
    rules = page[page.index("Aggressive hooks are never") : page.index("`gradwire advise` does not measure")]
    assert set(re.findall(r"(\d+) %", rules)) == {f"{100 * (WORTHWHILE - 1):.0f}"}
    assert f"a loss gap above {TOLERATED_GAP} with AdamW" in page
    assert f"buckets of {DEFAULT_CAP_MB} MiB" in rules


def printed(case, width=80):
    console = Console(file=io.StringIO(), width=width)
    print_advice(case, advise(case), 3.0, console)
    return console.file.getvalue()


def told(case):
    """The report without line breaks."""
    return " ".join(printed(case).split())


def test_report_warns_of_steps_that_vary():
    case = measured(1e7, *all_hooks())
    noisy = replace(case, model=replace(case.model, spread=3.1))
    assert "NOISE: the slowest step of the model took 3.1 times as long as the fastest" in told(noisy)
    assert "NOISE" not in told(case)


@pytest.mark.parametrize("width", [30, 50, 60])
def test_narrow_terminal_gets_every_cell_next_to_its_hook(width):
    case = measured(1e7, *all_hooks())
    whole, narrow = (printed(case, columns).splitlines() for columns in (200, width))
    notes = next(i for i, line in enumerate(narrow) if re.match(r"\W*step: ", line))
    table = narrow[narrow.index("") : notes]
    for name in ("no hook", "bf16", "int4", "powersgd-r16"):
        (row,) = [line for line in whole if re.match(rf"{name} +\d", line)]
        parts = [line.removeprefix(name) for line in table if line.startswith(f"{name} ")]
        assert " ".join(parts).split() == row.removeprefix(name).split()
    assert all(len(line) <= width for line in table)


def test_loss_gaps_are_those_of_the_kept_results():
    records = [
        record
        for record in load(Path(__file__).parents[2] / "bench" / "results" / "converge_long_text.jsonl")
        if record.metric == Metric.TRAINING_LOSS and record["steps"] == 2000
    ]

    def losses(hook, optimizer, implementation):
        found = [
            r for r in records if (r["hook"], r["optimizer"], r.implementation) == (hook, optimizer, implementation)
        ]
        return {record["seed"]: record.p50 for record in found}

    def gap(hook, optimizer):
        plain, own = losses("none", optimizer, PYTORCH), losses(hook, optimizer, GRADWIRE)
        assert plain.keys() == own.keys() == {0, 1, 2}
        return round(mean(own[seed] - plain[seed] for seed in own), 3)

    trained = {record["hook"] for record in records} - {"none"}
    assert {hook: LossGap(gap(hook, "adamw"), gap(hook, "muon")) for hook in trained} == LOSS_GAPS


def test_aggressive_hooks_are_those_with_a_larger_loss_or_not_trained():
    aggressive = {name for name in HOOKS if is_aggressive(name)}
    assert aggressive >= {"powersgd-r4", "powersgd-r8-int8", "powersgd-r1", "sign"}
    assert not aggressive & {"none", "allreduce", "fp16", "bf16", "bf16-fp32-sum", "int8", "int4", "powersgd-r16"}


def test_aggressive_hook_is_named_and_not_recommended():
    case = measured(1e7, *all_hooks(), hook("powersgd-r1", 10**5, 0.0))
    assert advise(case).recommended == "powersgd-r16"
    predictions = json.loads(to_json(case, advise(case)))["predictions"]
    assert predictions[2]["loss_gap"] == LOSS_GAPS["int4"]._asdict()
    names = [line.split()[0] for line in printed(case).splitlines() if line.startswith(("int", "bf16", "powersgd"))]
    assert names[:4] == ["powersgd-r1!", "powersgd-r16", "int4", "bf16"]
    assert "!: aggressive: a loss gap over 0.015 with AdamW, or fewer than 16 bits and no measured gap" in told(case)
    assert printed(case).rstrip().endswith(HOOKS["powersgd-r16"].code)
    assert re.search(
        r"powersgd-r1 would be \d+\.\d\dx as fast as without a hook, but its loss was not measured: comp", told(case)
    )
    long = measured(1e7, *all_hooks(), hook("powersgd-r4", 10**5, 0.0))
    assert (
        "x as fast as without a hook, but ended at a training loss +0.074 nats relative to no "
        "hook (small GPT, 2,000 steps, AdamW; +0.094 with Muon): compare" in told(long)
    )
    near = measured(1e7, *all_hooks(), hook("powersgd-r1", 5 * 10**6, 0.0))
    assert "would be" not in told(near), "not 5 % faster than powersgd-r16"
    assert [each["is_aggressive"] for each in predictions] == [*[False] * 4, True]
    assert "!" not in printed(measured(1e7, *all_hooks()))


def test_only_an_aggressive_hook_is_worthwhile_and_none_is_recommended():
    slow = hook("none", 10**8, 0.0), hook("bf16", 5 * 10**7, 1.0)
    case = measured(5e9, *slow, hook("powersgd-r1", 10**5, 0.0))
    assert "no hook makes a step 5 % faster" in told(measured(5e9, *slow, hook("powersgd-r1", 10**5, 1.0)))
    assert "Do not compress: no hook with a small loss gap makes a step 5 % faster; the best is bf16 with -" in told(
        case
    )
    assert "powersgd-r1 would be " in told(case)
    assert json.loads(to_json(case, advise(case)))["recommended"] == "none"


def test_larger_buckets_are_advised_where_messages_wait_for_the_network():
    """Eight buckets; a message takes 1 ms on the link, and arrives 1 or 200 ms later."""
    bucket = BucketCost(0.0, (0.0, 0.0), (Message(KIND, 125_000),), 0.0)
    of_gradients = BucketCost(0.0, (0.0, 0.0), (Message(KIND, 64 << 20),), 0.0)  # each has one parameter
    ready = tuple(0.01 * (i + 1) for i in range(8))
    model = ModelCost(forward=0.1, backward=0.1, ready=ready, gradient_bytes=10**8, overlap=Overlap.EVERYTHING)
    hooks = [
        HookCost(name=name, buckets=(each,) * 8, memory_bytes=0)
        for name, each in (("none", of_gradients), ("bf16", of_gradients), ("int4", bucket))
    ]

    def case(latency):
        link = Link(world_size=2, bandwidth=1e9, costs={KIND: MessageCost(latency, 8e-9)})
        return Measurement(model=model, hooks=hooks, link=link, threads=1, is_link_measured=True)

    assert advise(case(0.001)).buckets is None
    assert "bucket_cap_mb" not in printed(case(0.001))
    advice = advise(case(0.2))
    chosen = next(each for each in advice.predictions if each.hook == advice.recommended)
    assert advice.recommended == "int4"
    assert advice.buckets.cap_mb == 4 * 64, "two buckets are in flight at once"
    assert advice.buckets.step_seconds == pytest.approx(0.1 + 0.08 + 0.004 + 0.2)
    assert chosen.step_seconds > 2 * advice.buckets.step_seconds
    assert "Pass bucket_cap_mb=256 to DistributedDataParallel" in told(case(0.2))
    assert json.loads(to_json(case(0.2), advice))["bucket_cap_mb"] == 256
    for name, why in (("powersgd-r4", "has four times larger ones"), ("powersgd-r4-batched", "would send less")):
        assert larger_buckets(model, replace(hooks[2], name=name), hooks[0], case(0.2).link) is None, why


@pytest.mark.parametrize("name", [name for name, entry in HOOKS.items() if entry.code])
def test_code_registers_the_hook_that_was_measured(name, world_of_one):
    registered = []

    class Model(TorchDDP):
        _comm_hooks = ()

        def __init__(self):
            pass

        def register_comm_hook(self, state, hook):
            registered.append((state, hook))

    exec(HOOKS[name].code, {"model": Model()})
    state, function = HOOKS[name].make(dist.group.WORLD, 2)
    ((given, given_function),) = registered
    assert given_function is function
    assert ("refuses bf16" in HOOKS[name].code) == (function.__name__ == "bf16_compress_hook")
    if state is not dist.group.WORLD:
        assert repr(given) == repr(state)
