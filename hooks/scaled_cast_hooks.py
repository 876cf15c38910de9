"""16-bit all-reduce with delayed scaling: the precision of fp16 without its narrow range."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comm import Transport, Workspace
from gradwire.compress import BucketScale, DelayedScaling, Gradients, scaled_cast_all_reduce
from gradwire.hooks._arguments import ddp_hook, needs_state
from gradwire.hooks._parameter_names import NamedState
from gradwire.hooks._reduce_bucket import agree, reduce_bucket, zero_copy
from gradwire.hooks._state_validation import MAX_COUNT, check_scaled_cast_state
from gradwire.hooks._types import GradBucket, StepBoundary

__all__ = ["ScaledCastState", "scaled_cast_hook"]


class ScaledCastState(NamedState):
    """Options and scales of `scaled_cast_hook`, for one model.

    Each bucket has one scale, stored by parameter name. The defaults suit most models. Watch `saturated_elements` to
    tune ``margin``.

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

    Raises:
        ValueError: an option has the wrong type or is out of range.

    Examples:
        >>> state = ScaledCastState(process_group)
        >>> model.register_comm_hook(state, scaled_cast_hook)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float16,
        margin: int = 4,
        growth: int = 1,
        backoff: int = 4,
    ) -> None:
        super().__init__("scaled_cast_hook")
        self.process_group = process_group
        self.scaling = DelayedScaling(dtype=dtype, margin=margin, growth=growth, backoff=backoff)
        self._buckets: dict[tuple[str, ...], BucketScale] = {}
        # int32[2] as in BucketScale.exponent; the parameters of one bucket share one tensor.
        self._exponents: dict[str, torch.Tensor] = {}
        self._counters = torch.zeros(4, dtype=torch.int64)
        self._boundary = StepBoundary()
        self._is_open = False  # whether the latest step's last bucket has not come, which counts whether it is skipped

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

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self.scaling).items())
        return f"{type(self).__name__}({options})"

    def device_counters(self) -> dict[str, torch.Tensor]:
        """The three totals, for `metrics`."""
        return dict(zip(("nonfinite_elements", "saturated_elements", "skipped_steps"), self._counters, strict=False))

    def settings(self) -> dict[str, object]:
        """The options, which must be equal on all ranks. Scales need not be: the ranks agree on them."""
        return {"hook": self.hook_name, **vars(self.scaling)}

    def exponents(self) -> dict[str, int]:
        """The exponent of the current scale, 2^exponent, by parameter name. Waits for the device."""
        return {name: int(exponent[0]) for name, exponent in self._exponents.items()}

    def bucket_scale(self, names: tuple[str, ...], device: torch.device) -> BucketScale:
        """The scale of a bucket. A new bucket starts from the smallest scale of its parameters."""
        if names not in self._buckets:
            known = {id(exponent): exponent for name in names if (exponent := self._exponents.get(name)) is not None}
            if known:
                exponent = torch.stack([exponent.to(device) for exponent in known.values()]).amin(0)
            else:
                exponent = torch.zeros(2, dtype=torch.int32, device=device)
            self._forget_buckets_of(names)
            self._buckets[names] = BucketScale(exponent)
            self._exponents.update(dict.fromkeys(names, exponent))
        return self._buckets[names]

    def _forget_buckets_of(self, names: tuple[str, ...]) -> None:
        members = set(names)
        self._buckets = {key: scale for key, scale in self._buckets.items() if members.isdisjoint(key)}

    def counters(self, device: torch.device) -> torch.Tensor:
        """The counters, int64 [4], on ``device``."""
        if self._counters.device != device:
            self._counters = self._counters.to(device)
        return self._counters

    def state_dict(self) -> dict[str, Any]:
        """Scales and counters as plain tensors, for ``torch.load(weights_only=True)``.

        Scales are equal on all ranks and fit any world size; element counts are this rank's. Parameters without a scale
        have entries too, so that `torch.distributed.checkpoint` can load into the state of a new run.

        Raises:
            RuntimeError: the parameters' names are not known.
        """
        self._names.search()
        self._names.require("A checkpoint of a ScaledCastState")
        return self._entries()

    def _entries(self) -> dict[str, Any]:
        first = torch.zeros(2, dtype=torch.int32)  # as in `bucket_scale`
        names = sorted({*self._names.known(), *self._exponents})
        exponents = [self._exponents.get(name, first).cpu() for name in names]
        return {
            "names": names,
            "exponents": torch.stack(exponents) if exponents else torch.zeros(0, 2, dtype=torch.int32),
            "counters": self._counters.cpu().clamp(max=MAX_COUNT),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and any world size.

        Raises:
            ValueError: an entry is missing, of another type, dtype or shape, or out of range. The message names it,
                and the state is not modified.
        """
        check_scaled_cast_state(state_dict)
        exponents, counters = state_dict["exponents"].clone(), state_dict["counters"].clone()
        self._buckets = {}
        self._exponents = dict(zip(state_dict["names"], exponents.unbind(), strict=True))
        self._counters = counters
        self.expect_handshake()

    def replicated_state(self) -> dict[str, Any]:
        """Scales and the number of skipped steps; see `NamedState.replicated_state`."""
        return self.state_dict()

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take scales and the number of skipped steps from another rank; keep this rank's element counts."""
        counters = replicated["counters"].clone()
        counters[:2] = self._counters[:2]
        counters[3] = 0  # the step that failed is discarded
        self.load_state_dict({**replicated, "counters": counters})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and `state_dict`, without the process group, as in PyTorch's hook states."""
        return {"scaling": self.scaling, "state": self._entries()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.scaling = state["scaling"]
        self.load_state_dict(state["state"])


@zero_copy
@ddp_hook(needs_state(ScaledCastState))
def scaled_cast_hook(state: ScaledCastState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 16 bits, scaled by a power of two that follows the previous step.

    The scale depends on the largest reduced magnitude, which is bitwise equal on all ranks. So after
    the first step of a bucket, the ranks need no message to agree on the scale. The hook never
    synchronizes with the host. Finite elements that do not fit saturate and are counted in the
    state. inf and NaN pass through, do not change the scale, and count as a skipped step.

    Args:
        state: options, scales and counters. Modified.
        bucket: the gradients. Overwritten with their mean.
    """
    group = agree(state, state.process_group, bucket, state)
    names = state._names.of(bucket)
    is_last = bucket.is_last()
    is_left_open = state._boundary.is_before(bucket) and state._is_open
    state._is_open = not is_last

    async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        device = source.table.device
        scale = state.bucket_scale(names, device)
        counters = state.counters(device)
        if is_left_open:
            counters[2] += counters[3]
            counters[3] = 0
        await scaled_cast_all_reduce(source, target, state.scaling, scale, counters, is_last, transport, workspace)

    return reduce_bucket(group, bucket, algorithm, state.hook_name, observed=state)
