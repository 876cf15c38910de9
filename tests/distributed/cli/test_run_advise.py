"""``gradwire run --advise``: the first model of a script is measured, and advice given on rank 0."""

import os
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.cli import run_advise
from gradwire.hooks.default_hooks import fp16_compress_hook
from gradwire.planner import link_probe, measurement
from gradwire.planner.hook_registry import HOOKS
from gradwire.planner.jobs import JobError
from gradwire.planner.model_probe import STEPS, ScriptProbe
from tests.support.ranks import on_ranks
from tests.support.training import SMALL, build, train_steps


def advice_of(ddp_probe):
    """Exit status and output of the advice for a probe, with few measurements of two hooks."""
    few = {"COMPARABLE": {name: HOOKS[name] for name in ("none", "bf16")}}
    printed = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(run_advise, **few))
        stack.enter_context(mock.patch.multiple(link_probe, SIZES=(1 << 8, 1 << 12)))
        stack.enter_context(mock.patch.multiple(measurement, HOOK_BUDGET=0.0))
        stack.enter_context(
            mock.patch("rich.console.Console.print", lambda _, *text, **__: printed.append(" ".join(map(str, text))))
        )
        end = stack.enter_context(pytest.raises(SystemExit))
        run_advise._advise_script(ddp_probe)
    return end.value, "\n".join(printed)


def trained_probe():
    probes = []
    ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(ScriptProbe(ddp, probes.append, averages=False), ScriptProbe.reduce)
    train_steps(ddp, STEPS + 1)
    return probes[0]


@pytest.mark.parametrize(("n_hosts", "nodes"), [(1, "4 ranks on 1 node,"), (2, "4 ranks on 2 nodes,")])
@on_ranks(4)
def test_advise_finds_nodes_by_host_names_without_a_variable_of_the_launcher(n_hosts, nodes):
    host = f"host {dist.get_rank() * n_hosts // 4}"
    with mock.patch.dict(os.environ), mock.patch("socket.gethostname", lambda: host):
        for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
        end, printed = advice_of(trained_probe())
    assert (type(end), end.code) == (run_advise.AdviceGiven, 0)
    assert (f"Network:  {nodes}" in printed) == (dist.get_rank() == 0)
    assert (printed == "") == (dist.get_rank() > 0)


@on_ranks(2)
def test_advise_ends_every_rank_if_a_model_cannot_be_measured():
    failing = mock.Mock(device=torch.device("cpu"))
    failing.model.side_effect = JobError("no gradient") if dist.get_rank() == 1 else None
    with mock.patch("builtins.print") as printed:
        end, _ = advice_of(failing)
    assert end.code == 1
    assert [call.args for call in printed.mock_calls] == [("gradwire run: On rank 1: no gradient",)] * (
        dist.get_rank() == 0
    )


@on_ranks(2)
def test_advise_measures_the_first_model_of_all_ranks_and_ignores_its_hook():
    own, _ = dist.new_subgroups(group_size=1)
    with mock.patch.object(run_advise, "ScriptProbe", reduce=ScriptProbe.reduce) as made, run_advise.advised():
        DistributedDataParallel(build("mlp"), process_group=own)
        gradwire.DistributedDataParallel(build("mlp"))
        assert made.mock_calls == []
        ddp = DistributedDataParallel(build("mlp"))
        ddp.register_comm_hook(None, fp16_compress_hook)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        DistributedDataParallel(build("mlp"))
    made.assert_called_once_with(ddp, run_advise._advise_script, averages=False)
    DistributedDataParallel(build("mlp"))
    assert made.call_count == 1, "the class is as before"
