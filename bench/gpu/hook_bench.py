"""Cases of the lane's stage *bench* for hooks, on synthetic gradients of real models, compared with PyTorch's.

A step calls the hook on every bucket in turn, as DDP does, and waits for the results on the device. There is no
forward, no backward and one rank. gradwire's hook gets lists of gradients, as gradwire's DDP hands them over; PyTorch's
gets flat buffers, as with ``gradient_as_bucket_view=True``. Results replace the gradients, which loses nothing:
gradient + error is the same in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.bench.emulated import emulated_link
from gradwire.bench.gpu.checks import require
from gradwire.bench.gpu.kernel_bench import Row, buckets_of, calls_of, row
from gradwire.bench.implementations import (
    FIRST_COMPRESSED,
    GRADWIRE,
    PYTORCH,
    WARM_UP,
    Implementation,
    complaint_about_feedback,
    complaint_about_mean,
    error_memory,
    make_batch,
    needs_one_bucket,
    prepare,
)
from gradwire.bench.kernel_cases import BLOCK_SIZE
from gradwire.bench.namespaces import Rate
from gradwire.bench.record import percentiles_ms
from gradwire.bench.shapes import Shape
from gradwire.bench.timing import in_turn, timed, timed_replays
from gradwire.comm.graphs import WARM_UP_STEPS
from gradwire.comm.torch_internals import default_group
from gradwire.compress import LowRankPolicy, WirePolicy
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.planner.hook_registry import HOOKS, Registration
from gradwire.reducer.bucket import BucketSpec, DenseBucket

MODELS = ("gpt2-124m", "bert-base", "resnet50", "llama-1b")
BENCHED = ("fp16", "bf16", "scaled-fp16", "powersgd-r4", "powersgd-r32", "int8", "int4")
CAPTURED = ("fp16", "scaled-fp16", "powersgd-r4", "int8", "int4")
LINKED = ("fp16", "int4", "powersgd-r4")
RATES, HOSTS = ("10gbit", "100gbit"), 2
BUCKET_MIB = 25  # bucket size of hooks whose state prefers no other
ROUNDS = 10
GRAPHS = "gradwire, cuda_graphs=True"
CLOSEST = "PyTorch's closest"  # where PyTorch has no such hook


class HookStep:
    """A hook on all buckets of a model, flat ones as in PyTorch's DDP or lists of gradients; a call is a step."""

    def __init__(
        self, registration: Registration, shapes: Sequence[Sequence[Shape]], device: torch.device, is_flat: bool
    ) -> None:
        self.state, self._hook = registration
        self.gradients: dict[str, Tensor] = {}  # by parameter name; every step replaces their values
        self._buckets: list[DenseBucket] = []
        generator = torch.Generator(device).manual_seed(0)
        for index, bucket_shapes in enumerate(shapes):
            parameters = [torch.empty(shape, device=device) for shape in bucket_shapes]
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
            names = [f"{index}.{i}" for i in range(len(parameters))]
            spec = BucketSpec(
                index=index,
                is_last=index == len(shapes) - 1,
                members=list(range(len(parameters))),
                parameters=parameters,
                names=names,
            )
            bucket = DenseBucket(spec, as_view=is_flat)
            bucket.collect(zero_copy=not is_flat)
            self.gradients |= dict(zip(names, bucket.gradients() if is_flat else _gradients(parameters), strict=True))
            self._buckets.append(bucket)

    def __call__(self) -> None:
        """Reduce all buckets; the current stream waits for the results."""
        futures = [self._hook(self.state, bucket) for bucket in self._buckets]  # type: ignore[arg-type]
        for future in futures:
            future.wait()

    def check(self, wire: torch.dtype | None) -> None:
        """Take a step and check its result. A collective call."""
        local, old = self._copies(), self._errors()
        self()
        result, new = list(self.gradients.values()), self._errors()
        if wire is not None:
            complaint = complaint_about_mean(local, result, wire)
        else:
            is_quantized = isinstance(self.state, QuantizationState)
            complaint = complaint_about_feedback(local, old, result, new, is_quantized)
        require(complaint is None, f"{complaint}; nothing is timed.")

    def _copies(self) -> list[Tensor]:
        return [gradient.clone() for gradient in self.gradients.values()]

    def _errors(self) -> list[Tensor]:
        errors = error_memory(self.state)
        zero = torch.zeros((), device=next(iter(self.gradients.values())).device)
        return [errors.get(name, zero.expand_as(gradient)) for name, gradient in self.gradients.items()]


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def hook_bytes(hook: str, shapes: Sequence[Sequence[Shape]]) -> float:
    """Bytes that the kernels of a step read and write at least, on one rank."""
    parameters = [shape for bucket_shapes in shapes for shape in bucket_shapes]
    numel, fp32 = sum(map(prod, parameters)), torch.float32
    if (wire := HOOKS[hook].wire) is not None:
        return kernels.flatten_bytes(numel, fp32, wire) + kernels.unflatten_bytes(numel, wire, fp32)
    if hook in kernels.WIRE_FORMATS:
        formats = WirePolicy(wire=hook).wire_formats([torch.empty(shape, device="meta") for shape in parameters])
        return sum(_quantized_bytes(prod(shape), format) for shape, format in zip(parameters, formats, strict=True))
    policy = LowRankPolicy(rank=int(hook.removeprefix("powersgd-r")))
    found = [policy.matrix_shape("", torch.empty(shape, device="meta")) for shape in parameters]
    matrices = [matrix for matrix in found if matrix is not None]
    compressed = sum(m.matrices * m.rows * m.columns for m in matrices)
    return (
        kernels.lowrank_bytes(compressed, fp32)
        + kernels.orthogonalize_bytes(sum(m.matrices * m.rank * m.rows for m in matrices), fp32, fp32)
        + kernels.renew_bytes(sum(m.matrices * m.rank * m.columns for m in matrices), fp32, fp32)
        + kernels.flatten_bytes(numel - compressed, fp32, fp32)
        + kernels.unflatten_bytes(numel - compressed, fp32, fp32)
    )


