"""PowerSGD: the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Where PyTorch's hook runs one matrix at a time, waits three times on the wire and once on the device for each bucket,
and keeps its error by bucket index on each rank, this one runs a bucket's matrices together, waits twice on the wire
and never on the device, and keeps its error by parameter name, in a state that resumes on any number of ranks.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.compress import (
    ErrorMemory,
    Factors,
    Gradients,
    LowRankBucket,
    LowRankPolicy,
    Transport,
    Workspace,
    alternating_all_reduce,
    cast_all_reduce,
    powersgd_all_reduce,
)
from gradwire.compress.policy import MatrixShape
from gradwire.hooks.executor import executor_for
from gradwire.hooks.handshake import digest
from gradwire.hooks.meeting import meet
from gradwire.hooks.parameter_names import NamedState, is_number
from gradwire.hooks.reduce import agree, bucket_dtype, in_place, is_sparse, reduce_bucket
from gradwire.hooks.types import GradBucket
from gradwire.kernels import SegmentTable
from gradwire.kernels.flattening import compute_dtype
from gradwire.kernels.segments import as_real, gradient_layout

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

_OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
    "ranks",
    "stacks",
    "factor_dtype",
    "alternating",
)
_REPLICATED = tuple(name for name in _OPTIONS if name != "compression_stats_logging_frequency")
_replicated_options = attrgetter(*_REPLICATED)
_FACTOR_DTYPES = (None, torch.float32, torch.bfloat16)


class PowerSGDState(NamedState):
    """Options and memory of `powerSGD_hook` and `batched_powerSGD_hook`; one state for one model.

    The arguments up to ``batch_tensors_with_same_shape`` are PyTorch's, with its defaults.

    Args:
        process_group: the ranks to average over; None for the default group.
        matrix_approximation_rank: r of the factors. A higher one is more accurate, and sends and computes more.
        start_powerSGD_iter: steps of plain all-reduce before the first compressed one.
        min_compression_rate: a matrix of n rows and m columns is compressed if this times (n + m) r is below n m; one
            that would not shrink never is.
        use_error_feedback: whether what compression leaves out is remembered and sent later. Costs memory of the size
            of the compressed gradients in fp32; without it, expect to lose accuracy.
        warm_start: whether the factors begin from the last step's. Off, each step begins from random ones.
        orthogonalization_epsilon: not needed: the orthogonaliser divides by nothing that is near zero. Any value
            gives the same result.
        random_seed: of the random columns; the same on all ranks.
        compression_stats_logging_frequency: steps between two messages with `compression_stats` in the log.
        batch_tensors_with_same_shape: not needed: the matrices of a bucket are always handled together.
        ranks: other ranks by parameter name, as patterns of `fnmatch`; the first that matches counts, and 0 sends the
            parameter uncompressed: ``{"*.embedding.weight": 0, "head.*": 8}``.
        stacks: parameters that are several matrices along the first dimension, by name pattern, and how many of
            them: 3 for a fused query-key-value weight, the number of experts for experts x n x m.
        factor_dtype: of the factors on the wire: None for the gradients' own (bf16 for fp16 gradients), torch.float32,
            or torch.bfloat16, which halves the bytes. Arithmetic is in fp32, and error feedback sends what rounding
            took.
        alternating: whether to send P on even steps and Q on odd ones (ACP-SGD): one wait on the wire and about half
            the bytes, for a result that is a little worse.

    Attributes:
        iter: steps so far.
        total_numel_before_compression, total_numel_after_compression: elements of all compressed steps.

    Raises:
        ValueError: an option is out of range.

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
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                f"because the buckets of the first steps are not the later ones; got {start_powerSGD_iter}."
            )
        if factor_dtype not in _FACTOR_DTYPES:
            raise ValueError(
                f"factor_dtype is {factor_dtype}; expected None, torch.float32 or torch.bfloat16. Factors have the "
                "range of gradients, which fp16 has not."
            )
        if alternating and not warm_start:
            raise ValueError("alternating needs warm_start: each step sends one side and keeps the other.")
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.ranks = dict(ranks or {})
        self.stacks = dict(stacks or {})
        self.factor_dtype = factor_dtype
        self.alternating = alternating
        self.policy  # noqa: B018 - checks the options
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        super().__init__()
        self._memory = ErrorMemory()
        self._factors = Factors()
        self._is_batched = False
        self._is_loaded = False
        self._plans: dict[tuple[str, ...], _Plan] = {}

    @property
    def policy(self) -> LowRankPolicy:
        """What is compressed, as the attributes say now."""
        return LowRankPolicy(
            rank=self.matrix_approximation_rank,
            start_iteration=self.start_powerSGD_iter,
            min_compression_rate=self.min_compression_rate,
            ranks=dict(self.ranks),
            stacks=dict(self.stacks),
        )

    def settings(self) -> dict[str, object]:
        """What all ranks must share: every option but how often the log is written."""
        hook = "batched_powerSGD_hook" if self._is_batched else "powerSGD_hook"
        options = zip(_REPLICATED, _replicated_options(self), strict=True)
        return {"hook": hook, **dict(options), "ranks": dict(self.ranks), "stacks": dict(self.stacks)}

    def replicated(self) -> dict[str, object]:
        """The count of steps; after a load, also the factors, which `alternating` does not send every step."""
        facts: dict[str, object] = {"iter": self.iter}
        if self._is_loaded_anew:
            for side, factors in (("p", self._factors.p), ("q", self._factors.q)):
                facts[f"loaded factors {side}"] = f"{len(factors)}, digest {digest(factors)}"
            facts["loaded errors"] = len(self._memory.errors)
        return facts

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return self._memory.nbytes

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step if this is its last bucket."""
        if not bucket.is_last():
            return
        self.iter += 1
        self._names.close()
        if self.iter == self.start_powerSGD_iter:
            logger.info("PowerSGD starts after %s steps.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """The compression so far: (rate, elements before, elements after), of all steps since PowerSGD started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def _plan(self, names: tuple[str, ...], bucket: GradBucket, batched: bool) -> "_Plan":
        """How this bucket is compressed; made anew when its parameters, its dtype or the options have changed."""
        options = (self.policy, self.use_error_feedback, self.factor_dtype, self.alternating)
        signature = (bucket_dtype(bucket), batched, *options)
        plan = self._plans.get(names)
        if plan is None or plan.signature != signature:
            self._check_names(names)
            members = set(names)
            self._plans = {key: kept for key, kept in self._plans.items() if members.isdisjoint(key)}
            divide = self._divide_flat if batched else self._divide
            plan = self._plans[names] = _Plan(signature, *divide(names, bucket.parameters(), bucket_dtype(bucket)))
        return plan

    def _divide(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[SegmentTable, LowRankBucket | None]:
        """Every parameter by itself."""
        layouts = [gradient_layout(parameter) for parameter in parameters]
        policy = self.policy
        shapes = [policy.matrix_shape(name, layout) for name, layout in zip(names, layouts, strict=True)]
        layouts = [_in_dtype(as_real(layout), dtype) for layout in layouts]
        errors = None
        if self.use_error_feedback:
            compute = compute_dtype(dtype)
            chosen = zip(names, layouts, shapes, strict=True)
            errors = [self._memory.of(name, layout, compute) for name, layout, shape in chosen if shape is not None]
        return SegmentTable(layouts), self._low_rank_bucket(names, layouts, shapes, errors)

    def _divide_flat(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[SegmentTable, LowRankBucket | None]:
        """The flat bucket as one matrix as nearly square as can be, and the few elements that remain."""
        layouts = [_in_dtype(as_real(gradient_layout(parameter)), dtype) for parameter in parameters]
        table = SegmentTable(layouts)
        columns = max(1, math.isqrt(max(table.numel - 1, 0)) + 1)  # the square root, rounded up
        rows = table.numel // columns
        rank = min(self.matrix_approximation_rank, rows, columns)
        flat = torch.empty(table.numel, dtype=dtype, device=layouts[0].device)
        if (rows + columns) * rank >= rows * columns:
            return SegmentTable([flat]), None
        parts = list(flat.split([rows * columns, table.numel - rows * columns]))
        errors = None
        if self.use_error_feedback:
            errors = [self._memory.packed(names, table)[: rows * columns]]
        shapes = [MatrixShape(1, rows, columns, rank), None]
        key = f"{names[0]} ... {names[-1]}, {len(names)} parameters"
        return SegmentTable(parts), self._low_rank_bucket([key, "remainder"], parts, shapes, errors)

    def _low_rank_bucket(
        self,
        names: Sequence[str],
        layouts: Sequence[torch.Tensor],
        shapes: Sequence[MatrixShape | None],
        errors: Sequence[torch.Tensor] | None,
    ) -> LowRankBucket | None:
        if not any(shapes):
            return None
        return LowRankBucket(
            names,
            layouts,
            shapes,
            self.factor_dtype,
            errors,
            self._factors,
            seed=self.random_seed,
            iteration=max(self.iter, self.start_powerSGD_iter),
            alternating=self.alternating,
        )

    def _run(self, bucket: GradBucket, batched: bool) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket: plainly before the start, or if it has nothing worth compressing."""
        self._is_batched = batched
        agree(self, self.process_group, bucket)
        names = self._names.of(bucket)
        compresses = self.policy.has_started(self.iter) and not is_sparse(bucket)
        plan = self._plan(names, bucket, batched) if compresses else None
        iteration = self.iter

        async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
            if plan is None or plan.bucket is None:
                await cast_all_reduce(source, target, source.table.dtype, transport, workspace)
                return
            tensors = (plan.bucket, source.each(plan.table), target.each(plan.table), iteration)
            if self.alternating:
                await alternating_all_reduce(*tensors, transport, workspace)
            else:
                await powersgd_all_reduce(*tensors, self.warm_start, transport, workspace)

        self.maybe_increase_iter(bucket)
        if plan is not None:
            self._count(bucket, plan, iteration)
        return reduce_bucket(self.process_group, bucket, algorithm)

    def _count(self, bucket: GradBucket, plan: "_Plan", iteration: int) -> None:
        self.total_numel_before_compression += plan.table.numel
        self.total_numel_after_compression += plan.sent_numel(self.alternating, iteration)
        if bucket.is_last() and self.iter >= self.next_stats_report:
            logger.info(
                "Compression after %s steps: rate %.1f, elements %s -> %s", self.iter, *self.compression_stats()
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Add to the error of a parameter what was reduced for it and not applied. See `NamedState.take_back`."""
        error = self._memory.errors.get(name)
        if error is not None:
            error.add_(as_real(gradient))

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs, as plain tensors on the CPU, which ``torch.load(weights_only=True)`` takes.

        Every rank must call it, between two steps; all get the same. The errors are averaged over the ranks, which is
        exact: PowerSGD depends on their mean only, so any number of ranks can go on from it. Once the state is bound
        to a model, there is an entry for every parameter that is compressed, also before the first step, so that
        ``torch.distributed.checkpoint`` finds where to load. (With `batched_powerSGD_hook` that needs a first step, and
        loads no factors, which belong to buckets.)

        Raises:
            RuntimeError: some ranks have not called it within two minutes.
        """
        group = self.process_group or dist.distributed_c10d._get_default_group()
        meet(group, "PowerSGDState.state_dict()")
        self._fill_in()
        devices = [tensor.device for tensor in (*self._names.parameters(), *self._memory.errors.values())]
        errors = {}
        if self._memory.errors:
            executor = executor_for(self.process_group, devices[0])
            errors = executor.submit(lambda _: self._memory.averaged(executor.transport, devices[0])).wait()
        return {
            "iter": self.iter,
            "errors": errors,
            "q": {name: factor.to("cpu", copy=True) for name, factor in self._factors.q.items()},
            "p": {name: factor.to("cpu", copy=True) for name, factor in self._factors.p.items()},
            "numel": [self.total_numel_before_compression, self.total_numel_after_compression],
        }

    def _fill_in(self) -> None:
        """Make the errors and factors of a bound model that no step has made yet."""
        module = self._names.module
        known = self._memory.errors if self.use_error_feedback else self._factors.q
        if module is None or known:
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and self._is_batched:  # its factors belong to buckets, which are not known yet
                self._memory.of(name, as_real(gradient_layout(parameter)), compute_dtype(parameter.dtype.to_real()))
            elif parameter.requires_grad:
                self._divide([name], [parameter], parameter.dtype.to_real())

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise if the loaded state names parameters and this bucket numbers them, or the other way round."""
        known = set(self._memory.errors) | set(self._factors.q)
        if self._is_loaded and known and known.isdisjoint(names):
            numbered = [all(is_number(name) for name in some) for some in (known, names)]
            if numbered[0] != numbered[1]:
                raise ValueError(
                    f"The loaded state remembers {min(known)!r}, this bucket has {names[0]!r}: one was bound to its "
                    "model, the other was not. Call state.bind(model) in both runs, or in neither."
                )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, whatever the buckets and the number of ranks are now.

        Raises:
            ValueError: an entry is missing or of another kind; nothing is changed then.
        """
        if not _is_state(state_dict):
            entries = sorted(state_dict) if isinstance(state_dict, Mapping) else state_dict
            raise ValueError(
                f"The state has the entries {entries}; expected iter, errors, q, p and numel, as "
                "PowerSGDState.state_dict() returns them."
            )
        self.iter = int(state_dict["iter"])
        self.total_numel_before_compression, self.total_numel_after_compression = map(int, state_dict["numel"])
        self._plans = {}
        self._is_loaded = True
        self._memory.errors = {name: error.clone() for name, error in state_dict["errors"].items()}
        self._factors.q = {name: factor.clone() for name, factor in state_dict["q"].items()}
        self._factors.p = {name: factor.clone() for name, factor in state_dict["p"].items()}
        self.expect_handshake()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's own memory. The process group stays behind, as in PyTorch's state."""
        logger.warning("The process group of a PowerSGDState is not pickled; set state.process_group after loading.")
        memory = {
            "iter": self.iter,
            "errors": dict(self._memory.errors),
            "q": dict(self._factors.q),
            "p": dict(self._factors.p),
            "numel": [self.total_numel_before_compression, self.total_numel_after_compression],
        }
        return {"options": {name: getattr(self, name) for name in _OPTIONS}, "memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self.load_state_dict(state["memory"])


class _Plan(NamedTuple):
    """How a bucket is compressed, and the options that this follows from."""

    signature: tuple[object, ...]
    table: SegmentTable
    bucket: LowRankBucket | None

    def sent_numel(self, alternating: bool, iteration: int) -> int:
        """Real elements that a step hands to collectives."""
        if self.bucket is None:
            return self.table.numel
        sides = sum(self.bucket.table.p.sizes), sum(self.bucket.table.q.sizes)
        return self.bucket.raw_numel + (sides[iteration % 2] if alternating else sum(sides))


def _in_dtype(layout: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if layout.dtype == dtype:
        return layout
    return torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)


def _is_state(state: object) -> bool:
    """Whether ``state`` has the entries of `PowerSGDState.state_dict`."""
    if not isinstance(state, Mapping):
        return False
    tensors = [state.get(key) for key in ("errors", "q", "p")]
    numel = state.get("numel")
    return (
        isinstance(state.get("iter"), int)
        and isinstance(numel, list)
        and [type(number) for number in numel] == [int, int]
        and all(
            isinstance(entries, Mapping)
            and all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in entries.items())
            for entries in tensors
        )
    )


@in_place
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
    return state._run(bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`powerSGD_hook` on the whole bucket as one nearly square matrix of its flat elements.

    Fewer and larger products, and O(sqrt N) elements on the wire, but rows and columns that mean nothing: expect lower
    accuracy than `powerSGD_hook`, whose matrices are grouped as well. ``ranks``, ``stacks`` and
    ``min_compression_rate`` do not apply. The warm start begins anew when the buckets change; errors are kept.

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximated mean.
    """
    return state._run(bucket, batched=True)
