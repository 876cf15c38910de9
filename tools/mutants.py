"""``python -m tools.mutants``: plants small defects in copies of the repository, and checks that tests notice.

A *mutant* is a source file with one edit. tests/mutants.toml lists mutants, each with the tests that must fail. A test
must pass on the unedited copy first, so that it does not fail for another reason.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutants.toml"
SECONDS = 240  # a mutant that hangs is caught after this long
POLL_SECONDS = 0.2  # longest time from a signal to the end of the tests
PASSED, FAILED = 0, 1  # exit statuses of pytest; others mean that no test was run to its end
NO_TESTS_RAN = "no tests ran"
SURVIVED, CAUGHT, HUNG = "survived", "caught", "caught: hangs"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Mutant:
    """One edit of a source file."""

    name: str  # the defect
    file: str  # path of the file in the repository
    find: str  # text that occurs once in the file
    replace: str  # text in its place
    tests: tuple[str, ...]  # node ids of tests, of which one must fail
    interpreter: bool = False  # whether kernels run in Triton's interpreter
    survives: str = ""  # why no test can catch it; empty if one must

    def edited(self, root: Path) -> str:
        """The text of the file with the edit; raises ValueError unless the edit is possible."""
        text = (root / self.file).read_text()
        if text.count(self.find) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.find)} places like {self.find!r}; expected one. "
                "Update the edit, or remove it with the code that it was made for."
            )
        edited = text.replace(self.find, self.replace)
        compile(edited, self.file, "exec")
        return edited


def read(path: Path = LIST) -> list[Mutant]:
    """The mutants of a list."""
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path.name} has several mutants named {', '.join(twice)}.")
    return mutants


class Copy:
    """A copy of the working tree, whose packages a test imports instead of the installed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        for name in files:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        self._path = folder / "build" / "path"
        top = self._path / "gradwire"
        top.mkdir(parents=True)
        for package, place in packages.items():
            if package == "gradwire":
                for file in (folder / place).iterdir():
                    (top / file.name).symlink_to(file)
            else:
                (top / package.removeprefix("gradwire.")).symlink_to(folder / place)
        self._n_edits = 0

    def outcome(self, mutant: Mutant) -> str:
        """The outcome of the tests of a mutant."""
        place = self.folder / mutant.file
        text = mutant.edited(ROOT)
        place.write_text(text)
        self._n_edits += 1
        after = (ROOT / mutant.file).stat().st_mtime + 10 * self._n_edits  # Python's caches compare times in seconds
        os.utime(place, (after, after))
        try:
            return self.test(mutant.tests, mutant.interpreter)
        finally:
            shutil.copy2(ROOT / mutant.file, place)

    def test(self, tests: Iterable[str], interpreter: bool, workers: int = 0, limit: float = SECONDS) -> str:
        """Run tests on this copy as it is, until one fails."""
        environment = os.environ | {"PYTHONPATH": str(self._path), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if interpreter else {}
        options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile", "no shrinking", "-n", str(workers)]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        with (self.folder / "build" / "output").open("w+") as output:
            run = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = _exit_status(run, limit)
            finally:
                _end(run)
            if code is None:
                return HUNG
            output.seek(0)
            text = output.read()
        if code == PASSED:
            return SURVIVED
        return CAUGHT if code == FAILED else f"{NO_TESTS_RAN}: {text[-1000:]}"


def _exit_status(run: subprocess.Popen[Any], limit: float) -> int | None:
    """The exit status of a process; None if it runs for longer than ``limit``. Raises SystemExit after a signal."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if _signals:
            raise SystemExit(128 + _signals[0])
        with suppress(subprocess.TimeoutExpired):
            return run.wait(POLL_SECONDS)
    return None


_signals: list[int] = []  # received since `end_on_signals`


def end_on_signals() -> None:
    """After SIGTERM or SIGINT, end the tests that run and start no more. They run in sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _signals.append(received))


def _end(run: subprocess.Popen[Any]) -> None:
    """Kill the process and the ranks that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def outcomes(mutants: Sequence[Mutant], workers: int) -> list[str]:
    """The outcome of each mutant. Raises RuntimeError if their tests do not pass on the unedited copy."""
    for mutant in mutants:
        mutant.edited(ROOT)  # raises early
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(workers):
            copies.put(Copy(Path(folder) / str(number)))
        first = copies.get()
        for interpreter in (False, True):
            tests = {test for mutant in mutants for test in mutant.tests if mutant.interpreter is interpreter}
            if tests and (found := first.test(sorted(tests), interpreter, workers, limit=10 * SECONDS)) != SURVIVED:
                raise RuntimeError(f"The tests do not pass on the repository itself: {found}")
        copies.put(first)

        def outcome(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return copy.outcome(mutant)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(workers) as pool:
            each = pool.map(outcome, mutants)
            return list(track(each, "mutants", total=len(mutants), console=Console(stderr=True)))


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Parts of the names of mutants. Default: all.")] = None,
    workers: Annotated[int, typer.Option(help="Copies that are tested at once.")] = os.cpu_count() or 1,
) -> None:
    """Plant the defects of tests/mutants.toml one by one, and list those that no test catches."""
    end_on_signals()
    mutants = [each for each in read() if not names or any(name in each.name for name in names)]
    found = dict(zip(mutants, outcomes(mutants, workers), strict=True))
    wrong = 0
    for mutant, outcome in found.items():
        if outcome.startswith(CAUGHT):
            if mutant.survives:
                wrong += 1
                print(f"{mutant.name} ({mutant.file}): caught. Remove `survives` from the list.")
            continue
        wrong += not mutant.survives or outcome != SURVIVED
        print(f"{mutant.name} ({mutant.file}): {outcome}. {mutant.survives}")
    caught = sum(outcome.startswith(CAUGHT) for outcome in found.values())
    print(f"{caught} of {len(found)} mutants caught, {100 * caught / max(len(found), 1):.0f} %.")
    raise typer.Exit(code=1 if wrong else 0)


if __name__ == "__main__":
    app(prog_name="python -m tools.mutants")
