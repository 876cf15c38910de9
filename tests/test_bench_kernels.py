"""`gradwire bench kernels`: shape tables, arithmetic, checks, tables, and a run of the command."""

from math import prod

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench import kernel_timing, shapes
from gradwire.bench.commands import app
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import Case
from gradwire.bench.kernel_cases import MAKERS
from gradwire.bench.kernels import COPY, run, tables
from gradwire.bench.record import BANDWIDTH, HOST_MS, TIME_MS, VS_GRADWIRE, Measured, Record, load
from gradwire.bench.shapes import PARAMETERS, SHAPES, buckets
from gradwire.bench.tables import find
from gradwire.bench.timing import Timing

CPU = torch.device("cpu")
SMALL = [[(40, 30), (40,)], [(64, 3, 3, 3), (7,), (1, 50, 20)]]


@pytest.mark.parametrize("model", SHAPES)
def test_shape_table_adds_up_to_published_number_of_parameters(model):
    assert sum(map(prod, SHAPES[model]())) == PARAMETERS[model]


def test_transformer_layer_has_pytorchs_shapes():
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072)
    table = list(shapes._encoder_layer(768))
    assert sorted(table) == sorted(tuple(p.shape) for p in layer.parameters())


@pytest.mark.parametrize("mib", [1, 25])
def test_buckets_equal_those_of_ddp(mib):
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES["resnet50"]()][::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, [mib << 20])
    ours = buckets(SHAPES["resnet50"], mib << 20)
    assert [[tuple(parameters[i].shape) for i in of_bucket] for of_bucket in theirs] == ours


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
    monkeypatch.setattr(kernel_timing, "timed", clock)
    calls = {GRADWIRE: lambda i: (1e-3, 3e-3)[i], "other": lambda i: (2e-3, 6e-3)[i]}
    case = Case("copy", [1_000_000, 3_000_000], calls, lambda: None)
    records = run(case, "resnet50", 25, rounds=3, device=CPU)
    metrics = (TIME_MS, BANDWIDTH, VS_GRADWIRE)
    assert [find(records, metric, GRADWIRE).p50 for metric in metrics] == [2.0, 1.0, 1.0]
    assert [find(records, metric, "other").p50 for metric in metrics] == [4.0, 0.5, 2.0]
    of_ours, of_other = [1e-3, 3e-3], [2e-3, 6e-3]
    rounds = [clock.ran[i : i + 4] for i in range(0, len(clock.ran), 4)]
    assert {tuple(ran) for ran in rounds} == {(*of_ours, *of_other), (*of_other, *of_ours)}, "each goes first at times"


def test_host_time_is_recorded_on_a_gpu_only(monkeypatch):
    case = Case("copy", [1], {GRADWIRE: lambda i: 1e-3}, lambda: None)
    for host_seconds, recorded in ((None, None), (5e-6, 0.005)):
        monkeypatch.setattr(kernel_timing, "timed", Clock(host_seconds))
        found = find(run(case, "resnet50", 25, rounds=3, device=CPU), HOST_MS)
        assert (found and found.p50) == recorded


@pytest.mark.parametrize("make", MAKERS)
def test_case_passes_its_check_and_every_implementation_runs(make):
    torch.manual_seed(0)
    case = make(SMALL, CPU)
    assert next(iter(case.implementations)) == GRADWIRE
    with torch.no_grad():
        case.implementations[GRADWIRE](0)
        case.check()
        for implementation in case.implementations.values():
            implementation(1)


@pytest.mark.parametrize("make", MAKERS)
def test_kernel_that_writes_nothing_is_refused(make):
    torch.manual_seed(0)
    case = make(SMALL, CPU)
    lazy = Case(case.kernel, case.nbytes, case.implementations | {GRADWIRE: lambda i: None}, case.check)
    with pytest.raises(RuntimeError, match="is wrong; nothing is timed"):
        run(lazy, "resnet50", 25, rounds=1, device=CPU)


def made_up(case, implementation, metric, p50):
    return Record(bench="kernels", case=case, implementation=implementation, ranks=1, metric=metric, p50=p50)


def test_table_compares_implementations_and_fits_80_columns(facts, printed):
    case = {"kernel": "flatten to float16", "model": "gpt2-124m", "bucket_mib": 1056}
    others = ("DDP and hook of PyTorch", "cat, to, div", "torch.compile", "foreach copy")
    records = [
        made_up({"kernel": "copy"}, COPY, BANDWIDTH, 11.2),
        made_up(case, GRADWIRE, TIME_MS, 1013.5),
        made_up(case, GRADWIRE, BANDWIDTH, 9.9),
        *(made_up(case, other, TIME_MS, 1928.2) for other in others),
    ]
    made = tables(Measured({"rounds": 7}, records).with_provenance(facts))
    (only,) = made
    assert only.title == "Flatten to float16: time (ms)"
    assert only.headers == ["bucket", GRADWIRE, *others, BANDWIDTH, "of a copy"]
    assert only.rows == [["gpt2-124m, 1056 MiB", "1,014", *["1,928"] * 4, "9.9", "88 %"]]
    text = printed(*made)
    assert max(map(len, text.splitlines())) <= 80
    for phrase in ("bandwidth of copy_, 11.2 GB/s", "median of 7 rounds"):
        assert phrase in " ".join(text.split())


def test_command_writes_the_results_it_prints(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    path = tmp_path / "kernels.jsonl"
    options = ["--models", "gpt2-124m", "--sizes", "1", "--rounds", "2", "--output", str(path)]
    done = CliRunner().invoke(app, ["bench", "kernels", *options])
    assert done.exit_code == 0, done.output
    records = load(path)
    assert {record.implementation for record in records} > {GRADWIRE, "foreach copy", "linalg.qr", COPY}
    assert len({record["kernel"] for record in records if record.metric == TIME_MS}) == len(MAKERS)
    assert "gpt2-124m, 1 MiB" in done.output


@pytest.mark.parametrize("option", [["--models", "vgg"], ["--sizes", "0"], ["--sizes", "1.5"]])
def test_unknown_model_or_size_is_refused(option):
    done = CliRunner().invoke(app, ["bench", "kernels", *option])
    assert done.exit_code == 2
    assert option[0] in done.output
