"""Steps that are recorded and replayed, as on a GPU, have the bits of steps that run in full.

The ranks run the kernels in Triton's interpreter, where they read addresses in device memory, as on a GPU.
"""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm.stream_executor import StreamExecutor
from gradwire.comm.transport import GroupTransport
from gradwire.compress import quantized_all_reduce
from gradwire.exchange import hook_state, plans
from gradwire.exchange.hook_state import HookState, hook_for
from gradwire.hooks import default_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook, quantization_perchannel_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits
from tests.support.harness import INTERPRETER, World
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import WRAPPERS, Fault, Scaler, register
from tests.support.zoo import Probe

WARM_UP = 1
SHAPES = [(12, 8), (5,), (6, 10)]
ONE_BUCKET, TWO_BUCKETS = 1.0, 0.0002  # MiB


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """Ranks whose kernels run in Triton's interpreter."""
    opened = World(request.param, tmp_path_factory.mktemp("interpreted"), INTERPRETER)
    yield opened
    opened.close()


def int4(**options):
    return lambda group: (
        QuantizationState(group, "int4", **{"start_iter": 0, "exempt": ()} | options),
        quantization_hook,
    )


def powersgd(**options):
    return lambda group: (PowerSGDState(group, 4, 2, min_compression_rate=1, **options), powerSGD_hook)


def scaled_cast(group):
    return ScaledCastState(group), scaled_cast_hook


def cast(state=None, hook="fp16_compress_hook"):
    return lambda group: (group if state is None else state(group), getattr(default_hooks, hook))


class Run:
    """Training on two ranks with the code path of a GPU, on gradients that lie at other addresses in each step.

    Attributes:
        gradients: gradients after each step.
        counts: number of steps, and of elements before and after PowerSGD, after each step.
        metrics: those of each measured step, without times.
        replays: number of replayed buckets in each step.
    """

    def __init__(self, make, replays, wrapper="gradwire", shapes=SHAPES, cap=ONE_BUCKET, **options):
        self._stack = ExitStack()
        enter = self._stack.enter_context
        enter(gpu_on_cpu())
        self.with_replays, self.set_to_none = replays, True
        self.patch(plans, "WARM_UP_STEPS", WARM_UP if replays else 10**9)
        self._replay = enter(
            mock.patch.object(StreamExecutor, "replay", autospec=True, side_effect=StreamExecutor.replay)
        )
        self.group = dist.new_group(backend=register_backend())
        self.shapes = shapes
        self.ddp = WRAPPERS[wrapper](Probe(*shapes), process_group=self.group, bucket_cap_mb=cap, **options)
        self.state = None if make is None else register(self.ddp, make(self.group))
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._kept, self.gradients, self.replays, self.counts, self.metrics = [], [], [], [], []

    def patch(self, owner, name, value):
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def inputs(self, is_nan=False, unused=()):
        inputs = [torch.randn(shape, generator=self._generator) for shape in self.shapes]
        if is_nan and dist.get_rank() == 0:
            inputs[0].view(-1)[0] = torch.nan
        return [None if i in unused else each for i, each in enumerate(inputs)]

    def step(self, **options):
        before = self._replay.call_count
        self.ddp.zero_grad(set_to_none=self.set_to_none)
        self.ddp(*self.inputs(**options)).backward()
        self.note(before)

    def note(self, before):
        self.replays.append(self._replay.call_count - before)
        grads = [parameter.grad for parameter in self.ddp.parameters()]
        self._kept.append(grads)  # the next ones get other addresses
        self.gradients.append([None if grad is None else grad.clone() for grad in grads])
        if isinstance(self.state, HookState):
            stats = self.state.compression_stats() if isinstance(self.state, PowerSGDState) else ()
            self.counts.append((self.state.iter, *stats))

    def note_metrics(self, metrics):
        """The report of telemetry."""
        self.metrics.append({name: value for name, value in metrics.items() if not name.endswith("_ms")})

    def end(self):
        """All that must be equal with and without replays."""
        memory = getattr(self.state, "memory", None)
        tensors = {entry: memory.tensors(entry) for entry in memory.declared} if memory else {}
        own = {e: {k: t.clone() for k, t in each.items()} for e, each in tensors.items()}
        saved = {}
        if isinstance(self.state, HookState):
            saved = self.state.state_dict()
            if self.state._check is not None:
                self.note_metrics(self.state._check.latest)
            self.state.stop_observing()
        outcome = self.gradients, own, saved, self.counts, self.metrics
        self._stack.close()
        dist.destroy_process_group(self.group)
        return outcome


