"""`resynchronize` after a rank has exited: the others learn it at once, instead of waiting for their timeout."""

import os
import subprocess
import sys

import pytest

from gradwire.bench.launch import reserved_port
from tests.support.faulty_run import HANG_LIMIT
from tests.support.harness import ENVIRONMENT

PROGRAM = """
import torch, torch.distributed as dist
import gradwire
from gradwire import collectives

dist.init_process_group("gloo")  # whose timeout is half an hour
kind = {kind!r}
model = gradwire.DistributedDataParallel(torch.nn.Linear(3, 3)) if kind == "ddp" else None

def step():
    if kind == "ddp":
        model(torch.ones(1, 3)).sum().backward()
    else:
        collectives.all_reduce(torch.ones(500))

step()
if dist.get_rank() == 1:
    raise ValueError("the loader broke")
try:
    step()
except RuntimeError as error:
    print("step:", error)
try:
    model.resynchronize() if kind == "ddp" else collectives.resynchronize()
except RuntimeError as error:
    print("resynchronize:", error)
    raise SystemExit(1)
"""


@pytest.mark.parametrize("kind", ["ddp", "collectives"])
def test_resynchronize_without_a_rank_that_has_exited_raises_at_once(kind):
    with reserved_port() as port:
        launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(kind=kind)],
                env=dict(os.environ) | ENVIRONMENT | launched | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            texts = [rank.communicate(timeout=HANG_LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    assert "step: " in texts[0]
    expected = (
        "resynchronize: Rank 1 has exited after ValueError: the loader broke\n"
        "The ranks cannot start again without it. Restart the job from a checkpoint."
    )
    assert expected in texts[0], texts[0]
