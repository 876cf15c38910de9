"""Starts the ranks of `tests.support.faulty_rank` as processes, and checks the steps that they have applied."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gradwire.bench.launch import reserved_port
from tests.support.harness import ENVIRONMENT

PROGRAM = Path(__file__).with_name("faulty_rank.py")
PLACES = [
    *("forward", "loss", "backward", "before an exchange", "after an exchange", "end of the backward"),
    *("optimizer", "state_dict"),
]
HANG_LIMIT = 240  # seconds; ends ranks that hang, also on a busy machine
# The largest relative error of a gradient that is no sum of rounding errors; None: the hook is lossy.
PRECISION = {"none": 1e-5, "fp16": 1e-2, "scaled_fp16": 1e-2, "int4": None, "powersgd": None}


class Rank:
    """A process of a run, with the files of its output."""

    def __init__(self, process, path):
        self.process, self._path = process, path

    def facts(self):
        """The lines that it has printed so far."""
        text = self._path.with_suffix(".out").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self):
        """Facts about the steps that it has applied, by number."""
        return {fact["step"]: fact for fact in self.facts() if "step" in fact}

    def errors(self):
        """Its standard error."""
        return self._path.with_suffix(".err").read_text(errors="replace")

    def wait_until_stopped(self):
        """Wait for SIGSTOP, or for the end of the process."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def wait_for_step(self, number):
        """Wait until it has applied a step, or has ended."""
        while number not in self.steps() and self.process.poll() is None:
            time.sleep(0.05)

    def end(self):
        """The exit code, minus the number of a signal that ended the process; raises TimeoutExpired if it hangs."""
        return self.process.wait(HANG_LIMIT)


@contextmanager
def started(size, folder, *, hosts=None, **options):
    """The ranks of a run, in a namespace each where ``hosts`` are given; killed at the end."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        launched = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if hosts is not None:
            launched |= {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        ranks = []
        for rank in range(size):
            path = Path(folder, str(rank))
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(options)],
                env=environment | ENVIRONMENT | launched | {"RANK": str(rank)},
                stdout=stack.enter_context(path.with_suffix(".out").open("w")),
                stderr=stack.enter_context(path.with_suffix(".err").open("w")),
                preexec_fn=hosts[rank].enter if hosts is not None else None,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(Rank(process, path))
        yield ranks


def check_end(ranks, hook, codes):
    """The ranks end with these exit codes, those with 1 for a RuntimeError; and `check_applied_steps`."""
    found = [rank.end() for rank in ranks]
    assert found == codes, [rank.errors() for rank in ranks]
    assert all("RuntimeError" in rank.errors() for rank, code in zip(ranks, codes, strict=True) if code == 1)
    check_applied_steps(ranks, hook)


def check_applied_steps(ranks, hook):
    """Steps that several ranks have applied had the same gradients, led to the same parameters, and were exact means.

    All ranks have applied equally many steps, up to the last one.
    """
    by_rank = [rank.steps() for rank in ranks]
    lasts = [max(steps, default=-1) for steps in by_rank]
    assert max(lasts) - min(lasts) <= 1, lasts
    for step in {step for steps in by_rank for step in steps}:
        facts = [steps[step] for steps in by_rank if step in steps]
        for each in ("gradients", "parameters"):
            assert len({fact[each] for fact in facts}) == 1, (step, facts)
        if PRECISION[hook] is not None:
            assert all(fact["error"] <= PRECISION[hook] for fact in facts), (step, facts)


def resume_process(rank):
    """Let a stopped process continue."""
    rank.process.send_signal(signal.SIGCONT)
