"""`HookSettings`: a hook's options, equal on all ranks, its telemetry and its recorded steps.

`check_pairing` and `in_group` fit them to the model that the hook is registered for.
"""

import atexit
import functools
import warnings
import weakref
from collections.abc import Hashable, Mapping
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm.connections import Connections
from gradwire.comm.forks import in_this_process
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.exchange.bucket import Bucket, BucketOrder
from gradwire.exchange.decorators import CommHook, by_name, check_process_group, is_gradwire_hook, name_of
from gradwire.exchange.handshake import Handshake, check_same_ranks
from gradwire.exchange.memory import StateMemory
from gradwire.exchange.names import ParameterNames, registered_wrappers
from gradwire.exchange.telemetry import Report, Telemetry
from gradwire.validation import check_whole_number

_PYTORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


class HookSettings:
    """The settings of a hook, which must be equal on all ranks, and its telemetry.

    States of hooks derive from this class; for a hook without a state, its module has an instance.

    Attributes:
        hook_name: name of the hook.
        handshake: the process groups that have agreed on the settings.
        bucket_order: the order of the buckets of PyTorch's DDP.
        telemetry: the measurements, while the state is observed, or its errors are checked; else None.
        names: the names of parameters; None for a hook without memory, which may serve several models.
        memory: the memory by parameter name; None likewise.
        steps: the `StepCount`; None if the hook needs none.
    """

    _serves_one_model = False  # a state that does may take the model's process group
    telemetry: Telemetry | None = None
    names: ParameterNames | None = None
    memory: StateMemory | None = None
    steps: Any = None
    _follows_model = False  # whether ``process_group`` was taken from the model

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None = None) -> None:
        self.hook_name = self._own_hook = hook  # the first is that of the latest call, if several hooks share a state
        self.handshake = Handshake()
        self.bucket_order = BucketOrder()
        self.process_group = process_group
        self._plans = WeakIdKeyDictionary()  # of buckets that have none of their own, by their first parameter

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to average over; None for the model's."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_process_group(process_group, remedy=self._meant(process_group))
        self._process_group, self._follows_model = process_group, False
        self.handshake.revoke()

    def _meant(self, value: object) -> str:
        """The remedy for a value in place of the process group: the next option, if it has that type, or a name."""
        if not isinstance(value, str | int):
            return ""
        following = [*signature(type(self)).parameters.values()][1:2]
        is_meant = any(each.annotation is type(value) and each.kind is not each.KEYWORD_ONLY for each in following)
        return (f" Pass {following[0].name}={value!r}." if is_meant else "") + by_name(value)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._process_group or default_group()

    def _compared_options(self) -> dict[str, object]:
        """The hook's name and options, as plain values. Every bucket compares them, so this must be cheap."""
        return {"hook": self.hook_name}

    def _handshake_facts(self) -> dict[str, object]:
        """Further values that a handshake compares: counters, and digests of loaded memory."""
        return {}

    def _apply_settings(self, settings: dict[str, object]) -> None:
        """Apply settings that all ranks have agreed on; they may have changed since the last step."""

    # Recorded steps; see `gradwire.exchange.plans`.

    def _variant(self, number: int) -> Hashable:
        """Key of the host's decisions in step ``number``; steps with equal keys share a recording."""
        return None

    def _begin_bucket(self, position: int) -> bool:
        """Note that a bucket is launched; returns whether it begins a step, whose scale `_match_scale` then compares.

        The buckets of a step come in order, but any may be skipped.
        """
        return False

    def _match_scale(self, connections: Connections) -> None:
        """Bring the error memory into the scale of the gradients; RuntimeError if the ranks' scales differ."""

    def _count_bucket(self, bucket: Bucket, memory: Any) -> None:
        """Note that a bucket with this memory has raised no error."""

    # Telemetry. See docs/telemetry.md for the metrics.

    def _measurer(self, number: int) -> Telemetry | None:
        """The `Telemetry` that measures step ``number``; None if none does."""
        return self.telemetry

    def observe(self, *, every: int = 50, exact_every: int = 0, report: Report | None = None) -> None:
        """Measure one in ``every`` steps from now on. Call it on every rank, between the same two steps.

        Measuring does not change the result of a step. It computes the norms of the result and the error memory, and
        reads them in a later step, without waiting for the device. The last ones are read when the state is released or
        the interpreter exits.

        Args:
            every: number of steps per measured step, at least 1.
            exact_every: number of steps per comparison with the exact mean; 0 for no comparisons. A comparison takes an
                all-reduce in fp32 of about 65,536 elements of each bucket, or all if it has fewer, and of as many
                elements of its error memory. Must be equal on all ranks.
            report: called with the `metrics` of each measured step, in the training thread; see `to_jsonl`,
                `to_tensorboard` and `to_wandb`. Usually passed on one rank only. Its first exception is logged, with a
                traceback; none ends the training.

        Raises:
            ValueError: a number of steps is out of range.
        """
        check_whole_number("every", every, "a whole number of steps, at least 1", 1)
        check_whole_number("exact_every", exact_every, "a whole number of steps, at least 0", 0)
        if self.telemetry is not None:
            self.telemetry.close()
        self.telemetry = Telemetry(self, every, exact_every, report)
        # The latest function runs first: before a logger that was set up earlier ends.
        atexit.register(in_this_process(_stop_at_exit), weakref.ref(self))

    def stop_observing(self) -> None:
        """Report the steps measured so far, and stop measuring. Call it on every rank, between the same two steps."""
        if self.telemetry is not None:
            self._warn_if_unused(self.telemetry)
            self.telemetry.close()
        self.telemetry = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the latest measured step; empty before the first one has ended.

        Warns if no model uses the state.

        Raises:
            RuntimeError: `observe` was not called.
        """
        telemetry = self.telemetry
        if telemetry is None:
            raise RuntimeError(
                f"This {type(self).__name__} is not measured. Call state.observe() on every rank before the steps "
                "that you want to measure."
            )
        self._warn_if_unused(telemetry)
        telemetry.flush()
        return dict(telemetry.latest)

    def _warn_if_unused(self, telemetry: Telemetry) -> None:
        has_model = self.names is not None and self.names.is_complete
        if telemetry.n_steps == 0 and not has_model and not registered_wrappers(self):
            warnings.warn(
                f"This {type(self).__name__} is observed, but has no model, so nothing is measured. Register it on the "
                "model: model.register_comm_hook(state, hook).",
                stacklevel=3,
            )

    def _device_counters(self) -> Mapping[str, Tensor]:
        """Further totals among the metrics, one element each."""
        return {}


@functools.cache
def settings_of(hook: str) -> HookSettings:
    """The settings of a hook without a state."""
    return HookSettings(hook)


def _stop_at_exit(state: weakref.ref[HookSettings]) -> None:
    if (observed := state()) is not None:
        observed.stop_observing()


def check_pairing(state: object, hook: CommHook) -> None:
    """Raise TypeError for a hook of PyTorch's with a state of gradwire's."""
    module = getattr(hook, "__module__", None) or ""
    if module.startswith(_PYTORCHS_HOOKS) and isinstance(state, HookSettings):
        name, kind = name_of(hook), type(state)
        raise TypeError(
            f"{name} is from PyTorch, but its state is gradwire's {kind.__name__}, which PyTorch's hook cannot use. "
            f"Import the hook from gradwire too: from {kind.__module__} import {name}."
        )


def follow_model(state: HookSettings, group: dist.ProcessGroup) -> None:
    """Let a state average over the model's ``group``, until the user sets another one."""
    state.process_group, state._follows_model = group, True


def in_group(state: Any, hook: CommHook, group: dist.ProcessGroup) -> Any:
    """The state to call a registered hook with, so that it averages over ``group``, the ranks of its model.

    A state without a process group takes ``group``, and so does one with another group of the same ranks: all of a
    model's connections fail and start again together. A state that may serve several models, or that a user's hook may
    pass on to several of gradwire's, is left as it is: `Handshake.agree` chooses the group.

    Raises:
        ValueError: the state has or is a group of other ranks.
    """
    is_ours, has_group = is_gradwire_hook(hook), isinstance(state, HookSettings)
    if not has_group and not (is_ours and isinstance(state, dist.ProcessGroup)):
        return state
    chosen = state if not has_group else None if state._follows_model else state.process_group
    if chosen is not None and chosen is not group and is_initialized_group(chosen):
        if not is_ours:
            return state
        check_same_ranks(chosen, group, "hook's process group")
    if not has_group:
        return group
    if state._serves_one_model:
        follow_model(state, group)
    return state
