"""`PowerSGDState`: the options and the memory of PowerSGD's hooks."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire.compress import LowRankBucket, LowRankPolicy, PowerSGDMemory
from gradwire.hooks import _powersgd_checkpoint as checkpoint
from gradwire.hooks._error_feedback_state import ErrorFeedbackState
from gradwire.hooks._handshake import digest
from gradwire.hooks._parameter_names import plain_name
from gradwire.hooks._powersgd_options import OPTION_NAMES, OptionAttributes, PowerSGDOptions
from gradwire.hooks._state_validation import MAX_COUNT, check_model, check_powersgd_state
from gradwire.hooks._types import GradBucket
from gradwire.kernels import as_real

logger = logging.getLogger("gradwire.hooks.powerSGD_hook")

# Four times PyTorch's default. The payload is so small that a bucket costs mostly its two collectives, its kernel
# launches and its thread switches. Larger buckets than 100 MiB gain little and overlap less with the backward.
LOW_RANK_BUCKET_CAP_MB = 100


class PowerSGDState(OptionAttributes, ErrorFeedbackState):
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

    __module__ = "gradwire.hooks.powerSGD_hook"  # where it is imported from, and where pickles look for it

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
        options = locals()
        self.options = PowerSGDOptions(**{name: options[name] for name in OPTION_NAMES})
        super().__init__("powerSGD_hook")
        self.process_group = process_group
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._memory: dict[str, PowerSGDMemory] = {}
        # By parameter names, kept until the settings change; None where nothing is worth compressing.
        self._buckets: dict[tuple[str, ...], LowRankBucket | None] = {}
        self._is_batched = False  # whether the hook of the latest step is batched_powerSGD_hook
        self._fits_parameters = True  # whether the loaded memory was compared with every parameter
        self._has_compressed = False  # whether a compressed step is over

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTION_NAMES)
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    @property
    def policy(self) -> LowRankPolicy:
        """Which parameters are compressed, under the current options."""
        return self.options.policy

    def settings(self) -> dict[str, object]:
        """The hook and its options, which must be equal on all ranks; see `PowerSGDOptions.replicated`."""
        hook = "batched_powerSGD_hook" if self._is_batched else "powerSGD_hook"
        return {"hook": hook, **self.options.replicated()}

    def replicated(self) -> dict[str, object]:
        """The number of steps; after a load, or if `alternating` sends one side only, also digests of the factors."""
        facts: dict[str, object] = {"iter": self.iter}
        entries = checkpoint.entries_of(self._memory)
        if self._is_loaded_anew or self.options.alternating:
            for side in ("p", "q"):
                facts[f"factors {side}"] = f"{len(entries[side])}, digest {digest(entries[side])}"
        if self._is_loaded_anew:
            facts["loaded errors"] = len(entries["errors"])
        return facts

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:
        has_patterns = not self._is_batched and bool(self.options.ranks or self.options.stacks)
        return self._names.of(bucket, "A pattern in ranks or stacks" if has_patterns else None)

    def residuals(self) -> list[torch.Tensor]:
        """This rank's error memory, for `metrics`."""
        return [each.error for each in list(self._memory.values()) if each.error is not None]

    @property
    def preferred_bucket_cap_mb(self) -> int | None:
        """Bucket size in MiB that gradwire's DistributedDataParallel uses by default: 100.

        None with `batched_powerSGD_hook`, whose results depend on the bucket size.
        """
        return None if self._is_batched else LOW_RANK_BUCKET_CAP_MB

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(each.error.nbytes for each in self._memory.values() if each.error is not None)

    def count_step(self) -> None:
        """Count a step that has ended."""
        super().count_step()
        if self.iter == self.options.start_powerSGD_iter:
            logger.info("PowerSGD starts after %s steps.", self.iter)

    def drop_buckets(self) -> None:
        """Drop all buckets; their memory is the state's."""
        self._buckets = {}

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after) over all compressed steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def _count(self, numel: int, sent_numel: int, is_last: bool) -> None:
        """Add a bucket to `compression_stats`, and log them every ``compression_stats_logging_frequency`` steps."""
        self.total_numel_before_compression = min(self.total_numel_before_compression + numel, MAX_COUNT)
        self.total_numel_after_compression = min(self.total_numel_after_compression + sent_numel, MAX_COUNT)
        if is_last and self.iter >= self.next_stats_report:
            logger.info(
                "Compression after %s steps: rate %.1f, elements %s -> %s", self.iter, *self.compression_stats()
            )
            self.next_stats_report = self.iter + self.options.compression_stats_logging_frequency

    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Add a reduced gradient that was not applied to the parameter's error; see `NamedState.take_back`."""
        memory = self._memory.get(plain_name(name))
        if memory is not None and memory.error is not None:
            memory.error.add_(as_real(gradient))

    def state_dict(self) -> dict[str, Any]:
        """Step count, errors and factors as plain CPU tensors, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all
        ranks. Between `prepare_checkpoint` and the next step, any rank may call it alone: it then
        returns the prepared copy, and two such calls share tensors.

        Errors are averaged over the ranks. PowerSGD depends only on their mean, so a run resumed on
        any world size equals the uninterrupted one up to rounding.

        Every compressed parameter has an entry even before the first step, so that
        ``torch.distributed.checkpoint`` can load: register the hook or `bind` the model before you
        load. With `batched_powerSGD_hook`, factors belong to buckets and have entries only after a
        compressed step.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten
                seconds. A later call on all ranks works.
        """
        return super().state_dict()

    def _collected(self) -> dict[str, Any]:
        module = self._names.module
        if module is not None:
            self._memory.update(
                checkpoint.initial_memory(module, self._memory, self.options, self.iter, self._is_batched)
            )
        entries = checkpoint.averaged_entries(self._memory, self.process_group, self._names.parameters())
        return self._with_counts(entries)

    def _with_counts(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        numel = [self.total_numel_before_compression, self.total_numel_after_compression]
        return {"iter": self.iter, **entries, "numel": numel}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size.

        Entries are checked against the parameters; if those are not known yet, before the first compressed step.
        Factors of a different rank r start from scratch, as when r changes during training.

        Raises:
            ValueError: an entry is missing, has the wrong type, dtype or shape, is not finite, or is out of range. The
                message names the entry. The state is not modified.
        """
        check_powersgd_state(state_dict, checkpoint.expected_of(self._names, self.policy))
        if self._names.is_complete:
            check_model(state_dict["errors"], self._names.known())
        self._memory = checkpoint.memory_of(state_dict)
        self.iter = state_dict["iter"]
        self.total_numel_before_compression, self.total_numel_after_compression = state_dict["numel"]
        self._buckets, self._prepared = {}, None
        self._is_loaded, self._fits_parameters = True, False
        self.expect_handshake()

    def replicated_state(self) -> dict[str, Any]:
        """Step count and factors; see `NamedState.replicated_state`."""
        return self._with_counts({side: checkpoint.entries_of(self._memory)[side] for side in ("q", "p")})

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take step count and factors from another rank; keep this rank's errors."""
        self.load_state_dict({**replicated, "errors": checkpoint.entries_of(self._memory)["errors"]})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch."""
        options = {name: getattr(self.options, name) for name in OPTION_NAMES}
        return {"options": options, "memory": self._with_counts(checkpoint.entries_of(self._memory))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.load_state_dict(state["memory"])
