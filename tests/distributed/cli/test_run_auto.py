"""``gradwire run --hook auto``: measures the script, then takes the hook that is recommended."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.cli import run_compression, run_report
from gradwire.planner.jobs import JobError
from gradwire.planner.model_probe import STEPS
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, build, gradients


def steps_of(ddp, number):
    """Gradients of some steps; each draws its batch from the default generator."""
    seen = []
    for _ in range(number):
        ddp.zero_grad()
        ddp(torch.randn(4, next(ddp.parameters()).shape[1])).backward()
        seen.append(gradients(ddp))
    return seen


def advice(hook):
    return SimpleNamespace(recommended=hook, headline=f"Use {hook}", reason="because")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_auto_sends_in_full_while_it_measures_and_then_takes_the_recommended_hook(options):
    seed = 7 + dist.get_rank()
    plain = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL, **options)
    torch.manual_seed(seed)
    expected = steps_of(plain, STEPS + 4)
    with (
        run_compression.compressed("auto") as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("int4")),
    ):
        ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL, **options)
        torch.manual_seed(seed)
        found = steps_of(ddp, STEPS + 4)
    assert_same_bits(found[: STEPS + 2], expected[: STEPS + 2])  # int4 begins with two plain steps
    assert differences(found[-1], expected[-1])
    assert_same_on_all_ranks(from_all_ranks(found))
    (compression,) = made
    assert (compression.hook_name, compression.first_compressed) == ("int4", STEPS + 2)
    text = run_report.report(made)
    assert "gradwire run: int4 on Mlp" in text and "auto: Use int4: because" in text


@on_ranks(2)
def test_chosen_hook_knows_the_parameter_names_before_its_first_step():
    with (
        run_compression.compressed("auto") as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("int4")),
    ):
        ddp = DistributedDataParallel(build("mlp"))
        steps_of(ddp, STEPS)
        ddp(torch.ones(4, next(ddp.parameters()).shape[1]))  # measures
    assert made[0]._state.names.module is ddp.module


@pytest.mark.parametrize("start", [2, STEPS + 5])
@on_ranks(2)
def test_auto_does_not_compress_before_the_start_step(start):
    with (
        run_compression.compressed("auto", start=start) as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("int8")),
    ):
        ddp = DistributedDataParallel(build("mlp"))
        steps_of(ddp, STEPS + 1)
    assert made[0]._state.options.start_iter == max(start, STEPS + 2) - STEPS
    assert "nothing was compressed: that begins after" in run_report.report(made)


@on_ranks(2)
def test_auto_measures_the_script_and_prints_its_choice_on_rank_0():
    with mock.patch("builtins.print") as printed, run_compression.compressed("auto", measure=100) as made:
        steps_of(DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL), STEPS + 1)
    texts = [call.args[0] for call in printed.mock_calls]
    assert len(texts) == (dist.get_rank() == 0)
    assert all(text.startswith(("gradwire run: Mlp: auto: Use ", "gradwire run: Mlp: auto: Do not")) for text in texts)
    assert from_all_ranks(made[0].summary) == [made[0].summary] * 2


@pytest.mark.parametrize("reason", ["recommended", "one rank", "subgroup"])
@on_ranks(2)
def test_auto_sends_in_full_if_no_hook_is_worthwhile_or_none_can_be_measured(reason):
    own, _ = dist.new_subgroups(group_size=1)
    group = own if reason == "subgroup" else None
    plain = DistributedDataParallel(build("mlp"), process_group=group)
    torch.manual_seed(0)
    expected = steps_of(plain, STEPS + 4)
    with (
        run_compression.compressed("auto", measure=100) as made,
        mock.patch.object(run_compression, "advise", lambda _: advice("none")),
    ):
        ddp = DistributedDataParallel(build("mlp"), process_group=group)
        failure = mock.patch.object(run_compression, "measured_script", side_effect=JobError("one rank"))
        with failure if reason == "one rank" else nullcontext():
            torch.manual_seed(0)
            assert_same_bits(steps_of(ddp, STEPS + 4), expected)
    texts = {"recommended": "because", "one rank": "one rank", "subgroup": "the model has 1 of 2 ranks"}
    lines = run_report.report(made).splitlines()
    assert lines[0].startswith("gradwire run: auto on Mlp")
    assert lines[-1].startswith("  auto: ") and lines[-1].endswith(texts[reason])


@on_ranks(2)
def test_auto_keeps_gradients_and_random_numbers_of_the_script():
    with run_compression.compressed("auto"):
        ddp = DistributedDataParallel(build("mlp"))
        steps_of(ddp, STEPS)
        kept, numbers = [parameter.grad for parameter in ddp.parameters()], torch.get_rng_state()
        values = gradients(ddp)
        ddp(torch.ones(4, next(ddp.parameters()).shape[1]))  # measures
    assert [id(parameter.grad) for parameter in ddp.parameters()] == [id(each) for each in kept]
    assert_same_bits(gradients(ddp), values)
    assert torch.equal(torch.get_rng_state(), numbers)


@on_ranks(2)
def test_auto_refuses_sharded_models():
    model = fully_shard(build("mlp"), mesh=init_device_mesh("cpu", (2,)))
    with (
        run_compression.compressed("auto"),
        pytest.raises(ValueError, match="--hook auto measures models of Distributed"),
    ):
        model(*model.batch(torch.Generator()))
