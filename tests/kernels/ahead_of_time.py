"""Kernels compiled for GPUs that need not be there, and what became of them: registers, spills, wide accesses.

What is compiled is what the public functions launch: their arguments are recorded, not written down again.
"""

import re

import pytest

from tests.kernels.cases import INTERPRETED, REALS

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
pytest.importorskip("triton")

from tools.ahead_of_time import TARGETS, compile_launch, intermediate, recorded_launches
from tools.assembly import inspect

FP32, FP16, BF16, FP64 = REALS


def launches_and_targets(usual, every):
    """Parameters ``launch`` and ``target``: ``usual`` launches by target, and, as slow ones, the rest of ``every``."""
    fast = [(launch, target) for target, launches in usual.items() for launch in launches]
    slow = [(launch, target) for target in TARGETS for launch in every if (launch, target) not in fast]
    cases = [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
    return pytest.mark.parametrize("launch, target", cases, ids=str)


def recorded(call):
    """The last launch of each kernel that ``call()`` launches, by the kernel's name."""
    return {launch.name: launch for launch in recorded_launches(call)}


def compiled(launch, target, registers):
    """The `Binary` of a launch, which must not spill or fence, nor take more registers than these."""
    binary = inspect(compile_launch(launch, target))
    assert binary.spills == 0, binary
    assert binary.fences == 0, binary
    assert binary.registers <= registers, binary
    return binary


def check_program_number(launch):
    """The number of the program, which Triton gives in 32 bits, is made 64 bits wide before any arithmetic."""
    # Names of values are those of one function.
    functions = "\n".join(intermediate(launch, "sm_90")).split("tt.func ")[1:]
    (body,) = [function.splitlines() for function in functions if "tt.get_program_id" in function]
    (number,) = [line.split("=")[0].strip() for line in body if "tt.get_program_id" in line]
    users = [line for line in body if re.search(rf"{number}\b(?! =)", line)]
    assert users, "the kernel does not use its number"
    for line in users:
        assert re.search(r"arith\.extsi .*: i32 to i64", line), line
