"""States with ``cuda_graphs=True``: replayed graphs give the bits of eager steps, by a double of CUDA graphs."""

import gc
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import LocalTransport, Workspace, connections_of, run_algorithm
from gradwire.comm.graphs import WARM_UP_STEPS, PiecewiseGraphs
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.support.bits import assert_same_bits
from tests.support.graph_on_cpu import GraphOnCpu, graphs_on_cpu
from tests.support.powersgd_steps import HOOKS, Fed, new_state, noise
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import WRAPPERS, gradients, register

START = 2  # the first compressed step
FIRST_REPLAY = START + WARM_UP_STEPS + 1
STEPS = FIRST_REPLAY + 5
SHAPES = [(24, 16), (7,), (16, 3, 2), (), (30, 12), (5, 0), (12,)]
CAP_MB = 0.001  # three buckets
NAN_STEP = FIRST_REPLAY + 1


def function_of(hook):
    return quantization_hook if hook == "quantized" else HOOKS[hook]()


@dataclass
class Run:
    """Gradients of each step, memory, and the numbers of captures and replays."""

    gradients: list
    memory: dict
    captures: int
    replays: int


STATES = {"quantized": partial(QuantizationState, start_iter=START)}  # others are `new_state`


def run(
    cuda_graphs,
    hook="powersgd",
    wrapper="gradwire",
    options=None,
    changes=None,
    dtype=torch.float32,
    resume=None,
    steps=STEPS,
    **ddp_options,
):
    """Steps on chosen gradients, one of them with a NaN, with the code path of a GPU.

    Args:
        changes: attributes of the state that are set before a step, by step.
        resume: the step before which the state is saved and loaded.
    """
    group = dist.new_group(backend=register_backend())
    values = noise(dist.get_world_size(), steps, SHAPES, dtype)
    kept, seen = [], []
    with gpu_on_cpu():
        ddp = WRAPPERS[wrapper](Fed(values[0][0]), process_group=group, bucket_cap_mb=CAP_MB, **ddp_options)
        state = STATES.get(hook, new_state)(**(options or {}), cuda_graphs=cuda_graphs)
        state.process_group = group
        register(ddp, (state, function_of(hook)))
        for step, ranks in enumerate(values):
            tensors = [tensor.clone() for tensor in ranks[dist.get_rank()]]
            if step == NAN_STEP and dist.get_rank() == 0:
                tensors[0][0, 0] = torch.nan
            for name, value in (changes or {}).get(step, {}).items():
                setattr(state, name, value and cuda_graphs if name == "cuda_graphs" else value)
            if step == resume:
                state.load_state_dict(state.state_dict())
            ddp.zero_grad()
            ddp(*tensors).backward()
            kept.append([p.grad for p in ddp.parameters()])  # so that every step has other addresses
            seen.append(gradients(ddp))
        memory = {entry: state.memory.tensors(entry) for entry in state.memory.declared}
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
    "int8 factors": {"options": {"factor_wire": "int8"}},
    "batched": {"hook": "batched"},
    "fp16 gradients": {"dtype": torch.float16},
    "16-bit wrapper": {"hook": "bf16_of_powersgd"},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "int4": {"hook": "quantized"},
    "int8, bf16 errors": {
        "hook": "quantized",
        "options": {"wire": "int8", "error_dtype": torch.bfloat16},
        "dtype": torch.float16,
    },
    "int2, no feedback": {"hook": "quantized", "options": {"wire": "int2", "use_error_feedback": False}},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(2)
def test_graphs_give_the_bits_of_eager_steps(variant, wrapper):
    captures, replays = compared(wrapper=wrapper, **VARIANTS[variant])
    assert captures > 0
    assert replays >= 4 * captures  # at once, and in several later steps


