"""A model of the gradient exchange on many nodes of several GPUs. It predicts; nothing here is measured.

The stages of an exchange run one after another, each at full rate:

    link    bytes that leave a node, at the rate of all its network interfaces
    local   bytes that each GPU sends to the others of its node
    memory  bytes that the kernels read and write, as `gradwire.kernels.quantize` counts them
    wait    latency of the collectives, and the time to post a message to each peer, in every bucket

With N elements on K nodes of G GPUs, W = G K, and b bytes per element of a quantized message, a node sends

    plain          4 N (W - 1) / W                     ring all-reduce in bf16, of which each node sends 2 (W - 1) / W
    flat           b N (G (K - 1) / K + (W - 1) / W)   all-to-all and ring all-gather among all ranks
    hierarchical   2 b N (K - 1) / K                   the same among the ranks of equal place, in shards of N / G

The plain all-reduce overlaps its link and local stages and computes at no cost. It waits 2 log2 K times per bucket, as
a tree does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import torch

from gradwire.bench.namespaces import Rate
from gradwire.bench.record import Metric, Record
from gradwire.bench.tables import Table, format_bytes, format_number, format_rate, groups_of, median_of
from gradwire.kernels import WIRE_FORMATS
from gradwire.kernels.quantize import commit_errors_bytes, dequantize_bytes, quantize_bytes, reduce_quantized_bytes

MODELS = {"GPT-2 124 M": 124_000_000, "1.3 B": 1_300_000_000, "7 B": 7_000_000_000}  # parameters
NODES, GPUS = (16, 128, 1024), 8
RATES_GBIT = (25, 100, 400)  # of each GPU's network interface
BLOCK = 64  # elements that share a scale
METHODS = [(wire, is_hierarchical) for is_hierarchical in (False, True) for wire in ("int8", "int4")]
SEAMS = {False: "ddp-flat", True: "ddp-hierarchical"}


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


def bytes_out_of_node(numel: int, wire: str, is_hierarchical: bool, nodes: int, gpus: int) -> float:
    """Bytes that each node sends in an exchange; see the module."""
    others, ring, b = 1 - 1 / nodes, 1 - 1 / (nodes * gpus), block_bytes(wire)
    return numel * b * (2 * others if is_hierarchical else gpus * others + ring)


def block_bytes(wire: str) -> float:
    """Bytes per element, scales included."""
    return WIRE_FORMATS[wire].block_bytes(BLOCK) / BLOCK


def plain_seconds(numel: int, nodes: int, gpus: int, gbit: float, machine: Machine) -> float:
    """The ring all-reduce in bf16."""
    sent = 4 * numel * (1 - 1 / (nodes * gpus))  # by each GPU to its successor on all rings together
    waits = ceil(numel / machine.bucket) * 2 * log2(nodes) * machine.latency
    return max(sent / (gpus * gbit * 1e9 / 8), sent / machine.local) + waits


def stages(
    numel: int, wire: str, is_hierarchical: bool, nodes: int, gpus: int, gbit: float, machine: Machine
) -> Stages:
    """The exchange with quantized messages, of gradients in bf16, with error memory in fp32."""
    format_, fp32, source = WIRE_FORMATS[wire], torch.float32, torch.bfloat16
    shard, peers, inside = numel, nodes * gpus, 0.0
    memory = dequantize_bytes(numel, format_, BLOCK, source)
    if is_hierarchical:
        shard, peers, inside = numel // gpus, nodes, 1 - 1 / gpus
        memory += quantize_bytes(numel, source, WIRE_FORMATS["fp32"], BLOCK, None)
        memory += reduce_quantized_bytes(shard, gpus, WIRE_FORMATS["fp32"], BLOCK, None)
    memory += quantize_bytes(shard, fp32 if is_hierarchical else source, format_, BLOCK, fp32)
    memory += reduce_quantized_bytes(shard // peers, peers, format_, BLOCK, fp32)
    memory += commit_errors_bytes(shard, fp32) + commit_errors_bytes(shard // peers, fp32)
    local = inside * numel * (4 + block_bytes(wire))  # the sums in fp32, then the codes
    buckets = ceil(numel / machine.bucket)
    return Stages(
        link=bytes_out_of_node(numel, wire, is_hierarchical, nodes, gpus) / (gpus * gbit * 1e9 / 8),
        local=local / machine.local,
        memory=memory / machine.memory,
        wait=buckets * 2 * (machine.latency + (peers - 1) * machine.message),
    )


def tables() -> list[Table]:
    """A table for each model: milliseconds of the exchange, and how much faster than the plain one it is."""
    machine = Machine()
    headers = ["nodes, Gb/s per GPU", "bf16, plain"]
    headers += [f"{wire}, {'hierarchical' if is_hierarchical else 'flat'}" for wire, is_hierarchical in METHODS]
    result = []
    for name, numel in MODELS.items():
        rows = []
        for nodes in NODES:
            for gbit in RATES_GBIT:
                plain = plain_seconds(numel, nodes, GPUS, gbit, machine)
                times = [sum(stages(numel, *method, nodes, GPUS, gbit, machine)) for method in METHODS]
                cells = [f"{format_number(1e3 * time)} ({plain / time:.2g}x)" for time in times]
                rows.append([f"{nodes:,} x {GPUS}, {gbit}", format_number(1e3 * plain), *cells])
        title = f"Model, not a measurement: gradient exchange (ms) of {name} parameters"
        result.append(Table(title=title, headers=headers, rows=rows, notes=_notes(machine)))
    return result


def calibration(records: Sequence[Record]) -> list[Table]:
    """The link stage of the model against measured exchanges of DDP; no table without them."""
    settings = records[0].provenance["settings"]
    size = settings["parameters"], settings["hosts"], settings["ranks_per_host"]
    rows = []
    for (name,), group in groups_of(records, "rate"):
        measured = dict(groups_of(group, "seam", "method"))
        noop = median_of(measured.get((SEAMS[False], "noop"), ()), Metric.STEP_MS)
        for wire, is_hierarchical in METHODS:
            found = measured.get((SEAMS[is_hierarchical], wire), ())
            step, sent = (median_of(found, metric) for metric in (Metric.STEP_MS, Metric.SENT_PER_STEP))
            if noop is None or step is None or sent is None:
                continue
            predicted = bytes_out_of_node(size[0], wire, is_hierarchical, *size[1:])
            cells = [format_bytes(predicted), format_bytes(sent), f"{predicted / sent:.2f}"]
            mbit = Rate.parse(name).mbit
            if mbit is not None:
                times = 8e-3 * predicted / mbit, step - noop
                cells += [*map(format_number, times), f"{times[0] / times[1]:.2f}" if times[1] > 0 else "-"]
            label = f"{wire}, {'hierarchical' if is_hierarchical else 'flat'}, {format_rate(name)}"
            rows.append([label, *cells, *[""] * (6 - len(cells))])
    headers = ["exchange", *(f"{what}, {how}" for what in ("sent", "ms") for how in ("model", "measured", "ratio"))]
    title = "Calibration: link stage of the model against DDP"
    notes = ["calibration: ms measured is the step minus that with noop_hook, so it includes computation"]
    return [Table(title=title, headers=headers, rows=rows, notes=notes)] if rows else []


def _notes(machine: Machine) -> list[str]:
    return [
        "in parentheses: time of the plain exchange divided by this one; below 1x, compression loses",
        f"assumed per GPU: {machine.local / 1e9:.0f} GB/s inside a node, {machine.memory / 1e12:.1f} TB/s of memory",
        f"assumed: {1e6 * machine.latency:.0f} us per collective and {1e6 * machine.message:.0f} us per peer; buckets "
        f"of {machine.bucket / 1e6:.0f} M elements; gradients in bf16; sums inside a node in fp32",
        "plain: NCCL's all-reduce as a ring at full rate, with a tree's latency; it computes at no cost",
        "the stages of a compressed exchange run one after another, and nothing overlaps the backward pass",
    ]