BITS = {
    "no hook": None,
    "fp16": cast(),
    "int4, mixed formats": int4(exempt=("*.2",)),
    "int4, bf16 errors": int4(error_dtype=torch.bfloat16),
    "int8": int4(wires={"*": "int8"}),
    "PowerSGD": powersgd(),
    "PowerSGD, alternating": powersgd(alternating=True),
    "PowerSGD, int8 factors": powersgd(factor_wire="int8"),
    "PowerSGD, no error feedback": powersgd(use_error_feedback=False),
    "scaled fp16": scaled_cast,
}
DDPS = {
    "gradwire": {},
    "gradwire, views": {"gradient_as_bucket_view": True},
    "gradwire, static graph": {"static_graph": True},
    "gradwire, find unused": {"find_unused_parameters": True},
    "pytorch": {"wrapper": "pytorch"},
    "pytorch, views": {"wrapper": "pytorch", "gradient_as_bucket_view": True},
}
ON_ALL = ("fp16", "int4, mixed formats")  # the others on gradwire's DDP and, some of them slowly, on PyTorch's
QUICK = [("int4, bf16 errors", "pytorch"), ("PowerSGD, alternating", "pytorch")]
NEVER_REPLAYED = ("scaled fp16",)  # the host reads its counters
CASES = [
    pytest.param(
        hook, ddp, marks=[pytest.mark.slow] * (hook not in ON_ALL and ddp != "gradwire" and (hook, ddp) not in QUICK)
    )
    for hook in BITS
    for ddp in DDPS
    if (hook in ON_ALL or "," not in ddp) and not (hook == "no hook" and "pytorch" in ddp)
]


@pytest.mark.parametrize(("hook", "ddp"), CASES)
@on_ranks(2)
def test_replays_give_the_bits_of_full_steps(hook, ddp):
    outcomes = []
    steps = 9 if "alternating" in hook else 7
    for replays in (False, True):
        run = Run(BITS[hook], replays, cap=TWO_BUCKETS, **DDPS[ddp])
        for step in range(steps):
            run.step(is_nan=step == steps - 2)
        assert run.replays[-3:] == [2 * (replays and hook not in NEVER_REPLAYED)] * 3, run.replays
        outcomes.append(run.end())
    assert_same_bits(*outcomes)


@on_ranks(2)
def test_hook_with_an_operator_of_pytorch_is_not_replayed():
    run = Run(powersgd(warm_start=False), replays=True)
    for _ in range(6):
        run.step()
    run.end()
    assert sum(run.replays[3:]) == 0


# --- what may change between two steps


def assign_option(run):
    run.state.options = replace(run.state.options, wire="int8")


def modify_dictionary(run):
    run.state.options.wires["weights.0"] = "int8"


def set_step(run):
    run.state.iter = 100


def load(run):
    if not hasattr(run, "saved"):
        run.saved = run.state.state_dict()
    else:
        run.state.load_state_dict(run.saved)


def assign_group(run):
    run.state.process_group = dist.new_group(backend=register_backend())


def set_start(number):
    """From the next step on, compressed steps begin with that number."""

    def assign(run):
        run.state.options = replace(run.state.options, start_iter=number)

    return assign


def observe(run):
    run.state.observe(every=1, exact_every=1, report=run.note_metrics)


def stop_observing(run):
    run.state.stop_observing()


def check_sixth_step(run):
    run.patch(hook_state, "CHECK_EVERY", 6)


def follow_scaler(run):
    if run.state.memory.scaler is None:
        run.state.follow_scaler(Scaler(4.0))
    else:
        run.state.memory.scaler.scale /= 2


