"""The tables of every benchmark, by the name in its records."""

from collections.abc import Callable, Sequence

from gradwire.bench import (
    advise,
    auto,
    converge,
    demo,
    hooks,
    kernels,
    network,
    reducer,
    rounding,
    telemetry,
)
from gradwire.bench.record import Record
from gradwire.bench.tables import Table

TABLES: dict[str, Callable[[Sequence[Record]], list[Table]]] = {
    "demo": demo.tables,
    "network": network.tables,
    "converge": converge.tables,
    "hooks": hooks.tables,
    "reducer": reducer.tables,
    "kernels": kernels.tables,
    "rounding": rounding.tables,
    "telemetry": telemetry.tables,
    "advise": advise.tables,
    "auto": auto.tables,
}
