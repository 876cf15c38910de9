"""The methods that `gradwire.hooks.auto_hook` chooses from, and how each is measured on copies of the gradients."""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Executor
from gradwire.comm.pipeline import BucketTimes, busy_until, exchange_ends
from gradwire.hooks._bucket import CommHook, GradBucket, GradwireBucket, bucket_device, bucket_work, is_sparse
from gradwire.hooks._checkpoint import Scaler
from gradwire.hooks.default_hooks import CastState, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.hook_state import HookState
from gradwire.hooks.powerSGD_hook import FACTOR_WIRES, PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.telemetry import Mark, Stopwatch, durations
from gradwire.kernels import WIRE_FORMATS

PLAIN = "plain"
CASTS: dict[str, CommHook] = {PLAIN: allreduce_hook, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
LOW_RANK = re.compile(rf"powersgd-r(?P<rank>[1-9]\d*)(-(?P<wire>{'|'.join(FACTOR_WIRES)}))?")


class Method(NamedTuple):
    """A hook and its state."""

    state: CastState | QuantizationState | PowerSGDState
    hook: CommHook

    def run(self, bucket: GradBucket, iteration: int, recorder: Stopwatch | None) -> Future[Tensor]:
        """Start to average a bucket in step ``iteration``, measured by ``recorder``."""
        if isinstance(self.state, HookState):
            self.state.continue_at(iteration)  # it gets only some of the buckets
        self.state._recorder = recorder
        return self.hook(self.state, bucket)


def make_method(name: str, process_group: dist.ProcessGroup | None, start: int) -> Method:
    """The method that a candidate names, which compresses from step ``start`` on; raises ValueError for
    another name.
    """
    if name in CASTS:
        return Method(CastState(process_group), CASTS[name])
    if name in WIRE_FORMATS:
        return Method(QuantizationState(process_group, name, start_iter=start), quantization_hook)
    if low_rank := LOW_RANK.fullmatch(name):
        state = PowerSGDState(process_group, int(low_rank["rank"]), start, factor_wire=low_rank["wire"])
        state._has_compressed = True  # no warning if it cannot: the measurement shows that it gains nothing
        return Method(state, powerSGD_hook)
    raise ValueError(
        f"There is no candidate {name!r}; expected one of {', '.join((*CASTS, *WIRE_FORMATS))}, powersgd-rN with a "
        "rank N, such as powersgd-r4, or powersgd-rN-WIRE with a factor_wire, such as powersgd-r16-int8."
    )


class CopiedBucket:
    """A copy of a bucket, flat or sparse, on which a method is measured without consequences."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket
        if hasattr(bucket, "model_parameters"):
            ours = cast("GradwireBucket", bucket)
            self.process_group, self.note_use = ours.process_group, ours.note_use
            self.model_parameters = ours.model_parameters
        self._buffer = bucket.buffer().clone() if is_sparse(bucket) else _flat_copy(bucket)

    def index(self) -> int:
        return self._bucket.index()

    def is_last(self) -> bool:
        return self._bucket.is_last()

    def parameters(self) -> list[Tensor]:
        return self._bucket.parameters()

    def buffer(self) -> Tensor:
        return self._buffer


def _flat_copy(bucket: GradBucket) -> Tensor:
    source = bucket_work(bucket, {}).source
    table = source.table
    return source.flatten(torch.empty(table.numel, dtype=table.dtype, device=table.device))


class Trial:
    """The measurement of one candidate in one step, bucket by bucket, on copies of the gradients."""

    def __init__(self, candidate: str, method: Method) -> None:
        self.candidate = candidate  # name of the candidate
        self.buckets: list[tuple[str, ...]] = []  # parameter names of each bucket
        self.method = method
        self._stopwatch = Stopwatch()
        self._marks: list[Mark] = []  # begin and end of each bucket
        if isinstance(method.state, PowerSGDState):
            method.state.next_stats_report = sys.maxsize  # no log of a compression that only copies have seen

    def run(
        self, bucket: GradBucket, names: tuple[str, ...], iteration: int, plain: Method, recorder: Stopwatch | None
    ) -> Future[Tensor]:
        """Measure the candidate, then average the gradients with ``plain``, measured by ``recorder``."""
        self.buckets.append(names)
        device = bucket_device(bucket)
        self._marks.append(Mark(device))
        self.method.run(cast("GradBucket", CopiedBucket(bucket)), iteration, self._stopwatch).wait()
        result = plain.run(bucket, iteration, recorder)
        result.wait()
        self._marks.append(Mark(device))
        return result

    def costs(self) -> list[list[float]]:
        """Milliseconds of encoding, wire and decoding, for each bucket."""
        return [list(timeline.milliseconds()) for timeline in self._stopwatch.timelines]

    def ready(self) -> list[float]:
        """Milliseconds from the first complete gradient to each bucket, without the waiting."""
        return list(accumulate(durations(self._marks[1:]), initial=0.0))


class Methods(HookState):
    """The states of several methods as one: of those in use, and of those under measurement."""

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None, options: Any) -> None:
        self._methods: dict[str, Method] = {}  # in use, by name
        self._trials: list[Trial] = []
        self._followed: Scaler | None = None
        super().__init__(hook, process_group, options)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to average over; None for the model's."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        HookState.process_group.fset(self, process_group)  # type: ignore[attr-defined]
        for method in (*self._methods.values(), *(trial.method for trial in self._trials)):
            method.state.process_group = process_group

    def bind(self, module: torch.nn.Module) -> None:
        """Take parameter names from ``module``; see `HookState.bind`."""
        super().bind(module)
        for _, state in self._with_memory():
            state.bind(module)

    def bind_layouts(self, layouts: Mapping[str, Tensor]) -> None:
        """Take the parameter names of a sharded model; see `HookState.bind_layouts`."""
        super().bind_layouts(layouts)
        for _, state in self._with_memory():
            state.bind_layouts(layouts)

    def _with_memory(self) -> list[tuple[str, HookState]]:
        """The methods in use that keep error memory, by name."""
        found = sorted(self._methods.items())
        return [(name, each.state) for name, each in found if isinstance(each.state, HookState)]

    def residuals(self) -> list[Tensor]:
        """This rank's error memory, for `metrics`."""
        return [error for method in self._methods.values() for error in method.state.residuals()]

    def follow_scaler(self, scaler: Scaler | None) -> None:
        """Rescale the error memory of every method; see `HookState.follow_scaler`."""
        self._followed = scaler
        for method in (*self._methods.values(), *(trial.method for trial in self._trials)):
            if isinstance(method.state, HookState):
                method.state.follow_scaler(scaler)

    def match_scale(self) -> None:
        """Rescale the error memory of every method, also of one that no bucket of this step uses."""
        for _, state in self._with_memory():
            state.match_scale()

    def forget_errors(self) -> None:
        """Set the error memory of every method to zero."""
        for _, state in self._with_memory():
            state.forget_errors()


# A plan may take this much longer than the fastest one, if it rounds less.
TOLERANCE = 1.02


class Cost(NamedTuple):
    """Milliseconds of the exchange of one bucket on its own: before, in and after the collectives."""

    encode: float
    wire: float
    decode: float


Costs = Sequence[Mapping[str, Cost]]  # for each bucket, by candidate, the most precise one first


def slowest_times(
    counted: Mapping[str, Sequence[Trial]], executor: Executor, device: torch.device
) -> tuple[list[float], list[dict[str, Cost]]]:
    """`predicted_ms`' arguments for every candidate, from the times of the slowest rank. A collective call.

    The plain candidate counts with its minimum time, all others with their median: background load favors it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    costs = torch.stack(
        [
            _samples([trial.costs() for trial in trials]).quantile(0.0 if candidate == PLAIN else 0.5, 0)
            for candidate, trials in counted.items()
        ],
        1,
    )
    ready = _samples([trial.ready() for trials in counted.values() for trial in trials]).amin(0)
    times = torch.cat([costs.flatten(), ready]).to(device)

    async def largest() -> None:
        await executor.transport.all_reduce_max(times)

    executor.submit(lambda _: largest()).wait()
    costs_ms, ready_ms = times[: costs.numel()].view(costs.shape).tolist(), times[costs.numel() :].tolist()
    by_name = [{name: Cost(*cost) for name, cost in zip(counted, bucket, strict=True)} for bucket in costs_ms]
    return ready_ms, by_name


def _samples(times: Sequence[Any]) -> Tensor:
    return torch.tensor(times, dtype=torch.float64, device="cpu")


def predicted_ms(ready: Sequence[float], costs: Sequence[Cost]) -> float:
    """Milliseconds from the first complete gradient to the last result, of buckets that are ready at ``ready`` (ms)."""
    times = [BucketTimes((cost.encode, cost.decode), (cost.wire,), (0.0,)) for cost in costs]
    return max(exchange_ends(ready, times)[-1], busy_until(ready, times))


def _plan_ms(ready: Sequence[float], costs: Costs, plan: Sequence[str]) -> float:
    """`predicted_ms` if each bucket takes its candidate in ``plan``."""
    return predicted_ms(ready, [bucket[name] for bucket, name in zip(costs, plan, strict=True)])


def _fastest(costs: Costs) -> list[str]:
    """The candidate of each bucket that is the fastest on its own."""
    return [min(bucket, key=lambda name, bucket=bucket: sum(bucket[name])) for bucket in costs]  # type: ignore[misc]


def choose(ready: Sequence[float], costs: Costs, min_gain: float) -> list[str]:
    """The candidate of each bucket: the most precise ones that are about as fast as the fastest.

    Args:
        ready: time at which each bucket is ready (ms), not decreasing.
        costs: for each bucket, the cost of every candidate.
        min_gain: smallest speed-up over the plain candidate for which to compress.
    """

    plan_ms = partial(_plan_ms, ready, costs)
    plain = [next(iter(bucket)) for bucket in costs]
    fastest = _fastest(costs)
    limit = TOLERANCE * plan_ms(fastest)
    if min_gain * limit > TOLERANCE * plan_ms(plain):
        return plain
    plan = list(fastest)
    for i, bucket in enumerate(costs):
        plan[i] = next((name for name in bucket if plan_ms([*plan[:i], name, *plan[i + 1 :]]) <= limit), fastest[i])
    return plan


def reason(ready: Sequence[float], costs: Costs, plan: Sequence[str], min_gain: float) -> str:
    """Why `choose` has returned ``plan``, in one sentence."""

    plan_ms = partial(_plan_ms, ready, costs)
    plain = [next(iter(bucket)) for bucket in costs]
    plain_ms = plan_ms(plain)
    if list(plan) != plain:
        return (
            f"{plan_ms(plan):.3g} ms from the first gradient to the last result instead of {plain_ms:.3g} (predicted)"
        )
    fastest = _fastest(costs)
    gain = plain_ms / plan_ms(fastest)
    if gain <= 1:
        return "no candidate is faster"
    names = " and ".join(dict.fromkeys(fastest))
    if gain < min_gain:
        return f"{names} would be {gain:.4g} times as fast (predicted), less than min_gain={min_gain:g}"
    return f"{names} would be {gain:.4g} times as fast (predicted), within the tolerance of {TOLERANCE - 1:.0%}"
