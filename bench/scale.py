"""A model of the gradient exchange on many nodes of several GPUs. It predicts; nothing here is measured.

The stages of an exchange run one after another, each at full rate:

    link    bytes that leave a node, at the rate of all its network interfaces
    local   bytes that each GPU sends to the others of its node
    memory  bytes that the kernels read and write, as `gradwire.bench.kernel_bytes` counts them
    wait    latency of the collectives, and the time to post a message to each peer, in every bucket

`gradwire.planner.link_probe.bytes_out_of_node` counts the bytes of the link. The plain exchange is a ring all-reduce in
bf16. It overlaps its link and local stages and computes at no cost. On K nodes, it waits 2 log2 K times per bucket, as
a tree does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple

import torch

from gradwire.bench.kernel_bytes import (
    copy_bytes,
    dequantize_bytes,
    element_bytes,
    quantize_bytes,
    reduce_quantized_bytes,
    sum_quantized_bytes,
)
from gradwire.bench.namespaces import Rate
from gradwire.bench.record import Metric, Record, format_bytes
from gradwire.bench.tables import Table, format_number, format_rate, groups_of, median_of
from gradwire.compress.policy import STATELESS
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.link_probe import bytes_out_of_node
from gradwire.planner.step_model import BETWEEN_NODES

SIZES = {"GPT-2 124 M": 124_000_000, "1.3 B": 1_300_000_000, "7 B": 7_000_000_000}  # parameters
NODES, GPUS = (16, 128, 1024), 8
RATES_GBIT = (25, 100, 400)  # of each GPU's network interface
# The wire format, and whether nodes add up their gradients first.
QUANTIZED_EXCHANGES = {
    f"{wire}, {'hierarchical' if is_hierarchical else 'flat'}": (wire, is_hierarchical)
    for is_hierarchical in (False, True)
    for wire in ("int8", "int4")
}
FLAT, HIERARCHICAL = "ddp-flat", "ddp-hierarchical"  # seams of `gradwire.bench.nodes`


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Assumed rates of a node."""

    local: float = 360e9  # bytes per second that a GPU sends inside the node: 80 % of NVLink 4
    memory: float = 2.7e12  # bytes per second of a GPU's memory: 80 % of an H100's
    latency: float = 10e-6  # seconds of a collective between nodes
    message: float = 1e-6  # seconds to post a message to one peer
    bucket: float = 100e6  # elements of a bucket


class Stages(NamedTuple):
    """Seconds of the stages of an exchange."""

    link: float
    local: float
    memory: float
    wait: float


def quantized_bytes(numel: int, wire: str, is_hierarchical: bool, nodes: int, gpus: int) -> float:
    """Bytes that each node sends in a quantized exchange: an all-to-all and an all-gather, of all or of 1 / G."""
    message = numel / gpus if is_hierarchical else numel
    kinds = [shot + (BETWEEN_NODES if is_hierarchical else "") for shot in ("all-to-all", "all-gather")]
    out = sum(bytes_out_of_node(kind, nodes * gpus, gpus) for kind in kinds)
    return out * message * element_bytes(WIRE_FORMATS[wire]) / 2  # the payload of a shot is half of the message


def plain_seconds(numel: int, nodes: int, gpus: int, gbit: float, machine: Machine) -> float:
    """The ring all-reduce in bf16."""
    sent = 2 * numel * bytes_out_of_node("all-reduce bfloat16", nodes * gpus, gpus)
    waits = ceil(numel / machine.bucket) * 2 * log2(nodes) * machine.latency
    return max(sent / (gpus * gbit * 1e9 / 8), sent / machine.local) + waits


