"""The tables of every benchmark, by the name in its records."""

from collections.abc import Callable, Sequence

from gradwire.bench import converge, demo, hooks, kernels, network, reducer, telemetry
from gradwire.bench.record import Record
from gradwire.bench.tables import Table

_BENCHES = (demo, network, converge, hooks, reducer, kernels, telemetry)
TABLES: dict[str, Callable[[Sequence[Record]], list[Table]]] = {
    bench.__name__.rpartition(".")[2]: bench.tables for bench in _BENCHES
}