@on_ranks(2)
def test_changed_state_gets_new_graphs_and_the_bits_of_eager_steps():
    changes = {
        FIRST_REPLAY + 2: {"matrix_approximation_rank": 2},
        FIRST_REPLAY + 4: {"cuda_graphs": False},
        FIRST_REPLAY + 6: {"cuda_graphs": True, "iter": 100},
    }
    captures, _ = compared(changes=changes, steps=STEPS + 14, options={"warm_start": False})
    once, _ = compared(options={"warm_start": False})
    assert captures == 2 * once


@pytest.mark.parametrize("hook", ["powersgd", "quantized"])
@on_ranks(2)
def test_resumed_run_gets_new_graphs_and_the_bits_of_eager_steps(hook):
    captures, _ = compared(hook=hook, resume=FIRST_REPLAY + 2, steps=STEPS + WARM_UP_STEPS + 2)
    once, _ = compared(hook=hook)
    assert captures == 2 * once


# --- one process


class Owner:
    """An algorithm with one number on the device, and counts of its calls."""

    def __init__(self):
        self.offset = torch.zeros(())
        self.eager_calls = 0

    async def steps(self, workspace, transport, fails=False):
        self.eager_calls += 1
        wire = workspace.wire(4, torch.float32)
        wire.zero_().add_(self.offset)
        if fails:
            wire.sum().item()
        await transport.all_reduce(wire)
        self.offset.add_(wire[0])


@pytest.fixture
def graphs():
    with graphs_on_cpu() as graphs:
        yield graphs


def take_steps(owner, workspace, number, offset=1.0, **options):
    transport = LocalTransport()
    for _ in range(number):
        make_steps = partial(owner.steps, workspace, transport, **options)
        steps = workspace.graphs.run(owner, None, make_steps, lambda: owner.offset.fill_(offset))
        run_algorithm(steps, transport)


def new_workspace():
    return Workspace(torch.device("cpu"), PiecewiseGraphs())


def test_replays_call_no_algorithm_and_read_refreshed_numbers(graphs):
    owner, workspace = Owner(), new_workspace()
    take_steps(owner, workspace, WARM_UP_STEPS + 1)
    assert (owner.eager_calls, graphs.captures) == (WARM_UP_STEPS + 1, 2)
    for offset in (3.0, 5.0):
        take_steps(owner, workspace, 1, offset)
        assert owner.offset == 2 * offset
    assert owner.eager_calls == WARM_UP_STEPS + 1


def test_another_workspace_gets_its_own_graphs(graphs):
    owner, workspaces = Owner(), [new_workspace() for _ in range(2)]
    for workspace in workspaces:
        take_steps(owner, workspace, WARM_UP_STEPS + 2)
    assert graphs.captures == 4
    assert owner.eager_calls == 2 * (WARM_UP_STEPS + 1)


def test_graphs_replay_in_their_own_buffer_after_the_workspace_has_grown(graphs):
    owner, workspace = Owner(), new_workspace()
    take_steps(owner, workspace, WARM_UP_STEPS + 1)
    workspace.wire(1000, torch.float32).fill_(7.0)
    take_steps(owner, workspace, 1, 3.0)
    assert owner.offset == 6
    assert (workspace.wire(1000, torch.float32) == 7).all()


def test_graphs_do_not_outlive_their_owner(graphs):
    owner, workspace, made = Owner(), new_workspace(), []
    with mock.patch.object(torch.cuda, "CUDAGraph", lambda: made.append(GraphOnCpu()) or made[-1]):
        take_steps(owner, workspace, WARM_UP_STEPS + 2)
    alive = [weakref.ref(graph) for graph in made]
    made.clear()
    del owner
    gc.collect()
    assert all(graph() is None for graph in alive)


def test_graphs_of_a_new_owner_are_captured_after_all_others_are_gone(graphs):
    workspace = new_workspace()
    for _ in range(2):
        take_steps(Owner(), workspace, WARM_UP_STEPS + 2)
        gc.collect()
    assert graphs.captures == 4


