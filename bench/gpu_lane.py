"""``python -m gradwire.bench.gpu_lane smoke|ranks`` tests gradwire on this machine's GPU.

Stages:
    smoke   every kernel against its reference, and every hook over NCCL with one rank.
    ranks   every hook over NCCL with two ranks that share the GPU.

Needs only torch, triton and gradwire. Every case prints a line and appends one record to a file of JSON lines when it
ends. A case that has passed with the same code, versions and device, according to that file, is not run again, so an
interrupted stage resumes where it stopped. The exit status is 0 if no case failed.

``--rehearse`` runs the same cases on the CPU: the kernels' CPU code, and gloo with NCCL's rules enforced
(`gradwire.bench.rehearsal`). It finds mistakes in the cases and in code that both devices share. It does not run on a
GPU, and every line and record says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.bench.gpu_hook_cases import HOOK_CASES
from gradwire.bench.gpu_kernel_cases import KERNEL_CASES
from gradwire.bench.gpu_quantization_cases import QUANTIZATION_CASES
from gradwire.bench.gpu_worker import CASE_LIMIT, Case, Crew
from gradwire.bench.record import provenance

OUTPUT = Path("gpu_lane.jsonl")
RANKS = {"smoke": 1, "ranks": 2}
# Facts that must be equal for an earlier pass to count.
IDENTITY = ("source", "gradwire", "torch", "triton", "cuda", "nccl", "gpu", "rehearsal")


def cases_of(stage: str) -> dict[str, Case]:
    """A stage's cases by name; the case with two dtypes on the wire comes first."""
    if stage == "ranks":
        return HOOK_CASES
    first = next(iter(HOOK_CASES))
    return {first: HOOK_CASES[first], **KERNEL_CASES, **QUANTIZATION_CASES, **HOOK_CASES}


def facts(stage: str, rehearsal: bool) -> dict[str, Any]:
    """Provenance of a stage's records: machine, versions, date, and a digest of the code."""
    device = torch.device("cpu") if rehearsal else torch.device("cuda", 0)
    return {
        **provenance(device, "gloo" if rehearsal else "nccl", torch.get_num_threads()),
        "source": _source(),
        "triton": _triton(),
        "cuda": torch.version.cuda,
        "nccl": None if rehearsal else ".".join(map(str, torch.cuda.nccl.version())),
        "rehearsal": rehearsal,
        "stage": stage,
        "ranks": RANKS[stage],
    }


def _source() -> str:
    """A digest of the installed package's code, which changes where no version number does."""
    digest = blake2b(digest_size=8)
    for folder in sorted(Path(path) for path in gradwire.__path__):
        for file in sorted(_modules(folder)):
            digest.update(str(file.relative_to(folder)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _modules(folder: Path) -> Iterator[Path]:
    for path, _, names in os.walk(folder, followlinks=True):
        yield from (Path(path, name) for name in names if name.endswith(".py"))


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def passed_before(output: Path, identity: dict[str, Any]) -> set[str]:
    """Cases that have passed in the same stage with the same code, versions and device."""
    if not output.exists():
        return set()
    wanted = {name: identity[name] for name in (*IDENTITY, "stage")}
    passed = set()
    for line in output.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a killed run
        if record["status"] == "passed" and {name: record.get(name) for name in wanted} == wanted:
            passed.add(record["case"])
    return passed


def run_stage(
    stage: str,
    *,
    rehearsal: bool = False,
    output: Path = OUTPUT,
    limit: float = CASE_LIMIT,
    only: Sequence[str] = ("",),
) -> list[str]:
    """Run the cases of a stage that have not passed yet; returns the names of failed cases.

    Args:
        stage: "smoke" or "ranks".
        rehearsal: whether to run on the CPU.
        output: file of JSON lines to append to.
        limit: time limit of a case, in seconds.
        only: run the cases whose name contains one of these.
    """
    identity = facts(stage, rehearsal)
    cases = {name: case for name, case in cases_of(stage).items() if any(part in name for part in only)}
    passed = passed_before(output, identity)
    what = "REHEARSAL ON THE CPU, NOT ON A GPU" if rehearsal else identity["gpu"]
    print(f"{stage}: {len(cases)} cases, {RANKS[stage]} rank(s), {what}", flush=True)
    counts = {"passed": 0, "skipped": 0, "failed": 0, "passed before": 0}
    failed = []
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file, Crew(RANKS[stage], rehearsal) as crew:
        if file.tell() and not output.read_text().endswith("\n"):
            file.write("\n")  # after the last line of a killed run
        for number, (name, case) in enumerate(cases.items(), 1):
            place = f"{'rehearsal ' if rehearsal else ''}{stage} {number}/{len(cases)}"
            if name in passed:
                counts["passed before"] += 1
                print(f"{place} passed before: {name}", flush=True)
                continue
            outcome = crew.run(case, limit)
            counts[outcome.status] += 1
            record = {"case": name, "status": outcome.status, "seconds": round(outcome.seconds, 2)}
            json.dump({**record, "text": outcome.text, **identity}, file)
            file.write("\n")
            file.flush()
            reason = f" ({outcome.text})" if outcome.status == "skipped" else ""
            print(f"{place} {outcome.status} in {outcome.seconds:.1f} s: {name}{reason}", flush=True)
            if outcome.status == "failed":
                failed.append(name)
                print(outcome.text, flush=True)
    total = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{stage}: {total}; {what}; records in {output}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gradwire.bench.gpu_lane", description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=RANKS, metavar="stage", help="smoke, ranks, or both")
    parser.add_argument("--rehearse", action="store_true", help="run the cases on the CPU")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of JSON lines; default: %(default)s")
    parser.add_argument("--limit", type=float, default=CASE_LIMIT, help="seconds per case; default: %(default)g")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only cases whose name contains TEXT; repeatable"
    )
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print("There is no CUDA device here. Use --rehearse to run the same cases on the CPU.", file=sys.stderr)
        return 2
    failed = []
    only = options.only or [""]
    for stage in options.stages:
        failed += run_stage(stage, rehearsal=options.rehearse, output=options.output, limit=options.limit, only=only)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