def switching(group):
    """A user's hook that calls the hook of that name on that process group."""
    state = {"name": "fp16_compress_hook", "group": group}
    return state, lambda state, bucket: getattr(default_hooks, state["name"])(state["group"], bucket)


def switch(run):
    run.state["name"] = "bf16_compress_hook"


def switch_group(run):
    """Take the other of two process groups."""
    if not hasattr(run, "groups"):
        run.groups = [run.group, dist.new_group(backend=register_backend())]
    run.state["group"] = next(group for group in run.groups if group is not run.state["group"])


def keep_views(run):
    run.set_to_none = False


def sum_in_fp32(run):
    run.state.accumulate = "fp32"


def set_local_size(run):
    run.state.local_size = 2


def other_layout(run):
    weight = run.ddp.module.weights[0]
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def train_another(run):
    if not hasattr(run, "other"):
        other = run.other = WRAPPERS["gradwire"](Probe((40, 50)), process_group=run.group)
        register(other, cast(lambda group: default_hooks.CastState(group))(run.group))
    run.other(torch.ones(40, 50)).backward()


def accumulate(run):
    with run.ddp.no_sync():
        run.ddp(*run.inputs()).backward()


def capture(run):
    """From now on, the current stream is captured in a CUDA graph."""
    run.patch(torch.cuda, "is_current_stream_capturing", lambda: True)


def fail_in(number):
    """Collective ``number`` of a step raises; then the ranks go on."""

    def fail(run):
        calls, before = [], GroupTransport.run

        def failing(transport, collective):
            calls.append(collective)
            if len(calls) == number:
                raise Fault("expected")
            before(transport, collective)

        called = run._replay.call_count
        with mock.patch.object(GroupTransport, "run", failing), pytest.raises(Fault):
            run.step()
        assert len(calls) == number, "no collectives after the first failure"
        assert run._replay.call_count - called == 2 * run.with_replays
        run.ddp.resynchronize()

    return fail


def register_int4(run):
    run.state = register(run.ddp, int4()(run.group))


def own_algorithm(group):
    """A user's algorithm on the memory of gradwire's, which may decide on the host."""

    @hook_for(QuantizationState)
    def hook(state, bucket):
        return state.run(bucket, lambda step: quantized_all_reduce(step))

    return QuantizationState(group, "int4", start_iter=0, exempt=()), hook


def per_channel(group):
    return group, quantization_perchannel_hook


def drop_memory(run):
    run.state.memory.drop_buckets()


def nothing(run):
    pass


