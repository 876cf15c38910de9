"""Compression algorithms and their memory.

An algorithm is a coroutine that awaits its collectives. It touches no stream and no future, so it reads like its paper
and runs in one process too: see `powersgd_all_reduce`.
"""

from gradwire.compress.cast import cast_all_reduce, sparse_all_reduce
from gradwire.compress.nodes import NodeBucket, quantized_all_reduce_on_nodes
from gradwire.compress.policy import LowRankPolicy, WirePolicy
from gradwire.compress.powersgd import (
    LowRankBucket,
    alternating_all_reduce,
    flat_low_rank_bucket,
    powersgd_all_reduce,
)
from gradwire.compress.quantization import Quantization, QuantizedBucket, quantized_all_reduce
from gradwire.compress.reduce_scatter import ScatterBucket, quantized_reduce_scatter, start_reduce_scatter
from gradwire.compress.scaled_cast import BucketScale, DelayedScaling, scaled_cast_all_reduce
from gradwire.compress.step import NOT_CARRIED, UNKNOWN, Gradients, Stamp, Step, is_repeatable, repeatable
