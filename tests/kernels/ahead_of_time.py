"""Kernels compiled for GPUs that need not be there, and what became of them: registers, spills, wide accesses.

What is compiled is what the public functions launch: their arguments are recorded, not written down again.
"""

import re

import pytest

from tests.kernels.cases import INTERPRETED, REALS

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
pytest.importorskip("triton")

from tools import ahead_of_time, assembly

FP32, FP16, BF16, FP64 = REALS
NAMES = {80: "sm_80", 90: "sm_90", 100: "sm_100", "gfx942": "gfx942"}
TARGETS = {target: ahead_of_time.TARGETS[name] for target, name in NAMES.items()}


def recorded_launches(call):
    """The launches by ``call()``, in order: name, kernel and arguments."""
    return [launch[:3] for launch in ahead_of_time.recorded_launches(call)]


def recorded(call):
    """The kernels that ``call()`` launches, with their arguments, by name; the last launch of each."""
    return {name: (kernel, arguments) for name, kernel, arguments in recorded_launches(call)}


def _launch(kernel, arguments):
    return ahead_of_time.Launch("", kernel, arguments, (1,))


def variant(kernel, arguments, target):
    """The key by which Triton's launcher looks up a compiled kernel; launches with equal keys share one."""
    return ahead_of_time.variant(_launch(kernel, arguments), NAMES[target])


def intermediate(kernel, arguments, target):
    """The lines of a kernel in Triton's own intermediate language, before anything is optimized."""
    return ahead_of_time.intermediate(_launch(kernel, arguments), NAMES[target])


def compiled(kernel, arguments, target):
    """The `Binary` of a recorded launch for one of `TARGETS`."""
    return assembly.inspect(ahead_of_time.compile_launch(_launch(kernel, arguments), NAMES[target]))


def check_program_number(lines):
    """The number of the program, which Triton gives in 32 bits, is made 64 bits wide before any arithmetic."""
    functions = "\n".join(lines).split("tt.func ")[1:]  # names of values are those of one function
    (body,) = [function.splitlines() for function in functions if "tt.get_program_id" in function]
    (number,) = [line.split("=")[0].strip() for line in body if "tt.get_program_id" in line]
    users = [line for line in body if re.search(rf"{number}\b(?! =)", line)]
    assert users, "the kernel does not use its number"
    for line in users:
        assert re.search(r"arith\.extsi .*: i32 to i64", line), line
