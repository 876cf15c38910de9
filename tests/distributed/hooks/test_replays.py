"""Steps that are recorded and replayed, as on a GPU, have the bits of steps that run in full.

The ranks run the kernels in Triton's interpreter, where they read addresses in device memory, as on a GPU.
"""

from contextlib import ExitStack
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm.stream_executor import StreamExecutor
from gradwire.hooks import _plans, default_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.testing import _world
from tests.support.bits import assert_same_bits
from tests.support.harness import World
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import WRAPPERS, register

WARM_UP = 1
SHAPES = [(12, 8), (5,), (6, 10)]
ONE_BUCKET, TWO_BUCKETS = 1.0, 0.0002  # MiB


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """Ranks whose kernels run in Triton's interpreter. Imports choose it, so the ranks have servers of their own."""
    environment = {"TRITON_INTERPRET": "1", "GRADWIRE_KERNELS": "auto"}
    with (
        mock.patch.dict(_world.ENVIRONMENT, environment),
        mock.patch.object(_world, "fork_server", cache(_world.fork_server.__wrapped__)),
    ):
        opened = World(request.param, tmp_path_factory.mktemp("interpreted"))
        yield opened
        opened.close()


class Fed(nn.Module):
    """Parameters whose gradients are the inputs; an input that is None leaves its parameter unused."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, *inputs):
        return sum((w * x).sum() for w, x in zip(self.weights, inputs, strict=True) if x is not None)


def int4(**options):
    return lambda group: (
        QuantizationState(group, "int4", **{"start_iter": 0, "exempt": ()} | options),
        quantization_hook,
    )


def powersgd(**options):
    return lambda group: (PowerSGDState(group, 4, 2, min_compression_rate=1, **options), powerSGD_hook)


def cast(state=None, hook="fp16_compress_hook"):
    return lambda group: (group if state is None else state(group), getattr(default_hooks, hook))


class Run:
    """Training on two ranks with the code path of a GPU, on gradients that lie at other addresses in each step.

    Attributes:
        gradients: gradients after each step.
        replays: number of replayed buckets in each step.
    """

    def __init__(self, make, replays, wrapper="gradwire", shapes=SHAPES, cap=ONE_BUCKET, **options):
        self._stack = ExitStack()
        enter = self._stack.enter_context
        enter(gpu_on_cpu())
        enter(mock.patch.object(_plans, "WARM_UP_STEPS", WARM_UP if replays else 10**9))
        self._replay = enter(
            mock.patch.object(StreamExecutor, "replay", autospec=True, side_effect=StreamExecutor.replay)
        )
        self.group = dist.new_group(backend=register_backend())
        self.shapes = shapes
        self.ddp = WRAPPERS[wrapper](Fed(shapes), process_group=self.group, bucket_cap_mb=cap, **options)
        self.state = None if make is None else register(self.ddp, make(self.group))
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._kept, self.gradients, self.replays = [], [], []

    def inputs(self, is_nan=False, unused=()):
        inputs = [torch.randn(shape, generator=self._generator) for shape in self.shapes]
        if is_nan and dist.get_rank() == 0:
            inputs[0].view(-1)[0] = torch.nan
        return [None if i in unused else each for i, each in enumerate(inputs)]

    def step(self, **options):
        before = self._replay.call_count
        self.ddp.zero_grad()
        self.ddp(*self.inputs(**options)).backward()
        self.note(before)

    def note(self, before):
        self.replays.append(self._replay.call_count - before)
        grads = [parameter.grad for parameter in self.ddp.parameters()]
        self._kept.append(grads)  # the next ones get other addresses
        self.gradients.append([None if grad is None else grad.clone() for grad in grads])

    def end(self):
        """All that must be equal with and without replays."""
        memory = getattr(self.state, "memory", None)
        tensors = {entry: memory.tensors(entry) for entry in memory.declared} if memory else {}
        outcome = self.gradients, {e: {k: t.clone() for k, t in each.items()} for e, each in tensors.items()}
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
}
DDPS = {
    "gradwire": {},
    "gradwire, views": {"gradient_as_bucket_view": True},
    "gradwire, static graph": {"static_graph": True},
    "gradwire, find unused": {"find_unused_parameters": True},
    "pytorch": {"wrapper": "pytorch"},
    "pytorch, views": {"wrapper": "pytorch", "gradient_as_bucket_view": True},
}
ON_ALL = ("fp16", "int4, mixed formats")  # the others on gradwire's DDP and, slowly, on PyTorch's
CASES = [
    pytest.param(hook, ddp, marks=[pytest.mark.slow] * (hook not in ON_ALL and ddp != "gradwire"))
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
        assert run.replays[-3:] == [2 * replays] * 3, run.replays
        outcomes.append(run.end())
    assert_same_bits(*outcomes)


@on_ranks(2)
def test_hook_with_an_operator_of_pytorch_is_not_replayed():
    run = Run(powersgd(warm_start=False), replays=True)
    for _ in range(6):
        run.step()
    run.end()
    assert sum(run.replays[3:]) == 0
