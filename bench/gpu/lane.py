"""``python -m gradwire.bench.gpu first smoke ranks sanitize bench`` tests and times gradwire on this machine's GPU.

Stages, each under 9 minutes:
    first      whether the machine has what gradwire needs, and one or two cases of every kind; under 4 minutes.
               The last line is PASS or FAIL.
    smoke      every kernel against its reference, and every hook over NCCL with one rank.
    ranks      every hook over NCCL with two ranks that share the GPU.
    sanitize   small kernel cases under compute-sanitizer, if it is found.
    bench      times of kernels and hooks compared with PyTorch's, and a table of them.

Needs only torch, triton and gradwire. Every case prints a line and appends one record to a file of JSON lines. A case
that has passed with the same code, versions and device, according to that file, is not run again: an interrupted stage
resumes. A stage starts no case after `STAGE_SECONDS`, nor after three failures with the same traceback. The exit status
is 0 if no case failed and none remains.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.bench.gpu import first
from gradwire.bench.gpu.case import LaneCase
from gradwire.bench.gpu.hook_checks import HOOK_CHECKS
from gradwire.bench.gpu.kernel_checks import KERNEL_CHECKS
from gradwire.bench.gpu.report import tables
from gradwire.bench.gpu.sanitizer import SANITIZER_CASES
from gradwire.bench.gpu.sharded_checks import SHARDED_CHECKS
from gradwire.bench.gpu.timings import HOOK_TIMINGS, KERNEL_TIMINGS
from gradwire.bench.gpu.worker import CASE_LIMIT, Crew, Rehearse
from gradwire.bench.record import provenance

OUTPUT = Path("gpu_lane.jsonl")
RANKS = {"preflight": 1, "first": 1, "first ranks": 2, "smoke": 1, "ranks": 2, "sanitize": 1, "bench": 1}
CASES: dict[str, Mapping[str, LaneCase]] = {
    "preflight": first.PREFLIGHT,
    "first": first.FIRST,
    "first ranks": first.FIRST_RANKS,
    "smoke": {**KERNEL_CHECKS, **HOOK_CHECKS},
    "ranks": {**HOOK_CHECKS, **SHARDED_CHECKS},
    "sanitize": SANITIZER_CASES,
    "bench": {**KERNEL_TIMINGS, **HOOK_TIMINGS},
}
STAGES = ("first", "smoke", "ranks", "sanitize", "bench")
SAME_FAILURES = 3  # with the same traceback: the next ones would tell nothing new
# After STAGE_SECONDS a stage starts no case; after STAGE_LIMIT it ends the one that runs.
STAGE_SECONDS, STAGE_LIMIT = 510.0, 530.0
# Facts that must be equal for an earlier pass to count.
IDENTITY = ("source", "gradwire", "torch", "triton", "cuda", "nccl", "gpu", "rehearsal")


def facts(stage: str, rehearse: Rehearse | None) -> dict[str, Any]:
    """Provenance of a stage's records: machine, versions, date, and a digest of the code."""
    rehearsal = rehearse is not None
    code = [*map(Path, gradwire.__path__), *([Path(inspect.getfile(rehearse)).parent] if rehearse else [])]
    device = torch.device("cpu") if rehearsal else torch.device("cuda", 0)
    return {
        **provenance(device, "gloo" if rehearsal else "nccl", torch.get_num_threads()),
        "source": _source(code),
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "cuda": torch.version.cuda,
        "nccl": None if rehearsal else ".".join(map(str, torch.cuda.nccl.version())),
        "rehearsal": rehearsal,
        "stage": stage,
        "ranks": RANKS[stage],
    }


