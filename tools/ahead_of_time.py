"""Kernels compiled for GPUs that need not be there, from the launches that the public functions make.

Launches are recorded instead of made: the arguments that decide what Triton compiles are those of real calls. Needs
Triton without its interpreter.
"""

from __future__ import annotations

import pkgutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from gradwire import kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        name: name of the kernel, without ``_`` and ``_kernel``.
        kernel: the jitted function.
        arguments: arguments by name, with the options of the launch.
        grid: the number of programs along each axis.
    """

    name: str
    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]


class _Recorder:
    """Stands in for a kernel."""

    def __init__(self, name: str, kernel: Any, launches: list[Launch]) -> None:
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.launches.append(Launch(self.name, self.kernel, arguments, grid))


def kernel_modules() -> list[ModuleType]:
    """The modules of `gradwire.kernels`."""
    return [import_module(f"gradwire.kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]


def recorded_launches(call: Callable[[], object], modules: Iterable[ModuleType] | None = None) -> list[Launch]:
    """The launches by ``call()`` of the kernels of ``modules``, by default all of gradwire's, in order. None is made.

    Tensors may lie on any device, also on ``meta``.
    """
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module in kernel_modules() if modules is None else modules:
            for name, value in vars(module).copy().items():
                if name == "use_triton":
                    stack.enter_context(patch.object(module, name, lambda device: True))
                elif name.startswith("_") and name.endswith("_kernel"):
                    recorder = _Recorder(name.removeprefix("_").removesuffix("_kernel"), value, launches)
                    stack.enter_context(patch.object(module, name, recorder))
        call()
    return launches


@cache
def _binder(kernel: Any, target: str) -> tuple[Any, Any]:
    backend = triton.compiler.make_backend(TARGETS[target])
    return backend, triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)


def variant(launch: Launch, target: str) -> Any:
    """The key by which Triton's launcher looks up a compiled kernel: types, constants, alignments and options.

    The launcher's own code computes it; two launches with equal keys share a compiled kernel.
    """
    _, bind = _binder(launch.kernel, target)
    _, specialization, options = bind(**launch.arguments)
    return triton.runtime.jit.compute_cache_key({}, specialization, options)


def source_of(launch: Launch, target: str) -> tuple[Any, Any]:
    """The source that the launcher compiles for these arguments, and the options."""
    backend, bind = _binder(launch.kernel, target)
    bound, specialization, given = bind(**launch.arguments)
    options, *described = launch.kernel._pack_args(backend, launch.arguments, bound, specialization, given)
    return triton.compiler.ASTSource(launch.kernel, *described), options


def intermediate(launch: Launch, target: str) -> list[str]:
    """The lines of a kernel in Triton's intermediate language, before any optimization."""
    source, options = source_of(launch, target)
    backend, _ = _binder(launch.kernel, target)
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    return str(source.make_ir(TARGETS[target], options, codegen, backend.get_module_map(), context)).splitlines()


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        target: a member of `TARGETS`.
        threads: threads of a program.
        shared: bytes of shared memory of a program.
        ttgir: Triton's intermediate language with layouts.
        ptx: NVIDIA's virtual assembly; empty on AMD.
        assembly: SASS, or AMD's assembly.
        usage: cuobjdump's line of resources; empty on AMD.
    """

    target: str
    threads: int
    shared: int
    ttgir: str
    ptx: str
    assembly: str
    usage: str


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile the kernel of a launch for one of `TARGETS`."""
    source, options = source_of(launch, target)
    binary = triton.compile(source, target=TARGETS[target], options=options.__dict__)
    threads = launch.arguments["num_warps"] * TARGETS[target].warp_size
    common = (target, threads, binary.metadata.shared, binary.asm["ttgir"])
    if TARGETS[target].backend == "hip":
        return Compiled(*common, ptx="", assembly=binary.asm["amdgcn"], usage="")
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return Compiled(*common, ptx=binary.asm["ptx"], assembly=sass, usage=usage)
