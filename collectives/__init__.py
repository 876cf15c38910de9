"""Compressed collectives for code without DDP, with the names and arguments of ``torch.distributed``.

from gradwire import collectives as dist_c

dist_c.all_reduce(parameter.grad, wire="int8")
"""

from gradwire.collectives.functions import all_reduce, all_reduce_coalesced, reduce_scatter_tensor, resynchronize
from gradwire.collectives.memory import Memory

__all__ = ["Memory", "all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "resynchronize"]
