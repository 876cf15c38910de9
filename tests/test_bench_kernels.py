"""`gradwire bench kernels`: its shape tables, its arithmetic, its check, its tables, and a run for real."""

import json
from math import prod

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench import kernel_cost, shapes
from gradwire.bench.commands import app
from gradwire.bench.kernel_cases import MAKERS, OURS, Case
from gradwire.bench.kernel_cost import Timing, kernel_tables, run
from gradwire.bench.shapes import PARAMETERS, SHAPES, buckets

CPU = torch.device("cpu")
SMALL = [[(40, 30), (40,)], [(64, 3, 3, 3), (7,), (1, 50, 20)]]


@pytest.mark.parametrize("model", SHAPES)
def test_shape_tables_add_up_to_the_published_numbers_of_parameters(model):
    assert sum(map(prod, SHAPES[model]())) == PARAMETERS[model]


def test_transformer_layers_have_the_shapes_that_pytorch_gives_them():
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072)
    table = list(shapes._encoder_layer(768))
    assert sorted(table) == sorted(tuple(p.shape) for p in layer.parameters())


@pytest.mark.parametrize("mib", [1, 25])
def test_buckets_are_those_of_ddp(mib):
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES["resnet50"]()][::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, [mib << 20])
    ours = buckets(SHAPES["resnet50"], mib << 20)
    assert [[tuple(parameters[i].shape) for i in of_bucket] for of_bucket in theirs] == ours


class Clock:
    """Stands in for `timed`: a call takes as long as the contender says."""

    def __init__(self):
        self.ran = []

    def __call__(self, work, device):
        seconds = work()
        self.ran.append(seconds)
        return seconds


def test_a_bucket_takes_the_mean_over_the_rotation_and_ours_is_the_unit(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(kernel_cost, "timed", clock)
    contenders = {OURS: lambda i: (1e-3, 3e-3)[i], "other": lambda i: (2e-3, 6e-3)[i]}
    case = Case("copy", [1_000_000, 3_000_000], contenders, lambda: None)
    ours, other = run(case, "resnet50", 25, rounds=3, copied=2.0, device=CPU)
    assert (ours.ms["p50"], ours.gb_per_s, ours.of_copy, ours.vs_gradwire) == (2.0, 1.0, 0.5, 1.0)
    assert (other.ms["p50"], other.gb_per_s, other.vs_gradwire) == (4.0, 0.5, 2.0)
    of_ours, of_other = [1e-3, 3e-3], [2e-3, 6e-3]
    rounds = [clock.ran[i : i + 4] for i in range(0, len(clock.ran), 4)]
    assert {tuple(ran) for ran in rounds} == {(*of_ours, *of_other), (*of_other, *of_ours)}, "each goes first at times"


@pytest.mark.parametrize("make", MAKERS)
def test_every_case_passes_its_check_and_every_contender_runs(make):
    torch.manual_seed(0)
    case = make(SMALL, CPU)
    assert next(iter(case.contenders)) == OURS
    with torch.no_grad():
        case.contenders[OURS](0)
        case.check()
        for contender in case.contenders.values():
            contender(1)


@pytest.mark.parametrize("make", MAKERS)
def test_a_kernel_that_writes_nothing_is_refused(make):
    torch.manual_seed(0)
    case = make(SMALL, CPU)
    lazy = Case(case.kernel, case.nbytes, case.contenders | {OURS: lambda i: None}, case.check)
    with pytest.raises(RuntimeError, match="is wrong; nothing is timed"):
        run(lazy, "resnet50", 25, rounds=1, copied=1.0, device=CPU)


def test_tables_fit_80_columns_and_say_what_the_numbers_mean(facts, printed):
    timing = Timing(
        kernel="flatten to float16",
        model="gpt2-124m",
        bucket_mib=25,
        contender="PyTorch: DDP copies, hook casts",
        ms={"p20": 12.0, "p50": 13.5, "p80": 14.0},
        gb_per_s=9.9,
        of_copy=0.87,
        vs_gradwire=1.61,
    )
    measured = {"rounds": 7, "copy_gb_per_s": 11.2, "timings": [kernel_cost.asdict(timing)]}
    text = printed(*kernel_tables(measured, facts))
    assert max(map(len, text.splitlines())) <= 80
    for phrase in (
        "gpt2-124m, 25 MiB",
        "13.50 (12.0-14.0)",
        "87 %",
        "1.61x",
        "copy_, which moves 11.2 GB/s",
        "of 7 rounds",
    ):
        assert phrase in text


def test_a_run_writes_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    path = tmp_path / "kernels.json"
    options = ["--models", "gpt2-124m", "--sizes", "1", "--rounds", "2", "--output", str(path)]
    done = CliRunner().invoke(app, ["bench", "kernels", *options])
    assert done.exit_code == 0, done.output
    measured = json.loads(path.read_text())["measurements"]
    assert {row["contender"] for row in measured["timings"]} > {OURS, "_foreach_copy_", "linalg.qr, one by one"}
    assert len({row["kernel"] for row in measured["timings"]}) == len(MAKERS)
    assert "gpt2-124m, 1 MiB" in done.output


@pytest.mark.parametrize("option", [["--models", "vgg"], ["--sizes", "0"], ["--sizes", "1.5"]])
def test_unknown_models_and_sizes_are_refused(option):
    done = CliRunner().invoke(app, ["bench", "kernels", *option])
    assert done.exit_code == 2
    assert option[0] in done.output
