"""torchrun on two nodes of two processes each: network namespaces with a slow link between them."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradwire.bench import namespaces

ROOT = Path(__file__).parents[2]
OBSTACLE = namespaces.obstacle()
HANG_LIMIT = 300  # seconds; ends what hangs, also on a busy machine
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces: {OBSTACLE}")


def run_on_two_nodes(program, *arguments):
    """Run a program with the commands of docs/fsdp.md; returns the output of both nodes."""
    page = (ROOT / "docs" / "fsdp.md").read_text()
    export, command = re.search(r"^```sh\n(export .*)\n(torchrun .*)\n```", page, re.MULTILINE).groups()
    variables = dict(word.split("=") for word in shlex.split(export, comments=True)[1:])
    options = shlex.split(command)[1:-1]
    outputs = []
    with namespaces.hosts(2) as hosts, ExitStack() as stack:
        nodes = []
        for number, host in enumerate(hosts):
            options[options.index("--node-rank") + 1] = str(number)
            options[options.index("--master-addr") + 1] = hosts[0].address
            node = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, program, *arguments],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=host.enter,
            )
            nodes.append(stack.enter_context(node))
            stack.callback(node.terminate)  # and torchrun ends its workers
        outputs = [node.communicate(timeout=HANG_LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.mark.slow
def test_documented_command_trains_the_example():
    output, _ = run_on_two_nodes("examples/train_hsdp.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert "between replicas instead of" in output
