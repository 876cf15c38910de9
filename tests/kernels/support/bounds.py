"""Bounds of memory in Triton's interpreter: a load or store outside of every tensor raises.

A kernel gets addresses from `Tensor.data_ptr`, as arguments and in tables. So it may touch the tensors that were asked
for their address, and whose memory still exists.
"""

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Bounds:
    """The memory of all tensors that were asked for their address."""

    def __init__(self):
        self._tensors = {}  # first address and the one after the last, with the storage
        self._is_current = False
        self._starts = self._ends = np.empty(0, np.uint64)

    def add(self, tensor, start):
        if tensor.numel() == 0:
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        place = (start, start + (last + 1) * tensor.itemsize)
        storage = self._tensors.get(place)
        if storage is None or storage.expired():
            self._tensors[place] = StorageWeakRef(tensor.untyped_storage())
            self._is_current = False

    def forget_freed(self):
        self._tensors = {place: storage for place, storage in self._tensors.items() if not storage.expired()}
        self._is_current = False

    def check(self, addresses, mask, nbytes):
        """Raise IndexError if an element of ``nbytes`` at an address with a true mask is outside of all tensors."""
        touched = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, mask.shape))[mask.astype(bool)]
        if not self._is_current:
            self._merge()
        place = np.searchsorted(self._starts, touched, side="right") - 1
        is_inside = (place >= 0) & (touched + np.uint64(nbytes) <= self._ends[np.maximum(place, 0)])
        if not is_inside.all():
            wrong = touched[~is_inside]
            raise IndexError(f"out of bounds: {len(wrong)} of {len(touched)} elements, the first at {wrong[0]:#x}")

    def _merge(self):
        starts, ends = [0], [0]  # no tensor
        for start, end in sorted(self._tensors):
            if start < ends[-1]:
                ends[-1] = max(end, ends[-1])
            else:
                starts.append(start)
                ends.append(end)
        self._starts, self._ends = np.array(starts, np.uint64), np.array(ends, np.uint64)
        self._is_current = True


def install():
    """Check every access of every kernel that the interpreter runs in this process."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    bounds, shipped = Bounds(), torch.Tensor.data_ptr

    def data_ptr(tensor):
        address = shipped(tensor)
        bounds.add(tensor, address)
        return address

    torch.Tensor.data_ptr = data_ptr
    _before(GridExecutor, "__call__", lambda *_, **__: bounds.forget_freed())

    def check(pointers, mask):
        bounds.check(pointers.data, mask, pointers.get_element_ty().primitive_bitwidth // 8)

    _before(InterpreterBuilder, "create_masked_load", lambda _, ptrs, mask, *__: check(ptrs, mask.data))
    _before(InterpreterBuilder, "create_masked_store", lambda _, ptrs, value, mask, *__: check(ptrs, mask.data))
    _before(InterpreterBuilder, "create_atomic_rmw", lambda _, op, ptrs, value, mask, *__: check(ptrs, mask.data))
    _before(InterpreterBuilder, "create_atomic_cas", lambda _, ptrs, *__: check(ptrs, np.array(True)))


def _before(owner, name, check):
    """Call ``check`` before a method, with its arguments."""
    method = getattr(owner, name)

    def checked(*args, **kwargs):
        check(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, checked)
