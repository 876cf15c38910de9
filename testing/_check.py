"""`check_laws`: draw cases, run them on worlds of ranks, and report the smallest one that violates a law."""

import atexit
import functools
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import hypothesis
from hypothesis import strategies as st

from gradwire.comm.forks import in_this_process
from gradwire.exchange.decorators import CommHook
from gradwire.testing import _laws
from gradwire.testing._cases import GRADWIRE, PYTORCH, Case, Parameter, cases, poisoned_cases
from gradwire.testing._laws import Violation
from gradwire.testing._many_ranks import train_many
from gradwire.testing._world import CaseFailed, World

LAWS: Mapping[str, str] = {
    "mean": "Equal constant gradients are applied as that constant, or as zero where nothing was sent: the hook "
    "averages, and does not add up.",
    "nothing lost": "Summed over the ranks, gradient + old error == applied update + new error.",
    "ranks agree": "All ranks apply bitwise equal gradients.",
    "plain start": "Steps before the first compressed one are bitwise equal to the plain all-reduce.",
    "both DDPs": "The hook gives bitwise equal gradients on PyTorch's DDP and on gradwire's.",
    "no new NaN": "Finite gradients never give NaN.",
    "NaN reaches all": "NaN or inf on one rank reaches the gradient of that parameter on every rank, does not change "
    "its error memory, and is gone in the next step.",
    "any tensor": "The hook raises no error and does not hang, whatever the shapes, dtypes, layouts and buckets.",
    "checkpoints resume": "A checkpoint is equal on all ranks, keyed by parameter name, loads with weights_only=True, "
    "is the whole state, and resumes on another number of ranks without loss.",
    "deterministic": "The same run gives the same bits.",
    "errors stay bounded": "With new gradients of one kind in every step, what was not applied yet after 60 compressed "
    f"steps is at most {_laws.MOST_GROWTH} times as large as after 20.",
    "sums fit": "Equal constant gradients on up to 1,024 ranks are applied as that constant: no sum of messages leaves "
    "the range of its dtype.",
}
"""The laws that `check_laws` checks: names for its argument ``skip``, and what they say."""
CONSTANT = Case(tuple(Parameter(shape, values="constant", exponent=-1) for shape in ((16, 6), (5,))))
MANY = replace(CONSTANT, parameters=tuple(replace(each, exponent=2) for each in CONSTANT.parameters))
LONG = Case((Parameter((16, 12)), Parameter((5,))))
MANY_RANKS = (128, 1000, 1024)
RUNS_TO_SHRINK = 40  # runs for finding a smaller failing case


class LawViolation(AssertionError):
    """A hook violates a law.

    Attributes:
        law: key of `LAWS`.
        hook: name of the hook, and text of its state.
        case: the smallest case found.
        world_size: number of ranks.
        difference: description of the difference.
    """

    def __init__(self, law: str, hook: str, case: object, world_size: int, difference: str) -> None:
        self.law = law
        self.hook = hook
        self.case = case
        self.world_size = world_size
        self.difference = difference
        lines = "\n".join(f"    {line}" for line in str(case).splitlines())
        super().__init__(f'{hook} violates the law "{law}". {LAWS[law]}\n{difference}\n{world_size} ranks:\n{lines}')


class _Stop(BaseException):
    """Ends the search for a smaller case. Not an `Exception`, because hypothesis would continue."""


class _PassedOver(Exception):
    """The hook has raised an error or hung in a case, and the law "any tensor" is skipped."""


