"""A GPU that does nothing, for the host's time alone. `install` changes a process for good: call it in a worker.

Tensors are in the memory of the CPU and say that they are on a GPU, so PyTorch's and gradwire's Python take the way of
a GPU. Triton compiles and launches its kernels, by its own launcher, on a driver whose calls do nothing. Streams,
events and collectives are done at once. So the results are garbage, and what takes time is the host.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "gradwire_host"


def c_compilers() -> list[str]:
    """The paths of the C compilers that Triton can use: that of CC, if it is set, else of gcc and clang."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return [path for name in names if (path := shutil.which(name))]


class Device(str):
    """A device that says that it is a GPU, and is the CPU to PyTorch's C++."""

    type = "cuda"
    index = 0  # type: ignore[assignment]


DEVICE = Device("cpu")


class Event:
    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """A stream with the Python code of `torch.cuda.Stream`."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = Event()
        event.record(self)
        return event


class Collectives(dist.ProcessGroup):
    """Collectives of one rank that are done at once; futures have the tensors, as PyTorch's DDP expects."""

    count = 0  # collectives so far, of all groups

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None: ...

    def _done(self, tensors: Sequence[Tensor]) -> Any:
        Collectives.count += 1
        future: Future[Any] = Future()
        future.set_result(tensors)
        bindings: Any = torch._C._distributed_c10d
        return bindings._create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._done(tensors)

    def allgather(self, gathered: Any, own: Any, options: Any = None) -> Any:
        gathered[0][0].copy_(own[0])
        return self._done(own)

    def _allgather_base(self, gathered: Tensor, own: Tensor, options: Any = None) -> Any:
        return self._done([gathered])

    def alltoall_base(self, received: Tensor, sent: Tensor, *splits_and_options: Any) -> Any:
        return self._done([received])


class Driver:
    """The driver that does nothing, compiled from libcuda.c into ``folder`` and loaded before any other."""

    def __init__(self, folder: Path) -> None:
        source, library = Path(__file__).with_name("libcuda.c"), folder / "libcuda.so.1"
        options = ["-shared", "-fPIC", "-O2", f"-Wl,-soname,{library.name}", "-o", str(library)]
        subprocess.run([c_compilers()[0], *options, str(source)], check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    def count(self, name: str) -> int:
        """A counter of libcuda.c so far."""
        return ctypes.c_long.in_dll(self._library, name).value


def install(folder: Path) -> Driver:
    """Give this process a GPU that does nothing. Triton must not have been used."""
    import torch._dynamo  # lists PyTorch's functions, before some are replaced

    driver = Driver(folder)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = Event, Stream
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda device=None: (9, 0)  # an H100's
    cuda.current_device = cuda._exchange_device = cuda._maybe_exchange_device = lambda *_: 0
    cuda.set_device = cuda.set_stream = lambda *_: None
    cuda.current_stream = lambda device=None: Stream(stream_id=0, device_index=0, device_type=1)
    cuda.is_current_stream_capturing = lambda: False
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = lambda index: 0
    tensor: Any = Tensor
    tensor.device, tensor.is_cuda = property(lambda self: DEVICE), property(lambda self: True)
    tensor.get_device = lambda self: 0
    tensor.record_stream = lambda self, stream: None
    make_empty: Any = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: make_empty(*sizes, **options)
    future: Any = Future
    future.__init__ = lambda self, *, devices=None: bindings.Future.__init__(self, [])
    dist.Backend.register_backend(BACKEND, Collectives, devices=["cpu", "cuda"])
    return driver
