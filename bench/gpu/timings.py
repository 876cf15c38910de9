"""Cases of the GPU lane's stage *bench*: device, graph replay and host time, and launches, compared with PyTorch's.

A case checks gradwire's result, then times gradwire and PyTorch, interleaved. Kernels run over buckets that no cache
holds. A row's ``nbytes`` are those that gradwire's kernels read and write at least; divided by the bandwidth of a copy
they give the byte floor.

Steps of a hook, `gradwire.bench.hook_step`, run on one rank. gradwire's hook gets lists of gradients, PyTorch's flat
buffers, as with ``gradient_as_bucket_view=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch

from gradwire import kernels
from gradwire.bench.emulated import emulated_link
from gradwire.bench.hook_step import HookStep
from gradwire.bench.implementations import (
    GRADWIRE,
    PYTORCH,
    WARM_UP,
    Implementation,
    make_batch,
    needs_one_bucket,
    prepare,
)
from gradwire.bench.kernel_bytes import (
    copy_bytes,
    dequantize_bytes,
    lowrank_bytes,
    quantize_bytes,
    reduce_quantized_bytes,
    renew_bytes,
)
from gradwire.bench.kernel_cases import CASES, COMPILED, check, copy_bandwidth, time_cases
from gradwire.bench.namespaces import Rate
from gradwire.bench.record import percentiles_ms
from gradwire.bench.shapes import SHAPES, Shape, buckets, rotation
from gradwire.bench.timing import Timing, driver_calls, time_in_turn, timed, timed_replays, turns
from gradwire.comm.torch_internals import default_group
from gradwire.exchange.plans import WARM_UP_STEPS
from gradwire.hooks.powerSGD_hook import powerSGD_hook
from gradwire.hooks.quantization_hooks import quantization_hook
from gradwire.planner.hook_registry import FIRST_COMPRESSED, HOOKS, bucket_cap_mb

Row = dict[str, Any]

MODEL = "gpt2-124m"
SIZES_MIB = (25, 100, 1024)  # at which a bucket is full: DDP's default, a larger one, and the whole model
ROUNDS = 10
# A rehearsal takes a model's first parameters, each dimension divided by 4, in buckets of a sixteenth of the size.
REHEARSED_PARAMETERS, REHEARSED_DIVISOR = 24, 4


def buckets_of(model: str, mib: int, device: torch.device) -> list[list[Shape]]:
    """The shapes of a model's buckets that are full at ``mib``; those of a smaller model on a CPU."""
    shapes = list(SHAPES[model]())
    if device.type == "cuda":
        return buckets(lambda: iter(shapes), mib << 20)
    small = [tuple(-(-n // REHEARSED_DIVISOR) for n in shape) for shape in shapes[:REHEARSED_PARAMETERS]]
    return buckets(lambda: iter(small), (mib << 20) // REHEARSED_DIVISOR**2)


def row(implementation: str, timings: Sequence[Timing], **others: Any) -> Row:
    """The row of an implementation: percentiles of its timings in milliseconds, and ``others``."""
    host = [timing.host_seconds for timing in timings if timing.host_seconds is not None]
    return {
        "implementation": implementation,
        "device_ms": percentiles_ms([timing.seconds for timing in timings]),
        "host_ms": percentiles_ms(host) if host else None,
        "includes_host": any(timing.includes_host for timing in timings),
        **others,
    }


def calls_of(work: Callable[[], object], device: torch.device) -> Row:
    calls = driver_calls(work, device)
    return {} if calls is None else {"launches": calls.launches, "host_waits": calls.synchronizations}


def copy(device: torch.device) -> list[Row]:
    """The bandwidth of a copy, the measure of all byte floors."""
    numel = 1 << 26 if device.type == "cuda" else 1 << 16
    return [{"implementation": "copy_", "numel": numel, "gb_per_s": round(copy_bandwidth(device, numel), 1)}]


def kernel(name: str, mib: int, device: torch.device) -> list[Row]:
    """Check and time a kernel on buckets of `MODEL`."""
    shapes = rotation(buckets_of(MODEL, mib, device), mib)
    with torch.no_grad():
        cases = [CASES[name](bucket_shapes, device) for bucket_shapes in shapes]
        check(cases[0], MODEL)
        for case in cases:
            case.implementations.pop(COMPILED, None)  # it takes tens of seconds
        nbytes = mean(case.nbytes for case in cases)
        rows = []
        for implementation, timings in time_cases(cases, ROUNDS, device).items():
            calls = calls_of(cases[0].implementations[implementation], device)
            rows.append(row(implementation, timings, nbytes=nbytes, **calls))
        replays = timed_replays(lambda: [case.implementations[GRADWIRE]() for case in cases], device, ROUNDS)
    rows[0]["graph_ms"] = percentiles_ms([replay.seconds / len(shapes) for replay in replays])
    return rows


MODELS = (MODEL, "bert-base", "resnet50", "llama-1b")
# Choices that keep the stage short; any other hook of the registry can be added.
TIMED = ("fp16", "bf16", "scaled-fp16", "powersgd-r4", "powersgd-r32", "int8", "int4")
CAPTURED = ("fp16", "scaled-fp16", "powersgd-r4", "int8", "int4")
LINKED = ("fp16", "int4", "powersgd-r4")
RATES, HOSTS = ("10gbit", "100gbit"), 2
CLOSEST = "PyTorch's closest"  # where PyTorch has no such hook


def hook_bytes(hook: str, shapes: Sequence[Sequence[Shape]]) -> float | None:
    """Bytes that the kernels of a step read and write at least, on one rank; None where they are not counted."""
    layouts = [torch.empty(shape, device="meta") for bucket_shapes in shapes for shape in bucket_shapes]
    numel, fp32 = sum(layout.numel() for layout in layouts), torch.float32
    registration: tuple[Any, Any] = HOOKS[hook].make(None, FIRST_COMPRESSED) or (None, None)
    state, function = registration
    if (wire := HOOKS[hook].wire) is not None:
        return 2 * copy_bytes(numel, fp32, wire)  # flatten, unflatten
    if function is quantization_hook:
        formats = state.options.wire_formats(layouts)
        errors = state.options.error_dtype if state.options.keeps_errors else None
        return sum(_quantized_bytes(t.numel(), format, errors) for t, format in zip(layouts, formats, strict=True))
    if function is powerSGD_hook and not state.options.alternating:
        sent = state.options.factor_dtype or fp32
        matrices = [m for m in state.options.policy.matrix_shapes(layouts) if m is not None]
        compressed = sum(m.matrices * m.rows * m.columns for m in matrices)
        return (
            lowrank_bytes(compressed, fp32)
            + copy_bytes(sum(m.matrices * m.rank * m.rows for m in matrices), sent, fp32)  # orthogonalize
            + renew_bytes(sum(m.matrices * m.rank * m.columns for m in matrices), sent, fp32)
            + 2 * copy_bytes(numel - compressed, fp32, fp32)
        )
    return None


def _quantized_bytes(numel: int, format: kernels.WireFormat, errors: torch.dtype | None) -> float:
    fp32 = torch.float32
    return (
        quantize_bytes(numel, fp32, format, errors)
        + reduce_quantized_bytes(numel, 1, format, errors)
        + dequantize_bytes(numel, format, fp32)
        + (0 if errors is None else copy_bytes(2 * numel, errors, errors))  # errors of both shots
    )


def _buckets(hook: str, model: str, device: torch.device) -> list[list[Shape]]:
    """The model's buckets, of the size that gradwire's DDP uses for the hook; PyTorch's hook gets the same."""
    return buckets_of(model, bucket_cap_mb(hook), device)


def _warm(step: HookStep) -> HookStep:
    for _ in range(FIRST_COMPRESSED + WARM_UP_STEPS + 1):
        step()
    return step


def _ours(hook: str, shapes: Sequence[Sequence[Shape]], device: torch.device) -> HookStep:
    """gradwire's hook after its first steps, whose last is recorded, and a check of its result."""
    registration = HOOKS[hook].make(default_group(), FIRST_COMPRESSED)
    assert registration is not None
    step = _warm(HookStep(registration, shapes, device, is_flat=False))
    step.check(HOOKS[hook].wire)
    return step


def _theirs(hook: str, shapes: Sequence[Sequence[Shape]], device: torch.device) -> dict[str, HookStep]:
    """PyTorch's hook, by its name in the rows, if it runs here."""
    entry = HOOKS[hook].pytorch
    if not entry.is_available():
        return {}
    registration = entry.make(default_group(), FIRST_COMPRESSED)
    assert registration is not None
    if needs_one_bucket(HOOKS[hook], PYTORCH, device):
        shapes = [[shape for bucket_shapes in shapes for shape in bucket_shapes]]
    return {PYTORCH if entry.is_same else CLOSEST: _warm(HookStep(registration, shapes, device, is_flat=True))}


@torch.no_grad()
def hook_step(hook: str, model: str, device: torch.device) -> list[Row]:
    """Check gradwire's hook on the gradients of a model, then time it and PyTorch's, interleaved."""
    shapes = _buckets(hook, model, device)
    steps = {GRADWIRE: _ours(hook, shapes, device), **_theirs(hook, shapes, device)}
    timings: dict[str, list[Timing]] = {name: [] for name in steps}
    for _, name in turns(range(ROUNDS), list(steps)):
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
    names = [PYTORCH, GRADWIRE] if HOOKS[hook].pytorch.is_available() else [GRADWIRE]
    made = [Implementation(hook, name, device) for name in names]
    prepare(made, device)
    rounds = ROUNDS if device.type == "cuda" else 1
    batch_of = partial(make_batch, rank=0, device=device)
    with emulated_link(Rate.parse(rate), HOSTS, device):
        time_in_turn(made, range(WARM_UP + 1, WARM_UP + 1 + rounds), None, batch_of)
    return [{"implementation": each.name, "step_ms": percentiles_ms(each.seconds)} for each in made]


KERNEL_TIMINGS: dict[str, Callable[[torch.device], list[Row]]] = {
    "copy": copy,
    **{
        f"{name}, {MODEL}, {f'{mib} MiB' if mib < SIZES_MIB[-1] else 'whole model'}": partial(kernel, name, mib)
        for mib in SIZES_MIB
        for name in CASES
    },
}
HOOK_TIMINGS: dict[str, Callable[[torch.device], list[Row]]] = {
    **{f"hook {hook}, {model}": partial(hook_step, hook, model) for model in MODELS for hook in TIMED},
    **{f"graph of hook {hook}, {MODELS[0]}": partial(captured_step, hook, MODELS[0]) for hook in CAPTURED},
    **{f"hook {hook}, link of {rate}": partial(linked_step, hook, rate) for rate in RATES for hook in LINKED},
}
