"""Every kernel, compiled ahead of time for the GPUs it is meant for, must be vectorised and must not spill.

What is compiled is what the public functions launch: their arguments are recorded, not written down again here.
"""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
from cases import INTERPRETED, REALS, name

if INTERPRETED:
    pytest.skip("kernels decorated under TRITON_INTERPRET cannot be compiled", allow_module_level=True)
triton = pytest.importorskip("triton")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget

FP32, FP16, BF16, FP64 = REALS

# The largest number of registers that a thread may take (on gfx942: of vector registers). 64 lets four programs of
# 8 warps share a multiprocessor, 80 three, 128 two. No kernel may spill, and full aligned chunks must move through
# 128-bit accesses alone. The comments are the largest numbers measured, over all dtypes, with Triton 3.7.1 / 3.6.0.
LIMITS = {
    # (kernel, arithmetic, whether it counts or looks for the maximum): limit of each target
    ("flatten", FP32, False): {80: 64, 90: 64, 100: 64, "gfx942": 40},  # 64/48  64/48  64/54  37/38
    ("flatten", FP32, True): {80: 80, 90: 80, 100: 80, "gfx942": 64},  # 79/64  76/64  70/48  53/57
    ("flatten", FP64, False): {80: 104, 90: 96, 100: 96, "gfx942": 64},  # 100/100  94/94  88/94  56/56
    ("flatten", FP64, True): {80: 80, 90: 80, 100: 80, "gfx942": 64},  # 80/80  80/80  72/76  59/58
    ("unflatten", FP32, False): {80: 64, 90: 64, 100: 64, "gfx942": 40},  # 59/40  63/40  63/40  35/36
    ("unflatten", FP32, True): {80: 64, 90: 64, 100: 64, "gfx942": 48},  # 64/64  64/64  62/59  46/44
    ("unflatten", FP64, False): {80: 64, 90: 64, 100: 64, "gfx942": 48},  # 64/60  64/57  64/57  48/47
    ("unflatten", FP64, True): {80: 72, 90: 72, 100: 72, "gfx942": 64},  # 69/69  69/69  69/69  55/58
    ("update_scale", FP32, True): {80: 32, 90: 32, 100: 32, "gfx942": 16},  # 26/26  30/30  30/30  8/8
}
TARGETS = {
    80: GPUTarget("cuda", 80, 32),
    90: GPUTarget("cuda", 90, 32),
    100: GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MODULES = {
    "flatten": "gradwire.kernels.flattening",
    "unflatten": "gradwire.kernels.unflattening",
    "update_scale": "gradwire.kernels.scale",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Gradient dtype and wire dtype.
PAIRS = [(gradient, wire) for gradient in REALS for wire in (FP32, FP16, BF16)] + [(FP64, FP64)]
# For the targets other than sm_90: the two ends of the usual wires, the one of equal widths, and the widest.
REPRESENTATIVE = [(FP32, FP16), (FP32, BF16), (BF16, BF16), (FP64, FP64)]


@dataclass(frozen=True)
class Launch:
    """A call of a public function on a bucket that is aligned and has full chunks."""

    function: str
    gradient: torch.dtype = FP32
    wire: torch.dtype = FP32
    tensor_scale: bool = False
    observed: bool = False  # counted, or looked at for its maximum
    n_tensors: int = 2  # one is special: Triton makes an argument of value 1 a constant
    is_last: bool = True

    def __str__(self):
        if self.function == "update_scale":
            return f"update_scale-{'last' if self.is_last else 'earlier'}"
        options = {"scale": self.tensor_scale, "observed": self.observed, "single": self.n_tensors == 1}
        return "-".join([self.function, name(self.gradient), name(self.wire), *(o for o, on in options.items() if on)])


class Recorder:
    """Stands in for a kernel, and keeps what it is launched with."""

    def __getitem__(self, grid):
        def keep(**arguments):
            self.arguments = arguments

        return keep


def recorded(launch):
    """The kernel that a call launches, and its arguments."""
    module = import_module(MODULES[launch.function])
    kernel = f"_{launch.function}_kernel"
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, kernel, recorder)
        patch.setattr(module, "use_triton", lambda device: True)
        _call(getattr(module, launch.function), launch)
    return getattr(module, kernel), recorder.arguments


def _call(function, launch):
    if launch.function == "update_scale":
        tensors = (torch.zeros(2, dtype=torch.int32), torch.zeros(2), torch.zeros(1), torch.zeros(4, dtype=torch.int64))
        options = {"top": 13, "margin": 4, "growth": 1, "backoff": 4, "inverse_world": 0.5, "is_last": launch.is_last}
        function(*tensors, **options)
        return
    gradients = [torch.zeros(8192, dtype=launch.gradient) for _ in range(launch.n_tensors)]
    wire = torch.zeros(8192 * launch.n_tensors, dtype=launch.wire)
    scales = torch.ones(2)
    if launch.function == "flatten":
        counters = torch.zeros(4, dtype=torch.int64) if launch.observed else None
        function(gradients, wire, scale=scales[0] if launch.tensor_scale else 0.5, counters=counters)
    else:
        absmax = torch.zeros(1) if launch.observed else None
        function(wire, gradients, scale=scales[1] if launch.tensor_scale else 0.5, absmax=absmax)


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
        loaded: bytes that the wide (128 bits or more) loads of one program read.
        stored: bytes that its wide stores write.
    """

    registers: int
    spills: int
    loaded: int
    stored: int


@cache
def compiled(launch, target_name):
    kernel, arguments = recorded(launch)
    signature, constants, attributes = signature_of(kernel, arguments)
    target = TARGETS[target_name]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options={"num_warps": arguments["num_warps"]})
    threads = arguments["num_warps"] * target.warp_size
    return _amd(binary.asm["amdgcn"], threads) if target.backend == "hip" else _nvidia(binary.asm["cubin"], threads)


def _nvidia(cubin, threads):
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
        loaded=threads * sum(int(bits) // 8 for bits in re.findall(r"\bLDG\.\S*?(128|256)\b", sass)),
        stored=threads * sum(int(bits) // 8 for bits in re.findall(r"\bSTG\.\S*?(128|256)\b", sass)),
    )


def _amd(assembly, threads):
    def counted(field):
        return int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])

    return Binary(
        registers=counted("vgpr_count"),
        spills=counted("vgpr_spill_count") + counted("sgpr_spill_count") + counted("private_segment_fixed_size"),
        loaded=threads * 16 * len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", assembly)),
        stored=threads * 16 * len(re.findall(r"\b(?:global|buffer)_store_dwordx4\b", assembly)),
    )


def check(launch, target):
    binary = compiled(launch, target)
    arithmetic = FP64 if launch.gradient == FP64 else FP32
    limit = LIMITS[launch.function, arithmetic, launch.observed][target]
    assert binary.spills == 0, binary
    assert binary.registers <= limit, binary
    if launch.function != "update_scale":
        chunk = recorded(launch)[1]["CHUNK"]
        read, written = launch.gradient, launch.wire
        if launch.function == "unflatten":
            read, written = written, read
        # Each element of a full chunk passes through wide accesses once; the tail's accesses are narrow.
        assert (binary.loaded, binary.stored) == (chunk * read.itemsize, chunk * written.itemsize), binary


def launches(pairs, variants):
    return [
        Launch(function, gradient, wire, tensor_scale, observed)
        for function in ("flatten", "unflatten")
        for gradient, wire in pairs
        for tensor_scale, observed in variants
    ]


ENDS = [(False, False), (True, True)]
EVERY = [(tensor_scale, observed) for tensor_scale in (False, True) for observed in (False, True)]
UPDATES = [Launch("update_scale", observed=True, is_last=is_last) for is_last in (False, True)]
SINGLES = [Launch(f, FP32, BF16, True, True, n_tensors=1) for f in ("flatten", "unflatten")]


@pytest.mark.parametrize("launch", launches(PAIRS, ENDS) + UPDATES + SINGLES, ids=str)
def test_kernels_fit_sm_90(launch):
    check(launch, 90)


@pytest.mark.parametrize("target", [80, 100, "gfx942"])
@pytest.mark.parametrize("launch", launches(REPRESENTATIVE, ENDS) + UPDATES[:1], ids=str)
def test_representative_kernels_fit_other_gpus(launch, target):
    check(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("launch", launches(PAIRS, EVERY) + UPDATES + SINGLES, ids=str)
def test_every_kernel_fits_every_gpu(launch, target):
    check(launch, target)
