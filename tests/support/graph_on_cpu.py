"""CUDA graphs on a CPU: a capture records kernels and runs none of them; a replay runs them with the same arguments.

It is as strict as CUDA. A recorded kernel reads numbers in device memory when it is replayed; the addresses of
gradients are such numbers. A capture refuses a host wait and an upload of a table, which every replay would repeat.
Memory that is allocated in a capture is filled with NaN until the first replay.

Recorded are torch operators, the CPU paths of the kernels that `PowerSGDState(cuda_graphs=True)` captures, each as one
kernel, and, in Triton's interpreter, its launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradwire.comm import Workspace
from gradwire.compress import powersgd, quantization
from gradwire.kernels import Operands, SegmentTable, lowrank, uploads
from gradwire.kernels.dispatch import is_interpreted

Kernel = Callable[..., None]
# Allocations: nothing is recorded, nothing runs.
_ALLOCATIONS = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


class Pool:
    """Stands in for the memory pool that graphs share. Once all of them are freed, it cannot be used again."""

    def __init__(self) -> None:
        self.graphs: WeakSet[GraphOnCpu] = WeakSet()
        self.was_used = False

    def enter(self, graph: GraphOnCpu) -> None:
        if self.was_used and not self.graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.was_used = True
        self.graphs.add(graph)


class GraphOnCpu:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    under_way: GraphOnCpu | None = None  # the graph that is being captured
    captures = replays = 0  # numbers so far, of all graphs

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []
        self._recorder = _Recorder(self)
        self._pool: Pool | None = None

    def capture_begin(self, pool: Pool, capture_error_mode: str = "global") -> None:
        assert GraphOnCpu.under_way is None, "two captures at once"
        pool.enter(self)
        self._pool = pool
        GraphOnCpu.under_way = self
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        if GraphOnCpu.under_way is not self:
            raise RuntimeError("no capture of this graph is under way")
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        GraphOnCpu.under_way = None
        GraphOnCpu.captures += 1

    def replay(self) -> None:
        assert GraphOnCpu.under_way is None, "a replay in a capture"
        GraphOnCpu.replays += 1
        with torch.no_grad():
            for kernel in self.kernels:
                kernel()

    def pool(self) -> Pool:
        assert self._pool is not None, "nothing was captured"
        return self._pool

    def reset(self) -> None:
        self.kernels = []
        if self._pool is not None:
            self._pool.graphs.discard(self)


class _Recorder(TorchDispatchMode):
    """Records torch operators instead of running them."""

    def __init__(self, graph: GraphOnCpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords, schema = keywords or {}, function._schema
        if schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing: the host waits for the device")
        call = partial(function, *arguments, **keywords)
        written = [
            keywords[each.name] if each.name in keywords else arguments[i]
            for i, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if written:
            self._graph.kernels.append(call)
            return written[0] if len(schema.returns) == 1 else written if schema.returns else None
        result = call()
        if schema.name in _ALLOCATIONS:
            tree_map(_poison, result)
        elif not function.is_view:
            fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._graph.kernels.append(partial(_renew, fresh, call))
            tree_map(_poison, result)
        return result


def _poison(tensor: object) -> None:
    if isinstance(tensor, Tensor):
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _renew(targets: Sequence[Tensor], call: Callable[[], object]) -> None:
    """Run an operator that returns new tensors, into those that it returned in the capture."""
    results = [leaf for leaf in tree_leaves(call()) if isinstance(leaf, Tensor)]
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)


def _recorded(kernel: Kernel) -> Kernel:
    """A kernel whose calls are recorded in captures."""

    @wraps(kernel)  # `dispatch.choose` reads the name
    def call(*arguments: Any, **keywords: Any) -> None:
        if GraphOnCpu.under_way is None:
            kernel(*arguments, **keywords)
        else:
            GraphOnCpu.under_way.kernels.append(partial(kernel, *arguments, **keywords))

    return call


def _by_matrix_addresses(kernel: Kernel) -> Kernel:
    """A kernel of `Operands` whose replays find matrices and uncompressed gradients by the addresses on the device."""

    def call(operands: Operands, *rest: Any) -> None:
        table = operands.table
        if GraphOnCpu.under_way is None:
            kernel(operands, *rest)
            return
        addresses = table.on_device_addresses(operands.addresses)
        others = operands.uncompressed
        if others is not None:
            read, written = others.table.packed(others.source), others.target_table.packed(others.target)

        def replayed() -> None:
            moved = others
            if others is not None:
                source = _tensors_at(read, others.source)
                target = source if others.target is others.source else _tensors_at(written, others.target)
                moved = others._replace(source=source, target=target)
            parts = (operands.source, operands.target, operands.error or operands.target)
            found = _tensors_at(addresses, [tensor for part in parts for tensor in part])
            n = len(table)
            error = found[2 * n :] if operands.error is not None else None
            fields = {"source": found[:n], "target": found[n : 2 * n], "error": error, "uncompressed": moved}
            kernel(replace(operands, **fields), *rest)

        GraphOnCpu.under_way.kernels.append(replayed)

    return call


def _by_segment_addresses(kernel: Kernel, position: int) -> Kernel:
    """A kernel of a `SegmentTable`, with tensors as argument ``position``; replays find them by their addresses."""

    def call(*arguments: Any) -> None:
        if GraphOnCpu.under_way is None:
            kernel(*arguments)
            return
        tensors = arguments[position]
        table = next(argument for argument in arguments if isinstance(argument, SegmentTable))
        packed = table.packed(tensors)

        def replayed() -> None:
            kernel(*arguments[:position], _tensors_at(packed, tensors), *arguments[position + 1 :])

        GraphOnCpu.under_way.kernels.append(replayed)

    return call


def _by_block_addresses(kernel: Kernel, position: int) -> Kernel:
    """A kernel of a `Section`, with tensors as argument ``position``; replays find them by their addresses."""

    def call(*arguments: Any) -> None:
        tensors, segments = arguments[position], arguments[1].table.segments
        packed = (segments.packed_results if position == 2 else segments.packed)(tensors)  # eager steps upload, too
        if GraphOnCpu.under_way is None:
            kernel(*arguments)
            return

        def replayed() -> None:
            kernel(*arguments[:position], _tensors_at(packed, tensors), *arguments[position + 1 :])

        GraphOnCpu.under_way.kernels.append(replayed)

    return call


def _tensors_at(addresses: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Tensors at the first addresses in ``addresses``, in the layouts of ``likes``."""
    return [_tensor_at(address, like) for address, like in zip(addresses.tolist(), likes, strict=False)]


