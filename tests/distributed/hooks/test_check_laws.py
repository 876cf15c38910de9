"""`check_laws`: a right compressor passes, and every planted defect is named with a small case."""

import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from types import NoneType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from gradwire.hooks import HookState, Memory, hook_for
from gradwire.testing import LAWS, LawViolation, _check, check_laws
from gradwire.testing._bits import differences

calls = 0


@dataclass(frozen=True)
class ToyOptions:
    defect: str = ""
    start_iter: int = 2


class ToyState(HookState):
    """A compressor to bf16 with error feedback and, maybe, a defect."""

    def __init__(self, process_group=None, **options):
        super().__init__("toy_hook", process_group, ToyOptions(**options), {"errors": Memory(merge="sum")})

    def state_dict(self):
        saved = super().state_dict()
        if self.options.defect == "checkpoint by bucket index":
            saved["errors"] = dict(enumerate(saved["errors"].values()))
        if self.options.defect == "checkpoint with an object":
            saved["options"] = self.options
        if self.options.defect == "checkpoint of own errors":
            saved["errors"] = self.memory.tensors("errors")
        return saved


class UndeclaredState(HookState):
    """Keeps errors by bucket index, undeclared."""

    def __init__(self, process_group=None):
        super().__init__("undeclared_hook", process_group, ToyOptions())
        self.kept = {}


async def toy_all_reduce(step, errors, defect):
    global calls
    calls += 1
    world_size, rank = step.transport.world_size, step.transport.rank
    if defect == "hang" and rank == 1:
        threading.Event().wait()
    for gradient, error, result in zip(step.gradients, errors, step.results, strict=True):
        if defect == "raises" and gradient.numel() == 0:
            raise ValueError("nothing to send")
        share = gradient.to(error.dtype) / (world_size - 1 if defect == "wrong divisor" else world_size)
        total = share + error
        sent = (total + 2 * error if defect == "error that doubles" else total).bfloat16().to(total.dtype)
        mean = sent.clone(memory_format=torch.contiguous_format)
        await step.transport.all_reduce(mean)
        if defect == "bits of a rank":
            mean += rank * 2.0**-20 * mean
        if defect == "hash of a string":
            mean *= 1 + 2.0**-20 * (hash("rank") % 7)
        if defect == "bits of a run":
            mean *= 1 + 2.0**-20 * (calls % 7)
        if defect == "swallowed NaN":
            mean = mean.nan_to_num(0.0, 0.0, 0.0)
        if defect == "new NaN":
            mean *= mean.sum() / mean.sum()
        is_kept = mean.isfinite().all() | torch.tensor(defect == "poisoned error")
        if defect != "lost error":
            error.copy_(torch.where(is_kept, total - sent, error))
        result.copy_(mean)


async def ternary_all_reduce(step, errors):
    """Codes -1, 0 and 1, whose sum in int8 overflows from 128 ranks on; nothing that a few ranks would notice."""
    for gradient, error, result in zip(step.gradients, errors, step.results, strict=True):
        total = gradient.to(error.dtype) / step.transport.world_size + error
        flag = (total * 0).sum()  # NaN if an element is not finite
        scale = total.nan_to_num(0.0, 0.0, 0.0).abs().amax() if total.numel() else flag.clone()
        await step.transport.all_reduce(flag)
        await step.transport.all_reduce_max(scale)
        codes = (total / scale.clamp(min=1e-38)).round().nan_to_num(0.0, 0.0, 0.0).to(torch.int8).contiguous()
        kept = codes.to(total.dtype) * scale
        await step.transport.all_reduce(codes)
        error.copy_(torch.where(flag.isnan(), error, total - kept))
        result.copy_(codes.to(total.dtype) * scale + flag)


@hook_for(ToyState)
def ternary_hook(state, bucket):
    return state.run(bucket, lambda step: ternary_all_reduce(step, step.memory["errors"]))


@hook_for(ToyState)
def toy_hook(state, bucket):
    return state.run(bucket, lambda step: toy_all_reduce(step, step.memory["errors"], state.options.defect))


@hook_for(UndeclaredState)
def undeclared_hook(state, bucket):
    def algorithm(step):
        zeros = [torch.zeros(gradient.shape) for gradient in step.gradients]
        return toy_all_reduce(step, state.kept.setdefault(bucket.index(), zeros), "")

    return state.run(bucket, algorithm)


class EarlyState:
    """Says that it begins at step 1."""

    start_iter = 1


def early_hook(state, bucket):
    """Compresses from step 0 on."""
    return torch_hooks.bf16_compress_hook(None, bucket)


def own_bits_hook(state, bucket):
    """Compresses differently on the two DDPs."""
    if hasattr(bucket, "parameter_names"):
        return torch_hooks.bf16_compress_hook(None, bucket)
    return torch_hooks.allreduce_hook(None, bucket)


def no_fp64_hook(state, bucket):
    if bucket.buffer().dtype == torch.float64:
        raise TypeError("no fp64")
    return torch_hooks.allreduce_hook(None, bucket)


def failing_state():
    raise ValueError("no state")


def summing_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


