"""The algorithms: what is sent and what is remembered. Straight-line code that awaits its collectives; no streams,
no futures."""

from gradwire.compress.cast import cast_all_reduce, sparse_all_reduce
from gradwire.compress.error_memory import ErrorMemory
from gradwire.compress.gradients import Gradients
from gradwire.compress.policy import LowRankPolicy
from gradwire.compress.powersgd import Factors, LowRankBucket, alternating_all_reduce, powersgd_all_reduce
from gradwire.compress.scaled_cast import BucketScale, DelayedScaling, scaled_cast_all_reduce
from gradwire.compress.transport import Collective, Steps, Transport, wait_for
from gradwire.compress.workspace import Workspace

__all__ = [
    "BucketScale",
    "Collective",
    "DelayedScaling",
    "ErrorMemory",
    "Factors",
    "Gradients",
    "LowRankBucket",
    "LowRankPolicy",
    "Steps",
    "Transport",
    "Workspace",
    "alternating_all_reduce",
    "cast_all_reduce",
    "powersgd_all_reduce",
    "scaled_cast_all_reduce",
    "sparse_all_reduce",
    "wait_for",
]
