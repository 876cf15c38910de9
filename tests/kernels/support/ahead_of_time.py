"""Kernels compiled for GPUs that need not be there: registers, spills and wide accesses.

The kernels are those that the operations launch: launches are recorded instead of made.
"""

import pkgutil
import re
import subprocess
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from gradwire import kernels
from tests.kernels.support.cases import INTERPRETED, REALS

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
triton = pytest.importorskip("triton")

GPUTarget = triton.backends.compiler.GPUTarget
FP32, FP16, BF16, FP64 = REALS
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """A launch of a kernel, named without ``_`` and ``_kernel``; its arguments include the options of the launch."""

    name: str
    kernel: Any
    arguments: dict[str, Any]


class _Recorder:
    """Stands in for a kernel."""

    def __init__(self, name, kernel, launches):
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid):
        return lambda **arguments: self.launches.append(Launch(self.name, self.kernel, arguments))


def kernel_modules():
    """The modules of `gradwire.kernels`."""
    return [import_module(f"gradwire.kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]


def recorded_launches(call):
    """The kernel launches by ``call()``, in order. None is made. Tensors may lie on any device, also on ``meta``."""
    launches = []
    with ExitStack() as stack:
        for module in kernel_modules():
            for name, value in vars(module).copy().items():
                if name == "use_triton":
                    stack.enter_context(patch.object(module, name, lambda device: True))
                elif name.startswith("_") and name.endswith("_kernel"):
                    recorder = _Recorder(name.removeprefix("_").removesuffix("_kernel"), value.jitted, launches)
                    stack.enter_context(patch.object(module, name, recorder))
        call()
    return launches


def recorded(call):
    """The last launch of each kernel that ``call()`` launches, by the kernel's name."""
    return {launch.name: launch for launch in recorded_launches(call)}


def launches_and_targets(usual, every):
    """Parameters ``launch`` and ``target``: ``usual`` launches by target, and, as slow ones, the rest of ``every``."""
    fast = [(launch, target) for target, launches in usual.items() for launch in launches]
    slow = [(launch, target) for target in TARGETS for launch in every if (launch, target) not in fast]
    cases = [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
    return pytest.mark.parametrize("launch, target", cases, ids=str)


@cache
def _binder(kernel, target):
    backend = triton.compiler.make_backend(TARGETS[target])
    return backend, triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)


def variant(launch, target):
    """The key by which Triton's launcher looks up a compiled kernel: types, constants, alignments and options.

    The launcher's own code computes it; two launches with equal keys share a compiled kernel.
    """
    _, bind = _binder(launch.kernel, target)
    _, specialization, options = bind(**launch.arguments)
    return triton.runtime.jit.compute_cache_key({}, specialization, options)


def _source(launch, target):
    """The source that the launcher compiles for these arguments, and the options."""
    backend, bind = _binder(launch.kernel, target)
    bound, specialization, given = bind(**launch.arguments)
    options, *described = launch.kernel._pack_args(backend, launch.arguments, bound, specialization, given)
    return triton.compiler.ASTSource(launch.kernel, *described), options


def intermediate(launch, target):
    """The lines of a kernel in Triton's intermediate language, before any optimization."""
    source, options = _source(launch, target)
    backend, _ = _binder(launch.kernel, target)
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    return str(source.make_ir(TARGETS[target], options, codegen, backend.get_module_map(), context)).splitlines()


class Compiled(NamedTuple):
    """A compiled kernel."""

    shared: int  # bytes of shared memory of a program
    registers: int  # of a thread
    spills: int  # accesses or slots of memory that stands in for registers
    fences: int  # instructions that make accesses visible to the whole GPU, or forget what a cache holds
    loaded: int  # bytes that the wide loads (128 bits or more) of a program read, each load taken once
    stored: int  # bytes that its wide stores write
    flushes: bool  # whether it flushes subnormal numbers; not looked at on AMD


def compile_launch(launch, target):
    """The `Compiled` kernel of a launch for one of `TARGETS`."""
    source, options = _source(launch, target)
    binary = triton.compile(source, target=TARGETS[target], options=options.__dict__)
    threads = launch.arguments["num_warps"] * TARGETS[target].warp_size
    if TARGETS[target].backend == "hip":
        text = binary.asm["amdgcn"]
        registers, *spills = (
            _number(rf"\.{name}:\s+(\d+)", text)
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        )
        fences = re.findall(r"\bbuffer_(?:wbl2|inv)\b", text)
        wide = [(kind, "128") for kind in re.findall(r"\b(?:global|buffer)_(load|store)_dwordx4\b", text)]
    else:
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers = _number(r"REG:(\d+)", text)
        spills = _number(r"STACK:(\d+)", text), len(re.findall(r"\b(?:LDL|STL)\b", text))
        fences = re.findall(r"\b(?:MEMBAR\S*\.(?:GPU|SYS|VC)|ERRBAR|(?<!\.)CCTL\.IVALL)\b", text)
        wide = re.findall(r"\b(LDG|LDGSTS|STG)(?:\.\w+)*?\.(128|256)\b", text)
    loaded, stored = (
        threads * sum(int(bits) // 8 for kind, bits in wide if (kind in ("STG", "store")) == is_store)
        for is_store in (False, True)
    )
    flushes = ".ftz" in binary.asm.get("ptx", "")
    return Compiled(binary.metadata.shared, registers, sum(spills), len(fences), loaded, stored, flushes)


def _number(pattern, text):
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])


def compiled(launch, target, registers):
    """The `Compiled` kernel of a launch, which must not spill or fence, nor take more registers than these."""
    binary = compile_launch(launch, target)
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
