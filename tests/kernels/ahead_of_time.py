"""Kernels compiled for GPUs that need not be there, and what became of them: registers, spills, wide accesses.

What is compiled is what the public functions launch: their arguments are recorded, not written down again.
"""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from cases import INTERPRETED, REALS

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
triton = pytest.importorskip("triton")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget

FP32, FP16, BF16, FP64 = REALS
TARGETS = {
    80: GPUTarget("cuda", 80, 32),
    90: GPUTarget("cuda", 90, 32),
    100: GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def recorded_launches(modules, call):
    """The launches of ``modules``'s kernels by ``call()``, in order: name, kernel and arguments."""
    launches = []

    class Recorder:
        """Stands in for a kernel."""

        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            return lambda **arguments: launches.append((self.name, self.kernel, arguments))

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "use_triton", lambda device: True, raising=False)
            for name, kernel in vars(module).copy().items():
                if name.startswith("_") and name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(name.removeprefix("_").removesuffix("_kernel"), kernel))
        call()
    return launches


def recorded(modules, call):
    """The kernels of ``modules`` that ``call()`` launches, with their arguments, by name; the last launch of each."""
    return {name: (kernel, arguments) for name, kernel, arguments in recorded_launches(modules, call)}


@cache
def _binder(kernel, target):
    backend = triton.compiler.make_backend(target)
    return backend, triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)


def variant(kernel, arguments, target_name):
    """What Triton's launcher looks a compiled kernel up by: types, constants, alignments and options.

    The launcher's own code computes it, which needs no GPU; two launches with equal ones share a compiled kernel.
    """
    _, bind = _binder(kernel, TARGETS[target_name])
    _, specialization, options = bind(**arguments)
    return triton.runtime.jit.compute_cache_key({}, specialization, options)


def source_of(kernel, arguments, target_name):
    """What the launcher compiles for these arguments, and with which options."""
    backend, bind = _binder(kernel, TARGETS[target_name])
    bound, specialization, given = bind(**arguments)
    options, *described = kernel._pack_args(backend, arguments, bound, specialization, given)
    return triton.compiler.ASTSource(kernel, *described), options


@dataclass(frozen=True)
class Binary:
    """What became of a kernel.

    Attributes:
        registers: of one thread.
        spills: accesses or slots of memory that stands in for registers.
        shared: bytes of shared memory of one program.
        loaded: bytes that the wide (128 bits or more) loads of one program read.
        stored: bytes that its wide stores write.
        fences: instructions that make memory accesses visible to the whole GPU, or forget what a cache holds.
    """

    registers: int
    spills: int
    shared: int
    loaded: int
    stored: int
    fences: int


def intermediate(kernel, arguments, target_name):
    """The lines of a kernel in Triton's own intermediate language, before anything is optimised."""
    source, options = source_of(kernel, arguments, target_name)
    backend, _ = _binder(kernel, TARGETS[target_name])
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(TARGETS[target_name], options, codegen, backend.get_module_map(), context)
    return str(module).splitlines()


def check_program_number(lines):
    """The number of the program, which Triton gives in 32 bits, is made 64 bits wide before any arithmetic."""
    functions = "\n".join(lines).split("tt.func ")[1:]  # names of values are those of one function
    (body,) = [function.splitlines() for function in functions if "tt.get_program_id" in function]
    (number,) = [line.split("=")[0].strip() for line in body if "tt.get_program_id" in line]
    users = [line for line in body if re.search(rf"{number}\b(?! =)", line)]
    assert users, "the kernel does not use its number"
    for line in users:
        assert re.search(r"arith\.extsi .*: i32 to i64", line), line


def compiled(kernel, arguments, target_name):
    """The `Binary` of a recorded launch for one of `TARGETS`."""
    source, options = source_of(kernel, arguments, target_name)
    target = TARGETS[target_name]
    binary = triton.compile(source, target=target, options=options.__dict__)
    threads = arguments["num_warps"] * target.warp_size
    read = _amd if target.backend == "hip" else _nvidia
    return read(binary.asm["amdgcn" if target.backend == "hip" else "cubin"], threads, binary.metadata.shared)


def _nvidia(cubin, threads, shared):
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return Binary(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)) + int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=shared,
        loaded=threads * sum(int(bits) // 8 for bits in re.findall(r"\bLDG(?:STS)?\.\S*?(128|256)\b", sass)),
        stored=threads * sum(int(bits) // 8 for bits in re.findall(r"\bSTG\.\S*?(128|256)\b", sass)),
        fences=len(re.findall(r"\b(?:MEMBAR\S*\.(?:GPU|SYS|VC)|ERRBAR|(?<!\.)CCTL\.IVALL)\b", sass)),
    )


def _amd(assembly, threads, shared):
    def counted(field):
        return int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])

    return Binary(
        registers=counted("vgpr_count"),
        spills=counted("vgpr_spill_count") + counted("sgpr_spill_count") + counted("private_segment_fixed_size"),
        shared=shared,
        loaded=threads * 16 * len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", assembly)),
        stored=threads * 16 * len(re.findall(r"\b(?:global|buffer)_store_dwordx4\b", assembly)),
        fences=len(re.findall(r"\bbuffer_(?:wbl2|inv)\b", assembly)),
    )
