"""`PowerSGDState(cuda_graphs=True)`: replayed graphs give the bits of eager steps, by a double of CUDA graphs."""

import gc
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from powersgd_steps import HOOKS, Fed, new_state, noise
from training import WRAPPERS, gradients, register

from gradwire.bench.graph_on_cpu import GraphOnCpu
from gradwire.bench.rehearsal import gpu_on_cpu, register_backend
from gradwire.comm import Workspace, connections_of
from gradwire.comm.graphs import WARM_UP_STEPS, PiecewiseGraphs
from gradwire.compress import LowRankBucket
from gradwire.hooks._powersgd_checkpoint import entries_of
from gradwire.kernels import MatrixTable, SegmentTable

START = 2  # the first compressed step
FIRST_REPLAY = START + WARM_UP_STEPS + 1
STEPS = FIRST_REPLAY + 5
SHAPES = [(24, 16), (7,), (16, 3, 2), (), (30, 12), (5, 0), (12,)]
CAP_MB = 0.001  # three buckets
NAN_STEP = FIRST_REPLAY + 1


@dataclass
class Run:
    """What a run left: gradients of each step, memory, and how many captures and replays there were."""

    gradients: list
    memory: dict
    captures: int
    replays: int


class Missing:
    """`LowRankBucket.refresh` without one of its parts, once the graphs are captured."""

    PARTS = {
        "counter": (torch.Tensor, "fill_"),
        "matrices": (MatrixTable, "on_device_addresses"),
        "others": (SegmentTable, "packed"),
    }

    def __init__(self, part):
        self.part, self.seen, self.whole = self.PARTS[part], {}, LowRankBucket.refresh

    def __call__(self):
        def refresh(bucket, *arguments):
            calls = self.seen[id(bucket)] = self.seen.get(id(bucket), 0) + 1
            with mock.patch.object(*self.part, lambda *_: None) if calls > 1 else nullcontext():
                self.whole(bucket, *arguments)

        return mock.patch.object(LowRankBucket, "refresh", refresh)


def run(
    cuda_graphs,
    hook="powersgd",
    wrapper="gradwire",
    options=None,
    changes=None,
    dtype=torch.float32,
    missing=None,
    resume=None,
    steps=STEPS,
    **ddp_options,
):
    """Steps on chosen gradients, one of them with a NaN, with the code path of a GPU.

    Args:
        changes: attributes of the state that are set before a step, by step.
        missing: a part of `LowRankBucket.refresh` that is left out.
        resume: the step before which the state is saved and loaded.
    """
    group = dist.new_group(backend=register_backend())
    values = noise(dist.get_world_size(), steps, SHAPES, dtype)
    kept, seen = [], []
    with gpu_on_cpu(), Missing(missing)() if missing else nullcontext():
        ddp = WRAPPERS[wrapper](Fed(values[0][0]), process_group=group, bucket_cap_mb=CAP_MB, **ddp_options)
        state = new_state(**(options or {}), cuda_graphs=cuda_graphs)
        state.process_group = group
        register(ddp, (state, HOOKS[hook]()))
        for step, ranks in enumerate(values):
            tensors = [tensor.clone() for tensor in ranks[dist.get_rank()]]
            if step == NAN_STEP and dist.get_rank() == 0:
                tensors[0][0, 0] = torch.nan
            for name, value in (changes or {}).get(step, {}).items():
                setattr(state, name, value)
            if step == resume:
                state.load_state_dict(state.state_dict())
            ddp.zero_grad()
            ddp(*tensors).backward()
            kept.append([p.grad for p in ddp.parameters()])  # so that every step has other addresses
            seen.append(gradients(ddp))
        memory = entries_of(state._memory)
        result = Run(seen, memory, GraphOnCpu.captures, GraphOnCpu.replays)
        dist.destroy_process_group(group)
    return result


def compared(**case):
    eager, graphs = run(cuda_graphs=False, **case), run(cuda_graphs=True, **case)
    assert eager.captures == 0
    assert_same_bits(graphs.gradients, eager.gradients)
    assert_same_bits(graphs.memory, eager.memory)
    return graphs.captures, graphs.replays


VARIANTS = {
    "plain": {},
    "cold": {"options": {"warm_start": False}},
    "no feedback": {"options": {"use_error_feedback": False}},
    "bf16 factors": {"options": {"factor_dtype": torch.bfloat16, "matrix_approximation_rank": 3}},
    "alternating": {"options": {"alternating": True}, "steps": STEPS + WARM_UP_STEPS + 2},
    "batched": {"hook": "batched"},
    "fp16 gradients": {"dtype": torch.float16},
    "16-bit wrapper": {"hook": "bf16_of_powersgd"},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_give_the_bits_of_eager_steps(worlds, variant, wrapper):
    for captures, replays in worlds(2).run(compared, wrapper=wrapper, **VARIANTS[variant]):
        assert captures > 0
        assert replays >= 4 * captures  # at once, and in several later steps


def test_changed_state_gets_new_graphs_and_the_bits_of_eager_steps(worlds):
    changes = {
        FIRST_REPLAY + 2: {"matrix_approximation_rank": 2},
        FIRST_REPLAY + 4: {"cuda_graphs": False},
        FIRST_REPLAY + 6: {"cuda_graphs": True, "iter": 100},
    }
    (captures, _), *_ = worlds(2).run(compared, changes=changes, steps=STEPS + 14, options={"warm_start": False})
    (once, _), *_ = worlds(2).run(compared, options={"warm_start": False})
    assert captures == 2 * once


def test_resumed_run_gets_new_graphs_and_the_bits_of_eager_steps(worlds):
    (captures, _), *_ = worlds(2).run(compared, resume=FIRST_REPLAY + 2, steps=STEPS + WARM_UP_STEPS + 2)
    (once, _), *_ = worlds(2).run(compared)
    assert captures == 2 * once


def differs(missing, **case):
    eager, graphs = run(cuda_graphs=False, **case), run(cuda_graphs=True, missing=missing, **case)
    assert graphs.replays > graphs.captures
    try:
        assert_same_bits(graphs.gradients, eager.gradients)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("part", Missing.PARTS)
def test_double_finds_a_refresh_without_one_of_its_parts(worlds, part):
    # The counter advances in the graph itself: it needs a refresh only where steps are skipped.
    case = {"options": {"warm_start": False}, "changes": {FIRST_REPLAY + 2: {"iter": 100}}}
    assert all(worlds(2).run(differs, missing=part, **case))
