"""Tests with several versions of Python and PyTorch: ``python tests/project/matrix.py 3.11=2.11.0 3.12=2.13.0``.

Each pair gets a virtual environment in build/matrix, with the interpreter ``pythonX.Y`` of PATH. The default build of
PyTorch is installed, which on Linux is the one for CUDA: 5 GB each. It runs on CPUs too. The outcomes replace the table
of docs/compatibility.md where a row has the same versions, and are added to it where none has. The exit status is 1 if
a test failed.
"""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
TABLE = re.compile(r"(?<=<!-- begin tested -->\n).*?(?=<!-- end tested -->)", re.DOTALL)
HEADER = """\
| Python | PyTorch | Triton | hooks and reducer | kernels, interpreted | date |
| --- | --- | --- | ---: | ---: | --- |
"""
TOOLS = ("hypothesis>=6.100", "pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
# Imports and doctor, the laws, parity with PyTorch, the hooks, FSDP2.
CPU_TESTS = (
    "tests/cli/test_doctor.py",
    "tests/distributed/hooks/test_laws.py",
    "tests/distributed/reducer/test_parity_with_pytorch.py",
    "tests/distributed/hooks/test_hooks.py",
    "tests/distributed/hooks/test_powersgd.py",
    "tests/distributed/hooks/test_quantization_laws.py",
    "tests/distributed/comm/test_executor.py",
    "tests/distributed/sharded/test_sharded.py",
    "tests/distributed/sharded/test_sharded_recovery.py",
    "tests/distributed/sharded/test_sharded_reduce_scatter.py",
    "tests/kernels/test_dispatch.py",
)
KERNEL_TESTS = ("tests/kernels/test_flatten.py", "tests/kernels/test_lowrank.py", "tests/kernels/test_quantization.py")
VERSIONS = """
import platform
from importlib.metadata import version
print(platform.python_version(), version("torch"), version("triton"))
"""


def environment_of(python: str, torch: str) -> Path:
    """The interpreter of the virtual environment of a pair, made or brought up to date."""
    folder = ROOT / "build" / "matrix" / f"py{python}-torch{torch}"
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
    install = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={torch}", *TOOLS, f"{ROOT}[bench]"], check=True)
    return interpreter


def outcome_of(interpreter: Path, tests: tuple[str, ...], **variables: str) -> str:
    """The counts of pytest's last line, without skipped and deselected tests."""
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    last_line = (done.stdout.splitlines() or [""])[-1]
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", last_line)
    return ", ".join(counts) or "no test ran"


def table_with(table: str, row: str) -> str:
    """The table with a row in place of the one with the same versions, or at its end."""
    rows = [line for line in table.removeprefix(HEADER).splitlines() if line.split("|")[1:4] != row.split("|")[1:4]]
    return HEADER + "\n".join(sorted([*rows, row])) + "\n"


def main(pairs: list[str]) -> int:
    """Test the pairs of the command line, and write their rows; returns the exit status."""
    has_failed = False
    for pair in pairs:
        interpreter = environment_of(*pair.split("="))
        versions = subprocess.run([interpreter, "-c", VERSIONS], capture_output=True, text=True, check=True)
        on_cpu = outcome_of(interpreter, CPU_TESTS)
        interpreted = outcome_of(interpreter, KERNEL_TESTS, TRITON_INTERPRET="1")
        today = datetime.now(UTC).date().isoformat()
        row = f"| {' | '.join([*versions.stdout.split(), on_cpu, interpreted, today])} |"
        page = PAGE.read_text()
        PAGE.write_text(TABLE.sub(lambda table, row=row: table_with(table[0], row), page))
        print(row, flush=True)
        has_failed |= not all(re.fullmatch(r"\d+ passed", outcome) for outcome in (on_cpu, interpreted))
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
