"""Compression algorithms and their memory: straight-line code that awaits its collectives; no streams, no futures."""

from gradwire.compress.cast import cast_all_reduce, sparse_all_reduce
from gradwire.compress.error_memory import ErrorMemory
from gradwire.compress.gradients import Gradients
from gradwire.compress.policy import LowRankPolicy
from gradwire.compress.powersgd import Factors, LowRankBucket, alternating_all_reduce, powersgd_all_reduce
from gradwire.compress.scaled_cast import BucketScale, DelayedScaling, scaled_cast_all_reduce

__all__ = [
    "BucketScale",
    "DelayedScaling",
    "ErrorMemory",
    "Factors",
    "Gradients",
    "LowRankBucket",
    "LowRankPolicy",
    "alternating_all_reduce",
    "cast_all_reduce",
    "powersgd_all_reduce",
    "scaled_cast_all_reduce",
    "sparse_all_reduce",
]