def check_laws(
    make_state: Callable[[], Any],
    hook: CommHook | None,
    *,
    skip: Collection[str] = (),
    world_sizes: Sequence[int] = (2, 3),
    max_examples: int = 10,
    time_limit: float = 240.0,
) -> None:
    """Check the laws of a communication hook on random models, on gloo, in the ranks of worlds of its own.

    Models have parameters of any shape (empty, 0-d, prime-sized, one-dimensional to four-dimensional), layout and dtype
    (fp32, bf16, fp16, fp64), in one bucket or several. hypothesis draws them and shrinks a failing case. The cases are
    the same in every run. `LAWS` lists the laws. They require of a hook:

    - **The mean.** The result approximates the mean over the ranks, with the same bits on all of them: it is computed
      from data that is equal on all ranks, such as what a collective returned, never from a rank's own gradients.
    - **Determinism.** The same gradients give the same bits: no clock, no random numbers without a seed that is equal
      on all ranks. Python's ``hash`` of a string is not: every process has a seed of its own for it.
    - **Plain first steps.** Before the step ``start_iter``, an attribute of the state or an option of a `HookState`,
      results are bitwise equal to the plain all-reduce.
    - **Error feedback.** If ``state.state_dict()`` has an entry "errors", a dictionary by parameter name, it is the
      part of the mean gradients that was not applied yet, summed over the ranks: exact but for rounding. In steps with
      gradients of one kind, it stops to grow.
    - **Gradients that are not finite.** The gradient scaler of every rank must skip the step. So if an element is NaN
      or inf on one rank, the result is not finite in that parameter, on every rank; the parameter's error memory stays
      bitwise the same, and all of it finite; and the next step's results are finite. Finite gradients never give NaN.
    - **Sums that fit.** The result is the mean on 1,024 ranks, too. One process runs the algorithm that the hook passes
      to `HookState.run`, as the first 8 ranks; its collectives add up what 128, 1,000 and 1,024 ranks with the same
      gradients would send. The algorithm takes the number of ranks from ``step.transport.world_size``. Collectives that
      a hook issues itself, with ``torch.distributed``, are not covered.
    - **Checkpoints.** If the state has ``state_dict`` and ``load_state_dict``, a checkpoint is equal on all ranks,
      loads with ``torch.load(weights_only=True)`` and is the whole state: after a load, a trained state and a new one
      continue with the same bits. On another number of ranks, with other buckets and on the other DDP, nothing is lost.

    Args:
        make_state: creates a new state with options that are equal on all ranks, such as
            ``functools.partial(TopKState, density=0.25)``; ``types.NoneType`` for a hook without a state. Ranks import
            it, so it must be at the top level of a module, like ``hook``.
        hook: ``hook(state, bucket)`` for `torch.nn.parallel.DistributedDataParallel.register_comm_hook`; None checks
            the DDPs without a hook.
        skip: names of laws not to check. Without "any tensor", cases in which the hook raises an error or hangs are
            passed over.
        world_sizes: numbers of ranks, at least 2. A checkpoint of each world resumes on the next one.
        max_examples: random cases per group of laws and world size. There are three groups: training on both DDPs, a
            gradient that is not finite, and a checkpoint.
        time_limit: seconds after which a case is a hang: many times what a case takes, even on a busy machine.

    Raises:
        LawViolation: a law is violated.
        TypeError: ``make_state`` is not callable, or the ranks cannot import it or ``hook``.
        ValueError: ``skip`` has a name that is not in `LAWS`.
        RuntimeError: ``make_state`` raised an error on a rank, or did not end.

    Examples:
        >>> def test_topk_hook():
        ...     check_laws(functools.partial(TopKState, density=0.25), topk_hook)
    """
    if unknown := set(skip) - LAWS.keys():
        raise ValueError(f"skip names {sorted(unknown)}; expected names of laws: {', '.join(LAWS)}.")
    if not callable(make_state):
        raise TypeError(
            f"make_state is {make_state!r}; expected a function or class that makes a new state, such as "
            "functools.partial(TopKState, density=0.25)."
        )
    try:
        pickle.dumps((make_state, hook))
    except Exception as error:
        raise TypeError(
            f"make_state is {make_state!r} and hook is {hook!r}; expected functions or classes at the top level of a "
            f"module, or functools.partial of them: the ranks are other processes, which import them. {error}"
        ) from error
    for size, other in zip(world_sizes, (*world_sizes[1:], world_sizes[0]), strict=True):
        check = _Check(make_state, hook, skip, size, time_limit)
        check.search(check.mean, st.just(CONSTANT), 1)
        check.search(check.training, cases(), max_examples)
        check.search(check.poisoned, poisoned_cases(size), max_examples)
        if check.has_checkpoints and "checkpoints resume" not in skip:
            check.search(functools.partial(check.checkpoint, other), cases(is_moderate=True), max_examples)
        if check.has_checkpoints and "errors stay bounded" not in skip:
            check.search(check.long_run, st.just(LONG), 1)
    if hook is not None and "sums fit" not in skip:
        check.search(check.sums, st.just(MANY), 1)


@functools.cache
def _world(size: int) -> World:
    """The ranks, kept for later checks in this process."""
    world = World(size)
    atexit.register(in_this_process(world.close))
    return world


