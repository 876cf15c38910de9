"""Nodes: which ranks of a process group share a machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def node_name() -> str:
    """The name of this process's node: its host name, and torchrun's number of the node if there is one."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".rstrip()


def local_size(nodes: Sequence[str]) -> int:
    """Number of ranks on each node, if there are several nodes with equally many, consecutive ranks; else 1.

    Args:
        nodes: name of the node of each rank.
    """
    size = nodes.count(nodes[0])
    runs = [set(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    is_even = all(len(run) == 1 for run in runs) and len(set(nodes)) == len(runs) and len(nodes) % size == 0
    return size if is_even and len(runs) > 1 else 1
