"""PowerSGD: the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Where PyTorch's hook runs one matrix at a time, waits three times on the wire and once on the device for each bucket,
and keeps its error by bucket index on each rank, this one runs a bucket's matrices together, waits twice on the wire
and never on the device, and keeps its error by parameter name, in a state that resumes on any number of ranks.
"""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
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
from gradwire.compress._options import check_flag, check_number, check_patterns, check_whole_number
from gradwire.compress.policy import MatrixShape
from gradwire.hooks._state_validation import Expected, check_powersgd_shapes, check_powersgd_state
from gradwire.hooks.arguments import ddp_hook, needs_state
from gradwire.hooks.connections import executor_for
from gradwire.hooks.handshake import digest
from gradwire.hooks.meeting import meet
from gradwire.hooks.parameter_names import NamedState, is_number, parameter_names, plain_name
from gradwire.hooks.reduce import agree, bucket_dtype, in_place, is_sparse, reduce_bucket
from gradwire.hooks.types import GradBucket
from gradwire.kernels import SegmentTable, as_real, compute_dtype, gradient_layout

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
# How long a rank waits for the others. One that waits in `state_dict` was probably the only one to call it.
STATE_DICT_TIMEOUT = timedelta(seconds=10)
PREPARE_TIMEOUT = timedelta(minutes=2)


