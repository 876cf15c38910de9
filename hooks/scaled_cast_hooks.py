"""16-bit all-reduce with delayed scaling: the precision of fp16 without its narrow range."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.compress import BucketScale, DelayedScaling, scaled_cast_all_reduce
from gradwire.compress.scaled_cast import MAX_MARGIN
from gradwire.exchange.bucket import Bucket, GradBucket
from gradwire.exchange.hook_state import HookState, Step, hook_for
from gradwire.exchange.memory import StateDict
from gradwire.exchange.telemetry import HostCopy
from gradwire.kernels import MAX_EXPONENT, is_capturing
from gradwire.validation import (
    MAX_COUNT,
    check_count,
    check_elements,
    check_entries,
    check_keywords,
    check_tensor,
    wrong,
)

__all__ = ["ScaledCastState", "scaled_cast_hook"]


class _Turn(NamedTuple):
    """The turn of a bucket in its step, which the algorithm gets as the memory of the `Step`."""

    is_last: bool
    closes_step: bool  # whether the step before has ended without its last bucket


class ScaledCastState(HookState):
    """Options and scales of `scaled_cast_hook`, for one model.

    Each bucket has one scale, stored by parameter name. The defaults suit most models. If elements saturate, each rank
    whose elements they are warns once; watch `saturated_elements` to tune ``margin``.

    Args:
        process_group: the ranks to average over; None for the model's.
        dtype: wire dtype, torch.float16 or torch.bfloat16. bf16 has the range of fp32 and rarely needs
            a scale.
        margin: headroom for gradients to grow from one step to the next, in powers of two, 1 to 12.
            With the default, 4, they may grow 16-fold before elements saturate. Raise it if
            `saturated_elements` keeps rising. Lower it to keep smaller values: with the default and
            2 ranks, fp16 loses values below about 2^-32 of the largest.
        growth: powers of two by which a scale may rise per step. Raise it if gradients shrink to
            less than half from step to step.
        backoff: powers of two by which a scale falls below its target after a step in which a rank
            may have saturated. Raise it if saturation lasts for several steps.

    Attributes:
        iter: number of steps so far.
        options: all options, in a frozen dataclass. To change them between steps, equally on all ranks, assign
            ``dataclasses.replace(state.options, margin=6)``.

    Raises:
        ValueError: an option has the wrong type or is out of range.

    Examples:
        >>> state = ScaledCastState(process_group)
        >>> model.register_comm_hook(state, scaled_cast_hook)
    """

    @check_keywords
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float16,
        margin: int = 4,
        growth: int = 1,
        backoff: int = 4,
    ) -> None:
        options = DelayedScaling(dtype=dtype, margin=margin, growth=growth, backoff=backoff)
        super().__init__("scaled_cast_hook", process_group, options)
        self._scales: dict[tuple[str, ...], BucketScale] = {}
        # int32[2] as in BucketScale.exponent; the parameters of one bucket share one tensor.
        self._exponents: dict[str, torch.Tensor] = {}
        self._counters = torch.zeros(4, dtype=torch.int64)  # see `scaled_cast_all_reduce`
        self._n_seen = 0  # saturated elements of earlier runs
        self._has_warned = False  # of saturated elements
        self._saturated: HostCopy | None = None  # their number after an earlier step, on its way to the host
        self._is_left_open = False  # whether an earlier step lacked its last bucket, and no bucket has come since

    @property
    def nonfinite_elements(self) -> int:
        """Number of inf or NaN gradient elements on this rank. Reading it waits for the device."""
        return int(self._counters[0])

    @property
    def saturated_elements(self) -> int:
        """Number of finite gradient elements that saturated on this rank. Reading it waits for the device."""
        return int(self._counters[1])

    @property
    def skipped_steps(self) -> int:
        """Number of steps with a non-finite reduced gradient. Reading it waits for the device."""
        return int(self._counters[2])

    def _device_counters(self) -> dict[str, torch.Tensor]:
        return dict(zip(("nonfinite_elements", "saturated_elements", "skipped_steps"), self._counters, strict=False))

    def exponents(self) -> dict[str, int]:
        """The exponent of the current scale, 2^exponent, by parameter name. Waits for the device."""
        return {name: int(exponent[0]) for name, exponent in self._exponents.items()}

    def _begin_step(self) -> None:
        super()._begin_step()
        copy = self._saturated
        if copy is not None and not is_capturing(copy.device) and copy.is_there():  # a capture allows no event query
            (total,), self._saturated = copy.read(), None
            if total > self._n_seen:
                self._has_warned, margin = True, self.options.margin
                warnings.warn(
                    f"scaled_cast_hook: {int(total) - self._n_seen} gradient elements saturated on this rank before "
                    f"step {self.iter}, so the means of their steps are too small. margin={margin} lets gradients grow "
                    f"{2**margin}-fold from one step to the next. Raise it, up to {MAX_MARGIN}, or use "
                    "dtype=torch.bfloat16, which has the range of fp32. state.saturated_elements counts further ones, "
                    "without a warning.",
                    stacklevel=2,
                )

    def _end_open_step(self) -> None:
        """End a step without its last bucket, on which the algorithm counts skipped steps: the next bucket does."""
        self._is_left_open |= self.steps.is_open
        super()._end_open_step()

    def prepare(self, bucket: Bucket, names: tuple[str, ...], group: dist.ProcessGroup) -> "_Turn":
        """The bucket as the algorithm sees it; its scale is created on the stream or thread that uses it."""
        closes_step, self._is_left_open = self._is_left_open, False
        return _Turn(bucket.is_final, closes_step)

    def _bucket_scale(self, names: tuple[str, ...], device: torch.device) -> BucketScale:
        """The scale of a bucket. A new bucket starts from the smallest scale of its parameters."""
        if names not in self._scales:
            known = {id(exponent): exponent for name in names if (exponent := self._exponents.get(name)) is not None}
            if known:
                exponent = torch.stack([exponent.to(device) for exponent in known.values()]).amin(0)
            else:
                exponent = torch.zeros(2, dtype=torch.int32, device=device)
            members = set(names)
            self._scales = {key: scale for key, scale in self._scales.items() if members.isdisjoint(key)}
            self._scales[names] = BucketScale(exponent)
            self._exponents.update(dict.fromkeys(names, exponent))
        return self._scales[names]

    def prepare_checkpoint(self) -> None:
        """Do nothing: `state_dict` is no collective call."""

    def state_dict(self) -> StateDict:
        """Step count, scales and counters as plain numbers and tensors, for ``torch.load(weights_only=True)``.

        Scales are equal on all ranks and fit any world size; element counts are this rank's. Parameters without a scale
        have entries too, so that `torch.distributed.checkpoint` can load into the state of a new run.

        Raises:
            RuntimeError: the parameters' names are not known.
        """
        self.names.search()
        self.names.require("A checkpoint of a ScaledCastState")
        return self._entries()

    def _entries(self) -> StateDict:
        first = torch.zeros(2, dtype=torch.int32)  # as in `_bucket_scale`
        names = sorted({*self.names.known(), *self._exponents})
        exponents = [self._exponents.get(name, first).cpu() for name in names]
        return {
            "iter": self.iter,
            "names": names,
            "exponents": torch.stack(exponents) if exponents else torch.zeros(0, 2, dtype=torch.int32),
            "counters": self._counters.cpu().clamp(max=MAX_COUNT),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and any world size.

        The step count is 0 in checkpoints of earlier versions, which lack it.

        Raises:
            ValueError: an entry is missing, of another type, dtype or shape, or out of range. The message names it,
                and the state is not modified.
        """
        _check_state_dict(state_dict)
        exponents, counters = state_dict["exponents"].clone(), state_dict["counters"].clone()
        self._scales = {}
        self._exponents = dict(zip(state_dict["names"], exponents.unbind(), strict=True))
        self._counters = counters
        self._n_seen, self._saturated = int(counters[1]), None
        self._is_left_open = False
        self.iter = state_dict.get("iter", 0)

    def merge_shards(self, saved: StateDict, shards: Sequence[dist.ProcessGroup]) -> StateDict:
        """Take the smallest scale of all shards of a parameter; see `HookState.merge_shards`."""
        has_scale = torch.tensor([[name in self._exponents] for name in saved["names"]])
        exponents = saved["exponents"].where(has_scale, MAX_EXPONENT)
        # To the device of the group: before the first step, the state's own scales are missing or on the CPU.
        exponents = exponents.to(next(iter(self.names.parameters()), exponents).device)
        for group in shards:
            dist.all_reduce(exponents, dist.ReduceOp.MIN, group=group)
        # A parameter without a scale on any rank has the flag MAX_EXPONENT.
        exponents = exponents.where(exponents[:, 1:] <= 1, 0).cpu()
        return {**saved, "exponents": exponents}

    def replicated_state(self) -> StateDict:
        """Step count, scales and the number of skipped steps; see `HookState.replicated_state`."""
        state = self.state_dict()
        state["counters"][[0, 1, 3]] = 0  # this rank's elements, and the step in progress
        return state

    def load_replicated_state(self, replicated: StateDict) -> None:
        """Take step count, scales and number of skipped steps from another rank; keep this rank's element counts."""
        counters = replicated["counters"].clone()
        counters[:2] = self._counters[:2]
        n_seen = self._n_seen
        self.load_state_dict({**replicated, "counters": counters})
        self._n_seen = n_seen

    def __getstate__(self) -> StateDict:
        """For pickling: options and `state_dict`, without the process group, as in PyTorch's hook states."""
        return {"scaling": self.options, "state": self._entries()}

    def __setstate__(self, state: StateDict) -> None:
        self.__init__()  # type: ignore[misc]
        self.options = state["scaling"]
        self.load_state_dict(state["state"])


