"""`gradwire bench kernels`: shape tables, arithmetic, checks, the model, tables, and runs of the command."""

from math import prod
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench import kernel_cases
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_cases import CASES, COMPARED, KernelCase
from gradwire.bench.kernels import COPY, run, tables
from gradwire.bench.record import Measured, Metric, load, records_of
from gradwire.bench.shapes import SHAPES, buckets
from gradwire.bench.tables import find
from gradwire.bench.timing import Timing
from tools import compiled, kernel_model
from tools.compiled import TARGET_NAMES

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(compiled.obstacle() is not None, reason=f"{compiled.obstacle()}")
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

    def __init__(self, host_seconds=None):
        self.host_seconds = host_seconds
        self.ran = []

    def __call__(self, work, device):
        seconds = work()
        self.ran.append(seconds)
        return Timing(seconds, self.host_seconds)


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


def test_one_slow_round_changes_no_bandwidth(monkeypatch):
    monkeypatch.setattr(kernel_cases, "timed", Clock())
    # A call for the check, two rounds of warm-up, and three that count.
    times = {GRADWIRE: iter([0.5, 0.5, 0.5, 1e-3, 0.5, 1e-3]), "other": iter([0.5, 0.5, 2e-3, 2e-3, 0.5])}
    calls = {name: lambda name=name: next(times[name]) for name in times}
    records = run([KernelCase("copy", 1_000_000, calls, lambda: None)], "resnet50", 25, rounds=3, device=CPU)
    assert [find(records, Metric.BANDWIDTH, name).p50 for name in times] == [1.0, 0.5]
    assert find(records, Metric.VS_GRADWIRE, "other").p50 == 2.0


def test_bandwidth_of_a_copy_is_a_median_without_the_first_of_each_pair(monkeypatch):
    """A copy of 1000 fp32 elements reads and writes 8000 bytes."""
    seconds = iter([1.0] * 4 + [0.5] * 7 + [1e-6] * 9)
    monkeypatch.setattr(kernel_cases, "timed", lambda *_: Timing(next(seconds)))
    assert kernel_cases.copy_bandwidth(CPU, 1000) == pytest.approx(8.0)


def test_host_time_is_recorded_on_a_gpu_only(monkeypatch):
    case = KernelCase("copy", 1, {GRADWIRE: lambda: 1e-3}, lambda: None)
    for host_seconds, recorded in ((None, None), (5e-6, 0.005)):
        monkeypatch.setattr(kernel_cases, "timed", Clock(host_seconds))
        found = find(run([case], "resnet50", 25, rounds=3, device=CPU), Metric.HOST_MS)
        assert (found and found.p50) == recorded


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


def test_table_compares_implementations(facts):
    case = {"kernel": "flatten to float16", "model": "gpt2-124m", "bucket_mib": 1056}
    others = ("DDP and hook of PyTorch", "cat, to, div", "torch.compile", "foreach copy")
    records = [
        *records_of("kernels", {"kernel": "copy"}, COPY, 1, {Metric.BANDWIDTH: 11.2}),
        *records_of("kernels", case, GRADWIRE, 1, {Metric.TIME_MS: 1013.5, Metric.BANDWIDTH: 9.9}),
        *(record for other in others for record in records_of("kernels", case, other, 1, {Metric.TIME_MS: 1928.2})),
    ]
    (only,) = tables(Measured({"rounds": 7}, records).with_provenance(facts))
    assert only.headers == ["bucket", GRADWIRE, *others, Metric.BANDWIDTH, "of a copy"]
    assert only.rows == [["gpt2-124m, 1056 MiB", "1,014", *["1,928"] * 4, "9.9", "88 %"]]


class Counter:
    """Stands in for `ProgramCounter`: instructions of launches, by their names; each has 25 programs, 2 at a time."""

    def __init__(self, **counts):
        self.counts = counts

    def __call__(self, launch):
        return kernel_model.Programs(self.counts[launch], 25, 2)


GPU = kernel_model.Gpu("a GPU", "sm_90", bandwidth=1e9, source="made up", multiprocessors=10, clock_hz=1e6)