def test_graphs_of_a_workspace_share_a_memory_pool(graphs):
    owners, workspace, made = [Owner(), Owner()], new_workspace(), []
    with mock.patch.object(torch.cuda, "CUDAGraph", lambda: made.append(GraphOnCpu()) or made[-1]):
        for owner in owners:
            take_steps(owner, workspace, WARM_UP_STEPS + 2)
    assert len({graph.pool() for graph in made}) == 1


def test_reset_drops_graphs_and_begins_a_new_warm_up(graphs):
    owner, workspace = Owner(), new_workspace()
    take_steps(owner, workspace, WARM_UP_STEPS + 2)
    workspace.graphs.reset()
    take_steps(owner, workspace, WARM_UP_STEPS + 2)
    assert graphs.captures == 4
    assert owner.eager_calls == 2 * (WARM_UP_STEPS + 1)


def test_step_that_the_user_captures_runs_eagerly(graphs):
    owner, workspace = Owner(), new_workspace()
    take_steps(owner, workspace, WARM_UP_STEPS + 2)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        take_steps(owner, workspace, 1)
    assert owner.eager_calls == WARM_UP_STEPS + 2
    assert (graphs.captures, graphs.replays) == (2, 4)


def test_step_that_cannot_be_captured_raises_and_ends_the_capture(graphs):
    owner, workspace = Owner(), new_workspace()
    take_steps(owner, workspace, WARM_UP_STEPS)
    with pytest.raises(RuntimeError, match=r"host waits for the device\nPass cuda_graphs=False"):
        take_steps(owner, workspace, 1, fails=True)
    assert GraphOnCpu.under_way is None
    take_steps(owner, workspace, 2)
    assert owner.eager_calls == WARM_UP_STEPS + 2


def test_step_that_is_abandoned_while_it_is_captured_leaves_no_graphs(graphs):
    owner, workspace, transport = Owner(), new_workspace(), LocalTransport()
    take_steps(owner, workspace, WARM_UP_STEPS)
    steps = workspace.graphs.run(owner, None, partial(owner.steps, workspace, transport), lambda: None)
    steps.send(None)
    steps.close()
    assert graphs.captures == 1
    take_steps(owner, workspace, 2)
    assert graphs.captures == 3


@on_ranks(2)
def test_failed_exchange_drops_all_graphs():
    group = dist.new_group(backend=register_backend())
    values = noise(dist.get_world_size(), FIRST_REPLAY, SHAPES)
    with gpu_on_cpu():
        ddp = WRAPPERS["gradwire"](Fed(values[0][0]), process_group=group, bucket_cap_mb=CAP_MB)
        state = new_state(cuda_graphs=True)
        state.process_group = group
        register(ddp, (state, HOOKS["powersgd"]()))
        for ranks in values:
            ddp.zero_grad()
            ddp(*ranks[dist.get_rank()]).backward()
        workspaces = connections_of(group).executor(torch.device("cpu")).workspaces
        before = sum(len(workspace.graphs) for workspace in workspaces)
        connections_of(group).fail("expected")
        after = sum(len(workspace.graphs) for workspace in workspaces)
    dist.destroy_process_group(group)
    assert before > 0
    assert after == 0


@pytest.mark.parametrize("hook", ["powersgd", "quantized"])
@on_ranks(2)
def test_state_warns_where_graphs_have_no_effect(hook):
    values = noise(dist.get_world_size(), START + 2, SHAPES)
    ddp = WRAPPERS["gradwire"](Fed(values[0][0]))
    register(ddp, (STATES.get(hook, new_state)(cuda_graphs=True), function_of(hook)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ranks in values:
            ddp(*ranks[dist.get_rank()]).backward()
    messages = [str(warning.message) for warning in caught]
    (message,) = [each for each in messages if "cuda_graphs" in each]
    assert "no effect" in message and "on cpu" in message and "Triton's kernels" in message