def _quantized_bytes(numel: int, format: kernels.WireFormat) -> float:
    fp32 = torch.float32
    return (
        kernels.quantize_bytes(numel, fp32, format, BLOCK_SIZE, fp32)
        + kernels.reduce_quantized_bytes(numel, 1, format, BLOCK_SIZE, fp32)
        + kernels.dequantize_bytes(numel, format, BLOCK_SIZE, fp32)
        + kernels.commit_errors_bytes(2 * numel, fp32)  # errors of both shots
    )


def _buckets(hook: str, model: str, device: torch.device) -> list[list[Shape]]:
    """The model's buckets, of the size that gradwire's DDP uses for the hook; PyTorch's hook gets the same."""
    registration = HOOKS[hook].make(default_group(), FIRST_COMPRESSED)
    state = None if registration is None else registration[0]
    return buckets_of(model, getattr(state, "preferred_bucket_cap_mb", None) or BUCKET_MIB, device)


def _warm(step: HookStep) -> HookStep:
    for _ in range(FIRST_COMPRESSED + WARM_UP_STEPS + 1):
        step()
    return step


def _ours(hook: str, shapes: Sequence[Sequence[Shape]], device: torch.device, cuda_graphs: bool = False) -> HookStep:
    """gradwire's hook after its first steps and a check of its result; with ``cuda_graphs`` after the captures."""
    registration = HOOKS[hook].make(default_group(), FIRST_COMPRESSED)
    assert registration is not None
    if cuda_graphs:
        registration[0].cuda_graphs = True
    step = _warm(HookStep(registration, shapes, device, is_flat=False))
    step.check(HOOKS[hook].wire)
    return step


def _theirs(hook: str, shapes: Sequence[Sequence[Shape]], device: torch.device) -> dict[str, HookStep]:
    """PyTorch's hook, by its name in the rows, if it runs here."""
    if not _pytorch_runs(hook):
        return {}
    entry = HOOKS[hook].pytorch
    assert entry is not None
    registration = entry.make(default_group(), FIRST_COMPRESSED)
    assert registration is not None
    if needs_one_bucket(hook, device):
        shapes = [[shape for bucket_shapes in shapes for shape in bucket_shapes]]
    return {PYTORCH if entry.is_same else CLOSEST: _warm(HookStep(registration, shapes, device, is_flat=True))}


def _pytorch_runs(hook: str) -> bool:
    """Whether PyTorch's hook runs here: its PowerSGD needs numpy."""
    return not hook.startswith("powersgd") or find_spec("numpy") is not None


@torch.no_grad()
def hook_step(hook: str, model: str, device: torch.device) -> list[Row]:
    """Check gradwire's hook on the gradients of a model, then time it and PyTorch's, interleaved."""
    shapes = _buckets(hook, model, device)
    steps = {GRADWIRE: _ours(hook, shapes, device), **_theirs(hook, shapes, device)}
    if hook.startswith("powersgd"):
        steps[GRAPHS] = _ours(hook, shapes, device, cuda_graphs=True)
    timings = {name: [] for name in steps}  # type: ignore[var-annotated]
    for turn in range(ROUNDS):
        for name in in_turn(list(steps), turn):
            timings[name].append(timed(steps[name], device))
    rows = [row(name, timings[name], **calls_of(step, device)) for name, step in steps.items()]
    rows[0]["nbytes"] = hook_bytes(hook, shapes)
    return rows


@torch.no_grad()
def captured_step(hook: str, model: str, device: torch.device) -> list[Row]:
    """A step of gradwire's hook, captured in a CUDA graph with its collectives, compared with an eager one."""
    shapes = _buckets(hook, model, device)
    step = _ours(hook, shapes, device)
    eager = [timed(step, device) for _ in range(ROUNDS)]
    replays = timed_replays(step, device, ROUNDS)
    nbytes = hook_bytes(hook, shapes)
    return [row("eager", eager, nbytes=nbytes), row("captured", replays, nbytes=nbytes)]


def linked_step(hook: str, rate: str, device: torch.device) -> list[Row]:
    """Interleaved training steps of a small model in both DDPs, on an emulated link between `HOSTS` hosts."""
    names = [PYTORCH, GRADWIRE] if _pytorch_runs(hook) else [GRADWIRE]
    made = [Implementation(hook, n, device, n == PYTORCH and needs_one_bucket(hook, device)) for n in names]
    prepare(made, device)
    first = WARM_UP + 1
    with emulated_link(Rate.parse(rate), HOSTS, device):
        for step in range(first, first + (ROUNDS if device.type == "cuda" else 1)):
            for implementation in in_turn(made, step):
                implementation.seconds.append(implementation.step(make_batch(step, 0, device)))
    return [{"implementation": each.name, "step_ms": percentiles_ms(each.seconds)} for each in made]


HOOK_BENCHES: dict[str, Callable[[torch.device], list[Row]]] = {
    **{f"hook {hook}, {model}": partial(hook_step, hook, model) for model in MODELS for hook in BENCHED},
    **{f"graph of hook {hook}, {MODELS[0]}": partial(captured_step, hook, MODELS[0]) for hook in CAPTURED},
    **{f"hook {hook}, link of {rate}": partial(linked_step, hook, rate) for rate in RATES for hook in LINKED},
}
