"""Advice from a measurement: a prediction for every hook, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.planner.accuracy import LOSS_GAPS, is_aggressive
from gradwire.planner.hook_registry import CAST, DEFAULT_CAP_MB, HOOKS, PLAIN, bucket_cap_mb
from gradwire.planner.link_probe import bytes_out_of_node
from gradwire.planner.measurement import Measurement
from gradwire.planner.step_model import HookCost, Link, ModelCost, break_even, step_seconds, with_larger_buckets

WORTHWHILE = 1.05  # smallest speed-up for which a hook, or larger buckets, are recommended


@dataclass(frozen=True, kw_only=True)
class Prediction:
    hook: str  # name of the hook
    step_seconds: float  # forward, backward, gradient exchange and, if it was measured, optimizer
    speed_up: float  # over a step without a hook
    speed_up_over_bf16: float  # over a step with the bf16 hook
    # bandwidth in bits per second below which the hook makes a step shorter; None if it never does, infinity if
    # it always does
    break_even: float | None
    payload_bytes: int  # per step and rank
    network_bytes: int  # sent per step by all nodes; with a single node, by all ranks
    bytes_kept: int  # see `HookCost.bytes_kept`
    memory_bytes: int  # states and wire buffers


class LargerBuckets(NamedTuple):
    """Larger buckets for a hook: fewer messages, which wait less often for the latency of the network."""

    cap_mb: int  # `bucket_cap_mb` of DistributedDataParallel
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    predictions: tuple[Prediction, ...]  # one for each hook
    recommended: str  # name of a hook; `PLAIN` for none
    reason: str  # the reason, as part of a sentence
    buckets: LargerBuckets | None  # larger buckets for it; None: they are not worthwhile

    @property
    def headline(self) -> str:
        return "Do not compress" if self.recommended == PLAIN else f"Use {self.recommended}"


def advise(measured: Measurement) -> Advice:
    """Predict the step time with each hook, and recommend a hook that is not aggressive, or none.

    A hook is worthwhile if its steps are at least `WORTHWHILE` times as fast as those without a hook. bf16 is
    recommended if it is worthwhile, and no other is `WORTHWHILE` times as fast as bf16. Otherwise, of the worthwhile
    hooks within this ratio of the fastest, the one with the smallest loss gap (AdamW, to two decimals) is recommended,
    and among equals the one that keeps the most bytes of the gradients.
    """
    by_name = {hook.name: hook for hook in measured.hooks}
    seconds = {name: step_seconds(measured.model, hook, measured.link) for name, hook in by_name.items()}
    plain = by_name[PLAIN]
    predictions = tuple(
        Prediction(
            hook=name,
            step_seconds=seconds[name],
            speed_up=seconds[PLAIN] / seconds[name],
            speed_up_over_bf16=seconds[CAST] / seconds[name],
            break_even=None  # times of hooks that send as much differ by noise
            if hook.payload_bytes >= plain.payload_bytes
            else break_even(measured.model, hook, plain, measured.link),
            payload_bytes=hook.payload_bytes,
            network_bytes=_network_bytes(hook, measured.link),
            bytes_kept=hook.bytes_kept(measured.link.ranks_per_node),
            memory_bytes=hook.memory_bytes,
        )
        for name, hook in by_name.items()
    )
    recommended, reason = _recommend(predictions)
    buckets = larger_buckets(measured.model, by_name[recommended], plain, measured.link)
    return Advice(predictions=predictions, recommended=recommended, reason=reason, buckets=buckets)


def larger_buckets(model: ModelCost, hook: HookCost, plain: HookCost, link: Link) -> LargerBuckets | None:
    """Buckets with which a step is `WORTHWHILE` times as fast as with the hook's, and no larger than is needed.

    The default size, if it is passed, also applies to the first bucket, which has 1 MiB otherwise.
    ``plain`` is the cost without a hook, whose messages are the gradients.
    """
    if HOOKS[hook.name].by_bucket:
        return None
    preferred = bucket_cap_mb(hook.name)
    factor = max(1, preferred // DEFAULT_CAP_MB)
    best, least = None, step_seconds(*with_larger_buckets(model, hook, factor), link)
    while factor < len(hook.buckets):
        factor *= 2
        seconds = step_seconds(*with_larger_buckets(model, hook, factor), link)
        if seconds * WORTHWHILE <= least:
            _, gradients = with_larger_buckets(model, plain, factor)
            nbytes = max(sum(message.nbytes for message in bucket.messages) for bucket in gradients.buckets)
            best, least = LargerBuckets(max(preferred, -(-nbytes // 2**20)), seconds), seconds
    return best


def _network_bytes(hook: HookCost, link: Link) -> int:
    senders = link.nodes if link.nodes > 1 else link.world_size
    messages = [message for bucket in hook.buckets for message in bucket.messages]
    sent = [each.nbytes * bytes_out_of_node(each.kind, link.world_size, link.ranks_per_node) for each in messages]
    return round(senders * sum(sent))


def _recommend(predictions: Sequence[Prediction]) -> tuple[str, str]:
    percent = f"{100 * (WORTHWHILE - 1):.0f} %"
    mild = [each for each in predictions if not is_aggressive(each.hook)]
    fastest = max((each for each in mild if each.hook != PLAIN), key=lambda each: each.speed_up)
    worthwhile = {each.hook: each for each in mild if each.speed_up >= WORTHWHILE}
    is_complete = sum(each.speed_up >= WORTHWHILE for each in predictions) == len(worthwhile)
    hook = "hook" if is_complete else "hook with a small loss gap"
    if not worthwhile:
        best = f"{fastest.hook} with {100 * (fastest.speed_up - 1):+.1f} %"
        return PLAIN, f"no {hook} makes a step {percent} faster; the best is {best}"
    if CAST in worthwhile and fastest.speed_up_over_bf16 < WORTHWHILE:
        speed_up = worthwhile[CAST].speed_up
        return CAST, (
            f"a step is {speed_up:.2f}x as fast as without a hook, and no other {hook} is {percent} faster than {CAST}"
        )
    near = [each for each in worthwhile.values() if each.speed_up * WORTHWHILE >= fastest.speed_up]
    chosen = min(near, key=lambda each: (_loss_gap(each.hook), -each.bytes_kept))
    return chosen.hook, (
        f"a step is {chosen.speed_up:.2f}x as fast as without a hook, {chosen.speed_up_over_bf16:.2f}x as with bf16"
    )


def _loss_gap(hook: str) -> float:
    """To two decimals, because the losses of two seeds differ in the third; 0 if it was not measured (16-bit hooks)."""
    return round(LOSS_GAPS[hook].adamw, 2) if hook in LOSS_GAPS else 0.0
