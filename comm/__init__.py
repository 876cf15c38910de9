"""How collectives are issued: transports, executors, wire buffers and process groups.

This package imports neither kernels nor hooks.
"""

from gradwire.comm.connections import Connections, connections_of, executor_for
from gradwire.comm.executor import Executor, Task, Workspace
from gradwire.comm.transport import (
    Algorithm,
    Collective,
    Driver,
    GroupTransport,
    IdleTransport,
    LocalTransport,
    Transport,
    run_algorithm,
)