TOYS = {
    "lost error": "nothing lost",
    "wrong divisor": "mean",
    "bits of a rank": "ranks agree",
    "hash of a string": "ranks agree",
    "bits of a run": "deterministic",
    "swallowed NaN": "NaN reaches all",
    "poisoned error": "NaN reaches all",
    "new NaN": "no new NaN",
    "raises": "any tensor",
    "hang": "any tensor",
    "checkpoint by bucket index": "checkpoints resume",
    "checkpoint with an object": "checkpoints resume",
    "checkpoint of own errors": "checkpoints resume",
    "error that doubles": "errors stay bounded",
}
DEFECTS = {defect: (partial(ToyState, defect=defect), toy_hook, law) for defect, law in TOYS.items()} | {
    "errors kept by bucket index": (UndeclaredState, undeclared_hook, "checkpoints resume"),
    "starts too early": (EarlyState, early_hook, "plain start"),
    "differs between DDPs": (NoneType, own_bits_hook, "both DDPs"),
    "sum": (NoneType, summing_hook, "mean"),
    # PyTorch casts before it divides: sums of inf and -inf.
    "PyTorch's fp16 hook": (NoneType, torch_hooks.fp16_compress_hook, "no new NaN"),
}


SLOW = ["hash of a string", "poisoned error", "raises", "checkpoint with an object", "checkpoint of own errors"]
SLOW += ["errors kept by bucket index", "sum", "error that doubles", "hang"]


def test_right_compressor_passes():
    check_laws(ToyState, toy_hook, max_examples=3)


@pytest.mark.parametrize(
    "defect", [pytest.param(defect, marks=[pytest.mark.slow] * (defect in SLOW)) for defect in DEFECTS]
)
def test_planted_defect_is_named(monkeypatch, defect):
    make_state, hook, law = DEFECTS[defect]
    monkeypatch.setattr(_check, "RUNS_TO_SHRINK", 1)
    limit = 5 if defect == "hang" else 60
    with pytest.raises(LawViolation) as violation:
        check_laws(make_state, hook, world_sizes=(2,), time_limit=limit)
    assert violation.value.law == law
    assert LAWS[law] in str(violation.value)


def test_violation_tells_law_hook_case_and_difference():
    with pytest.raises(LawViolation) as caught:
        check_laws(partial(ToyState, defect="raises"), toy_hook, world_sizes=(2,))
    violation = caught.value
    assert (violation.law, violation.world_size, len(violation.case.parameters)) == ("any tensor", 2, 1)
    assert violation.hook == "toy_hook with ToyState(iter=0, defect='raises', start_iter=2)"
    assert "ValueError: nothing to send" in violation.difference
    text = str(violation)
    assert text.startswith(
        "toy_hook with ToyState(iter=0, defect='raises', start_iter=2) violates the law \"any tensor\""
    )
    assert "2 ranks:" in text and "seed=" in text and "weights.0: (0,)" in text


def test_sum_that_overflows_on_many_ranks_is_named_although_every_other_law_holds():
    with pytest.raises(LawViolation) as caught:  # the last law: the others hold
        check_laws(ToyState, ternary_hook, max_examples=3)
    violation = caught.value
    assert (violation.law, violation.world_size) == ("sums fit", 128)
    assert violation.difference == "on 128 ranks, in step 2, all gradients are 100.0; the largest applied one is -100"


def test_skipped_law_is_not_checked():
    check_laws(
        partial(ToyState, defect="lost error"), toy_hook, world_sizes=(2,), max_examples=3, skip=["nothing lost"]
    )


def test_hook_that_refuses_a_dtype_passes_without_the_law_of_any_tensor():
    with pytest.raises(LawViolation, match="no fp64") as caught:
        check_laws(NoneType, no_fp64_hook, world_sizes=(2,))
    assert caught.value.law == "any tensor"
    check_laws(NoneType, no_fp64_hook, world_sizes=(2,), max_examples=5, skip=["any tensor"])


def test_error_of_make_state_is_raised_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)make_state is <function failing_state.*ValueError: no state"):
        check_laws(failing_state, toy_hook, world_sizes=(2,))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float16, torch.complex64])
def test_difference_of_two_tensors_is_told_in_any_dtype(dtype):
    actual, expected = (torch.tensor(values).to(dtype) for values in ([0, 0, 1], [0, 1, 1]))
    assert differences(actual, expected, "x") == ["x: 1 of 3 elements differ, by up to 1"]


def test_unknown_law_raises():
    with pytest.raises(ValueError, match=r"skip names \['no such law'\]; expected names of laws: mean, nothing lost"):
        check_laws(ToyState, toy_hook, skip=["no such law"])


def test_objects_that_ranks_cannot_import_raise_with_the_remedy():
    with pytest.raises(
        TypeError, match=r"make_state is ToyState.*; expected a function or class that makes a new state"
    ):
        check_laws(ToyState(), toy_hook)
    with pytest.raises(TypeError, match="expected functions or classes at the top level of a module"):
        check_laws(lambda: ToyState(), toy_hook)


def test_import_without_hypothesis_names_the_extra():
    program = "import sys; sys.modules['hypothesis'] = None; import gradwire.testing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: gradwire.testing needs hypothesis: pip install hypothesis" in done.stderr
