"""The hooks and the reducer over NCCL: one rank, and two ranks that share one GPU.

Each rank is a process of its own that runs `rank.py`, because NCCL takes the ranks of one GPU for duplicates unless
every process claims another host.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANK = Path(__file__).with_name("rank.py")
# Several ranks on one GPU go over sockets, with few blocks, so that they make progress side by side.
SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": "16777216",
}


def run_ranks(case, world_size, folder):
    """Run a function of `rank.py` on every rank; fails with the output of all ranks."""
    rendezvous = folder / "rendezvous"
    processes = []
    for rank in range(world_size):
        shared = SHARED_GPU | {"NCCL_HOSTID": f"emulated-{rank}"} if world_size > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(RANK), case, str(rank), str(world_size), str(rendezvous)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | shared,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * world_size, "\n\n".join(f"rank {i}:\n{text}" for i, text in enumerate(outputs))


@pytest.mark.parametrize("world_size", [1, 2], ids=["1-rank", "2-ranks-on-one-gpu"])
@pytest.mark.parametrize(
    "case",
    [
        "no_hook_matches_pytorch",
        "hooks_match_on_both_reducers",
        "cast_hooks_match_the_mean",
        "steps_do_not_synchronise_with_the_host",
        "no_flat_buffer_is_allocated",
        "two_collectives_per_bucket_stay_in_order",
        "scaled_cast_keeps_tiny_gradients",
        "powersgd_loses_nothing",
        "powersgd_survives_a_nonfinite_gradient",
        "powersgd_launches_a_dozen_kernels_for_each_bucket",
        "wrapped_hooks_of_pytorch_run",
        "an_emulated_link_takes_its_time_and_changes_no_bit",
    ],
)
def test_over_nccl(case, world_size, tmp_path):
    run_ranks(case, world_size, tmp_path)