# The hook, what happens before each of the steps after the `first_steps` (default: 4), the replays in them, and options
# of `Run`.
STATE = cast(default_hooks.CastState)
BF16 = int4(error_dtype=torch.bfloat16)
ALTERNATING = powersgd(alternating=True)
SKIPS = {"cap": TWO_BUCKETS, "find_unused_parameters": True, "skip_all_reduce_unused_params": True}
TWO_GROUPS = [switch_group, switch_group, nothing, nothing, switch_group]
TWO_ON_PYTORCHS = {"wrapper": "pytorch", "cap": TWO_BUCKETS}
OBSERVED = [observe, stop_observing, nothing, nothing, observe]
CHANGES = {
    "option": (int4(), [assign_option], [0, 0, 1], {}),
    "dictionary in place": (int4(wires={"weights.1": "int8"}), [modify_dictionary], [0, 0, 1], {}),
    "step number": (BF16, [set_step], [0, 0, 1], {}),
    "checkpoint": (int4(), [load, load], [1, 0, 0, 1], {}),
    "process group": (int4(), [assign_group], [0, 0, 1], {"wrapper": "pytorch"}),
    "first compressed step, changed": (BF16, [set_start(6)], [0, 0, 0, 0, 1], {}),
    "telemetry": (STATE, [observe, stop_observing], [0, 0, 0, 1], {}),
    "telemetry of a state": (powersgd(), OBSERVED, [0, 0, 0, 2, 0], TWO_ON_PYTORCHS | {"first_steps": 6}),
    "check of errors": (int4(), [check_sixth_step], [1, 0, 1, 1], {}),
    "scaler": (int4(), [follow_scaler] * 3, [1, 1, 1], {}),
    "first compressed step": (int4(start_iter=4), [], [0, 0, 1], {}),
    "another hook": (switching, [switch], [0, 0, 1], {}),
    "another hook's group": (switching, TWO_GROUPS, [0, 0, 0, 1, 0], {"wrapper": "pytorch"}),
    "gradients that stay views": (STATE, [keep_views], [0, 0, 1], {"gradient_as_bucket_view": True}),
    "accumulate": (STATE, [sum_in_fp32], [0, 0, 1], {}),
    "local size": (STATE, [set_local_size], [0, 0, 1], {}),
    "memory format": (int4(), [other_layout], [0, 0, 1], {"wrapper": "pytorch", "shapes": [(4, 3, 2, 2), (5,)]}),
    "another model": (int4(), [train_another] * 3, [1, 1, 1], {}),
    "accumulation": (int4(), [accumulate] * 2, [1, 1], {}),
    "capture": (STATE, [capture], [0, 0], {}),
    "hook registered later": (None, [register_int4], [0, 0, 1], {}),
    "own algorithm": (own_algorithm, [], [0, 0, 0], {"replays_before": 0}),
    "buckets of equal layouts": (per_channel, [], [2, 2], {"cap": TWO_BUCKETS, "shapes": [(8, 8), (8, 8)]}),
    "dropped memory": (int4(), [drop_memory], [0, 0, 1], {}),
    "failure": (int4(), [fail_in(3)], [0, 0, 0, 2], {"cap": TWO_BUCKETS}),
    "failure without a hook": (None, [fail_in(2)], [0, 0, 0, 2], {"cap": TWO_BUCKETS}),
    "step number, two buckets": (BF16, [set_step], [0, 0, 2], TWO_ON_PYTORCHS),
    "skipped bucket": (STATE, [nothing], [0, 2, 2, 2], SKIPS),
    "skipped bucket, bf16 errors": (BF16, [nothing], [0, 2, 2, 2], SKIPS),
    "skipped bucket, alternating": (ALTERNATING, [nothing], [0, 2, 2, 2], SKIPS | {"first_steps": 8}),
    "skipped last bucket": (STATE, [nothing], [1, 2, 2, 2], SKIPS),
    "skipped last bucket, bf16 errors": (BF16, [nothing], [1, 2, 2, 2], SKIPS),
    "skipped last bucket, alternating": (ALTERNATING, [nothing], [1, 2, 2, 2], SKIPS | {"first_steps": 8}),
}

# The parameters without gradients in the step after the first ones.
SKIPPED = {"skipped bucket": (1, 2), "skipped last bucket": (0,)}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_change_between_two_steps_has_the_effect_that_it_has_without_replays(change):
    hook, actions, expected, options = CHANGES[change]
    options = dict(options)
    before, first_steps = options.pop("replays_before", None), options.pop("first_steps", 4)
    outcomes = []
    for replays in (False, True):
        run = Run(hook, replays, **options)
        for _ in range(first_steps):
            run.step()
        n_buckets = 1 if options.get("cap", ONE_BUCKET) == ONE_BUCKET else 2
        assert run.replays[-1] == replays * (n_buckets if before is None else before)
        for step in range(len(expected)):
            for action in actions[step : step + 1]:
                action(run)
            run.step(unused=(SKIPPED if step == 0 else {}).get(change.partition(",")[0], ()))
        assert run.replays[first_steps:] == [n * replays for n in expected], run.replays[first_steps:]
        outcomes.append(run.end())
    assert_same_bits(*outcomes)


@on_ranks(2)
def test_ranks_without_inputs_change_the_divisor():
    outcomes = []
    for replays in (False, True):
        run = Run(None, replays)
        with run.ddp.join(divide_by_initial_world_size=False):
            for _ in range(5 if dist.get_rank() == 0 else 3):
                run.step()
        assert run.replays[3:] in ([], [0, 0]), run.replays
        outcomes.append(run.end())
    assert_same_bits(*outcomes)
