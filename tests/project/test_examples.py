"""The programs in examples/ run as their docstrings say, and without arguments."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.example_programs import EXAMPLES, NAMES, PACKAGES, commands_of, output_of, outputs_of


def assert_learns(output, count=3, factor=0.5):
    """So many losses were printed, and the last is below this part of the first."""
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.e-]+)", output, re.MULTILINE)]
    assert len(losses) == count
    assert losses[-1] < factor * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_commands_and_explains_every_option(name, monkeypatch, capsys):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="needs the extra 'integrations': make test-integrations")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        pytest.fail(f"examples/{name}.py --help ran the program; its `__main__` has to parse the arguments first")
    except SystemExit as end:
        assert end.code == 0
    shown = capsys.readouterr().out
    for text in (*commands_of(name), *re.findall(r"\.py.* (--[\w-]+)", " ".join(commands_of(name)))):
        assert text in shown, f"examples/{name}.py --help does not show {text!r}"


def test_every_example_has_a_test_that_runs_its_commands():
    tested = {*re.findall(r'outputs_of\("(\w+)"', Path(__file__).read_text()), *PACKAGES}
    for name in NAMES:
        assert commands_of(name), f"the docstring of examples/{name}.py has no line with a command that runs the file"
        assert name in tested, f'no test in this file runs examples/{name}.py with outputs_of("{name}", tmp_path)'
    assert tested <= set(NAMES), "a test runs an example that does not exist"


@pytest.mark.slow
def test_train_ddp_on_two_ranks_learns_with_fewer_elements_sent(tmp_path):
    (output,) = outputs_of("train_ddp", tmp_path)
    assert_learns(output)
    (rate,) = re.findall(r"elements instead of \S+: (\S+) times fewer", output)
    assert float(rate) > 5


@pytest.mark.slow
def test_train_hsdp_on_two_replicas_of_two_shards_learns_with_fewer_bytes(tmp_path):
    (output,) = outputs_of("train_hsdp", tmp_path)
    assert "quantization_hook compresses the all-reduce of 2 parameter groups between 2 replicas" in output
    assert_learns(output)
    ((sent, whole),) = re.findall(r"(\S+) bytes per step between replicas instead of (\S+)", output)
    assert 6 * int(sent.replace(",", "")) < int(whole.replace(",", ""))


@pytest.mark.slow
def test_train_fsdp2_on_two_ranks_learns(tmp_path):
    (output,) = outputs_of("train_fsdp2", tmp_path)
    assert "2 parameter groups are reduce-scattered in bf16" in output
    assert_learns(output)


@pytest.mark.slow
def test_topk_hook_on_two_ranks_learns(tmp_path):
    (output,) = outputs_of("topk_hook", tmp_path)
    assert_learns(output, count=4, factor=1)


@pytest.mark.slow
def test_simple_hooks_on_two_ranks_learn(tmp_path):
    for output in (*outputs_of("powersgd_simple", tmp_path), *outputs_of("quantization_simple", tmp_path)):
        assert_learns(output)


def test_compress_tensors_error_feedback_reduces_the_error_of_the_mean(tmp_path):
    (output,) = outputs_of("compress_tensors", tmp_path)
    errors = [float(error) for error in re.findall(r"relative errors of the mean: (\S+),", output)]
    assert len(errors) == 3
    assert errors[-1] < 0.5 * errors[0]
    ((sent, whole),) = re.findall(r"sent (\S+) bytes per step instead of (\S+)", output)
    assert 10 * int(sent.replace(",", "")) < int(whole.replace(",", ""))


@pytest.mark.slow
def test_train_int4_saved_on_two_ranks_resumes_on_three(tmp_path):
    outputs = outputs_of("train_int4", tmp_path)
    found = re.findall(r"^(\d) ranks, step (\d+): loss (\S+)$", "".join(outputs), re.MULTILINE)
    losses = {(int(ranks), int(step)): float(loss) for ranks, step, loss in found}
    assert list(losses) == [(2, 50), (2, 100), (2, 150), (3, 200), (3, 250), (3, 300)]
    assert losses[3, 200] < losses[2, 100]
    assert losses[3, 300] < 0.5 * losses[2, 50]


@pytest.mark.slow
def test_train_elastic_resumes_after_a_failure_of_one_rank(tmp_path):
    (output,) = outputs_of("train_elastic", tmp_path)
    assert re.findall(r"^attempt (\d): 2 ranks, start at step (\d+)$", output, re.MULTILINE) == [
        ("0", "0"),
        ("1", "50"),
    ]
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+),", output, re.MULTILINE)}
    assert list(losses) == [50, 100, 150]
    assert losses[150] < losses[50]
    without_arguments = output_of("torchrun --nproc-per-node 2 examples/train_elastic.py", tmp_path)
    assert without_arguments == "attempt 0: 2 ranks, start at step 150\n"


@pytest.mark.slow
def test_train_mixed_precision_learns_with_a_compiled_model(tmp_path):
    (output,) = outputs_of("train_mixed_precision", tmp_path)
    assert_learns(output, factor=1)


@pytest.mark.slow
def test_weighted_mean_on_two_ranks_learns_with_and_without_a_hook(tmp_path):
    for output in outputs_of("weighted_mean", tmp_path):
        assert_learns(output)


@pytest.mark.slow
def test_local_sgd_on_two_nodes_learns_and_averages(tmp_path):
    (output,) = outputs_of("local_sgd", tmp_path)
    assert_learns(output, count=4)
    distances = [float(distance) for distance in re.findall(r"mean of the nodes (\S+)", output)]
    assert distances[0] == distances[3] == 0 < min(distances[1:3])
