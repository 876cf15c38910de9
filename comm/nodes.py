"""Nodes: which ranks of a process group share a machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def node_name() -> str:
    """The name of this process's node: its host name, and torchrun's number of the node if there is one."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".rstrip()


def ranks_per_node(nodes: Sequence[str]) -> int:
    """Number of ranks on the node that has most of them.

    Args:
        nodes: name of the node of each rank.
    """
    return max(map(nodes.count, set(nodes)))


def local_size(nodes: Sequence[str]) -> int:
    """Number of ranks on each node, if there are several nodes with equally many, consecutive ranks; else 1.

    Args:
        nodes: name of the node of each rank.
    """
    size, count = nodes.count(nodes[0]), len(set(nodes))
    runs = [set(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    if len(runs) == count and count * size == len(nodes) and all(len(run) == 1 for run in runs):
        logger.info("%d ranks are on %d nodes, %d on each.", len(nodes), count, size)
        return size if count > 1 else 1
    logger.info("Ranks are not on nodes of equally many, consecutive ranks, so all exchange gradients: %s.", nodes)
    return 1
