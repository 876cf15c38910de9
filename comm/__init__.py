"""How collectives are issued: transports, executors, wire buffers and process groups.

This package imports neither kernels nor hooks.
"""

from gradwire.comm.collectives import Collective
from gradwire.comm.connections import Connections, connections_of, executor_for
from gradwire.comm.executor import Executor
from gradwire.comm.profiling import in_ranges
from gradwire.comm.transport import (
    GroupTransport,
    LocalTransport,
    Steps,
    Transport,
    run_algorithm,
    wait_for,
)
from gradwire.comm.workspace import Workspace

__all__ = [
    "Collective",
    "Connections",
    "Executor",
    "GroupTransport",
    "LocalTransport",
    "Steps",
    "Transport",
    "Workspace",
    "connections_of",
    "executor_for",
    "in_ranges",
    "run_algorithm",
    "wait_for",
]
