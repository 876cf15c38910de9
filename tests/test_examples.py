"""The programs in examples/ run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
HANG_LIMIT = 600  # seconds; ends what hangs, also on a busy machine


def output_of(*command):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=HANG_LIMIT, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_learns(output):
    """Three losses were printed, and the last is below half of the first."""
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_train_ddp_on_two_ranks_learns_with_fewer_elements_sent():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = output_of(*launcher, str(EXAMPLES / "train_ddp.py"))
    assert_learns(output)
    (rate,) = re.findall(r"elements instead of \S+: (\S+) times fewer", output)
    assert float(rate) > 5


@pytest.mark.slow
def test_train_hsdp_on_two_replicas_of_two_shards_learns_with_fewer_bytes():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    output = output_of(*launcher, str(EXAMPLES / "train_hsdp.py"))
    assert "quantization_hook compresses the all-reduce of 2 parameter groups between 2 replicas" in output
    assert_learns(output)
    ((sent, whole),) = re.findall(r"(\S+) bytes per step between replicas instead of (\S+)", output)
    assert 6 * int(sent.replace(",", "")) < int(whole.replace(",", ""))


@pytest.mark.slow
def test_train_fsdp2_on_two_ranks_learns():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = output_of(*launcher, str(EXAMPLES / "train_fsdp2.py"))
    assert "2 parameter groups are reduce-scattered in bf16" in output
    assert_learns(output)


def test_compress_tensors_error_feedback_reduces_the_error_of_the_mean():
    output = output_of(str(EXAMPLES / "compress_tensors.py"))
    errors = [float(error) for error in re.findall(r"relative errors of the mean: (\S+),", output)]
    assert len(errors) == 3
    assert errors[-1] < 0.5 * errors[0]
    ((sent, whole),) = re.findall(r"sent (\S+) bytes per step instead of (\S+)", output)
    assert 10 * int(sent.replace(",", "")) < int(whole.replace(",", ""))


@pytest.mark.slow
def test_train_int4_saved_on_two_ranks_resumes_on_three(tmp_path):
    checkpoint, losses = tmp_path / "checkpoint.pt", {}
    for ranks in ("2", "3"):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        output = output_of(*launcher, str(EXAMPLES / "train_int4.py"), str(checkpoint))
        losses |= {
            (ranks, int(step)): float(loss)
            for step, loss in re.findall(rf"^{ranks} ranks, step (\d+): loss (\S+)$", output, re.MULTILINE)
        }
    assert list(losses) == [("2", 50), ("2", 100), ("2", 150), ("3", 200), ("3", 250), ("3", 300)]
    assert losses["3", 200] < losses["2", 100]
    assert losses["3", 300] < 0.5 * losses["2", 50]


@pytest.mark.slow
def test_train_elastic_resumes_after_a_failure_of_one_rank(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    output = output_of(*launcher, str(EXAMPLES / "train_elastic.py"), str(tmp_path), "70")
    assert re.findall(r"^attempt (\d): 2 ranks, start at step (\d+)$", output, re.MULTILINE) == [
        ("0", "0"),
        ("1", "50"),
    ]
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+),", output, re.MULTILINE)}
    assert list(losses) == [50, 100, 150]
    assert losses[150] < losses[50]


@pytest.mark.slow
def test_train_mixed_precision_learns_with_a_compiled_model():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = output_of(*launcher, str(EXAMPLES / "train_mixed_precision.py"))
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", output, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