class _Check:
    """The laws of a hook in a world."""

    def __init__(
        self, make_state: Callable[[], Any], hook: Any, skip: Collection[str], world_size: int, time_limit: float
    ) -> None:
        self._kit = {"make_state": make_state, "hook": hook}
        self._skip = skip
        self._world_size = world_size
        self._time_limit = time_limit
        try:
            described = _world(world_size).run(_laws.describe, make_state=make_state, limit=time_limit)
        except CaseFailed as failure:
            raise RuntimeError(f"make_state is {make_state!r}, and no rank can use it: {failure.first}") from None
        text, self._start, self.has_checkpoints = described[0]
        self._name = f"{getattr(hook, '__name__', hook)} with {text}"
        self._latest: LawViolation | None = None  # the smallest: hypothesis tries smaller cases only
        self._runs_to_shrink = RUNS_TO_SHRINK

    def search(self, check: Callable[[Case], None], strategy: st.SearchStrategy[Case], max_examples: int) -> None:
        """Draw cases; raises the smallest `LawViolation`."""

        @hypothesis.seed(zlib.crc32(self._name.encode()))
        @hypothesis.settings(
            max_examples=max_examples,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.given(case=strategy)
        def holds(case: Case) -> None:
            with suppress(_PassedOver):
                check(case)

        try:
            holds()
        except (_Stop, LawViolation, hypothesis.errors.Flaky):
            assert self._latest is not None
            self._latest.__notes__ = []  # hypothesis's text of the case
            raise self._latest from None

    def _run(self, function: Callable[..., Any], case: Case, world_size: int | None = None, **arguments: Any) -> Any:
        size = world_size or self._world_size
        if self._latest is not None:
            self._runs_to_shrink -= 1
            if self._runs_to_shrink < 0:
                raise _Stop
        try:
            return _world(size).run(function, limit=self._time_limit, case=case, **self._kit, **arguments)
        except CaseFailed as failure:
            if "any tensor" in self._skip:
                raise _PassedOver from None
            self._latest = LawViolation("any tensor", self._name, case, size, failure.first)
            raise (_Stop if failure.is_timeout else self._latest) from None

    def _judge(self, case: Case, violations: Iterable[Violation], world_size: int | None = None) -> None:
        for law, difference in violations:
            if law not in self._skip:
                self._latest = LawViolation(law, self._name, case, world_size or self._world_size, difference)
                raise self._latest

    def mean(self, case: Case) -> None:
        results = self._run(_laws.train, case, wrapper=case.wrapper, steps=self._start + case.steps, start=0)
        if text := _laws.wrong_mean(case, list(results[0].gradients[-1].values())):
            self._judge(case, [("mean", text)])

    def sums(self, case: Case) -> None:
        """Constant gradients on many ranks, in the steps up to the first compressed one."""
        for ranks in MANY_RANKS:
            (results,) = self._run(train_many, case, 1, ranks=ranks, steps=self._start + case.steps)
            for step, result in enumerate(results):
                if text := _laws.wrong_mean(case, [result]):
                    text = f"on {ranks} ranks, in step {step}, {text}"
                    self._judge(case, [("sums fit", text)], ranks)

    def long_run(self, case: Case) -> None:
        self._judge(case, _laws.after_long_run(self._run(_laws.train_long, case, start=self._start)[0]))

    def training(self, case: Case) -> None:
        self._judge(
            case, _laws.after_training(case, self._start, self._run(_laws.train_on_both, case, start=self._start))
        )

    def poisoned(self, case: Case) -> None:
        self._judge(case, _laws.after_poison(case, self._run(_laws.train_poisoned, case, start=self._start)))

    def checkpoint(self, other_size: int, case: Case) -> None:
        """A checkpoint that resumes with other buckets, on the other DDP and in another world."""
        results, first = self._run(_laws.save, case, start=self._start), self._start + case.steps
        self._judge(case, _laws.after_save(case, results))
        saved = {"checkpoint": results[0][0]}
        other = PYTORCH if case.wrapper == GRADWIRE else GRADWIRE
        resumed = replace(case, wrapper=other, bucket_cap_mb=0.0005)
        results = self._run(_laws.resume, resumed, other_size, first=first, **saved)
        self._judge(case, _laws.after_resume(case, first, results=results, **saved))
        results = self._run(_laws.resume_new_and_used, case, start=self._start, **saved)
        self._judge(case, _laws.after_loads(results))
