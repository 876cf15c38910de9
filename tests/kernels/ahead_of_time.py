"""Kernels compiled for GPUs that need not be there, and what became of them: registers, spills, wide accesses.

What is compiled is what the public functions launch: their arguments are recorded, not written down again.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
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


def recorded(modules, call):
    """The kernels of ``modules`` that ``call()`` launches, with their arguments, by name; the last launch of each."""
    launches = {}

    class Recorder:
        """Stands in for a kernel."""

        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            return lambda **arguments: launches.update({self.name: (self.kernel, arguments)})

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "use_triton", lambda device: True, raising=False)
            for name, kernel in vars(module).copy().items():
                if name.startswith("_") and name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(name.removeprefix("_").removesuffix("_kernel"), kernel))
        call()
    return launches


def signature_of(kernel, arguments):
    """What the launcher makes of arguments: types, constants, and which are multiples of 16."""
    pointers = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16", FP64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        address = value
        if isinstance(value, torch.Tensor):
            signature[parameter.name], address = pointers[value.dtype], value.data_ptr()
        else:
            signature[parameter.name] = parameter.annotation_type or ("fp32" if isinstance(value, float) else "i32")
        if isinstance(address, int) and address % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


@dataclass(frozen=True)
class Binary:
    """What became of a kernel.

    Attributes:
        registers: of one thread.
        spills: accesses or slots of memory that stands in for registers.
        shared: bytes of shared memory of one program.
        loaded: bytes that the wide (128 bits or more) loads of one program read.
        stored: bytes that its wide stores write.
    """

    registers: int
    spills: int
    shared: int
    loaded: int
    stored: int


def compiled(kernel, arguments, target_name):
    """The `Binary` of a recorded launch for one of `TARGETS`."""
    signature, constants, attributes = signature_of(kernel, arguments)
    target = TARGETS[target_name]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options={"num_warps": arguments["num_warps"]})
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
    )
