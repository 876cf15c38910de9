"""Compressed collectives for code without DDP, with the names and arguments of ``torch.distributed``.

`all_reduce`, `all_reduce_coalesced` and `reduce_scatter_tensor` take the wire format as an argument. `compressed_group`
makes a process group for code that takes one.
"""

from gradwire.collectives.functions import all_reduce, all_reduce_coalesced, reduce_scatter_tensor, resynchronize
from gradwire.collectives.group import CompressedGroup, compressed_group
from gradwire.collectives.memory import Memory

__all__ = [
    "CompressedGroup",
    "Memory",
    "all_reduce",
    "all_reduce_coalesced",
    "compressed_group",
    "reduce_scatter_tensor",
    "resynchronize",
]
