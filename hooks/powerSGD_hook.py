"""PowerSGD, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Differences from PyTorch's hook: batched kernels process all matrices of a bucket at once. A bucket takes two
all-reduces instead of three, and does not synchronize with the host. Error memory and factors are stored by parameter
name instead of bucket index, so a checkpoint resumes on any world size.
"""

import logging
import operator
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Algorithm, Transport
from gradwire.compress import (
    LowRankBucket,
    LowRankPolicy,
    alternating_all_reduce,
    flat_low_rank_bucket,
    powersgd_all_reduce,
    repeatable,
)
from gradwire.compress.memory import MemoryByName, error_like
from gradwire.compress.powersgd import check_factors, check_size_of_factors
from gradwire.exchange.bucket import Bucket, GradBucket
from gradwire.exchange.decorators import ddp_hook, replayable
from gradwire.exchange.hook_state import HookState, Memory, Step, hook_for
from gradwire.exchange.memory import ERRORS, StateDict
from gradwire.kernels import WIRE_FORMATS, as_real, compute_dtype, gradient_layout, layout_in_dtype
from gradwire.validation import (
    MAX_COUNT,
    check_choice,
    check_elements,
    check_flag,
    check_keywords,
    check_number,
    check_whole_number,
    wrong,
)

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger("gradwire.hooks.powerSGD_hook")

# Four times PyTorch's default. The payload is so small that two collectives, kernel launches and thread switches
# dominate the cost of a bucket. Buckets beyond 100 MiB gain little and overlap less with the backward.
LOW_RANK_BUCKET_CAP_MB = 100
FACTOR_WIRES = ("int8", "int4", "bf16", "fp16")
MAX_FACTOR = 1 + 2.0**-10  # columns have unit length, up to rounding
_PYTORCH_ATTRIBUTES = ("error_dict", "maybe_increase_iter", "p_memory_dict", "q_memory_dict", "rng")


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """The options of `PowerSGDState`, documented there: PyTorch's in PyTorch's order, then gradwire's."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    compression_stats_logging_frequency: int
    batch_tensors_with_same_shape: bool
    ranks: Mapping[str, int]
    stacks: Mapping[str, int]
    factor_dtype: torch.dtype | None
    alternating: bool
    precision: str
    factor_wire: str | None

    def __post_init__(self) -> None:
        check_whole_number("matrix_approximation_rank", self.matrix_approximation_rank, "at least 1, a whole number", 1)
        _ = self.policy  # validates the other options that choose matrices
        for name in ("start_powerSGD_iter", "compression_stats_logging_frequency"):
            check_whole_number(name, getattr(self, name), "a whole number of steps")
        check_number("orthogonalization_epsilon", self.orthogonalization_epsilon, "a finite number, at least 0", 0)
        check_whole_number("random_seed", self.random_seed, "a whole number")
        for name in ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape", "alternating"):
            check_flag(name, getattr(self, name))
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                f"because buckets are rebuilt after the first step; got {self.start_powerSGD_iter}."
            )
        dtypes, hint = (None, torch.float32, torch.bfloat16), "Factors have the range of the gradients, unlike fp16."
        check_choice("factor_dtype", self.factor_dtype, dtypes, hint=hint)
        check_choice("factor_wire", self.factor_wire, (*FACTOR_WIRES, None))
        if self.factor_wire is not None and self.factor_dtype is not None:
            raise ValueError(
                f"factor_wire is {self.factor_wire!r} and factor_dtype is {self.factor_dtype}, but factors are sent in "
                "one of them. Pass factor_dtype=None: factors are computed in fp32 and then quantized."
            )
        check_choice("precision", self.precision, ("tf32", "fp32"))
        if self.alternating and not self.warm_start:
            raise ValueError(
                "alternating needs warm_start: each step sends one factor and reuses the other. Set warm_start=True."
            )
        every = max(1, self.compression_stats_logging_frequency)  # as PyTorch does
        for name, value in (
            ("compression_stats_logging_frequency", every),
            ("ranks", self.policy.ranks),  # a user may modify these two in place
            ("stacks", self.policy.stacks),
        ):
            object.__setattr__(self, name, value)

    @property
    def start_iter(self) -> int:
        """``start_powerSGD_iter``, which may be negative, as in PyTorch."""
        return max(0, self.start_powerSGD_iter)

    @cached_property
    def policy(self) -> LowRankPolicy:
        """The choice of compressed parameters."""
        return LowRankPolicy(
            rank=self.matrix_approximation_rank,
            min_compression_rate=self.min_compression_rate,
            ranks=self.ranks,
            stacks=self.stacks,
        )

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern in ``ranks`` or ``stacks`` that matches none of the names."""
        return self.policy.unmatched_pattern(names)


