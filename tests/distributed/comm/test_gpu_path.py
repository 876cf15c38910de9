"""The path of a GPU without a GPU: no race of streams, no use of freed memory, and no plan that only keeps memory.

The ranks have a double of a GPU, on which gradwire's hooks launch their compiled kernels, and a happens-before checker.
"""

import gc
import math
from dataclasses import replace
from unittest import mock

import pytest

from gradwire.bench.host_double import DEVICE, c_compilers
from gradwire.exchange import plans
from tests.support.gpu_scenarios import (
    ACTS,
    COLLECTIVES,
    DDPS,
    ERRORS,
    HOOKS,
    N_BUCKETS,
    PAIRS,
    SHARDED,
    SOME,
    STEPS,
    TRAININGS,
    VECTOR,
    VECTORS,
    WARM_UP_STEPS,
    WITH_MEMORY,
    Training,
    error_in_backward,
    later_hook,
    plain,
    run,
    sharded,
    wrap_again,
)
from tests.support.happens_before import RACE, STALE, Stream
from tests.support.harness import World
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(not c_compilers(), reason="needs a C compiler")


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """Ranks of their own: the double of a GPU stays."""
    opened = World(request.param, tmp_path_factory.mktemp("gpu_path"), {"GRADWIRE_KERNELS": "auto"})
    yield opened
    opened.close()


def check(scenario, *arguments, **options):
    checker = run(scenario, *arguments, **options)
    assert checker.counts["launches"] > 0
    assert dict(checker.findings) == {}


@pytest.mark.parametrize(("hook", "ddp"), PAIRS)
@on_ranks(1)
def test_steps_of_hook_are_ordered(hook, ddp):
    check(plain, hook, **DDPS[ddp])


@pytest.mark.parametrize("hook", SOME)
@pytest.mark.parametrize("training", TRAININGS)
@on_ranks(1)
def test_training_is_ordered(training, hook):
    check(TRAININGS[training], hook)


@pytest.mark.parametrize("hook", WITH_MEMORY)
@pytest.mark.parametrize("act", ACTS)
@on_ranks(1)
def test_act_between_two_steps_is_ordered(act, hook):
    check(ACTS[act], hook)


@pytest.mark.parametrize("hook", SOME[1:])
@on_ranks(1)
def test_hook_registered_later_is_ordered(hook):
    check(later_hook, hook)


@pytest.mark.parametrize("act", ACTS)
@on_ranks(2)
def test_act_between_two_steps_on_a_node_is_ordered(act):
    check(ACTS[act], "int4_on_nodes")


@pytest.mark.parametrize("hook", SOME)
@pytest.mark.parametrize("error", ERRORS)
@on_ranks(2)  # a rank alone begins again at once
def test_training_after_error_is_ordered(error, hook):
    check(ERRORS[error], hook)


@on_ranks(2)
def test_training_after_error_is_ordered_where_collectives_reduce_gradients_in_place():
    check(error_in_backward, "none", at=1, **VECTORS)


@pytest.mark.parametrize("hook", SOME[1:])
@on_ranks(1)
def test_pytorchs_ddp_wrapped_again_after_error_is_ordered(hook):
    check(error_in_backward, hook, at=1, recover=wrap_again, wrapper="pytorch")


@pytest.mark.parametrize("call", COLLECTIVES)
@on_ranks(1)
def test_collective_is_ordered(call):
    check(COLLECTIVES[call])


@pytest.mark.parametrize("model", SHARDED)
@on_ranks(2)
def test_sharded_model_is_ordered(model):
    check(SHARDED[model])


@on_ranks(2)
def test_sharded_gradients_are_kept_after_a_wait_that_raises():
    """The results, which are discarded, may race: they become NaN while kernels may still write them."""
    checker = run(sharded, False, within="int4", fails_in_wait=True, detaches=True)
    assert checker.counts["launches"] > 0
    assert checker.kinds <= {RACE}


# --- what the checker finds


@pytest.mark.parametrize("hook", ["fp16", "int4", "powersgd"])
@pytest.mark.parametrize(
    "edge", [("main", "kernels"), ("kernels", "collectives"), ("collectives", "kernels"), ("kernels", "main")]
)
@on_ranks(1)
def test_replay_without_an_edge_is_found(edge, hook):
    def scenario():
        trained = Training(hook)
        trained.steps(STEPS)
        assert not Stream.checker.findings
        Stream.checker.leaves_out = lambda event, stream: (event.stream.name, stream.name) == edge
        trained.steps(2)

    assert RACE in run(scenario).kinds


