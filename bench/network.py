"""Steps over a network: the same model with each hook, on hosts that are joined at a chosen rate.

One rank on each host, one thread each. All contenders live in the same processes and take turns step by step, at one
rate after another. `measure` starts the ranks; each runs `main`, checks the gradients, sets the rate of its own
interface, and times its steps. With one GPU the link can be a model instead: see `gradwire.bench.emulated`.
"""

import itertools
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from rich.table import Table

from gradwire.bench import namespaces
from gradwire.bench.contenders import (
    BUCKETS,
    FIRST_COMPRESSED,
    GRADWIRE,
    MODEL,
    PYTORCH,
    WARM_UP,
    Contender,
    make_batch,
    needs_one_bucket,
    provider_label,
)
from gradwire.bench.emulated import emulated_link
from gradwire.bench.launch import Place, exit_with_launcher, launch_at, leave, loopback_interface
from gradwire.bench.measuring import backend_of, bench_device, in_turn, percentiles_ms, slowest, synchronize
from gradwire.bench.namespaces import Rate
from gradwire.bench.report import add_hooks, bench_table, format_bytes, machine_line

REFERENCE = "noop"
DEFAULT_HOOKS = ("noop", "none", "fp16", "bf16", "powersgd-r1", "powersgd-r4", "powersgd-r16")
QUICK_HOOKS = ("noop", "none", "powersgd-r4")
DEFAULT_RATES = ("100mbit", "1gbit", "unlimited")
EMULATED_RATES = ("10gbit", "25gbit", "100gbit", "400gbit")
QUICK_RATES = ("1gbit",)
LOOPBACK = Rate("loopback", None)
_PORT = 29500
_PROBE_BYTES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step took at a rate.

    Attributes:
        rate: as asked for.
        hook: its name in `gradwire.bench.hooks.HOOKS`.
        provider: whose hook, on whose DDP.
        one_bucket: whether the model was one bucket; else buckets of 25 MiB.
        step_ms: a forward and a backward on the slower rank of each step: p20, p50, p80.
        link_bytes: what a rank's interface sent in a step, headers and the barrier around it included: the median;
            None on loopback and on a modelled link.
        exposed_ms: the median beyond that of noop_hook on the same DDP with the same buckets: what the exchange adds to
            a step, compressing included, because nothing hides it.
        vs_noop: the median in units of that of noop_hook.
        vs_pytorch: the median in units of that of PyTorch's hook on its DDP; None for that itself.
    """

    rate: str
    hook: str
    provider: str
    one_bucket: bool
    step_ms: dict[str, float]
    link_bytes: float | None
    exposed_ms: float
    vs_noop: float
    vs_pytorch: float | None


def measure(
    hooks: Sequence[str], rates: Sequence[Rate], steps: int, count: int, is_emulated: bool = False
) -> dict[str, Any]:
    """Step times of each hook at each rate.

    Args:
        hooks: names in `HOOKS`.
        rates: between the hosts, in this order; ``[LOOPBACK]`` for ranks that share this machine's loopback.
        steps: timed steps of each contender at each rate.
        count: hosts.
        is_emulated: whether one rank, on a GPU, stands for all, and the link is a model. Then allreduce_hook stands for
            no hook.

    Returns:
        What `step_tables` takes and JSON holds: the settings, the rate that a plain all-reduce reached, and a list of
        `Step` as dictionaries.

    Raises:
        NamespaceError: the system refuses to make hosts.
        LaunchError: a rank failed.
    """
    if is_emulated:
        hooks = ["allreduce" if hook == "none" else hook for hook in hooks]
    settings = {"hooks": list(hooks), "rates": [rate.name for rate in rates], "steps": steps, "hosts": count}
    one_for_all = is_emulated or list(rates) == [LOOPBACK]
    return run_on_hosts(
        "gradwire.bench.network", settings | {"emulated": is_emulated}, one_for_all, 1 if is_emulated else count
    )


def run_on_hosts(module: str, settings: dict[str, Any], is_loopback: bool, count: int) -> dict[str, Any]:
    """Run ``python -m module`` as one rank on each host; returns what rank 0 has written.

    Args:
        module: takes ``settings`` as JSON, and with them the ``path`` of the file to write, JSON too.
        settings: of the module.
        is_loopback: whether the hosts share this machine's loopback.
        count: hosts.

    Raises:
        NamespaceError: the system refuses to make hosts.
        LaunchError: a rank failed.
    """
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")), "measured.json")
        places, address, port = stack.enter_context(_places(is_loopback, count))
        launch_at(module, [json.dumps(settings | {"path": str(path)})], places, address, port)
        measured: dict[str, Any] = json.loads(path.read_text())
    return measured


def link_named(name: str) -> Rate:
    """The rate of that name, or `LOOPBACK`."""
    return LOOPBACK if name == LOOPBACK.name else Rate.parse(name)


@contextmanager
def _places(is_loopback: bool, count: int) -> Iterator[tuple[list[Place], str, int]]:
    """Where the ranks run, and where rank 0 listens."""
    if is_loopback:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        yield [Place((), loopback_interface() or "lo")] * count, "127.0.0.1", port
    else:
        with namespaces.hosts(count) as made:
            yield [Place(host.prefix, namespaces.INTERFACE) for host in made], made[0].address, _PORT


def main(hooks: Sequence[str], rates: Sequence[Rate], steps: int, hosts: int, is_emulated: bool, path: Path) -> None:
    """One rank."""
    exit_with_launcher()
    torch.set_num_threads(1)
    device = bench_device() if is_emulated else torch.device("cpu")
    dist.init_process_group(backend_of(device), timeout=timedelta(minutes=5))
    measured, reached = time_steps(make_contenders(hooks, device), rates, steps, hosts, is_emulated)
    if dist.get_rank() == 0:
        document = {
            "model": MODEL,
            "hosts": hosts,
            "emulated": is_emulated,
            "steps": steps,
            "first_compressed_step": FIRST_COMPRESSED,
            "reached_mbit": reached,
            "measured": [asdict(step) for step in measured],
        }
        path.write_text(json.dumps(document))
    dist.destroy_process_group()


def time_steps(
    contenders: Sequence[Contender], rates: Sequence[Rate], steps: int, hosts: int, is_emulated: bool
) -> tuple[list[Step], dict[str, float]]:
    """Check the gradients of all contenders, then time their steps; a collective call.

    Args:
        contenders: as `make_contenders` makes them.
        rates, steps, hosts, is_emulated: as `measure` takes them and ``count``.

    Returns:
        A `Step` for each contender at each rate, and the rate that a plain all-reduce reached, in Mb/s.

    Raises:
        RuntimeError: the gradients of a contender are wrong; then nothing was timed.
    """
    rank, device = dist.get_rank(), contenders[0].device
    has_interface = not is_emulated and list(rates) != [LOOPBACK]
    for step, contender in _turns(range(WARM_UP), contenders, "warm-up"):
        contender.step(make_batch(step, rank, device))
    for step, contender in _turns(range(WARM_UP, WARM_UP + 1), contenders, "check"):
        contender.check(make_batch(step, rank, device))
    first = WARM_UP + 1
    measured: list[Step] = []
    reached: dict[str, float] = {}
    for rate in rates:
        if has_interface:
            namespaces.limit(rate)
        with emulated_link(rate, hosts, device) if is_emulated else nullcontext():
            reached[rate.name] = _probe(hosts, device)
            for contender in contenders:
                contender.seconds, contender.link_bytes = [], []
            for step, contender in _turns(range(first, first + steps), contenders, rate.name):
                batch = make_batch(step, rank, device)
                sent_before = namespaces.sent_bytes() if has_interface else 0
                dist.barrier()
                contender.seconds.append(contender.step(batch))
                dist.barrier()
                contender.link_bytes.append(namespaces.sent_bytes() - sent_before if has_interface else 0)
        first += steps
        seconds = [slowest(contender.seconds) for contender in contenders]
        measured += summarize(rate.name, contenders, seconds, not has_interface)
    return measured, reached


def make_contenders(hooks: Sequence[str], device: torch.device) -> list[Contender]:
    """PyTorch's and gradwire's of each hook, and noop_hook on every kind of DDP among them."""
    contenders = []
    for hook in dict.fromkeys((REFERENCE, *hooks)):
        contenders.append(Contender(hook, PYTORCH, device, one_bucket=needs_one_bucket(hook, device)))
        contenders.append(Contender(hook, GRADWIRE, device))
    if any(contender.one_bucket for contender in contenders):
        contenders.insert(1, Contender(REFERENCE, PYTORCH, device, one_bucket=True))
    return contenders


def _turns(steps: range, contenders: Sequence[Contender], title: str) -> Iterator[tuple[int, Contender]]:
    """Every contender in every step, with a line of progress on rank 0."""
    for step in track(steps, description=f"{title:<12}", disable=dist.get_rank() != 0):
        for contender in in_turn(contenders, step):
            yield step, contender


def _probe(hosts: int, device: torch.device) -> float:
    """The megabits a second that each rank sends in a plain all-reduce."""
    tensor = torch.zeros(_PROBE_BYTES // 4, device=device)
    times = []
    for _ in range(3):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return round(2 * (hosts - 1) / hosts * 8e-6 * _PROBE_BYTES / median(times), 1)


def summarize(
    rate: str, contenders: Sequence[Contender], seconds: Sequence[Sequence[float]], is_loopback: bool
) -> list[Step]:
    """What contenders took at a rate.

    Args:
        rate: its name.
        contenders: with their bytes; among them noop_hook on every kind of DDP.
        seconds: of each contender's steps.
        is_loopback: whether the bytes are unknown.
    """
    medians = {
        (contender.hook, contender.provider, contender.one_bucket): median(times)
        for contender, times in zip(contenders, seconds, strict=True)
    }

    def step_of(contender: Contender, times: Sequence[float]) -> Step:
        hook, provider, one_bucket = key = contender.hook, contender.provider, contender.one_bucket
        noop = medians[REFERENCE, provider, one_bucket]
        theirs = None
        if provider != PYTORCH:
            theirs = medians.get((hook, PYTORCH, False)) or medians[hook, PYTORCH, True]
        return Step(
            rate=rate,
            hook=hook,
            provider=provider,
            one_bucket=one_bucket,
            step_ms=percentiles_ms(times),
            link_bytes=None if is_loopback else median(contender.link_bytes),
            exposed_ms=round(1e3 * (medians[key] - noop), 3),
            vs_noop=round(medians[key] / noop, 3),
            vs_pytorch=round(medians[key] / theirs, 3) if theirs is not None else None,
        )

    return [step_of(contender, times) for contender, times in zip(contenders, seconds, strict=True)]


def step_tables(measured: dict[str, Any], facts: dict[str, Any]) -> Iterator[Table]:
    """A table for each rate; what the numbers mean is below the last."""
    rates = list(measured["reached_mbit"])
    for rate, steps in itertools.groupby(measured["measured"], key=itemgetter("rate")):
        caption = _caption(measured, facts) if rate == rates[-1] else None
        headers = ("hook", "ms per step", "exposed\nms", "vs\nPyTorch", "sent")
        table = bench_table(_title(rate, measured), caption, headers)
        add_hooks(table, steps, _row)
        yield table


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    ms, sent = step["step_ms"], step["link_bytes"]
    return (
        f"  {provider_label(step['hook'], step['provider'], step['one_bucket'])}",
        f"{ms['p50']:.0f} ({ms['p20']:.0f}-{ms['p80']:.0f})",
        f"{step['exposed_ms']:.0f}",
        f"{step['vs_pytorch']:.2f}x" if step["vs_pytorch"] is not None else "",
        format_bytes(sent) if sent is not None else "-",
    )


def _title(rate: str, measured: dict[str, Any]) -> str:
    place = "this machine's loopback" if rate == LOOPBACK.name else f"link: {rate}"
    if measured["emulated"]:
        place = f"a model of a link: {rate}"
    reached = measured["reached_mbit"][rate]
    return f"{measured['hosts']} hosts, {place} (a plain all-reduce reaches {reached:,.0f} Mb/s)"


def _caption(measured: dict[str, Any], facts: dict[str, Any]) -> str:
    return (
        f"{measured['model']}\n"
        "ms: forward and backward on the slower rank,\n"
        f"  median (20th-80th percentile) of {measured['steps']}, in turns\n"
        "exposed: beyond the median with noop_hook on the same DDP; compressing included\n"
        "vs PyTorch: in units of the median with PyTorch's hook on its DDP\n"
        "sent: by rank 0's interface in a step, headers and a barrier included\n"
        f"{BUCKETS}\n"
        f"{_machines(measured, facts)}\n"
        f"{machine_line(facts)}"
    )


def _machines(measured: dict[str, Any], facts: dict[str, Any]) -> str:
    if measured["emulated"]:
        return (
            f"one rank stands for {measured['hosts']}; after a collective its stream waits as long as a link would take"
        )
    return f"{facts['cpu_count']} CPUs run all {measured['hosts']} hosts, one thread each"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(
        given["hooks"],
        [link_named(name) for name in given["rates"]],
        given["steps"],
        given["hosts"],
        given["emulated"],
        Path(given["path"]),
    )
    leave()
