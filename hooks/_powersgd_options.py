"""`PowerSGDOptions`: the options of PowerSGD's hooks, validated."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from gradwire.compress import LowRankPolicy
from gradwire.compress._options import check_flag, check_number, check_patterns, check_whole_number


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """The options of `PowerSGDState`, documented there: PyTorch's in PyTorch's order, then gradwire's.

    Raises:
        ValueError: an option is of another type or out of range, or two exclude each other.
    """

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
    cuda_graphs: bool

    def __post_init__(self) -> None:
        check_whole_number("matrix_approximation_rank", self.matrix_approximation_rank, "at least 1, a whole number", 1)
        check_whole_number("start_powerSGD_iter", self.start_powerSGD_iter, "a whole number of steps")
        check_number("min_compression_rate", self.min_compression_rate, "a finite number")
        check_number("orthogonalization_epsilon", self.orthogonalization_epsilon, "a finite number, at least 0", 0)
        check_whole_number("random_seed", self.random_seed, "a whole number")
        frequency = self.compression_stats_logging_frequency
        check_whole_number("compression_stats_logging_frequency", frequency, "a whole number of steps")
        flags = ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape", "alternating", "cuda_graphs")
        for name in flags:
            check_flag(name, getattr(self, name))
        check_patterns("ranks", self.ranks, "a rank, or 0 to send it uncompressed", 0)
        check_patterns("stacks", self.stacks, "a number of matrices, at least 1", 1)
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                f"because buckets are rebuilt after the first step; got {self.start_powerSGD_iter}."
            )
        if self.factor_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"factor_dtype is {self.factor_dtype}; expected None, torch.float32 or torch.bfloat16. Factors have "
                "the range of the gradients, which fp16 does not cover."
            )
        if self.precision not in ("tf32", "fp32"):
            raise ValueError(f"precision is {self.precision!r}; expected 'tf32' or 'fp32'.")
        if self.alternating and not self.warm_start:
            raise ValueError("alternating needs warm_start: each step sends one side and keeps the other.")
        object.__setattr__(self, "compression_stats_logging_frequency", max(1, frequency))  # as PyTorch does
        object.__setattr__(self, "ranks", dict(self.ranks))
        object.__setattr__(self, "stacks", dict(self.stacks))

    @cached_property
    def policy(self) -> LowRankPolicy:
        """The choice of compressed parameters."""
        return LowRankPolicy(
            rank=self.matrix_approximation_rank,
            start_iteration=self.start_powerSGD_iter,
            min_compression_rate=self.min_compression_rate,
            ranks=self.ranks,
            stacks=self.stacks,
        )

    def of_buckets(self, iteration: int) -> dict[str, Any]:
        """Keyword arguments of `LowRankBucket`, for a bucket made in step ``iteration``."""
        return {
            "error_feedback": self.use_error_feedback,
            "factor_dtype": self.factor_dtype,
            "seed": self.random_seed,
            "iteration": max(iteration, self.start_powerSGD_iter),
            "alternating": self.alternating,
            "precision": self.precision,
        }

    def why_nothing_is_compressed(self, layouts: Mapping[str, torch.Tensor]) -> str:
        """Why none of these parameters is compressed: the largest matrix, its rate, and the option to change."""
        policy = self.policy
        shapes = {name: policy.as_matrices(name, layout) for name, layout in layouts.items()}
        matrices = {
            name: shape for name, shape in shapes.items() if min(layouts[name].dim(), shape.rows, shape.columns) > 1
        }
        if not matrices:
            return "No parameter is a matrix, and only matrices are compressed."
        compressible = {name: shape for name, shape in matrices.items() if shape.rank > 0}
        if not compressible:
            return "ranks exempts every matrix."
        name = max(compressible, key=lambda name: layouts[name].numel())
        shape = compressible[name]
        wanted = max(self.min_compression_rate, 1)
        highest = shape._replace(rank=1).rate
        if shape.rate > 1:
            remedy = f"min_compression_rate={self.min_compression_rate} asks for a higher one: lower it"
            remedy += f", or matrix_approximation_rank: rank 1 has {highest:.2f}." if highest > wanted else "."
        elif highest > wanted:
            remedy = f"Lower matrix_approximation_rank: rank 1 has {highest:.2f}."
        elif highest > 1:
            remedy = f"Lower matrix_approximation_rank and min_compression_rate: rank 1 has {highest:.2f}."
        else:
            remedy = "It is too small for any rank."
        return (
            f"The largest matrix, {name}, has {shape.rows} x {shape.columns} elements; its factors of rank "
            f"{shape.rank} have {(shape.rows + shape.columns) * shape.rank:,}, a rate of {shape.rate:.2f}. {remedy}"
        )


OPTION_NAMES = tuple(field.name for field in fields(PowerSGDOptions))

_OF_PYTORCHS_STATE = ("error_dict", "p_memory_dict", "q_memory_dict", "rng")


class _Option:
    """An option as an attribute of a state: reads ``state.options``, and replaces it when assigned."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, kind: type | None = None) -> Any:
        return self if state is None else getattr(state.options, self._name)

    def __set__(self, state: Any, value: object) -> None:
        if "options" not in vars(state):
            raise AttributeError(
                f"{self._name} is an option: pass it to super().__init__(), or assign it after that call."
            )
        state.options = replace(state.options, **{self._name: value})


class OptionAttributes:
    """Options as attributes of a state, as in PyTorch.

    Assigning one replaces ``options``, which validates it together with all others.
    """

    options: PowerSGDOptions
    matrix_approximation_rank = _Option()
    start_powerSGD_iter = _Option()
    min_compression_rate = _Option()
    use_error_feedback = _Option()
    warm_start = _Option()
    orthogonalization_epsilon = _Option()
    random_seed = _Option()
    compression_stats_logging_frequency = _Option()
    batch_tensors_with_same_shape = _Option()
    ranks = _Option()
    stacks = _Option()
    factor_dtype = _Option()
    alternating = _Option()
    precision = _Option()
    cuda_graphs = _Option()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PYTORCHS_STATE:
            raise AttributeError(
                f"{name} belongs to PyTorch's PowerSGDState and powerSGD_hook. This state is gradwire's: register "
                "gradwire.hooks.powerSGD_hook.powerSGD_hook with it."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
