"""Cases of the lane's stage *bench* for kernels: time of the device, of a graph's replay and of the host, and launches.

A case checks gradwire's result, then times gradwire and PyTorch, interleaved, over buckets that no cache holds. A row's
``nbytes`` are those that gradwire's kernels read and write at least; divided by the bandwidth of a copy they give the
byte floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import check, copy_bandwidth, time_cases
from gradwire.bench.kernel_cases import CASES, COMPILED
from gradwire.bench.record import percentiles_ms
from gradwire.bench.shapes import SHAPES, Shape, buckets, rotation
from gradwire.bench.timing import Timing, driver_calls, timed_replays

Row = dict[str, Any]

MODEL = "gpt2-124m"
SIZES_MIB = (25, 100, 1024)  # at which a bucket is full: DDP's default, a larger one, and the whole model
ROUNDS = 7
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


KERNEL_BENCHES: dict[str, Callable[[torch.device], list[Row]]] = {
    "copy": copy,
    **{
        f"{name}, {MODEL}, {f'{mib} MiB' if mib < SIZES_MIB[-1] else 'whole model'}": partial(kernel, name, mib)
        for mib in SIZES_MIB
        for name in CASES
    },
}