def _tensor_at(address: int, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return like
    span = 1 + sum(stride * (size - 1) for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_byte * (span * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def _refuse_uploads(replace_numbers: Callable[..., None]) -> Callable[..., None]:
    def call(upload: uploads.Upload, numbers: Sequence[int]) -> None:
        if GraphOnCpu.under_way is not None:
            raise RuntimeError("A table is uploaded in a capture, so every replay would upload it again: refresh it.")
        replace_numbers(upload, numbers)

    return call


def is_capturing(*_: object) -> bool:
    """Whether a capture is under way."""
    return GraphOnCpu.under_way is not None


@contextmanager
def graphs_on_cpu() -> Iterator[type[GraphOnCpu]]:
    """A context in which ``torch.cuda.CUDAGraph`` is `GraphOnCpu`, which it yields with its counts at 0."""
    GraphOnCpu.captures = GraphOnCpu.replays = 0
    # Modules of these names are hidden in their package by the functions.
    flatten, orthogonalize, quantize = (
        import_module(f"gradwire.kernels.{name}") for name in ("flatten", "orthogonalize", "quantize")
    )
    leaves: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (lowrank, "project_cpu", _by_matrix_addresses),
        (lowrank, "backproject_cpu", _by_matrix_addresses),
        (lowrank, "reconstruct_cpu", _by_matrix_addresses),
        (lowrank, "renew_cpu", _recorded),
        (flatten, "flatten_cpu", partial(_by_segment_addresses, position=0)),
        (flatten, "unflatten_cpu", partial(_by_segment_addresses, position=1)),
        (orthogonalize, "orthogonalize_cpu", _recorded),
        (orthogonalize, "orthogonalize_reference", _recorded),
        (quantize, "quantize_cpu", partial(_by_block_addresses, position=0)),
        (quantize, "reduce_quantized_cpu", _recorded),
        (quantize, "dequantize_cpu", partial(_by_block_addresses, position=2)),
        (quantize, "commit_errors_cpu", _recorded),
        (uploads.Upload, "_write", _refuse_uploads),
    ]
    if is_interpreted():
        from triton.runtime.interpreter import GridExecutor

        leaves.append((GridExecutor, "__call__", _recorded))
    with ExitStack() as patches:
        for owner, name, wrap in leaves:
            patches.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        for owner, name, stand_in in (
            (torch.cuda, "CUDAGraph", GraphOnCpu),
            (torch.cuda, "graph_pool_handle", Pool),
            (torch.cuda, "is_current_stream_capturing", is_capturing),
            (uploads, "is_capturing", is_capturing),
            (powersgd, "is_capturing", is_capturing),
            (quantization, "is_capturing", is_capturing),
            (powersgd.LowRankBucket, "can_capture", True),
            (quantization.QuantizedBucket, "can_capture", True),
            (Workspace, "_is_capturing", is_capturing),
        ):
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        yield GraphOnCpu
