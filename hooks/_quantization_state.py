"""`QuantizationState`: the options and the error memory of `quantization_hook`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport
from gradwire.compress import Quantization, QuantizedBucket, WirePolicy
from gradwire.compress._options import check_flag, check_whole_number
from gradwire.hooks._error_feedback_state import ErrorFeedbackState, check_loaded_names, sum_errors
from gradwire.hooks._parameter_names import compressible_parameters, plain_name
from gradwire.hooks._state_validation import check_model, check_quantization_state
from gradwire.hooks._types import GradBucket
from gradwire.kernels import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, as_real, gradient_layout, layout_in_dtype

DEFAULT_EXEMPT = ("*.bias", "*norm*")


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """The options of `QuantizationState`, documented there.

    Raises:
        ValueError: an option is of another type or out of range.
    """

    wire: str = "int4"
    block_size: int = 64
    use_error_feedback: bool = True
    start_iter: int = 2
    exempt: tuple[str, ...] = DEFAULT_EXEMPT
    wires: Mapping[str, str] = field(default_factory=dict)
    stochastic_rounding: bool = False
    error_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("start_iter", self.start_iter, "a whole number of steps, at least 0", 0)
        check_block_size("block_size", self.block_size)
        for name in ("use_error_feedback", "stochastic_rounding"):
            check_flag(name, getattr(self, name))
        if self.error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype is {self.error_dtype}; expected torch.float32 or torch.bfloat16.")
        check_whole_number("seed", self.seed, "a whole number")
        _ = self.policy  # validates the other options
        object.__setattr__(self, "wires", dict(self.wires))

    def values(self) -> dict[str, Any]:
        """The options by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def policy(self) -> WirePolicy:
        """The wire format of each parameter."""
        return WirePolicy(wire=self.wire, exempt=self.exempt, wires=self.wires, start_iteration=self.start_iter)

    @property
    def quantization(self) -> Quantization:
        """The arithmetic of blocks."""
        return Quantization(
            block_size=self.block_size,
            error_dtype=self.error_dtype if self.use_error_feedback else None,
            stochastic_rounding=self.stochastic_rounding,
            seed=self.seed,
        )

    @property
    def needs_names(self) -> bool:
        """Whether numbers in place of parameter names do not suffice."""
        return bool(self.wires) or self.exempt != DEFAULT_EXEMPT