def _source(folders: Sequence[Path]) -> str:
    """A digest of the code in these folders, which changes where no version number does."""
    digest = blake2b(digest_size=8)
    for folder in sorted(folders):
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def passed_before(output: Path, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Records, by case, of those that have passed in the same stage with the same code, versions and device."""
    if not output.exists():
        return {}
    wanted = {name: identity[name] for name in (*IDENTITY, "stage")}
    passed = {}
    for line in output.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a killed run
        if record["status"] == "passed" and {name: record.get(name) for name in wanted} == wanted:
            passed[record["case"]] = record
    return passed


def run_stage(
    stage: str,
    *,
    rehearse: Rehearse | None = None,
    output: Path = OUTPUT,
    limit: float = CASE_LIMIT,
    only: Sequence[str] = ("",),
) -> list[str]:
    """Run the cases of a stage that have not passed yet; returns the names of those that failed or remain.

    Records are appended to ``output``. Cases whose name contains nothing of ``only`` are left out; none runs longer
    than ``limit`` seconds.
    """
    start = time.monotonic()
    identity = facts(stage, rehearse)
    rehearsal = identity["rehearsal"]
    cases = {name: case for name, case in CASES[stage].items() if any(part in name for part in only)}
    passed = passed_before(output, identity)
    what = "REHEARSAL ON THE CPU, NOT ON A GPU" if rehearsal else identity["gpu"]
    label = f"rehearsal {stage}" if rehearsal else stage
    print(f"{label}: {len(cases)} cases, {RANKS[stage]} rank(s), {what}", flush=True)
    counts = {"passed": 0, "skipped": 0, "failed": 0, "passed before": 0}
    failed, remaining, measured = [], [], {}
    tracebacks: Counter[tuple[str, ...]] = Counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file, Crew(RANKS[stage], rehearse) as crew:
        if file.tell() and not output.read_text().endswith("\n"):
            file.write("\n")  # after the last line of a killed run
        for number, (name, case) in enumerate(cases.items(), 1):
            place = f"{label} {number}/{len(cases)}"
            if name in passed:
                counts["passed before"] += 1
                measured[name] = passed[name].get("measured", ())
                print(f"{place} passed before: {name}", flush=True)
                continue
            elapsed = time.monotonic() - start
            if elapsed > STAGE_SECONDS or SAME_FAILURES in tracebacks.values():
                remaining.append(name)
                continue
            outcome = crew.run(case, min(limit, STAGE_LIMIT - elapsed))
            counts[outcome.status] += 1
            record = {"case": name, "status": outcome.status, "seconds": round(outcome.seconds, 2)}
            json.dump({**record, "text": outcome.text, "measured": list(outcome.measured), **identity}, file)
            file.write("\n")
            file.flush()
            measured[name] = outcome.measured
            reason = f" ({outcome.text})" if outcome.status == "skipped" else ""
            print(f"{place} {outcome.status} in {outcome.seconds:.1f} s: {name}{reason}", flush=True)
            if outcome.status == "failed":
                failed.append(name)
                if places := traceback_of(outcome.text):
                    tracebacks[places] += 1
                print(outcome.text, flush=True)
    for line in tables({name: rows for name, rows in measured.items() if rows}):
        print(f"{label}: {line}", flush=True)
    total = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{label}: {total}; {what}; records in {output}", flush=True)
    if remaining:
        is_same = SAME_FAILURES in tracebacks.values()
        reason = f"{SAME_FAILURES} failures are the same" if is_same else f"{STAGE_SECONDS / 60:g} minutes are over"
        print(f"{label}: {reason}, {len(remaining)} cases remain; run it again for them:")
        print("\n".join(f"{label}: {name}" for name in remaining), flush=True)
    return failed + remaining


def traceback_of(text: str) -> tuple[str, ...]:
    """The lines that name a place in the code, in the traceback of the first rank that has one."""
    parts = (re.findall(r'^  File ".*$', part, re.MULTILINE) for part in text.split("--- output of rank"))
    return tuple(next(filter(None, parts), ()))


def run_first(**options: Any) -> list[str]:
    """Preflight, and if it passes the cases of one and of two ranks; returns those that failed or remain."""
    total = len(first.FIRST) + len(first.FIRST_RANKS)
    missing = run_stage("preflight", **options)
    if missing:
        print(f"Preflight: not ready, because of {', '.join(missing)}; the reasons are above.\nFAIL 0/{total}")
        return missing
    print(f"Preflight: ready; {', '.join(first.PREFLIGHT)} work.", flush=True)
    still_open = run_stage("first", **options) + run_stage("first ranks", **options)
    print(f"{'FAIL' if still_open else 'PASS'} {total - len(still_open)}/{total}", flush=True)
    return still_open


def main(arguments: Sequence[str] | None = None, rehearse: Rehearse | None = None) -> int:
    """Run the stages on the command line, on the CPU with ``rehearse``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gradwire.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "stages", nargs="+", choices=STAGES, metavar="stage", help=f"one or more of {', '.join(STAGES)}"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of JSON lines; default: %(default)s")
    parser.add_argument("--limit", type=float, default=CASE_LIMIT, help="seconds per case; default: %(default)g")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only cases whose name contains TEXT; repeatable; not for first"
    )
    options = parser.parse_args(arguments)
    if options.only and "first" in options.stages:
        parser.error("--only selects no cases of the stage first, which runs all of its cases; leave one of them out")
    if rehearse is None and not torch.cuda.is_available():
        print(
            "There is no CUDA device here. In a checkout, make gpu-rehearsal runs the cases on the CPU.",
            file=sys.stderr,
        )
        return 2
    open_cases = []
    shared = {"rehearse": rehearse, "output": options.output, "limit": options.limit}
    for stage in options.stages:
        open_cases += run_first(**shared) if stage == "first" else run_stage(stage, **shared, only=options.only or [""])
    return 1 if open_cases else 0
