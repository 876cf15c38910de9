"""The choice of an exchange for each bucket, from measured times: the arithmetic behind `gradwire.hooks.auto_hook`.

Gradients of bucket b are complete at r_b. An executor encodes buckets in order, sends one at a time, and decodes:

    encoded_b = max(r_b, encoded_{b-1}) + encode_b
    sent_b    = max(encoded_b, sent_{b-1}) + wire_b
    done_b    = max(sent_b, done_{b-1}) + decode_b

The step cannot end before done of the last bucket, nor before all computing behind each r_b is over.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A plan may take this much longer than the fastest one, if it rounds less.
TOLERANCE = 1.02


class Cost(NamedTuple):
    """What the exchange of one bucket takes on its own, in milliseconds.

    Attributes:
        encode: computing up to the last collective.
        wire: the collectives.
        decode: computing behind the last collective.
    """

    encode: float
    wire: float
    decode: float


Costs = Sequence[Mapping[str, Cost]]  # of each bucket, by exchange, the most precise one first


def predicted_ms(ready: Sequence[float], costs: Sequence[Cost]) -> float:
    """Milliseconds from the first complete gradient to the end of the last bucket's exchange.

    Args:
        ready: r of each bucket, in milliseconds, not decreasing.
        costs: of each bucket.
    """
    encoded = sent = done = 0.0
    for at, cost in zip(ready, costs, strict=True):
        encoded = max(at, encoded) + cost.encode
        sent = max(encoded, sent) + cost.wire
        done = max(sent, done) + cost.decode
    computing, busy_until = 0.0, done
    for at, cost in zip(reversed(ready), reversed(costs), strict=True):
        computing += cost.encode + cost.decode
        busy_until = max(busy_until, at + computing)
    return busy_until


def choose(ready: Sequence[float], costs: Costs, min_gain: float) -> list[str]:
    """The exchange of each bucket: the most precise ones that are about as fast as the fastest.

    Args:
        ready: as in `predicted_ms`.
        costs: of every exchange for each bucket.
        min_gain: how many times faster the fastest plan must be than the most precise one to be considered.
    """
    plain = [next(iter(of)) for of in costs]
    fastest = [min(of, key=lambda name, of=of: sum(of[name])) for of in costs]  # type: ignore[misc]
    limit = TOLERANCE * _of_plan(ready, costs, fastest)
    if min_gain * limit > TOLERANCE * _of_plan(ready, costs, plain):
        return plain
    plan = list(fastest)
    for i, of in enumerate(costs):
        for name in of:
            plan[i] = name
            if _of_plan(ready, costs, plan) <= limit:
                break
        else:
            plan[i] = fastest[i]
    return plan


def _of_plan(ready: Sequence[float], costs: Costs, plan: Sequence[str]) -> float:
    return predicted_ms(ready, [of[name] for of, name in zip(costs, plan, strict=True)])
