"""Kernels: the fused device work, each beside its plain-PyTorch reference. Nothing here communicates."""

from gradwire.kernels.flattening import flatten
from gradwire.kernels.segments import SegmentTable
from gradwire.kernels.unflattening import unflatten

__all__ = ["SegmentTable", "flatten", "unflatten"]