def _check_state_dict(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state`` is a `ScaledCastState.state_dict`."""
    check_entries(state, "ScaledCastState", ("names", "exponents", "counters"))
    check_count("iter", state.get("iter", 0))
    names, exponents, counters = state["names"], state["exponents"], state["counters"]
    if not isinstance(names, list):
        raise wrong("names", names, "a list of parameter names")
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str) or name in seen:
            raise wrong(f"names[{i}]", name, "strings, each of them once")
        seen.add(name)
    check_tensor("exponents", exponents, (torch.int32,), (len(names), 2))
    exponent, is_calibrated = exponents.unbind(1)
    in_range = (exponent >= -MAX_EXPONENT) & (exponent <= MAX_EXPONENT)
    is_flag = (is_calibrated == 0) | (is_calibrated == 1)
    expected = f"an exponent from -{MAX_EXPONENT} to {MAX_EXPONENT}, then 0 or 1"
    check_elements("exponents", exponents, torch.stack([in_range, is_flag], 1), expected)
    check_tensor("counters", counters, (torch.int64,), (4,))
    check_elements("counters", counters, (counters >= 0) & (counters <= MAX_COUNT), "0 to 2**62")
    if int(counters[3]) > 1:
        raise wrong("counters[3]", int(counters[3]), "0 or 1")


@hook_for(ScaledCastState)
def scaled_cast_hook(state: ScaledCastState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean in 16 bits, at the scale of the previous step; gradients that grow 16-fold may saturate.

    If they grow more than 2^``margin``-fold from one step to the next, by default 16-fold, the mean of that step may be
    too small, by all of the growth beyond. What saturation cuts off is lost, and each rank whose elements saturate
    warns once, in a later step. The scale then falls, so the next step is right unless gradients grow again.

    The mean is (sum of cast(s G / n)) / s. The scale s depends on the largest reduced magnitude, which is bitwise equal
    on all ranks. So after the first step of a bucket, the ranks need no message to agree on the scale. The hook never
    synchronizes with the host; replays of a CUDA graph do not warn. `ScaledCastState.saturated_elements` counts
    saturated elements. inf and NaN pass through, do not change the scale, and count as a skipped step.

    Args:
        state: options, scales and counters. Modified.
        bucket: the gradients. Overwritten with their mean.
    """
    return state.run(bucket, partial(_scaled_cast, state))


async def _scaled_cast(state: ScaledCastState, step: Step) -> None:
    device = step.source.table.device
    scale = state._bucket_scale(step.names, device)
    counters = state._counters = state._counters.to(device)
    if step.memory.closes_step:
        counters[2] += counters[3]
        counters[3] = 0
    await scaled_cast_all_reduce(step, state.options, scale, counters, step.memory.is_last)
    # A later step reads the number on the host: no step waits for it.
    if step.memory.is_last and not state._has_warned and state._saturated is None and not is_capturing(device):
        state._saturated = HostCopy(counters[1:2])