def check_block_size(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a power of two that blocks may have."""
    expected = f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
    check_whole_number(name, value, expected, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    if value & (value - 1):  # type: ignore[operator]
        raise ValueError(f"{name} is {value}; expected {expected}.")


class QuantizationState(ErrorFeedbackState):
    """Options and error memory of `quantization_hook`, for one model.

    Args:
        process_group: the ranks to average over; None for the model's.
        wire: wire format of the gradients. Start with "int4": 7.5 times fewer bytes than fp32. "int8"
            affects accuracy least. "int2" and "sign" send about a half and a third of int4's bytes,
            but take more steps. "fp8_e4m3" has the size of int8; it represents small elements of a
            block more precisely, and large ones less. "bf16" and "fp16" halve the bytes and sum in
            fp32.
        block_size: elements that share a scale, a power of two from 32 to 1024. Smaller blocks are
            more accurate but send more scales of 2 bytes each: 64 adds 0.25 bits per element. 256 is
            enough for int8; int2 benefits from 32.
        use_error_feedback: whether to add the rounding error to the next gradient. Keep it on below
            8 bits. The residuals take 1 + 1 / world size values of ``error_dtype`` per element.
        start_iter: steps of plain all-reduce before the first quantized step. The default suffices
            for most models.
        exempt: `fnmatch` patterns of parameters to send in 16 bits. Parameters with fewer than two
            dimensions always are: they are small and sensitive to rounding.
        wires: wire format by name pattern, instead of ``wire``. The first match wins, and takes
            precedence over ``exempt``. For layers that need more accuracy than others, such as
            ``{"*.embedding.weight": "int8", "head.*": "bf16"}``. "fp32" sends a parameter
            uncompressed.
        stochastic_rounding: whether to round randomly to one of the two nearest codes, so that every
            element is correct in expectation. Worth trying without error feedback; with it, rounding
            to nearest is more accurate.
        error_dtype: torch.float32, or torch.bfloat16, which halves the error memory and is rounded
            stochastically, without bias.
        seed: seed of the random numbers, equal on all ranks.

    Attributes:
        iter: number of steps so far.
        options: all options.

    Raises:
        ValueError: an option has the wrong type or is out of range.

    Examples:
        >>> state = QuantizationState(process_group, wire="int4")
        >>> model.register_comm_hook(state, quantization_hook)
    """

    __module__ = "gradwire.hooks.quantization_hooks"  # where it is imported from, and where pickles look for it
    options: QuantizationOptions

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        wire: str = "int4",
        *,
        block_size: int = 64,
        use_error_feedback: bool = True,
        start_iter: int = 2,
        exempt: Sequence[str] = DEFAULT_EXEMPT,
        wires: Mapping[str, str] | None = None,
        stochastic_rounding: bool = False,
        error_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__("quantization_hook")
        if isinstance(exempt, list):
            exempt = tuple(exempt)
        wires = {} if wires is None else wires
        options = locals()
        self.options = QuantizationOptions(**{each.name: options[each.name] for each in fields(QuantizationOptions)})
        self.process_group = process_group
        self._buckets: dict[tuple[str, ...], QuantizedBucket] = {}
        # This rank's errors, in units of the mean gradient: views of the buckets', or what earlier buckets left.
        self._errors: dict[str, Tensor] = {}
        # The errors of all ranks together, from a checkpoint, until a bucket takes this rank's share.
        self._loaded: dict[str, Tensor] = {}
        self._fits_model = True  # whether the loaded errors were compared with the model's names

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.values().items())
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    def settings(self) -> dict[str, object]:
        """The options, which must be equal on all ranks."""
        return {"hook": "quantization_hook", **self.options.values(), "wires": dict(self.options.wires)}

    def replicated(self) -> dict[str, object]:
        """The number of steps; after a load also the number of errors."""
        loaded = {"loaded errors": len(self._loaded)} if self._is_loaded_anew else {}
        return {"iter": self.iter, **loaded}

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:
        return self._names.of(bucket, "A pattern in wires or exempt" if self.options.needs_names else None)

    @property
    def policy(self) -> WirePolicy:
        """The wire format of each parameter."""
        return self.options.policy

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(errors.nbytes for errors in self.residuals())

    def residuals(self) -> list[Tensor]:
        """This rank's error memory of both shots, for `metrics`."""
        return [bucket.errors for bucket in list(self._buckets.values()) if bucket.errors is not None]

    def bucket(
        self, names: tuple[str, ...], dtype: torch.dtype, bucket: GradBucket, transport: Transport
    ) -> QuantizedBucket:
        """The `QuantizedBucket` of a bucket, kept from step to step.

        Args:
            names: of its parameters.
            dtype: of its gradients, real.
            bucket: of either DDP.
            transport: of its collectives.

        Raises:
            ValueError: a loaded error has another shape than its gradient, or a pattern matches no parameter.
        """
        kept = self._buckets.get(names)
        if kept is not None and kept.fits(dtype, transport):
            return kept
        if self._is_loaded:
            check_loaded_names(self._loaded, names)
            if self._names.is_complete and not self._fits_model:
                check_model(self._loaded, self._names.known())
            self._fits_model = True
        self._check_patterns()
        parameter_layouts = [gradient_layout(parameter) for parameter in bucket.parameters()]
        layouts = [layout_in_dtype(as_real(layout), dtype) for layout in parameter_layouts]
        self.drop_buckets(names)
        share = {name: self._loaded[name] / transport.world_size for name in names if name in self._loaded}
        made = QuantizedBucket(
            layouts,
            self.policy.wire_formats(parameter_layouts, names),
            transport,
            self.options.quantization,
            names=names,
            memory=self._errors | share,
            iteration=self.iter,
        )
        for name in share:
            del self._loaded[name]
        self._errors.update(made.memory)
        self._buckets[names] = made
        return made

    def drop_buckets(self, names: Sequence[str] | None = None) -> None:
        """Drop the buckets that have one of these parameters, by default all, and keep their errors of both shots."""
        for key, bucket in list(self._buckets.items()):
            if names is None or not set(names).isdisjoint(key):
                self._errors.update(bucket.folded_errors())
                del self._buckets[key]

    def take_back(self, name: str, gradient: Tensor) -> None:
        """Add a reduced gradient that was not applied to the parameter's error; see `NamedState.take_back`."""
        error = self._errors.get(plain_name(name))
        if error is not None:
            error.add_(as_real(gradient), alpha=1 / dist.get_world_size(self._group))

    def state_dict(self) -> dict[str, Any]:
        """Step count and errors as plain CPU tensors, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all
        ranks. Between `prepare_checkpoint` and the next step, any rank may call it alone: it then
        returns the prepared copy, and two such calls share tensors.

        All errors are summed over the ranks: the part of the gradients that has not been applied yet.
        Any world size can resume from them, and nothing is lost. Later steps round differently from
        those of the uninterrupted run.

        Every parameter with a dense gradient has an entry even before the first step, so that
        ``torch.distributed.checkpoint`` can load: register the hook or `bind` the model before you
        load.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten
                seconds. A later call on all ranks works.
        """
        return super().state_dict()

    def _collected(self) -> dict[str, Any]:
        errors = sum_errors(self._own_errors(), self.process_group, self._names.parameters(), 1)
        module = self._names.module
        if module is not None and self.options.use_error_feedback:
            for parameter, name in compressible_parameters(module).items():
                errors.setdefault(name, torch.zeros(as_real(parameter).shape, device="cpu"))
        return {"iter": self.iter, "errors": errors}

    def _own_errors(self) -> dict[str, Tensor]:
        """This rank's errors of both shots and its share of the loaded ones, by parameter name."""
        if not self._loaded:
            return self._folded_errors()
        world_size = dist.get_world_size(self._group)
        return self._folded_errors() | {name: error / world_size for name, error in self._loaded.items()}

    def _folded_errors(self) -> dict[str, Tensor]:
        """This rank's errors of both shots, by parameter name, without loaded ones."""
        errors = dict(self._errors)
        for bucket in self._buckets.values():
            errors |= bucket.folded_errors()
        return errors

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size.

        Errors are checked against the parameters; if those are not known yet, before the first quantized step.

        Raises:
            ValueError: an entry is missing, has the wrong type, dtype or shape, is not finite, or is out of range. The
                message names the entry. The state is not modified.
        """
        shapes = {name: as_real(parameter).shape for name, parameter in self._names.known().items()}
        check_quantization_state(state_dict, shapes)
        if self._names.is_complete:
            check_model(state_dict["errors"], self._names.known())
        self._loaded = {name: error.detach().float().clone() for name, error in state_dict["errors"].items()}
        self._errors, self._buckets, self._prepared = {}, {}, None
        self.iter = state_dict["iter"]
        self._is_loaded, self._fits_model = True, False
        self.expect_handshake()

    def replicated_state(self) -> dict[str, Any]:
        """The step count; see `NamedState.replicated_state`."""
        return {"iter": self.iter}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take the step count from another rank; keep this rank's errors."""
        check_quantization_state({**replicated, "errors": {}}, {})
        self.iter, self._prepared = replicated["iter"], None
        self.expect_handshake()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch's hook states."""
        return {
            "options": self.options.values(),
            "iter": self.iter,
            "errors": self._folded_errors(),
            "loaded": self._loaded,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.iter, self._errors, self._loaded = state["iter"], dict(state["errors"]), dict(state["loaded"])
        self._is_loaded = True
        self.expect_handshake()
