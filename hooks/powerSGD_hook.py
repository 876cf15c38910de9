"""PowerSGD: the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

PyTorch's hook runs one matrix at a time. For each bucket it waits three times for collectives and once for the device,
and its error memory belongs to bucket indices. This hook runs the matrices of a bucket together, waits for two
collectives and never for the device, and its memory belongs to parameter names: it resumes on any number of ranks.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import Transport, Workspace
from gradwire.comm.torch_internals import default_group
from gradwire.compress import (
    Gradients,
    LowRankBucket,
    LowRankPolicy,
    PowerSGDMemory,
    alternating_all_reduce,
    cast_all_reduce,
    flat_low_rank_bucket,
    powersgd_all_reduce,
)
from gradwire.hooks import _powersgd_checkpoint as checkpoint
from gradwire.hooks._arguments import ddp_hook, needs_state
from gradwire.hooks._handshake import digest
from gradwire.hooks._parameter_names import NamedState, parameter_names, plain_name
from gradwire.hooks._powersgd_options import OPTION_NAMES, PowerSGDOptions
from gradwire.hooks._reduce_bucket import agree, bucket_dtype, is_sparse, reduce_bucket, zero_copy
from gradwire.hooks._state_validation import check_powersgd_shapes, check_powersgd_state
from gradwire.hooks._types import GradBucket
from gradwire.kernels.flattening import compute_dtype
from gradwire.kernels.segments import as_real, gradient_layout

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)


class PowerSGDState(NamedState):
    """Options and memory of `powerSGD_hook` and `batched_powerSGD_hook`; one state for one model.

    The arguments up to ``batch_tensors_with_same_shape`` are PyTorch's, with its defaults. All are
    attributes too, which may be assigned between steps, equally on all ranks.

    Args:
        process_group: the ranks to average over; None for the default group.
        matrix_approximation_rank: r. A matrix of n x m elements sends r (n + m); time grows with r
            too. Start with 1 to 4 (the paper's image and language models need 2 and 4), and double
            it until the loss follows that of uncompressed training.
        start_powerSGD_iter: steps of plain all-reduce before the first compressed one. Early
            gradients change fast, and compression harms them most. Use at least the learning
            rate's warm-up; PyTorch suggests to begin with 10 % of all steps.
        min_compression_rate: a matrix of n x m is compressed if this times r (n + m) is below
            n m; one that would not shrink never is. Finite. A higher rate exempts matrices that
            gain little.
        use_error_feedback: whether what compression leaves out is added to the next gradient.
            Leave it on: without it the loss goes wrong for good. It takes memory of the size of
            the compressed gradients in fp32.
        warm_start: whether Q begins as the last step's. Leave it on: one multiplication per step
            then suffices, because gradients of successive steps are alike. Without it every step
            begins with a random Q and needs a higher rank.
        orthogonalization_epsilon: not needed: the orthogonaliser divides by nothing that is near
            zero. Any value gives the same result.
        random_seed: of the random columns; the same on all ranks.
        compression_stats_logging_frequency: steps between two messages with `compression_stats`
            in the log.
        batch_tensors_with_same_shape: not needed: the matrices of a bucket are always handled
            together.
        ranks: other ranks by parameter name, as patterns of `fnmatch`; the first that matches
            counts, and 0 sends the parameter uncompressed. Exempt what is sensitive, as the first
            and the last layer often are: ``{"*.embedding.weight": 0, "head.*": 8}``.
        stacks: parameters that are several matrices along the first dimension, by name pattern,
            and how many of them: 3 for a fused query-key-value weight, the number of experts for
            experts x n x m.
        factor_dtype: of the factors on the wire: None for the gradients' own (bf16 for fp16
            gradients), torch.float32, or torch.bfloat16, which halves the bytes. Arithmetic is in
            fp32, and error feedback sends what rounding took.
        alternating: whether to send P on even steps and Q on odd ones (ACP-SGD): one wait and
            about half the bytes per step, for a result that is a little worse. Worth it where the
            network's latency counts.

    Attributes:
        iter: steps so far.
        options: all options, as `PowerSGDOptions`.
        total_numel_before_compression, total_numel_after_compression: elements of all compressed
            steps.

    Raises:
        ValueError: an option is of another type or out of range.

    Example::
        >>> state = PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> model.register_comm_hook(state, powerSGD_hook)
    """

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
    ) -> None:
        ranks, stacks = {} if ranks is None else ranks, {} if stacks is None else stacks
        arguments = locals()
        self.options = PowerSGDOptions(**{name: arguments[name] for name in OPTION_NAMES})
        super().__init__()
        self.process_group = process_group
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._memory: dict[str, PowerSGDMemory] = {}
        self._buckets: dict[tuple[str, ...], LowRankBucket | None] = {}  # None: nothing worth compressing
        self._settings_of_buckets: dict[str, object] | None = None
        self._is_batched = False
        self._is_loaded = False
        self._fits_parameters = True  # whether what was loaded fits every parameter
        self._patterns_match = False  # whether every pattern in ranks and stacks matches a parameter
        self._has_compressed = False  # whether a compressed step is over
        self._prepared: dict[str, Any] | None = None  # what `state_dict` returns until the next step

    def __getattr__(self, name: str) -> Any:
        if name in OPTION_NAMES:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTION_NAMES:
            self.options = replace(self.options, **{name: value})
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTION_NAMES)
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    @property
    def policy(self) -> LowRankPolicy:
        """Which parameters are compressed, as the options say now."""
        return self.options.policy

    def settings(self) -> dict[str, object]:
        """What all ranks must share: every option but how often the log is written."""
        hook = "batched_powerSGD_hook" if self._is_batched else "powerSGD_hook"
        return {"hook": hook, **self.options.replicated()}

    def replicated(self) -> dict[str, object]:
        """The count of steps; after a load, also the factors, which `alternating` does not send every step."""
        facts: dict[str, object] = {"iter": self.iter}
        if self._is_loaded_anew:
            entries = checkpoint.entries_of(self._memory)
            for side in ("p", "q"):
                facts[f"loaded factors {side}"] = f"{len(entries[side])}, digest {digest(entries[side])}"
            facts["loaded errors"] = len(entries["errors"])
        return facts

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(each.error.nbytes for each in self._memory.values() if each.error is not None)

    def bind(self, module: torch.nn.Module) -> None:
        """Name the parameters after ``module``. See `NamedState.bind`.

        Raises:
            ValueError: the state was bound to another model, or a pattern in ``ranks`` or ``stacks`` matches none of
                this one's parameters.
        """
        super().bind(module)
        self._check_patterns()

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:  # noqa: D102
        has_patterns = not self._is_batched and bool(self.options.ranks or self.options.stacks)
        return self._names.of(bucket, "A pattern in ranks or stacks" if has_patterns else None)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step if this is its last bucket."""
        if not bucket.is_last():
            return
        self.iter += 1
        self._names.close()
        if self.iter == self.options.start_powerSGD_iter:
            logger.info("PowerSGD starts after %s steps.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """The compression so far: (rate, elements before, elements after), of all steps since PowerSGD started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def _reduce(self, bucket: GradBucket, batched: bool) -> Future[torch.Tensor]:
        """Average a bucket: plainly before the start, or if nothing of it is worth compressing."""
        self._is_batched = batched
        self._prepared = None
        agree(self, self.process_group, bucket)
        if self._settings_of_buckets != (settings := self.settings()):
            self.options = replace(self.options)  # checks them: ranks and stacks may have changed in place
            self._settings_of_buckets, self._buckets, self._patterns_match = settings, {}, False
        names, iteration, options = self.parameter_names(bucket), self.iter, self.options
        self._names.note(names, bucket)
        self._check_patterns()
        has_started = options.policy.has_started(iteration)
        compresses = has_started and not is_sparse(bucket)
        low_rank = self._low_rank_bucket(names, bucket) if compresses else None

        async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
            if low_rank is None:
                await cast_all_reduce(source, target, source.table.dtype, transport, workspace)
                return
            gradients, results = source.each(low_rank.layout), target.each(low_rank.layout)
            step = (low_rank, gradients, results, iteration, transport, workspace)
            if options.alternating:
                await alternating_all_reduce(*step)
            else:
                await powersgd_all_reduce(*step, warm_start=options.warm_start)

        self.maybe_increase_iter(bucket)
        if compresses:
            self._count(bucket, low_rank, iteration)
        if has_started and bucket.is_last():
            self._warn_if_idle()
        return reduce_bucket(self.process_group, bucket, algorithm)

    def _low_rank_bucket(self, names: tuple[str, ...], bucket: GradBucket) -> LowRankBucket | None:
        """The bucket's matrices with their memory; None if nothing is worth compressing. Kept from step to step."""
        dtype = bucket_dtype(bucket)
        kept = self._buckets.get(names)
        if names not in self._buckets or (kept is not None and kept.layout.dtype != dtype):
            if self._is_loaded:
                checkpoint.check_names_fit(self._memory, names)
            self._check_loaded_shapes()
            members = set(names)
            self._buckets = {key: each for key, each in self._buckets.items() if members.isdisjoint(key)}
            self._buckets[names] = self._new_bucket(names, bucket.parameters(), dtype)
        return self._buckets[names]

    def _new_bucket(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> LowRankBucket | None:
        """The matrices of some parameters; their memory becomes the state's."""
        options, parameter_layouts = self.options, [gradient_layout(parameter) for parameter in parameters]
        layouts = [_in_dtype(as_real(layout), dtype) for layout in parameter_layouts]
        common: dict[str, Any] = {
            "names": names,
            "memory": self._memory,
            "error_feedback": options.use_error_feedback,
            "factor_dtype": options.factor_dtype,
            "seed": options.random_seed,
            "iteration": max(self.iter, options.start_powerSGD_iter),
            "alternating": options.alternating,
        }
        if self._is_batched:
            bucket = flat_low_rank_bucket(layouts, options.matrix_approximation_rank, **common)
        else:
            shapes = options.policy.matrix_shapes(parameter_layouts, names)
            bucket = LowRankBucket(layouts, shapes, **common) if any(shapes) else None
        if bucket is not None:
            self._memory.update(bucket.memory)
        return bucket

    def _count(self, bucket: GradBucket, low_rank: LowRankBucket | None, iteration: int) -> None:
        numel = sum(as_real(parameter).numel() for parameter in bucket.parameters())
        self.total_numel_before_compression += numel
        self.total_numel_after_compression += low_rank.sent_numel(iteration) if low_rank is not None else numel
        if bucket.is_last() and self.iter >= self.next_stats_report:
            logger.info(
                "Compression after %s steps: rate %.1f, elements %s -> %s", self.iter, *self.compression_stats()
            )
            self.next_stats_report = self.iter + self.options.compression_stats_logging_frequency

    def _warn_if_idle(self) -> None:
        """At the end of the first compressed step: say why, if nothing was compressed in it."""
        if not self._has_compressed and not any(self._buckets.values()):
            known = self._names.known()
            numel = sum(as_real(known[name]).numel() for names in self._buckets for name in names)
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
        self._has_compressed = True

    def _check_patterns(self) -> None:
        """Raise if a pattern matches no parameter, as soon as the names of all are known."""
        if not self._patterns_match and self._names.is_complete:
            self.options.check_patterns_match(sorted(self._names.known()))
            self._patterns_match = True

    def _check_loaded_shapes(self) -> None:
        """Raise, before anything is sent, if what was loaded does not fit a parameter that is known by now."""
        if not self._fits_parameters:
            expected = checkpoint.expected_of(self._names, self.policy)
            check_powersgd_shapes(**checkpoint.entries_of(self._memory), parameters=expected)
            self._fits_parameters = self._names.is_complete

    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Add to the error of a parameter what was reduced for it and not applied. See `NamedState.take_back`."""
        memory = self._memory.get(plain_name(name))
        if memory is not None and memory.error is not None:
            memory.error.add_(as_real(gradient))

    def prepare_checkpoint(self) -> None:
        """Average the errors over the ranks, and keep the copy that `state_dict` returns until the next step.

        A collective call: every rank must make it, between two steps. After it, any rank may call
        `state_dict` by itself, as trainers do that save on rank 0::

            >>> state.prepare_checkpoint()
            >>> if dist.get_rank() == 0:
            >>>     torch.save({"model": model.state_dict(), "powersgd": state.state_dict()}, path)

        The copy takes CPU memory of the size of `state_dict` on every rank.

        Raises:
            RuntimeError: the parameters' names are not known, or some ranks have not called it
                within two minutes.
        """
        self._prepared = None
        self._check_names_are_known()
        checkpoint.wait_for_prepare_checkpoint(self.process_group or default_group())
        self._prepared = self._averaged()

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs, as plain tensors on the CPU, which ``torch.load(weights_only=True)`` takes.

        The copy that `prepare_checkpoint` has made, if no step came after it: that needs no other
        rank, and two calls share its tensors. Else every rank must call it, between two steps; all
        get the same.

        The errors are averaged over the ranks. PowerSGD depends on their mean only, so any number
        of ranks can go on from it, as the uninterrupted run would but for rounding. There is an
        entry for every parameter that is compressed, also before the first step, so that
        ``torch.distributed.checkpoint`` finds where to load: register the hook before loading, or
        `bind` the state to the model. (With `batched_powerSGD_hook` that needs a first step, and
        loads no factors, which belong to buckets.)

        Raises:
            RuntimeError: the parameters' names are not known, or some ranks have not called it
                within ten seconds. A later call on all ranks works.
        """
        if self._prepared is not None:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._prepared.items()}
        self._check_names_are_known()
        checkpoint.wait_for_state_dict(self.process_group or default_group())
        return self._averaged()

    def _averaged(self) -> dict[str, Any]:
        """What `state_dict` returns. A collective call."""
        self._fill_in()
        return self._with_counts(
            checkpoint.averaged_entries(self._memory, self.process_group, self._names.parameters())
        )

    def _with_counts(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        numel = [self.total_numel_before_compression, self.total_numel_after_compression]
        return {"iter": self.iter, **entries, "numel": numel}

    def _fill_in(self) -> None:
        """Make the errors and factors of a bound model that no step has made yet."""
        module = self._names.module
        known = checkpoint.entries_of(self._memory)["errors" if self.options.use_error_feedback else "q"]
        if module is None or known:
            return
        trained = [(parameter, name) for parameter, name in parameter_names(module).items() if parameter.requires_grad]
        for parameter, name in trained:
            dtype = parameter.dtype.to_real()
            if self._is_batched:  # its factors belong to buckets, which are not known yet
                error = PowerSGDMemory().error_like(as_real(gradient_layout(parameter)), compute_dtype(dtype), name)
                self._memory[name] = PowerSGDMemory(error=error)
            else:
                self._new_bucket([name], [parameter], dtype)

    def _check_names_are_known(self) -> None:
        """Raise if a checkpoint would have numbers for names, or no entries because the model is not known yet."""
        self._names.search()
        self._names.require("A checkpoint of a PowerSGDState")
        if self._names.module is None and self.iter == 0 and not self._is_loaded:
            raise RuntimeError(
                "This PowerSGDState belongs to no model yet, so the entries of its checkpoint are not known. Register "
                "it with model.register_comm_hook(state, powerSGD_hook), or call state.bind(model), before it is saved "
                "or loaded."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, whatever the buckets and the number of ranks are now.

        Parameters that are not known yet are compared with the entries before the first compressed step. Factors of
        another rank than this state's begin anew, as when the rank changes in training.

        Raises:
            ValueError: an entry is missing, of another type, dtype or shape, not finite, or out of range. The message
                names it; nothing is changed then.
        """
        check_powersgd_state(state_dict, checkpoint.expected_of(self._names, self.policy))
        self._memory = checkpoint.memory_of(state_dict)
        self.iter = state_dict["iter"]
        self.total_numel_before_compression, self.total_numel_after_compression = state_dict["numel"]
        self._buckets, self._prepared = {}, None
        self._is_loaded, self._fits_parameters = True, False
        self.expect_handshake()

    def replicated_state(self) -> dict[str, Any]:
        """Step counts and factors; see `NamedState.replicated_state`."""
        return self._with_counts({side: checkpoint.entries_of(self._memory)[side] for side in ("q", "p")})

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take step counts and factors from another rank, and keep this rank's errors."""
        self.load_state_dict({**replicated, "errors": checkpoint.entries_of(self._memory)["errors"]})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's own memory. The process group stays behind, as in PyTorch's state."""
        if self.process_group is not None:
            logger.warning(
                "The process group of a PowerSGDState is not pickled; set state.process_group after loading."
            )
        options = {name: getattr(self.options, name) for name in OPTION_NAMES}
        return {"options": options, "memory": self._with_counts(checkpoint.entries_of(self._memory))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.load_state_dict(state["memory"])


def _in_dtype(layout: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if layout.dtype == dtype:
        return layout
    return torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)


@zero_copy
@ddp_hook(needs_state(PowerSGDState))
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients, each matrix among them approximated to rank r with error feedback.

    Sends r (n + m) elements for a matrix of n x m, and the rest of the bucket as it is; two waits on the wire for each
    bucket, one with ``alternating``. Steps before ``start_powerSGD_iter`` are the plain all-reduce, to the bit. A
    matrix with an inf or NaN on any rank becomes NaN on all, so that a gradient scaler skips the step, and leaves its
    error and factors untouched. Gradients may be fp32, fp16, bf16, fp64 or complex (as real pairs).

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximated mean.

    Raises:
        ValueError: the bucket belongs to another model than the state, or a pattern in ``stacks`` does not fit.
    """
    return state._reduce(bucket, batched=False)


@ddp_hook(needs_state(PowerSGDState))
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`powerSGD_hook` on the whole bucket as one nearly square matrix of its flat elements.

    Fewer and larger products, and O(sqrt N) elements on the wire, but rows and columns that mean nothing: expect lower
    accuracy than `powerSGD_hook`, whose matrices are grouped as well. ``ranks``, ``stacks`` and
    ``min_compression_rate`` do not apply. The warm start begins anew when the buckets change; errors are kept.

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximated mean.
    """
    return state._reduce(bucket, batched=True)
