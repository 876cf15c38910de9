"""Memory of PowerSGD: bytes of errors, and no tensor of the size of a gradient in a step."""

import copy
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, LowRankPolicy, flat_low_rank_bucket
from gradwire.compress.policy import MatrixShape
from gradwire.compress.powersgd import alternating_all_reduce, powersgd_all_reduce
from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState
from tests.support.bits import assert_same_bits
from tests.support.powersgd_checkpoints import EARLY, own_memory
from tests.support.training import SMALL, WRAPPERS, build, register

# --- buckets


@pytest.mark.parametrize("alternating", [False, True], ids=["both", "alternating"])
def test_bucket_continues_from_memory_and_does_not_modify_it(alternating):
    gradients = [torch.randn(24, 16, generator=torch.Generator().manual_seed(0)), torch.ones(24)]
    shapes = LowRankPolicy(rank=2).matrix_shapes(gradients)
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))

    def step(bucket, iteration):
        results = [torch.empty_like(gradient) for gradient in gradients]
        algorithm = alternating_all_reduce if alternating else powersgd_all_reduce
        run_algorithm(algorithm(bucket, gradients, results, iteration, transport, workspace), transport)
        return results

    first = LowRankBucket(gradients, shapes, names=["w", "b"], alternating=alternating)
    step(first, 0)
    memory = copy.deepcopy(first.memory)
    expected = step(first, 1)
    known = {entry: dict(tensors) for entry, tensors in memory.items()}
    second = LowRankBucket(gradients, shapes, names=["w", "b"], memory=memory, alternating=alternating)
    assert memory == known
    assert (
        second.memory["errors"]["w"] is memory["errors"]["w"]
    )  # updated in place by the next step, as the state expects
    assert second.memory["q"]["w"] is not memory["q"]["w"]
    assert_same_bits(step(second, 1), expected)


@pytest.mark.parametrize("shape", [(16, 24), (384,), (24, 17), (2, 12, 16)], ids=str)
@pytest.mark.parametrize("is_flat", [False, True], ids=["matrices", "flat"])
def test_bucket_rejects_an_error_of_another_shape(is_flat, shape):
    gradients, memory = [torch.ones(24, 16)], {"errors": {"w": torch.zeros(shape)}}
    with pytest.raises(ValueError, match=re.escape(f"error memory of w has shape {shape}, its gradient (24, 16)")):
        if is_flat:
            flat_low_rank_bucket(gradients, 1, names=["w"], memory=memory)
        else:
            LowRankBucket(gradients, LowRankPolicy().matrix_shapes(gradients), names=["w"], memory=memory)


# --- errors


def memory(wrapper, model, hook, options):
    module = build(model)
    state = PowerSGDState(None, **(EARLY | options))
    ddp = WRAPPERS[wrapper](module, bucket_cap_mb=SMALL)
    register(ddp, (state, getattr(ours, hook)))
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(5):
        ddp.zero_grad()
        ddp(*module.batch(generator)).backward()
        held.append(state.error_memory_bytes)
    compressed, everything = 0, 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            real = parameter.numel() * (2 if parameter.is_complex() else 1)
            nbytes = real * (8 if parameter.dtype == torch.float64 else 4)
            everything += nbytes
            compressed += nbytes if state.options.policy.matrix_shape(name, parameter) is not None else 0
    storages = {
        error.untyped_storage()._cdata: error.untyped_storage().nbytes()
        for error in own_memory(state)["errors"].values()
    }
    return held, compressed, everything, sum(storages.values())


@pytest.mark.parametrize("model", ["mlp", "transformer", "conv", "complex", "mixed", "brain", "half", "frozen"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_error_memory_has_size_of_compressed_gradients_in_fp32(worlds, wrapper, model):
    # In fp64 for fp64 gradients.
    case = {"wrapper": wrapper, "model": model, "hook": "powerSGD_hook"}
    ((held, compressed, everything, stored),) = worlds(1).run(memory, options={}, **case)
    assert held == [0, 0] + [compressed] * 3
    assert 0 < compressed < everything
    assert stored == compressed, "what the tensors hold in fact"
    ((held, *_, stored),) = worlds(1).run(memory, options={"use_error_feedback": False}, **case)
    assert held == [0] * 5
    assert stored == 0


def test_error_memory_of_batched_hook_has_size_of_all_gradients_in_fp32(worlds):
    case = {"wrapper": "gradwire", "model": "mlp", "hook": "batched_powerSGD_hook", "options": {}}
    ((held, _, everything, stored),) = worlds(1).run(memory, **case)
    assert held == [0, 0] + [everything] * 3
    assert stored == everything


class Allocations(TorchDispatchMode):
    """Notes the bytes of every storage that an operation makes, and keeps it, so that no other takes its place."""

    def __init__(self):
        super().__init__()
        self.nbytes = []
        self._kept = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._kept:
                    self._kept[storage._cdata] = storage
                    self.nbytes.append(storage.nbytes())
        return result


@pytest.mark.parametrize("kind", ["warm", "cold", "alternating"])
@pytest.mark.parametrize("feedback", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_allocates_no_tensor_of_gradient_size(dtype, feedback, kind):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator).to(dtype) for shape in ((1024, 1024), (2048, 512), (1000,))]
    shapes = [MatrixShape(1, 1024, 1024, 4), MatrixShape(2, 1024, 512, 4), None]
    alternating = kind == "alternating"
    bucket = LowRankBucket(sources, shapes, error_feedback=feedback, alternating=alternating)
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    with Allocations() as allocations:
        for i in range(4):
            if i == 2:
                allocations.nbytes = []
            if alternating:
                steps = alternating_all_reduce(bucket, sources, sources, i, transport, workspace)
            else:
                steps = powersgd_all_reduce(
                    bucket, sources, sources, i, transport, workspace, warm_start=kind == "warm"
                )
            run_algorithm(steps, transport)
    # All P of the bucket together, in fp64, are 3 * 4 * 1024 * 8 bytes: 1/21 of a matrix in 16 bit.
    assert allocations.nbytes, "the factors' small tensors are seen"
    assert max(allocations.nbytes) <= sources[0].nbytes / 20