@pytest.mark.parametrize("hook", ["fp16", "int4", "powersgd"])
@on_ranks(1)
def test_replay_with_the_addresses_of_an_earlier_step_is_found(hook):
    def scenario():
        trained = Training(hook)
        trained.steps(STEPS)
        assert not Stream.checker.findings
        with mock.patch.object(plans._Entry, "refresh", lambda *_: None):
            trained.steps(2)

    assert STALE in run(scenario).kinds


# --- what plans keep

WITHOUT_REPLAYS = {"fp16_of_allreduce", "fp16_of_pytorch", "scaled_fp16", "topk", "powersgd_cold"}
# Hooks that send vectors as they are: a collective then works on the gradient itself, or on a wrapper's new buffer.
UNCOMPRESSED = {"none", "allreduce", "powersgd", "powersgd_int8", "powersgd_alternating", "fp16_of_powersgd"}
ALL_DDPS = DDPS | {"vectors": VECTORS}
CASES = {
    f"{hook}, {ddp}, {'freed' if set_to_none else 'kept'} gradients": (hook, ddp, set_to_none)
    for hook, ddp in [*PAIRS, *((hook, "vectors") for hook in HOOKS)]
    for set_to_none in (True, False)
}


def is_ordinary(hook, ddp, set_to_none):
    return hook in ("none", "fp16_of_allreduce") or (ddp == "gradwire, views" and set_to_none)


def n_expected_replays(hook, ddp, set_to_none):
    """Of one step."""
    is_divided_by_pytorch = (hook, ddp, set_to_none) == ("none", "gradwire, views", False)
    if hook in WITHOUT_REPLAYS or (ddp == "vectors" and hook in UNCOMPRESSED) or is_divided_by_pytorch:
        return 0
    return N_BUCKETS


def train_and_measure(warm_up_steps, hook, **options):
    """Replays in a late step, and bytes that live after it, without the gradients."""
    trained, checker = Training(hook, **options), Stream.checker
    with mock.patch.object(plans, "WARM_UP_STEPS", warm_up_steps):
        trained.steps(2 * STEPS)  # an alternating hook has recorded both kinds of steps, and dropped them
        before = checker.counts["replays"]
        trained.steps(1)
    n_replays = checker.counts["replays"] - before
    trained.ddp.zero_grad(set_to_none=True)
    gc.collect()
    checker.poll()
    return n_replays, sum(block.nbytes for block in checker.memory.living.values())


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if is_ordinary(*case) else pytest.mark.slow) for name, case in CASES.items()],
)
@on_ranks(1)
def test_hook_is_replayed_or_its_plans_keep_nothing(case):
    hook, ddp, set_to_none = CASES[case]
    options = {"set_to_none": set_to_none, **ALL_DDPS[ddp]}
    found = []
    run(lambda: found.append(train_and_measure(WARM_UP_STEPS, hook, **options)))
    run(lambda: found.append(train_and_measure(10**9, hook, **options)))
    (n_replays, with_plans), (_, without_plans) = found
    assert n_replays == n_expected_replays(hook, ddp, set_to_none)
    if n_replays == 0:
        tables = 64 * N_BUCKETS  # with the address of a flat buffer
        assert with_plans <= without_plans + tables < without_plans + math.prod(VECTOR) * 4


@on_ranks(1)
def test_plan_whose_gradients_have_moved_once_is_recorded_again():
    """An all-reduce of PyTorch's DDP holds its buffers, which are new after the model was wrapped again."""

    def scenario():
        trained, checker = Training("allreduce", "pytorch"), Stream.checker
        for _ in range(3):
            trained.steps(STEPS)
            before = checker.counts["replays"]
            trained.steps(1)
            counts.append(checker.counts["replays"] - before)
            trained.wrap()

    counts = []
    assert not run(scenario).findings
    assert counts == [N_BUCKETS] * 3


@on_ranks(1)
def test_plan_of_earlier_steps_does_not_keep_their_large_buffer():
    """PowerSGD sends gradients in full until step 12: these steps are recorded, too."""

    def scenario(first_compressed):
        trained = Training("powersgd")
        trained.state.options = replace(trained.state.options, start_powerSGD_iter=first_compressed)
        with mock.patch.object(plans, "WARM_UP_STEPS", full):
            trained.steps(26)
        executor = trained.ddp.reducer.exchange.connections.existing_executor(DEVICE)
        sizes.append([workspace.nbytes for workspace in executor.workspaces])

    sizes, full = [], plans.WARM_UP_STEPS
    for first_compressed in (2, 12):
        run(scenario, first_compressed)
    assert sizes[0] == sizes[1]
