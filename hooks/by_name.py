"""Hooks by name, such as ``int4`` or ``powersgd-r16-int8``: the state and the hook that a name stands for.

    allreduce, fp16, bf16                    the gradients in a dtype
    bf16-fp32-sum                            in bf16, summed in fp32
    scaled-fp16                              in fp16, times a power of two per bucket
    int8, fp8, int6, int4, int2, sign        a wire format of `quantization_hook`
    powersgd-r8                              `powerSGD_hook` with rank 8, or any other
    powersgd-r8-int8, -int4, -fp16           with factors in that wire format
    powersgd-r8-bf16                         with factors in an all-reduce of bf16
    powersgd-r8-alternating                  with one factor per step
    powersgd-r8-batched                      `batched_powerSGD_hook`

``-no-feedback`` at the end of a wire format or of PowerSGD's name switches error feedback off.

The environment variable ``GRADWIRE_HOOK`` names a hook for gradwire's DDP, ``attach`` without a name, and
``gradwire run``.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.compress.policy import WIRE_ALIASES, wire_name
from gradwire.exchange.decorators import CommHook
from gradwire.hooks.default_hooks import CastState, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import FACTOR_WIRES, PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import WIRE_FORMATS
from gradwire.validation import closest

__all__ = ["NamedHook", "hook_named"]

logger = logging.getLogger("gradwire.hooks")

QUANTIZED = tuple(name for name, wire in WIRE_FORMATS.items() if wire.is_scaled)
NONE = "none"  # no hook
VARIABLE = "GRADWIRE_HOOK"  # the environment variable that names a hook
_NO_FEEDBACK = r"(?P<off>-no-feedback)?"
_WIRE = re.compile(rf"(?P<wire>{'|'.join([*QUANTIZED, *WIRE_ALIASES])}){_NO_FEEDBACK}")
_POWERSGD = re.compile(
    rf"powersgd-r(?P<rank>[1-9]\d*)(?:-(?P<factors>{'|'.join(FACTOR_WIRES)}))?"
    rf"(?:-(?P<variant>alternating|batched))?{_NO_FEEDBACK}"
)
_EXAMPLES = ("powersgd-r4", "powersgd-r16", "powersgd-r16-int8", "powersgd-r32-int8", "int4-no-feedback")


class NamedHook(NamedTuple):
    """What a name stands for."""

    make_state: type
    hook: CommHook
    options: Mapping[str, Any] = {}  # of the state
    start_option: str | None = None  # the state's option for the number of plain steps

    def state(self, process_group: dist.ProcessGroup | None = None, **options: Any) -> Any:
        """A state with these and further options. Raises TypeError for an option that the name has set."""
        for name in self.options.keys() & options:
            raise TypeError(
                f"{name}={options[name]!r} contradicts the name of the hook: {name}={self.options[name]!r}."
            )
        return self.make_state(process_group, **self.options, **options)

    def registration(self, process_group: dist.ProcessGroup | None, start: int) -> tuple[Any, CommHook]:
        """State and hook that send ``start`` plain steps first, if the hook has such an option."""
        options = {} if self.start_option is None else {self.start_option: start}
        return self.state(process_group, **options), self.hook


_CASTS = {
    "allreduce": NamedHook(CastState, allreduce_hook),
    "fp16": NamedHook(CastState, fp16_compress_hook),
    "bf16": NamedHook(CastState, bf16_compress_hook),
    "bf16-fp32-sum": NamedHook(CastState, bf16_compress_hook, {"accumulate": "fp32"}),
    "scaled-fp16": NamedHook(ScaledCastState, scaled_cast_hook),
}


def hook_named(name: str) -> NamedHook:
    """The hook that a name stands for. Raises ValueError for any other name, with the nearest one."""
    if name in _CASTS:
        return _CASTS[name]
    if found := _WIRE.fullmatch(name):
        feedback = {"use_error_feedback": False} if found["off"] else {}
        options = {"wire": wire_name("wire", found["wire"]), **feedback}
        return NamedHook(QuantizationState, quantization_hook, options, "start_iter")
    if found := _POWERSGD.fullmatch(name):
        return _low_rank(found)
    rank = re.search(r"r([1-9]\d*)", name)
    own = [f"powersgd-r{rank[1]}", f"powersgd-r{rank[1]}-int8"] if rank else []
    lower = name.lower()
    short = lower.removesuffix("-no-feedback")
    nearest = short if short in _CASTS else closest(lower, [*_CASTS, *QUANTIZED, *own, *_EXAMPLES])
    meant = "" if nearest is None else f"Did you mean {nearest!r}? "
    raise ValueError(
        f"There is no hook {name!r}. {meant}Hooks: {', '.join([*_CASTS, *QUANTIZED])}, and powersgd-rN with a rank N, "
        f"such as {', '.join(_EXAMPLES[:3])}; -no-feedback at the end switches error feedback off."
    )


def _low_rank(found: re.Match[str]) -> NamedHook:
    options: dict[str, Any] = {"matrix_approximation_rank": int(found["rank"])}
    if found["factors"] == "bf16":
        options["factor_dtype"] = torch.bfloat16
    elif found["factors"] is not None:
        options["factor_wire"] = found["factors"]
    if found["variant"] == "alternating":
        options["alternating"] = True
    if found["off"]:
        options["use_error_feedback"] = False
    hook = batched_powerSGD_hook if found["variant"] == "batched" else powerSGD_hook
    return NamedHook(PowerSGDState, hook, options, "start_powerSGD_iter")


def environment_value() -> str:
    """The value of the environment variable `VARIABLE`, unchecked; empty without one."""
    return os.environ.get(VARIABLE, "").strip()


def name_from_environment() -> str | None:
    """The hook that the environment variable `VARIABLE` names; None without one. ValueError for any other name."""
    name = environment_value()
    if name and name != NONE:
        try:
            hook_named(name)
        except ValueError as error:
            raise ValueError(f"The environment variable {VARIABLE} is {name!r}. {error}") from None
    return name or None


@functools.cache
def log_name_from_environment(name: str) -> None:
    """Log, once per process and on rank 0 only, that the environment changes the training."""
    if name != NONE and dist.get_rank() == 0:
        text = "The environment variable %s compresses the gradients with %s. Unset it to average them plainly."
        logger.warning(text, VARIABLE, name)