class PowerSGDState(NamedState):
    """Options and memory of `powerSGD_hook` and `batched_powerSGD_hook`; one state for one model.

    The arguments up to ``batch_tensors_with_same_shape`` are PyTorch's, with its defaults.

    Args:
        process_group: the ranks to average over; None for the default group.
        matrix_approximation_rank: r of the factors. A higher one is more accurate, and sends and computes more.
        start_powerSGD_iter: steps of plain all-reduce before the first compressed one.
        min_compression_rate: a matrix of n rows and m columns is compressed if this times (n + m) r is below n m; one
            that would not shrink never is. Finite.
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
        check_whole_number("matrix_approximation_rank", matrix_approximation_rank, "at least 1, a whole number", 1)
        check_whole_number("start_powerSGD_iter", start_powerSGD_iter, "a whole number of steps")
        check_number("min_compression_rate", min_compression_rate, "a finite number")
        check_number("orthogonalization_epsilon", orthogonalization_epsilon, "a finite number, at least 0", 0)
        check_whole_number("random_seed", random_seed, "a whole number")
        check_whole_number(
            "compression_stats_logging_frequency", compression_stats_logging_frequency, "a whole number of steps"
        )
        for name, flag in (
            ("use_error_feedback", use_error_feedback),
            ("warm_start", warm_start),
            ("batch_tensors_with_same_shape", batch_tensors_with_same_shape),
            ("alternating", alternating),
        ):
            check_flag(name, flag)
        ranks, stacks = {} if ranks is None else ranks, {} if stacks is None else stacks
        check_patterns("ranks", ranks, "a rank, or 0 to send it uncompressed", 0)
        check_patterns("stacks", stacks, "a number of matrices, at least 1", 1)
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
        self.ranks = dict(ranks)
        self.stacks = dict(stacks)
        self.factor_dtype = factor_dtype
        self.alternating = alternating
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        super().__init__()
        self._memory = ErrorMemory()
        self._factors = Factors()
        self._is_batched = False
        self._is_loaded = False
        self._is_checked = True  # whether what was loaded fits every parameter
        self._found_patterns: tuple[dict[str, int], dict[str, int]] = ({}, {})  # ranks and stacks that all match
        self._has_compressed = False  # whether a compressed step is over
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._prepared: dict[str, Any] | None = None  # what `state_dict` returns until the next step

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

    def bind(self, module: torch.nn.Module) -> None:
        """Name the parameters after ``module``. See `NamedState.bind`.

        Raises:
            ValueError: the state was bound to another model, or a pattern in ``ranks`` or ``stacks`` matches none of
                this one's parameters.
        """
        super().bind(module)
        self._check_patterns()

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
            self._check_loaded_shapes()
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

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:  # noqa: D102
        has_patterns = not self._is_batched and bool(self.ranks or self.stacks)
        return self._names.of(bucket, "A pattern in ranks or stacks" if has_patterns else None)

    def _run(self, bucket: GradBucket, batched: bool) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket: plainly before the start, or if it has nothing worth compressing."""
        self._is_batched = batched
        self._prepared = None
        agree(self, self.process_group, bucket)
        names = self.parameter_names(bucket)
        compresses = self.policy.has_started(self.iter) and not is_sparse(bucket)
        self._names.note(names, bucket)
        self._check_patterns()
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
        if self.policy.has_started(iteration) and bucket.is_last():
            self._warn_if_idle()
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
        error = self._memory.errors.get(plain_name(name))
        if error is not None:
            error.add_(as_real(gradient))

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
        meet(self._group, "PowerSGDState.prepare_checkpoint()", timeout=PREPARE_TIMEOUT)
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
        try:
            meet(self._group, "PowerSGDState.state_dict()", timeout=STATE_DICT_TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error
        return self._averaged()

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.process_group or dist.distributed_c10d._get_default_group()

    def _averaged(self) -> dict[str, Any]:
        """The entries of `state_dict`. A collective call."""
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
        for parameter, name in parameter_names(module).items():
            if parameter.requires_grad and self._is_batched:  # its factors belong to buckets, which are not known yet
                self._memory.of(name, as_real(gradient_layout(parameter)), compute_dtype(parameter.dtype.to_real()))
            elif parameter.requires_grad:
                self._divide([name], [parameter], parameter.dtype.to_real())

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

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise if the loaded state names parameters and this bucket numbers them, or the other way round."""
        known = set(self._memory.errors) | set(self._factors.q)
        if self._is_loaded and known and known.isdisjoint(names):
            numbered = [all(is_number(name) for name in some) for some in (known, names)]
            if numbered[0] != numbered[1]:
                raise ValueError(
                    f"The loaded state remembers {min(known)!r}, this bucket has {names[0]!r}: the names of parameters "
                    "were known in one of the runs only. Call state.bind(model) before the first step, in both."
                )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, whatever the buckets and the number of ranks are now.

        Parameters that are not known yet are compared with the entries before the first compressed step. Factors of
        another rank than this state's begin anew, as when the rank changes in training.

        Raises:
            ValueError: an entry is missing, of another type, dtype or shape, not finite, or out of range. The message
                names it; nothing is changed then.
        """
        check_powersgd_state(state_dict, self._expected())
        loaded = {
            key: {name: tensor.detach().clone() for name, tensor in state_dict[key].items()}
            for key in ("errors", "q", "p")
        }
        self.iter = state_dict["iter"]
        self.total_numel_before_compression, self.total_numel_after_compression = state_dict["numel"]
        self._plans = {}
        self._prepared = None
        self._is_loaded = True
        self._is_checked = False
        self._memory.errors, self._factors.q, self._factors.p = loaded["errors"], loaded["q"], loaded["p"]
        self.expect_handshake()

    def _check_loaded_shapes(self) -> None:
        """Raise, before anything is sent, if what was loaded does not fit a parameter that is known by now."""
        if not self._is_checked:
            check_powersgd_shapes(self._memory.errors, self._factors.q, self._factors.p, self._expected())
            self._is_checked = self._names.is_complete

    def _check_patterns(self) -> None:
        """Raise if a pattern matches no parameter, as soon as the names of all are known."""
        if self._names.is_complete and self._found_patterns != (self.ranks, self.stacks):
            names = sorted(self._names.known())
            unmatched = self.policy.unmatched_pattern(names)
            if unmatched is not None:
                numbered = all(is_number(name) for name in names)
                remedy = "Call state.bind(model), which names them, or use" if numbered else "Correct or remove it:"
                raise ValueError(
                    f"{unmatched} matches none of the model's {len(names)} parameters, {', '.join(names[:5])}, ... "
                    f"{remedy} patterns of whole names as in `fnmatch`, such as '*.weight'."
                )
            self._found_patterns = (dict(self.ranks), dict(self.stacks))

    def _expected(self) -> dict[str, Expected]:
        """What errors and factors have to fit, of every parameter that is known by now."""
        policy = self.policy
        layouts = {name: gradient_layout(parameter) for name, parameter in self._names.known().items()}
        return {
            name: Expected(as_real(layout).shape, policy.matrix_shape(name, layout)) for name, layout in layouts.items()
        }

    def _warn_if_idle(self) -> None:
        """At the end of the first compressed step: say why, if nothing was compressed in it."""
        is_idle = all(plan.bucket is None for plan in self._plans.values())
        if is_idle and not self._has_compressed:
            numel = sum(plan.table.numel for plan in self._plans.values())
            if self._is_batched:
                why = "No bucket is large enough: lower matrix_approximation_rank or raise bucket_cap_mb."
            else:
                trained = {name: each for name, each in self._names.known().items() if each.requires_grad}
                why = _why_none(self.policy, {name: gradient_layout(each) for name, each in trained.items()})
            warnings.warn(
                f"PowerSGD compresses nothing here: it sends all {numel:,} elements. {why} Otherwise use another hook: "
                "fp16_compress_hook halves the bytes of any model.",
                stacklevel=2,
            )
        self._has_compressed = True

    def replicated_state(self) -> dict[str, Any]:
        """Step counts and factors; see `NamedState.replicated_state`."""
        return {
            "iter": self.iter,
            "q": dict(self._factors.q),
            "p": dict(self._factors.p),
            "numel": [self.total_numel_before_compression, self.total_numel_after_compression],
        }

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take step counts and factors from another rank, and keep this rank's errors."""
        self.load_state_dict({**replicated, "errors": self._memory.errors})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's own memory. The process group stays behind, as in PyTorch's state."""
        if self.process_group is not None:
            logger.warning(
                "The process group of a PowerSGDState is not pickled; set state.process_group after loading."
            )
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


def _why_none(policy: LowRankPolicy, layouts: Mapping[str, torch.Tensor]) -> str:
    """Why a policy compresses none of these parameters: the largest matrix, its rate, and the argument that decides."""
    shapes = {name: policy.as_matrices(name, layout) for name, layout in layouts.items()}
    matrices = {
        name: shape for name, shape in shapes.items() if min(layouts[name].dim(), shape.rows, shape.columns) > 1
    }
    if not matrices:
        return "No parameter is a matrix, and the rest is sent as it is."
    compressible = {name: shape for name, shape in matrices.items() if shape.rank > 0}
    if not compressible:
        return "ranks exempts every matrix."
    name = max(compressible, key=lambda name: layouts[name].numel())
    shape = compressible[name]
    wanted = max(policy.min_compression_rate, 1)
    highest = shape._replace(rank=1).rate
    if shape.rate > 1:
        remedy = f"min_compression_rate={policy.min_compression_rate} asks for a higher one: lower it"
        remedy += f", or matrix_approximation_rank: rank 1 has {highest:.2f}." if highest > wanted else "."
    elif highest > wanted:
        remedy = f"Lower matrix_approximation_rank: rank 1 has {highest:.2f}."
    elif highest > 1:
        remedy = f"Lower matrix_approximation_rank and min_compression_rate: rank 1 has {highest:.2f}."
    else:
        remedy = "It is too small for any rank."
    return (
        f"The largest matrix, {name}, has {shape.rows} x {shape.columns} elements; its factors of rank {shape.rank} "
        f"have {(shape.rows + shape.columns) * shape.rank:,}, a rate of {shape.rate:.2f}. {remedy}"
    )


@in_place
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
    return state._run(bucket, batched=False)


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
    return state._run(bucket, batched=True)