class PowerSGDState(HookState):
    """Options, error memory and factors of `powerSGD_hook` and `batched_powerSGD_hook`, for one model.

    The arguments up to ``batch_tensors_with_same_shape`` are PyTorch's, with PyTorch's defaults.
    Every option is also an attribute, which you may assign between steps, equally on all ranks.

    Args:
        process_group: the ranks to average over; None for the model's.
        matrix_approximation_rank: rank r of the approximation. For an n x m matrix, r (n + m)
            elements are sent, and compute time grows with r. Start with 1 to 4 and double it until
            the loss matches uncompressed training. The paper used 2 for an image model and 4 for a
            language model.
        start_powerSGD_iter: steps of plain all-reduce before the first compressed step. Compression
            does most harm early in training, when gradients change fast. Use at least the warm-up
            of the learning rate; PyTorch suggests 10 % of all steps as a first try.
        min_compression_rate: an n x m matrix is compressed if min_compression_rate r (n + m) < n m,
            and never if it would not shrink. Finite. A higher value excludes matrices that gain
            little.
        use_error_feedback: whether to add the residual of compression to the next gradient. Keep it
            on: otherwise the part of the gradient outside the factors is lost, and accuracy drops.
            The residuals take one fp32 value per element of the compressed gradients.
        warm_start: whether to start from the Q of the previous step. Keep it on: successive
            gradients are similar, so one power iteration per step suffices. Otherwise each step
            starts from a random Q, and needs a higher rank for the same accuracy.
        orthogonalization_epsilon: no effect; the orthogonalization never divides by a number near
            zero.
        random_seed: seed of the random columns, equal on all ranks.
        compression_stats_logging_frequency: steps between two log messages with
            `compression_stats`.
        batch_tensors_with_same_shape: no effect; all matrices of a bucket are always batched.
        ranks: rank r by parameter name, as `fnmatch` patterns, instead of
            ``matrix_approximation_rank``. The first match wins; 0 sends a parameter uncompressed. For
            layers that need more accuracy than others, such as ``{"*.embedding.weight": 0, "head.*": 8}``.
        stacks: number of matrices along the first dimension, by name pattern: 3 for a fused
            query-key-value weight, the number of experts for a weight of experts x n x m.
        factor_dtype: wire dtype of the factors: None for the dtype of the gradients (bf16 for fp16
            gradients), torch.float32, or torch.bfloat16, which halves the bytes. Arithmetic is in
            fp32; error feedback makes up for the rounding.
        alternating: whether to send P on even steps and Q on odd steps (ACP-SGD). A bucket then
            takes one all-reduce and about half the bytes; the approximation is slightly worse. Worth
            trying if latency or bandwidth still limits the step.
        precision: arithmetic of the products that compute the factors, on GPUs and at ranks above 8:
            "tf32", on tensor cores if the GPU has them, or "fp32", which is slower. Error feedback makes up for
            the rounding of TF32. Lower ranks and CPUs always use fp32.
        factor_wire: quantize the factors to this wire format: "int8", "int4", "bf16" or "fp16"; None: an all-reduce in
            ``factor_dtype``. P and Q are exchanged as in `quantization_hook`, with a scale per 64 elements and sums in
            fp32. "int8" sends a quarter of the bytes of fp32, so four times the rank in the same bytes, and error
            feedback makes up for the rounding. Gradients that are not compressed are sent in 16 or 32 bits.

    Attributes:
        iter: number of steps so far.
        options: all options.

    Raises:
        ValueError: an option has the wrong type or is out of range, or two options exclude each other.

    Examples:
        >>> state = PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> model.register_comm_hook(state, powerSGD_hook)
    """

    local_options = frozenset({"compression_stats_logging_frequency"})
    compiles_early = True
    options: PowerSGDOptions

    @check_keywords
    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        ranks: Mapping[str, int] | None = None,
        stacks: Mapping[str, int] | None = None,
        factor_dtype: torch.dtype | None = None,
        alternating: bool = False,
        precision: str = "tf32",
        factor_wire: str | None = None,
    ) -> None:
        ranks, stacks = {} if ranks is None else ranks, {} if stacks is None else stacks
        values = locals()
        options = PowerSGDOptions(**{each.name: values[each.name] for each in fields(PowerSGDOptions)})
        memory = {
            ERRORS: Memory(merge="mean"),  # the all-reduced M Q and M^T P are linear in M: only the mean error matters
            "q": Memory(merge="same", shape=None),
            "p": Memory(merge="same", shape=None),
        }
        super().__init__("powerSGD_hook", process_group, options, memory)
        self._counts = {"numel": [0, 0]}
        self.next_stats_report = 0
        self._has_compressed = False  # whether a compressed step has ended

    @property
    def _is_batched(self) -> bool:
        """Whether the hook of the latest step is batched_powerSGD_hook."""
        return self.hook_name == "batched_powerSGD_hook"

    def __getattr__(self, name: str) -> Any:
        if name in _PYTORCH_ATTRIBUTES:
            raise AttributeError(
                f"{name} belongs to PyTorch's PowerSGDState and powerSGD_hook. This state is gradwire's: register "
                "gradwire.hooks.powerSGD_hook.powerSGD_hook with it."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    if TYPE_CHECKING:  # options are attributes

        def __setattr__(self, name: str, value: Any) -> None: ...

    def _handshake_facts(self) -> dict[str, object]:
        """The factors, too, if `alternating` sends one side only."""
        return super()._handshake_facts() | (self.memory.digests() if self.options.alternating else {})

    def _needs_names(self) -> str | None:
        has_patterns = not self._is_batched and bool(self.options.ranks or self.options.stacks)
        return "A pattern in ranks or stacks" if has_patterns else None

    @property
    def preferred_bucket_cap_mb(self) -> int | None:
        """Bucket size in MiB that gradwire's DistributedDataParallel uses by default: 100.

        None with `batched_powerSGD_hook`, whose results depend on the bucket size.
        """
        return None if self._is_batched else LOW_RANK_BUCKET_CAP_MB

    @property
    def total_numel_before_compression(self) -> int:
        """Gradient elements of all compressed steps."""
        return self._counts["numel"][0]

    @property
    def total_numel_after_compression(self) -> int:
        """Elements sent in these steps."""
        return self._counts["numel"][1]

    def _count_step(self) -> None:
        super()._count_step()
        if self.steps.ended <= self._start:
            return
        if not self._has_compressed:
            self._warn_if_idle()
            self._has_compressed = True
        if self.steps.ended >= self.next_stats_report:
            logger.info(
                "Compression after %s steps: rate %.1f, elements %s -> %s", self.steps.ended, *self.compression_stats()
            )
            self.next_stats_report = self.steps.ended + self.options.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after) over all compressed steps."""
        before, after = self._counts["numel"]
        return (before / after if after > 0 else 0, before, after)

    def _variant(self, number: int) -> Hashable:
        """Whether step ``number`` is compressed, and which side an alternating one sends."""
        return super()._variant(number), self.options.alternating and number % 2

    def _count_bucket(self, bucket: Bucket, memory: LowRankBucket | None) -> None:
        """Add the elements of a compressed step to `compression_stats`; see `HookState._count_bucket`."""
        if self.steps.ended >= self._start and not bucket.is_sparse:
            if memory is not None:
                numel, sent = memory.layout.numel, memory.sent_numels[self.steps.ended % 2]
            else:
                numel = sent = sum(as_real(parameter).numel() for parameter in bucket.parameters())
            before, after = self._counts["numel"]
            self._counts["numel"] = [min(before + numel, MAX_COUNT), min(after + sent, MAX_COUNT)]
        super()._count_bucket(bucket, memory)

    def make_bucket(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        names: Sequence[str],
        transport: Transport | None,
        earlier: MemoryByName,
    ) -> LowRankBucket | None:
        """A new `LowRankBucket`; None if none of its matrices would shrink enough. See `HookState.make_bucket`."""
        options = self.options
        layouts = [layout_in_dtype(as_real(parameter), dtype) for parameter in parameters]
        arguments: dict[str, Any] = {
            "names": names,
            "memory": earlier,
            "error_feedback": options.use_error_feedback,
            "factor_dtype": options.factor_dtype,
            "factor_wire": WIRE_FORMATS[options.factor_wire] if options.factor_wire is not None else None,
            "seed": options.random_seed,
            "iteration": max(self.iter, options.start_powerSGD_iter),
            "alternating": options.alternating,
            "precision": options.precision,
        }
        if self._is_batched:
            return flat_low_rank_bucket(layouts, options.matrix_approximation_rank, **arguments)
        shapes = options.policy.matrix_shapes(parameters, names)
        return LowRankBucket(layouts, shapes, **arguments) if any(shapes) else None

    def _warn_if_idle(self) -> None:
        """Warn, with the reason, if the first compressed step has compressed nothing."""
        if any(low_rank for _, low_rank in self.memory.buckets.values()):
            return
        known = self.names.known()
        numel = sum(as_real(known[name]).numel() for names in self.memory.buckets for name in names if name in known)
        if self._is_batched:
            why = "No bucket is large enough: lower matrix_approximation_rank or raise bucket_cap_mb."
        else:
            layouts = {name: gradient_layout(each) for name, each in known.items() if each.requires_grad}
            why = self.options.policy.why_nothing_is_compressed(layouts)
        warnings.warn(
            f"PowerSGD compresses nothing here: it sends all {numel:,} elements. {why} Otherwise use another hook: "
            "fp16_compress_hook halves the bytes of fp32 gradients.",
            stacklevel=2,
        )

    def _initialize(self, parameters: Mapping[Tensor, str]) -> None:
        """Allocate the missing memory of every compressed parameter, as its first compressed step would.

        Errors without factors exist after a failed step, if `resynchronize` took over from a rank without factors.
        Factors of `batched_powerSGD_hook` belong to buckets that are not known yet.
        """
        q, kept = self.memory.own["q"], self.memory.own[ERRORS if self.options.use_error_feedback else "q"]
        for parameter, name in parameters.items():
            layout = gradient_layout(parameter)
            if not self._is_batched:
                if name not in kept or name not in q:
                    made = self.make_bucket([layout], layout.dtype.to_real(), [name], None, self.memory.own)
                    self.memory.keep(made.memory if made is not None else {})
            elif self.options.use_error_feedback and name not in kept:
                dtype = compute_dtype(layout.dtype.to_real())
                kept[name] = error_like(None, as_real(layout), dtype, name)

    def _keeps(self, entry: str) -> bool:
        """False: `_initialize` has allocated every entry."""
        return False

    def replicated_state(self) -> StateDict:
        """The hook, which a state learns in its first step, and the factors; see `HookState.replicated_state`."""
        return {"hook": self.hook_name, **super().replicated_state()}

    def load_replicated_state(self, replicated: StateDict) -> None:
        """Continue with hook and factors of another rank; see `HookState.load_replicated_state`."""
        self.hook_name = replicated["hook"]
        super().load_replicated_state(replicated)

    def _check_shapes(self, memory: Mapping[str, Mapping[str, Tensor]], layouts: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless factors fit the known parameters, and the errors of unknown ones.

        Factors may have another rank r: they then start from scratch, as when r changes during training.
        """
        errors, q, p = (memory[entry] for entry in (ERRORS, "q", "p"))
        for side, factors in (("q", q), ("p", p)):
            for name, factor in factors.items():
                entry = f"{side}[{name!r}]"
                if factor.dim() != 3 or factor.shape[0] < 1 or not 1 <= factor.shape[1] <= factor.shape[2]:
                    raise wrong(entry, factor, "matrices x rank x length, with a rank from 1 to that length")
                check_elements(entry, factor, factor.abs() <= MAX_FACTOR, "-1 to 1: a column has length 1")
        for name in sorted(q.keys() | p.keys()):
            shape = self.options.policy.matrix_shape(name, layouts[name]) if name in layouts else None
            if shape is not None:
                check_factors(name, q, p, shape)
            elif name in layouts:
                check_size_of_factors(name, q, p, as_real(layouts[name]).numel(), "its gradient")
            elif name in errors:
                check_size_of_factors(name, q, p, errors[name].numel(), f"errors[{name!r}]")
            elif name in q and name in p:
                check_size_of_factors(
                    name, q, p, q[name].shape[0] * q[name].shape[2] * p[name].shape[2], f"q[{name!r}]"
                )


