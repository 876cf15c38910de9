"""`gradwire bench kernels`: shape tables, arithmetic, checks, tables, and runs of the command."""

from math import prod

import pytest
import torch

from gradwire.bench import kernel_cases
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_bytes import (
    copy_bytes,
    dequantize_bytes,
    lowrank_bytes,
    quantize_bytes,
    reduce_quantized_bytes,
    sum_quantized_bytes,
)
from gradwire.bench.kernel_cases import CASES, KernelCase
from gradwire.bench.kernels import run
from gradwire.bench.record import Metric
from gradwire.bench.shapes import SHAPES, buckets
from gradwire.bench.tables import find
from gradwire.bench.timing import Timing
from gradwire.kernels import WIRE_FORMATS, lowrank

CPU = torch.device("cpu")
SMALL = [[(192, 192), (40,)], [(256, 32, 3, 3), (7,), (1, 50, 20)]]


def test_shape_tables_add_up_to_published_numbers_of_parameters():
    assert {model: sum(map(prod, shapes())) for model, shapes in SHAPES.items()} == {
        "resnet50": 25_557_032,
        "vit-b16": 86_567_656,
        "bert-base": 109_482_240,
        "gpt2-124m": 124_439_808,
        "llama-1b": 973_146_112,
    }


@pytest.mark.parametrize("mib", [1, 25])
def test_buckets_equal_those_of_ddp(mib):
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES["resnet50"]()][::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, [mib << 20])
    ours = buckets(SHAPES["resnet50"], mib << 20)
    assert [[tuple(parameters[i].shape) for i in bucket_indices] for bucket_indices in theirs] == ours


class Clock:
    """Stands in for `timed`: a call takes as long as the implementation returns."""

    def __init__(self):
        self.ran = []

    def __call__(self, work, device):
        seconds = work()
        self.ran.append(seconds)
        return Timing(seconds, None)


def test_time_is_mean_over_rotation_and_bandwidth_is_of_gradwires_bytes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(kernel_cases, "timed", clock)
    cases = [
        KernelCase("copy", n * 1e6, {GRADWIRE: lambda n=n: n * 1e-3, "other": lambda n=n: n * 2e-3}, lambda: None)
        for n in (1, 3)
    ]
    records = run(cases, "resnet50", 25, rounds=3, device=CPU)
    metrics = (Metric.TIME_MS, Metric.BANDWIDTH, Metric.VS_GRADWIRE)
    assert [find(records, metric, GRADWIRE).p50 for metric in metrics] == [2.0, 1.0, 1.0]
    assert [find(records, metric, "other").p50 for metric in metrics] == [4.0, 0.5, 2.0]
    our_times, other_times = [1e-3, 3e-3], [2e-3, 6e-3]
    rounds = [clock.ran[i : i + 4] for i in range(0, len(clock.ran), 4)]
    assert {tuple(ran) for ran in rounds} == {(*our_times, *other_times), (*other_times, *our_times)}, (
        "each goes first at times"
    )


@pytest.mark.parametrize("name", CASES)
def test_case_passes_its_check_and_every_implementation_runs(name):
    torch.manual_seed(0)
    case, other = (CASES[name](shapes, CPU) for shapes in SMALL)
    assert next(iter(case.implementations)) == GRADWIRE
    with torch.no_grad():
        case.implementations[GRADWIRE]()
        case.check()
        for implementation in other.implementations.values():
            implementation()


def test_kernel_that_writes_nothing_is_refused():
    for make in CASES.values():
        torch.manual_seed(0)
        case = make(SMALL[0], CPU)
        lazy = KernelCase(case.kernel, case.nbytes, case.implementations | {GRADWIRE: lambda: None}, case.check)
        with pytest.raises(RuntimeError, match="is wrong; nothing is timed"):
            run([lazy], "resnet50", 25, rounds=1, device=CPU)


def test_byte_counts_agree_with_docstrings():
    fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    assert copy_bytes(10, fp32, bf16) == 60
    assert [lowrank_bytes(1, dtype) for dtype in (fp32, bf16, fp16, fp64)] == [28, 24, 24, 56]
    assert "= 28 N in fp32" in lowrank.__doc__
    assert "= 24 N with 16-bit gradients" in lowrank.__doc__
    int4 = WIRE_FORMATS["int4"]
    assert quantize_bytes(64, fp32, int4, fp32) == 64 * (4 + 8) + 32 + 2
    assert quantize_bytes(64, bf16, int4, None) == 64 * 2 + 34
    assert reduce_quantized_bytes(64, 4, int4, bf16) == 64 * 4 + 5 * 34
    assert sum_quantized_bytes(64, 4, int4) == 64 * 4 + 4 * 34
    assert dequantize_bytes(64, int4, fp16) == 64 * 2 + 34