def stages(
    numel: int, wire: str, is_hierarchical: bool, nodes: int, gpus: int, gbit: float, machine: Machine
) -> Stages:
    """The exchange with quantized messages, of gradients in bf16, with error memory in fp32 where it is the default."""
    errors = None if wire in STATELESS else torch.float32
    format_, fp32, source, inside_format = WIRE_FORMATS[wire], torch.float32, torch.bfloat16, WIRE_FORMATS["bf16"]
    shard, peers, inside = numel, nodes * gpus, 0.0
    memory = dequantize_bytes(numel, format_, source)
    if is_hierarchical:
        shard, peers, inside = numel // gpus, nodes, 1 - 1 / gpus
        memory += quantize_bytes(numel, source, inside_format, None)
        memory += sum_quantized_bytes(shard, gpus, inside_format)
    memory += quantize_bytes(shard, fp32 if is_hierarchical else source, format_, errors)
    memory += reduce_quantized_bytes(shard // peers, peers, format_, errors)
    memory += 0 if errors is None else copy_bytes(shard + shard // peers, errors, errors)
    local = inside * numel * (source.itemsize + element_bytes(format_))  # the gradients, then the codes
    buckets = ceil(numel / machine.bucket)
    return Stages(
        link=quantized_bytes(numel, wire, is_hierarchical, nodes, gpus) / (gpus * gbit * 1e9 / 8),
        local=local / machine.local,
        memory=memory / machine.memory,
        wait=buckets * 2 * (machine.latency + (peers - 1) * machine.message),
    )


def tables() -> list[Table]:
    """A table for each model: milliseconds of the exchange, and how much faster than the plain one it is."""
    machine = Machine()
    headers = ["nodes, Gb/s per GPU", "bf16, plain", *QUANTIZED_EXCHANGES]
    result = []
    for name, numel in SIZES.items():
        rows = []
        for nodes in NODES:
            for gbit in RATES_GBIT:
                plain = plain_seconds(numel, nodes, GPUS, gbit, machine)
                of = [stages(numel, *each, nodes, GPUS, gbit, machine) for each in QUANTIZED_EXCHANGES.values()]
                times = list(map(sum, of))
                cells = [f"{format_number(1e3 * time)} ({plain / time:.2g}x)" for time in times]
                rows.append([f"{nodes:,} x {GPUS}, {gbit}", format_number(1e3 * plain), *cells])
        title = f"Model, not a measurement: gradient exchange (ms) of {name} parameters"
        result.append(Table(title=title, headers=headers, rows=rows))
    return [*result[:-1], replace(result[-1], notes=_notes(machine))]


def calibration(records: Sequence[Record]) -> list[Table]:
    """The link stage of the model against measured exchanges of DDP; no table without them."""
    settings = records[0].provenance["settings"]
    size = settings["parameters"], settings["hosts"], settings["ranks_per_host"]
    rows = []
    for (name,), group in groups_of(records, "rate"):
        measured = dict(groups_of(group, "seam", "method"))
        noop = median_of(measured.get((FLAT, "noop"), ()), Metric.STEP_MS)
        for exchange, (wire, is_hierarchical) in QUANTIZED_EXCHANGES.items():
            found = measured.get((HIERARCHICAL if is_hierarchical else FLAT, wire), ())
            step, sent = (median_of(found, metric) for metric in (Metric.STEP_MS, Metric.SENT_PER_STEP))
            if noop is None or step is None or sent is None:
                continue
            predicted = quantized_bytes(size[0], wire, is_hierarchical, *size[1:])
            cells = [format_bytes(predicted), format_bytes(sent), f"{predicted / sent:.2f}"]
            mbit = Rate.parse(name).mbit
            if mbit is not None:
                times = 8e-3 * predicted / mbit, step - noop
                cells += [*map(format_number, times), f"{times[0] / times[1]:.2f}" if times[1] > 0 else "-"]
            rows.append([f"{exchange}, {format_rate(name)}", *cells, *[""] * (6 - len(cells))])
    headers = ["exchange", *(f"{what}, {how}" for what in ("sent", "ms") for how in ("model", "measured", "ratio"))]
    title = "Calibration: link stage of the model against DDP"
    notes = ["calibration: ms measured is the step minus that with noop_hook, so it includes computation"]
    return [Table(title=title, headers=headers, rows=rows, notes=notes)] if rows else []


def _notes(machine: Machine) -> list[str]:
    return [
        "in parentheses: time of the plain exchange divided by this one; below 1x, compression loses",
        f"assumed per GPU: {machine.local / 1e9:.0f} GB/s inside a node, {machine.memory / 1e12:.1f} TB/s of memory",
        f"assumed: {1e6 * machine.latency:.0f} us per collective and {1e6 * machine.message:.0f} us per peer; buckets "
        f"of {machine.bucket / 1e6:.0f} M elements; gradients and messages inside a node in bf16",
        "plain: NCCL's all-reduce as a ring at full rate, with a tree's latency; it computes at no cost",
        "the stages of a compressed exchange run one after another, and nothing overlaps the backward pass",
    ]
