"""How collectives are issued: transports, executors, wire buffers and process groups.

This package imports neither kernels nor hooks.
"""

from gradwire.comm.connections import Connections, connections_of, executor_for
from gradwire.comm.executor import Executor, Workspace
from gradwire.comm.transport import (
    Collective,
    Driver,
    GroupTransport,
    LocalTransport,
    Steps,
    Transport,
    run_algorithm,
    wait_for,
)

__all__ = [
    "Collective",
    "Connections",
    "Driver",
    "Executor",
    "GroupTransport",
    "LocalTransport",
    "Steps",
    "Transport",
    "Workspace",
    "connections_of",
    "executor_for",
    "run_algorithm",
    "wait_for",
]