def _option(name: str) -> property:
    """An option as an attribute of the state, whose assignment validates all options together."""

    def assign(state: PowerSGDState, value: object) -> None:
        if "options" not in vars(state):
            raise AttributeError(f"{name} is an option: pass it to super().__init__(), or assign it after that call.")
        state.options = replace(state.options, **{name: value})  # type: ignore[arg-type]

    return property(operator.attrgetter(f"options.{name}"), assign)


for _each in fields(PowerSGDOptions):
    setattr(PowerSGDState, _each.name, _option(_each.name))


@replayable
@hook_for(PowerSGDState)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients, each matrix M = G + E as P Q^T of rank r, with error feedback.

    For an n x m matrix, a rank sends r (n + m) elements. Gradients that are not worth compressing are sent as they are.
    Each bucket takes two all-reduces, or one with ``alternating``. Steps before ``start_powerSGD_iter`` are bitwise
    equal to the plain all-reduce. If a matrix contains inf or NaN on any rank, it becomes NaN on all ranks, so that a
    gradient scaler skips the step; its error and factors do not change. Gradients may be fp32, fp16, bf16, fp64 or
    complex (as real pairs).

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximate mean.

    Raises:
        ValueError: the state belongs to another model, or an entry of ``stacks`` does not fit its parameter.
    """
    state.hook_name = "powerSGD_hook"
    return state.run(bucket, partial(_powersgd, state.options))


@ddp_hook(PowerSGDState)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Apply PowerSGD to the flat bucket as one nearly square matrix.

    Of N elements, it sends O(r sqrt(N)). The rows and columns of the matrix are arbitrary, so expect
    lower accuracy than with `powerSGD_hook`. "Batched" is PyTorch's name; `powerSGD_hook` batches its
    matrices too. ``ranks``, ``stacks`` and ``min_compression_rate`` have no effect. When buckets
    change, the warm start begins again; errors are kept.

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximate mean.
    """
    state.hook_name = "batched_powerSGD_hook"
    return state.run(bucket, partial(_powersgd, state.options))


@repeatable
def _powersgd(options: PowerSGDOptions, step: Step) -> Algorithm[None]:
    if options.alternating:
        return alternating_all_reduce(step)
    return powersgd_all_reduce(step, warm_start=options.warm_start)