@pytest.mark.parametrize(
    "counts, for_instructions, expected",
    [
        ({"a": 4000.0, "b": 0.0}, 100.0, 4 + 1000),  # limited by bytes
        ({"a": 40_000.0, "b": 60_000.0}, 2500.0, 4 + 2500),  # limited by instructions
        ({"a": None, "b": 4000.0}, 100.0, 4 + 1000),
    ],
)
def test_modeled_time_is_launches_plus_slower_of_bytes_and_instructions(counts, for_instructions, expected):
    numbers = kernel_model.modeled([1_000_000], [["a", "b"]], GPU, Counter(**counts))
    assert numbers == {
        kernel_model.LAUNCHES_US: 4.0,
        kernel_model.BYTES_US: 1000.0,
        kernel_model.INSTRUCTIONS_US: for_instructions,
        kernel_model.MODELED_US: expected,
        kernel_model.WAVES: 2 * 25 / 20,
        kernel_model.WHOLE_WAVES_US: 4 + (expected - 4) * 4 / 2.5,
        Metric.LAUNCHES: 2,
        kernel_model.UNCOUNTED: list(counts.values()).count(None),
    }


def test_modeled_time_is_mean_over_buckets():
    numbers = kernel_model.modeled([1_000_000, 3_000_000], [["a"], ["a", "a"]], GPU, Counter(a=0.0))
    assert (numbers[Metric.LAUNCHES], numbers[kernel_model.MODELED_US]) == (1.5, 3 + 2000)


@needs_compiler
@pytest.mark.parametrize(
    "registers, threads, shared, target, expected",
    [
        (64, 256, 0, "sm_90", 4),  # by registers
        (57, 128, 0, "sm_90", 8),  # a thread's registers are rounded up to a multiple of 8
        (16, 256, 0, "sm_90", 8),  # by warps
        (16, 32, 0, "sm_90", 32),  # by programs
        (32, 128, 40 << 10, "sm_80", 4),  # by shared memory, of which each program takes 1 KiB more
        (32, 128, 40 << 10, "sm_100", 5),
    ],
)
def test_resident_programs_follow_from_the_scarcest_resource(registers, threads, shared, target, expected):
    from tools import assembly

    binary = assembly.Binary(registers, 0, shared, 0, 0, 0)
    compiled = SimpleNamespace(threads=threads, target=target)
    assert assembly.resident_programs(binary, compiled) == expected


def test_gpus_copy_between_10_and_30_bytes_per_clock_and_multiprocessor():
    for gpu in kernel_model.GPUS.values():
        assert 10 < gpu.bandwidth / gpu.multiprocessors / gpu.clock_hz < 30
        assert gpu.target in TARGET_NAMES


@needs_compiler
@pytest.mark.parametrize("name", COMPARED)
def test_launches_of_a_case_are_recorded_without_memory(name):
    cases, launches = kernel_model.recorded_cases(CASES[name], SMALL)
    assert len(launches) == len(SMALL) == len(cases)
    assert all(launches)


@needs_compiler
def test_instructions_grow_with_the_grid_and_a_variant_is_compiled_once(monkeypatch):
    from tools import ahead_of_time

    compiled, compile_launch = [], ahead_of_time.compile_launch
    monkeypatch.setattr(ahead_of_time, "compile_launch", lambda *of: compiled.append(of) or compile_launch(*of))
    _, ((launch,),) = kernel_model.recorded_cases(CASES[COMPARED[0]], [[(4096,), (8192,)]])
    counter = kernel_model.ProgramCounter("sm_90")
    three, six = counter(launch), counter(launch._replace(grid=(6,)))
    assert six == (2 * three.instructions, 6, three.resident)
    assert three.instructions > 3 * 4096 / kernel_model.WARP
    assert len(compiled) == 1


@needs_compiler
def test_command_writes_modeled_times_and_labels_them(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    monkeypatch.setattr(kernel_model, "COMPARED", COMPARED[:2])
    path = tmp_path / "model.jsonl"
    options = ["--models", "gpt2-124m", "--sizes", "1", "--output", str(path)]
    done = CliRunner().invoke(kernel_model.app, ["h200", *options])
    assert done.exit_code == 0, done.output
    records = load(path)
    assert {record.implementation for record in records} == {"model of h200"}
    assert all("modeled" in record.metric or "launches" in record.metric for record in records)
    assert records[0].provenance["settings"]["modeled_gpu"] == "h200"
    assert done.output.count("modeled, not measured") == 3  # two titles and a note


@pytest.mark.parametrize("arguments", [["v100"], ["h200", "--rounds", "3"]])
def test_unknown_gpu_or_option_without_effect_of_the_model_is_refused(arguments):
    done = CliRunner().invoke(kernel_model.app, arguments)
    assert done.exit_code == 2
    assert arguments[-2:][0] in done.output
