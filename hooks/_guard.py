"""The divergence guard: ranks watch the gradients and the error memory, and send in full while these run away.

In one of ``every`` steps, the ranks add up two numbers, in one all-reduce: the squares of the mean gradient and of the
error memory. All read the same sums at the start of the next step, so all decide alike.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Algorithm, Transport
from gradwire.compress._validation import check_number, check_whole_number
from gradwire.hooks._checkpoint import Checkpointed
from gradwire.hooks.telemetry import HostCopy, Stopwatch, T, Work, sum_of_squares
from gradwire.kernels import is_capturing

HISTORY = 32  # checks; the median norm of their older half is the reference
MIN_HISTORY = 4  # checks before the first comparison
MAX_NONFINITE = 2  # consecutive checks; a gradient scaler's first steps overflow one after another
HYSTERESIS = 0.5  # compression resumes below this part of ``growth``


class Guard(Stopwatch):
    """The divergence guard of ``state``; the other arguments are those of `HookState.guard`.

    Attributes:
        is_tripped: whether gradients are sent in full.
    """

    def __init__(self, state: Guarded, every: int, growth: float, ratio: float, plain_steps: int) -> None:
        super().__init__()
        check_whole_number("every", every, "a whole number of steps, at least 1", 1)
        check_number("growth", growth, "a finite number, at least 2", 2)
        check_number("ratio", ratio, "a finite number, at least 1", 1)
        check_whole_number("plain_steps", plain_steps, "a whole number of steps, at least 1", 1)
        self._state = weakref.proxy(state)
        self._every, self._growth, self._ratio, self._plain_steps = every, growth, ratio, plain_steps
        self._log = logging.getLogger(type(state).__module__)
        self._is_watched = False  # whether the current step is checked
        self.restart()

    def restart(self) -> None:
        """Forget all checks, on every rank."""
        self.is_tripped = False
        self._wait = 0  # steps that are sent in full after the latest trip, at least
        self._changed_at = 0  # number of the step at which `is_tripped` changed
        self._norms: deque[float] = deque(maxlen=HISTORY)  # of the mean gradient, in the latest checks
        self._n_nonfinite = 0  # consecutive checks with a gradient that was not finite
        self._squares: Tensor | None = None  # of the buckets of the current step so far
        self._sums: HostCopy | None = None  # of the latest check

    def settings(self) -> dict[str, object]:
        """The options: a check is a collective."""
        return {"guard()": (self._every, self._growth, self._ratio, self._plain_steps)}

    def begin_step(self, iteration: int) -> None:
        """Judge the latest check, and decide whether to check this step."""
        sums = self._sums
        if sums is not None:
            if is_capturing(sums.device):
                return
            self._sums = None
            self._judge(iteration, *sums.read())
        self._is_watched, self._squares = iteration % self._every == 0, None

    def sample(self, index: int) -> Guard | None:
        """This object in a step that is checked."""
        return self if self._is_watched else None

    async def measured(
        self, algorithm: Algorithm[T], is_last: bool, device: torch.device, work: Work | None, transport: Transport
    ) -> T:
        result = await algorithm
        squares = sum_of_squares(work[1].tensors if work is not None else (), device)
        self._squares = squares if self._squares is None else self._squares + squares
        if is_last:
            sums = torch.stack([self._squares, sum_of_squares(self._state.residuals(), device)])
            sums /= transport.world_size
            await transport.all_reduce(sums)
            self._sums = HostCopy(sums)
        return result

    def _judge(self, iteration: int, gradient: float, errors: float) -> None:
        """Change to plain steps, or back, by the squared norms of a check."""
        norm, is_finite = math.sqrt(max(gradient, 0.0)), math.isfinite(gradient)
        older = list(self._norms)[: max(MIN_HISTORY, len(self._norms) // 2)]
        reference = median(older) if len(older) >= MIN_HISTORY else math.inf
        self._n_nonfinite = 0 if is_finite else self._n_nonfinite + 1
        if self.is_tripped:
            is_calm = is_finite and norm <= HYSTERESIS * self._growth * reference
            if iteration >= self._changed_at + self._wait and is_calm:
                self.is_tripped, self._changed_at = False, iteration
                self._tell(f"Step {iteration}: the norm of the gradient is {norm:.3g}. Gradients are compressed again.")
        elif iteration > self._state.first_compressed_step and (problem := self._problem(norm, errors, reference)):
            # Compression that fails sooner than it was off stays off for longer: progress outweighs divergence.
            again = iteration < self._changed_at + self._wait
            self._wait = 2 * self._wait if again else self._plain_steps
            self.is_tripped, self._changed_at = True, iteration
            self._state.forget_errors()
            self._tell(
                f"Step {iteration}: {problem}. Gradients are sent in full for at least {self._wait} steps, and "
                "the error memory starts from zero. If this comes back, lower the learning rate, or take a more "
                "precise hook."
            )
            return
        if is_finite and norm > 0:
            self._norms.append(norm)

    def _problem(self, norm: float, errors: float, reference: float) -> str | None:
        """The reason to send in full, if there is one."""
        if not math.isfinite(errors):
            return "the error memory is not finite"
        if self._n_nonfinite >= MAX_NONFINITE:
            return f"the gradient was not finite in {self._n_nonfinite} checks"
        if self._n_nonfinite:
            return None
        if norm > self._growth * reference:
            return f"the norm of the gradient is {norm:.3g}, {norm / reference:.3g} times the median of earlier steps"
        if norm > 0 and math.sqrt(errors) > self._ratio * norm:
            return f"the norm of the error memory is {math.sqrt(errors) / norm:.3g} times that of the gradient"
        return None

    def _tell(self, text: str) -> None:
        if dist.get_rank(self._state.process_group) == 0:
            self._log.warning("%s: %s", self._state.hook_name, text)


class Guarded(Checkpointed):
    """A state that may send gradients in full: before its first compressed step, and while its `guard` is tripped."""

    _guard: Guard | None = None

    @property
    def first_compressed_step(self) -> int:
        """Number of the first compressed step: the option ``start_iter``, or 0 without it."""
        start: int = getattr(self.options, "start_iter", 0)
        check_whole_number("start_iter", start, "a whole number of steps, at least 0", 0)
        return start

    def guard(self, *, every: int = 5, growth: float = 10.0, ratio: float = 100.0, plain_steps: int = 100) -> None:
        """Send gradients in full for a while whenever training seems to diverge. Call it on every rank.

        In one of ``every`` steps, the ranks compute the norms of the mean gradient and of the error memory, and share
        them in an all-reduce of 16 bytes. In the next step, all of them change to the plain all-reduce, clear their
        error memory and log a warning if

        - the norm of the gradient exceeds ``growth`` times its median in the older half of the last 32 checks, or
        - the norm of the error memory exceeds ``ratio`` times that of the gradient, or
        - the error memory is not finite, or the gradient was not finite in two checks in a row.

        They compress again after ``plain_steps`` steps, once the norm of the gradient is below half of ``growth`` times
        the median. If the guard trips again before as many compressed steps, the next pause is twice as long. Until it
        trips, steps are bitwise the same as without it.

        The guard starts anew whenever the ranks compare their settings: after ``resynchronize()``, a load, an assigned
        step count or option, and `observe`. It is neither pickled nor saved in checkpoints. It needs the last bucket of
        a step, and does nothing while a whole step is captured in a CUDA graph. With FSDP2, the replicas of each shard
        decide for themselves.

        Args:
            every: number of steps per check.
            growth: largest norm of the mean gradient, relative to its median, at least 2.
            ratio: largest norm of the error memory, relative to that of the mean gradient: the root mean square over
                the ranks of ``residual_ratio`` in `metrics`.
            plain_steps: number of steps without compression, at least.

        Raises:
            ValueError: a number is out of range.

        Examples:
            >>> state = QuantizationState(wire="sign")
            >>> state.guard()
        """
        self._guard = Guard(self, every, growth, ratio, plain_steps)
        self._record()
        self.revoke_agreements()

    def stop_guarding(self) -> None:
        """Turn the `guard` off. Call it on every rank, between the same two steps."""
        self._guard = None
        self._record()

    def recorders(self) -> list[Stopwatch]:
        """The guard and telemetry, as far as they are on."""
        return [*([self._guard] if self._guard is not None else []), *super().recorders()]

    def expect_handshake(self) -> None:
        """Request a handshake at the next bucket; call it after the state was loaded."""
        super().expect_handshake()
        if self._guard is not None:
            self._guard.restart()
