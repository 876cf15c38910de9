"""After an error on one rank every interpreter ends as Python ends: its exit code, and no line of a file lost.

The ranks are processes that run a script and come to its end, unlike those of `harness`.
"""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.harness import ENVIRONMENT, reserved_port

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import gradwire
from gradwire.hooks import default_hooks, quantization_hooks

how, name, wrapper, path = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
lines = open(f"{path}/{rank}", "w")  # never closed
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
DDP = {"gradwire": gradwire.DistributedDataParallel, "pytorch": torch.nn.parallel.DistributedDataParallel}[wrapper]
ddp = DDP(model, bucket_cap_mb=0.02)
state = quantization_hooks.QuantizationState() if name == "int4" else None
hook = {"fp16": default_hooks.fp16_compress_hook, "int4": quantization_hooks.quantization_hook}.get(name)
fails = False

def failing(state, bucket):
    if fails and bucket.index() == 2:
        raise ValueError("of rank 1")
    return (hook or default_hooks.allreduce_hook)(state, bucket)

if how != "dies" or hook is not None:
    ddp.register_comm_hook(state, hook if how == "dies" else failing)

def train(steps):
    for step in range(steps):
        ddp(torch.randn(4, 64)).square().mean().backward()
        lines.write(f"step {step}\\n")

train(3)
if how == "dies" and rank == 1:
    raise ValueError("of rank 1")
fails = rank == 1
try:
    train(1)
except (RuntimeError, ValueError) as error:
    lines.write(f"{type(error).__name__}: {error}".replace("\\n", " ") + "\\n")
fails = False
if how == "resynchronizes":
    ddp.resynchronize()
    train(2)
lines.write("end\\n")
"""


def run(how, hook, wrapper, folder):
    """Exit codes, lines of the files and output of both ranks."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        processes = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, how, hook, wrapper, str(folder)],
                env=environment | ENVIRONMENT | launched | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    lines = [(folder / str(rank)).read_text().splitlines() for rank in range(2)]
    return [process.returncode for process in processes], lines, outputs


CASES = [  # one of each ends in `make test`, too: tests/faults
    ("dies", "fp16", "gradwire"),
    ("fails", "int4", "gradwire"),
    ("resynchronizes", "fp16", "gradwire"),
    ("dies", "none", "gradwire"),
    ("dies", "fp16", "pytorch"),
    ("fails", "none", "gradwire"),
] * 8


@pytest.mark.slow
@pytest.mark.parametrize(("how", "hook", "wrapper"), CASES)
def test_interpreter_of_every_rank_ends_normally_after_an_error(tmp_path, how, hook, wrapper):
    codes, (survivor, failed), outputs = run(how, hook, wrapper, tmp_path)
    assert codes == [0, 1 if how == "dies" else 0], outputs
    assert survivor[:3] == failed[:3] == ["step 0", "step 1", "step 2"]
    assert survivor[-1] == "end"
    if wrapper == "gradwire":
        assert "rank 1" in survivor[3].lower() and "ValueError" in survivor[3] and "of rank 1" in survivor[3]
    if how != "dies":
        assert failed[3] == "ValueError: of rank 1"
        assert survivor[4:] == failed[4:] == (["step 0", "step 1"] if how == "resynchronizes" else []) + ["end"]


UNANSWERED = """
import os
import signal
import sys
import time
from torch.distributed import TCPStore

theirs, ours = os.pipe()
server = os.fork()
if server == 0:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ours, str(served.port).encode())
    signal.pause()
port = int(os.read(theirs, 100))

from gradwire.comm import store_collectives

store_collectives.EXIT_SECONDS = 0.0
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
os.kill(server, signal.SIGSTOP)
requests = store_collectives.Notices(store)
assert requests.ask(lambda store: store.check(["key"]), 0.0) is None
(thread,) = store_collectives._requests

class Last:
    def __del__(self, kill=os.kill, arguments=(server, signal.SIGKILL), thread=thread, sleep=time.sleep):
        kill(*arguments)  # the interpreter is being finalized
        while thread.is_alive():
            sleep(0.01)  # a thread that wakes up meanwhile aborts the process

sys.last_of_all = Last()
"""


def test_request_without_an_answer_does_not_abort_the_exit():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", UNANSWERED],
        env=environment | ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
