"""PowerSGD, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Differences from PyTorch's hook: batched kernels process all matrices of a bucket at once. A bucket takes two
all-reduces instead of three, and does not synchronize with the host. Error memory and factors are stored by parameter
name instead of bucket index, so a checkpoint resumes on any world size.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Steps
from gradwire.compress import (
    LowRankBucket,
    PowerSGDMemory,
    alternating_all_reduce,
    flat_low_rank_bucket,
    powersgd_all_reduce,
)
from gradwire.hooks._bucket import bucket_dtype, ddp_hook, needs_state
from gradwire.hooks._handshake import digest
from gradwire.hooks._parameter_names import compressible_parameters
from gradwire.hooks._powersgd_options import OPTION_NAMES, OptionAttributes, PowerSGDOptions
from gradwire.hooks._state_validation import (
    MAX_COUNT,
    Expected,
    check_model,
    check_powersgd_shapes,
    check_powersgd_state,
)
from gradwire.hooks._types import GradBucket
from gradwire.hooks.hook_state import ERRORS, HookState, Memory, Step, check_loaded_names, hook_for
from gradwire.kernels import MAX_RANK, as_real, compute_dtype, gradient_layout, layout_in_dtype

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger("gradwire.hooks.powerSGD_hook")

# Four times PyTorch's default. The payload is so small that two collectives, kernel launches and thread switches
# dominate the cost of a bucket. Buckets beyond 100 MiB gain little and overlap less with the backward.
LOW_RANK_BUCKET_CAP_MB = 100


class PowerSGDState(OptionAttributes, HookState):
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
        cuda_graphs: whether to capture each bucket's kernels between two collectives in CUDA graphs,
            after a warm-up, and to replay them in later steps. Saves host time. Results are bitwise
            equal, so this option may differ between ranks. Without effect, and with a warning, where
            Triton kernels do not run: on CPUs, with fp64 gradients, and at ranks above 64.

    Attributes:
        iter: number of steps so far.
        options: all options.
        total_numel_before_compression: gradient elements of all compressed steps.
        total_numel_after_compression: elements sent in these steps.

    Raises:
        ValueError: an option has the wrong type or is out of range, or two options exclude each other.

    Examples:
        >>> state = PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> model.register_comm_hook(state, powerSGD_hook)
    """

    __module__ = "gradwire.hooks.powerSGD_hook"  # the import path, also in pickles
    memory: ClassVar[Mapping[str, Memory]] = {
        ERRORS: Memory(merge="mean"),  # the all-reduced M Q and M' P are linear in M: only the mean error matters
        "q": Memory(merge="same"),
        "p": Memory(merge="same"),
    }
    local_options = frozenset({"compression_stats_logging_frequency", "cuda_graphs"})
    options: PowerSGDOptions

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
        cuda_graphs: bool = False,
    ) -> None:
        ranks, stacks = {} if ranks is None else ranks, {} if stacks is None else stacks
        values = locals()
        options = PowerSGDOptions(**{name: values[name] for name in OPTION_NAMES})
        super().__init__("powerSGD_hook", process_group, options)
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        # By parameter names, kept until the settings change; None where nothing is worth compressing.
        self._buckets: dict[tuple[str, ...], LowRankBucket | None] = {}
        self._has_compressed = False  # whether a compressed step has ended

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTION_NAMES)
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    @property
    def _is_batched(self) -> bool:
        """Whether the hook of the latest step is batched_powerSGD_hook."""
        return self.hook_name == "batched_powerSGD_hook"

    @property
    def start_iteration(self) -> int:
        """The first compressed step."""
        return self.options.start_powerSGD_iter

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern in ``ranks`` or ``stacks`` that matches none of the names; see `HookState`."""
        return self.options.policy.unmatched_pattern(names)

    def replicated(self) -> dict[str, object]:
        """The number of steps; after a load, or if `alternating` sends one side only, also digests of the factors."""
        facts: dict[str, object] = {"iter": self.iter}
        if self._is_loaded_anew or self.options.alternating:
            for side in ("p", "q"):
                facts[f"factors {side}"] = f"{len(self._tensors[side])}, digest {digest(self._tensors[side])}"
        if self._is_loaded_anew:
            facts["loaded errors"] = len(self._tensors[ERRORS])
        return facts

    def needs_names(self) -> str | None:
        """Patterns in the options need names; see `HookState`."""
        has_patterns = not self._is_batched and bool(self.options.ranks or self.options.stacks)
        return "A pattern in ranks or stacks" if has_patterns else None

    @property
    def preferred_bucket_cap_mb(self) -> int | None:
        """Bucket size in MiB that gradwire's DistributedDataParallel uses by default: 100.

        None with `batched_powerSGD_hook`, whose results depend on the bucket size.
        """
        return None if self._is_batched else LOW_RANK_BUCKET_CAP_MB

    def count_step(self) -> None:
        """Count a step that has ended."""
        super().count_step()
        if self.iter == self.options.start_powerSGD_iter:
            logger.info("PowerSGD starts after %s steps.", self.iter)
        if self.iter <= self.options.start_powerSGD_iter:
            return
        if not self._has_compressed:
            self._warn_if_idle()
            self._has_compressed = True
        if self.iter >= self.next_stats_report:
            logger.info(
                "Compression after %s steps: rate %.1f, elements %s -> %s", self.iter, *self.compression_stats()
            )
            self.next_stats_report = self.iter + self.options.compression_stats_logging_frequency

    def drop_buckets(self) -> None:
        """Drop all buckets; their memory is the state's."""
        self._buckets = {}

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after) over all compressed steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def _count(self, numel: int, sent_numel: int) -> None:
        """Add a bucket to `compression_stats`."""
        self.total_numel_before_compression = min(self.total_numel_before_compression + numel, MAX_COUNT)
        self.total_numel_after_compression = min(self.total_numel_after_compression + sent_numel, MAX_COUNT)

    def prepare(self, bucket: GradBucket, names: tuple[str, ...], group: dist.ProcessGroup) -> LowRankBucket | None:
        """The `LowRankBucket` of a bucket, kept from step to step; None if none of its matrices would shrink enough."""
        dtype, low_rank = bucket_dtype(bucket), self._buckets.get(names)
        if names not in self._buckets or (low_rank is not None and low_rank.layout.dtype != dtype):
            self._check_loaded(names)
            low_rank = self._new_bucket([gradient_layout(each) for each in bucket.parameters()], dtype, names)
            members = set(names)  # a bucket that shared a parameter with this one no longer exists
            self._buckets = {key: each for key, each in self._buckets.items() if members.isdisjoint(key)}
            self._buckets[names] = low_rank
        if low_rank is not None:
            self._count(low_rank.layout.numel, low_rank.sent_numel(self._iter))
        else:
            numel = sum(as_real(parameter).numel() for parameter in bucket.parameters())
            self._count(numel, numel)
        return low_rank

    def _new_bucket(
        self, parameters: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str]
    ) -> LowRankBucket | None:
        layouts = [layout_in_dtype(as_real(layout), dtype) for layout in parameters]
        options, memory = self.options.of_buckets(self.iter), self._known()
        made: LowRankBucket | None = None
        if self._is_batched:
            rank = self.options.matrix_approximation_rank
            made = flat_low_rank_bucket(layouts, rank, names=names, memory=memory, **options)
        elif any(shapes := self.options.policy.matrix_shapes(parameters, names)):
            made = LowRankBucket(layouts, shapes, names=names, memory=memory, **options)
        if made is not None:
            self._keep(made.memory)
            if self.options.cuda_graphs and not made.can_capture:
                warnings.warn(
                    f"cuda_graphs=True has no effect for {dtype} gradients on {made.table.device} at rank "
                    f"{made.table.largest_rank}. It needs Triton's kernels: a GPU, fp32 or 16-bit gradients, ranks up "
                    f"to {MAX_RANK}. Results are the same without it; pass cuda_graphs=False.",
                    stacklevel=2,
                )
        return made

    def _warn_if_idle(self) -> None:
        """Warn after the first compressed step if it has compressed nothing, and tell why."""
        if any(self._buckets.values()):
            return
        known = self._names.known()
        numel = sum(as_real(known[name]).numel() for names in self._buckets for name in names if name in known)
        if self._is_batched:
            why = "No bucket is large enough: lower matrix_approximation_rank or raise bucket_cap_mb."
        else:
            layouts = {name: gradient_layout(each) for name, each in known.items() if each.requires_grad}
            why = self.options.why_nothing_is_compressed(layouts)
        warnings.warn(
            f"PowerSGD compresses nothing here: it sends all {numel:,} elements. {why} Otherwise use another hook: "
            "fp16_compress_hook halves the bytes of any model.",
            stacklevel=2,
        )

    def _known(self) -> dict[str, PowerSGDMemory]:
        """The memory of every parameter and bucket, by name."""
        errors, q, p = (self._tensors[entry] for entry in (ERRORS, "q", "p"))
        names = dict.fromkeys([*errors, *q, *p])
        return {name: PowerSGDMemory(error=errors.get(name), p=p.get(name), q=q.get(name)) for name in names}

    def _keep(self, memory: Mapping[str, PowerSGDMemory]) -> None:
        """Keep the memory of a bucket, whose tensors its steps update in place."""
        for entry, attribute in ((ERRORS, "error"), ("q", "q"), ("p", "p")):
            for name, each in memory.items():
                if (tensor := getattr(each, attribute)) is not None:
                    self._tensors[entry][name] = tensor
                else:
                    self._tensors[entry].pop(name, None)

    def _initialize(self, module: torch.nn.Module) -> None:
        """Allocate the memory of every compressed parameter that no compressed step has had yet, as that step would.

        Without factors for `batched_powerSGD_hook`, whose factors belong to buckets that are not known yet.
        """
        kept = self._tensors[ERRORS if self.options.use_error_feedback else "q"]
        for parameter, name in compressible_parameters(module).items():
            layout = gradient_layout(parameter)
            if name in kept or (self._is_batched and not self.options.use_error_feedback):
                continue
            if self._is_batched:
                dtype = compute_dtype(layout.dtype.to_real())
                self._tensors[ERRORS][name] = PowerSGDMemory().error_like(as_real(layout), dtype, name)
            elif (shape := self.options.policy.matrix_shape(name, layout)) is not None:
                options = self.options.of_buckets(self.iter)
                self._keep(
                    LowRankBucket([as_real(layout)], [shape], names=[name], memory=self._known(), **options).memory
                )

    def keeps(self, entry: str, name: str, layout: Tensor) -> bool:
        """No entries besides those that `_initialize` has made."""
        return False

    def _counts(self) -> dict[str, Any]:
        return {"numel": [self.total_numel_before_compression, self.total_numel_after_compression]}

    def _collected(self) -> dict[str, Any]:
        if self._names.module is not None:
            self._initialize(self._names.module)
        return super()._collected() | self._counts()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size; see `HookState.load_state_dict`.

        Factors of a different rank r start from scratch, as when r changes during training.
        """
        super().load_state_dict(state_dict)
        self._tensors, self._loaded = self._loaded, self._tensors  # a rank's share is the mean itself
        self.total_numel_before_compression, self.total_numel_after_compression = state_dict["numel"]

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        check_powersgd_state(state_dict, self._expected())
        if self._names.is_complete:
            check_model(state_dict[ERRORS], self._names.known())

    def _check_loaded(self, names: Sequence[str]) -> None:
        errors, q, p = (self._tensors[entry] for entry in (ERRORS, "q", "p"))
        if self._is_loaded:
            check_loaded_names(errors | q, names)
        if not self._fits_model:
            check_powersgd_shapes(errors, q, p, parameters=self._expected())
            if self._names.is_complete:
                check_model(errors, self._names.known())
                self._fits_model = True

    def _expected(self) -> dict[str, Expected]:
        """The shapes that errors and factors must fit, for every parameter known so far."""
        layouts = {name: gradient_layout(parameter) for name, parameter in self._names.known().items()}
        policy = self.options.policy
        return {
            name: Expected(as_real(layout).shape, policy.matrix_shape(name, layout)) for name, layout in layouts.items()
        }

    def replicated_state(self) -> dict[str, Any]:
        """Step count and factors; see `HookState.replicated_state`."""
        return super().replicated_state() | self._counts()

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take step count and factors from another rank; keep this rank's errors."""
        self.load_state_dict({**replicated, ERRORS: self._tensors[ERRORS]})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch."""
        memory = {"iter": self.iter, **self._tensors, **self._counts()}
        return {"options": self._option_values(), "memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.load_state_dict(state["memory"])


@hook_for(PowerSGDState)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients, approximating each matrix at rank r, with error feedback.

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


@ddp_hook(needs_state(PowerSGDState))
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


def _powersgd(options: PowerSGDOptions, step: Step) -> Steps[None]:
    bucket, gradients, results, workspace = step.memory, step.gradients, step.results, step.workspace
    arguments = (bucket, gradients, results, step.iteration, step.transport, workspace)

    def steps() -> Steps[None]:
        if options.alternating:
            return alternating_all_reduce(*arguments)
        return powersgd_all_reduce(*arguments, warm_start=options.warm_start)

    if options.cuda_graphs and workspace.graphs is not None and bucket.can_capture:
        is_in_place = all(map(is_, gradients, results))
        variant = (is_in_place, options.alternating and step.iteration % 2)
        refresh = partial(bucket.refresh, gradients, results, step.iteration)
        return workspace.graphs.run(bucket, variant, steps, refresh)
    return steps()
