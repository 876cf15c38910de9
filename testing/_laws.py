"""The laws: training on the ranks, and the comparisons afterwards."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.exchange.hook_state import HookState
from gradwire.exchange.memory import StateDict
from gradwire.hooks.default_hooks import allreduce_hook
from gradwire.testing._bits import differences
from gradwire.testing._cases import GRADWIRE, PYTORCH, WRAPPERS, Case, Training

NamedGradients = list[dict[str, Tensor]]  # by step, then by parameter name
Violation = tuple[str, str]  # a law, and the difference
RESUMED_STEPS = 2
LONG_STEPS = (20, 60)  # compressed steps before each measurement of the error memory
MOST_GROWTH = 4  # of the error memory between them: it triples if a part of the gradient is never applied


# On the ranks.


class Trained(NamedTuple):
    """The results of a training run."""

    gradients: NamedGradients
    plain: NamedGradients
    errors: dict[str, Tensor]


def describe(make_state: Callable[[], Any]) -> tuple[str, int, bool]:
    """The text of a new state, its first compressed step, and whether it has checkpoints."""
    state = make_state()
    has_text = type(state).__repr__ is not object.__repr__  # type: ignore[comparison-overlap]
    text = repr(state) if has_text else type(state).__name__
    start = state._start if isinstance(state, HookState) else getattr(state, "start_iter", 0)
    return text, start, hasattr(state, "state_dict")


def train(case: Case, wrapper: str, steps: int, start: int, make_state: Callable[[], Any], hook: Any) -> Trained:
    rank, state = dist.get_rank(), make_state()
    gradients = Training(case, wrapper, rank, state, hook).run(range(steps))
    plain = Training(case, wrapper, rank, None, allreduce_hook).run(range(start))
    return Trained(gradients, plain, errors_in(state))


def train_on_both(case: Case, start: int, make_state: Callable[[], Any], hook: Any) -> dict[str, Trained]:
    """Train on both DDPs, and once more on gradwire's."""
    runs = {"again": GRADWIRE, **dict(zip(WRAPPERS, WRAPPERS, strict=True))}
    steps = start + case.steps
    return {name: train(case, wrapper, steps, start, make_state, hook) for name, wrapper in runs.items()}


def train_poisoned(
    case: Case, start: int, make_state: Callable[[], Any], hook: Any
) -> tuple[NamedGradients, list[dict[str, Tensor]]]:
    """Reduced gradients of the poisoned step and of the next one, and the errors before and after the poisoned one."""
    state, number = make_state(), start + case.steps
    training = Training(case, case.wrapper, dist.get_rank(), state, hook)
    training.run(range(number))
    before = errors_in(state)
    poisoned = training.step(number, case.poison)
    after = errors_in(state)
    return [poisoned, training.step(number + 1)], [before, after]


def save(case: Case, start: int, make_state: Callable[[], Any], hook: Any) -> tuple[bytes, NamedGradients]:
    """A checkpoint, and the reduced gradients before it."""
    state = make_state()
    gradients = Training(case, case.wrapper, dist.get_rank(), state, hook).run(range(start + case.steps))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    return file.getvalue(), gradients


def resume(
    case: Case, first: int, checkpoint: bytes, make_state: Callable[[], Any], hook: Any
) -> tuple[StateDict, NamedGradients, dict[str, Tensor]]:
    """The checkpoint of a state that has just loaded one, the gradients of further steps, and the errors after them."""
    state = make_state()
    training = Training(case, case.wrapper, dist.get_rank(), state, hook)
    state.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
    saved = state.state_dict()
    return saved, training.run(range(first, first + RESUMED_STEPS)), errors_in(state)


def resume_new_and_used(
    case: Case, start: int, checkpoint: bytes, make_state: Callable[[], Any], hook: Any
) -> list[NamedGradients]:
    """Gradients after a load into a new state, and into one that has trained, with the same buckets."""
    first, results = start + case.steps, []
    for steps in (0, first):
        state = make_state()
        # With this option, buckets are not rebuilt after the first step.
        training = Training(case, GRADWIRE, dist.get_rank(), state, hook, find_unused_parameters=True)
        training.run(range(steps))
        state.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
        results.append(training.run(range(first, first + RESUMED_STEPS)))
    return results


def train_long(case: Case, start: int, make_state: Callable[[], Any], hook: Any) -> list[dict[str, Tensor]]:
    """The error memory after each of `LONG_STEPS`."""
    state, done, errors = make_state(), 0, []
    training = Training(case, case.wrapper, dist.get_rank(), state, hook)
    for steps in LONG_STEPS:
        training.run(range(done, start + steps))
        done = start + steps
        errors.append(errors_in(state))
    return errors


def errors_in(state: Any) -> dict[str, Tensor]:
    """The error memory in a state's checkpoint, by parameter name; all parts of a composite state together."""
    return errors_of(state.state_dict()) if hasattr(state, "state_dict") else {}


def errors_of(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The error memory in a checkpoint, by parameter name."""
    errors: dict[str, Tensor] = {}
    for key, value in saved.items():
        if isinstance(value, Mapping):
            for name, error in (value if key == "errors" else errors_of(value)).items():
                errors[name] = errors.get(name, 0) + error
    return errors


def without_errors(saved: Mapping[str, Any]) -> StateDict:
    rest = {key: value for key, value in saved.items() if key != "errors"}
    return {key: without_errors(value) if isinstance(value, Mapping) else value for key, value in rest.items()}


# On the results of all ranks.


def labeled(gradients: NamedGradients) -> dict[str, Tensor]:
    """Gradients by step and name."""
    return {f"step {n}, {name}": each for n, step in enumerate(gradients) for name, each in step.items()}


def rank_differences(results: Sequence[Any]) -> str | None:
    """The difference between the results of rank 0 and of the first rank that differs; None if all are equal."""
    for rank, result in enumerate(results):
        if lines := differences(result, results[0]):
            return f"rank {rank} differs from rank 0: " + "; ".join(lines[:5])
    return None


def not_finite(gradients: NamedGradients) -> list[str]:
    return [label for label, each in labeled(gradients).items() if not each.isfinite().all()]


def wrong_mean(case: Case, applied: Sequence[Tensor]) -> str | None:
    """How the mean of constant gradients differs from that constant; None if the largest element is close."""
    constant, largest = 10.0 ** case.parameters[0].exponent, max(gradient.max().item() for gradient in applied)
    if abs(largest - constant) <= 0.1 * constant:  # one rank more or fewer makes a larger difference
        return None
    return f"all gradients are {constant}; the largest applied one is {largest:.4g}"


def lost(
    case: Case,
    ranks: int,
    steps: Sequence[int],
    applied: NamedGradients,
    after: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> str | None:
    """Law 1: where mean gradient + old error - applied update - new error exceeds the rounding.

    Per step and rank, a few numbers round, each to the precision of fp32 or of the gradient, and none larger than the
    sum of all magnitudes: the share of the mean, its compensation, and the sums.
    """
    for index, name in enumerate(case.names):
        dtype = case.parameters[index].dtype
        missing = torch.zeros(case.parameters[index].shape, dtype=torch.float64)
        size = torch.zeros_like(missing)
        for number, gradients in zip(steps, applied, strict=True):
            own = torch.stack([case.gradients(rank, number)[name].double() for rank in range(ranks)])
            missing += own.mean(0) - gradients[name].double()
            size += own.abs().sum(0) + gradients[name].double().abs()
        for errors, sign in ((before, 1), (after, -1)):
            if name in errors:
                missing += sign * errors[name].double()
                size += errors[name].double().abs()
        if missing.numel() == 0:
            continue
        precision = max(2.0**-24, torch.finfo(dtype).eps / 2)
        smallest = max(2.0**-150, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        bound = (len(steps) + 1) * (ranks + 4) * (precision * size.max().item() + smallest)
        if (largest := missing.abs().max().item()) > bound:
            return f"{name}: up to {largest:.3g} is missing; rounding explains {bound:.3g}"
    return None


def after_long_run(errors: Sequence[Mapping[str, Tensor]]) -> Iterator[Violation]:
    early, late = errors
    for name in late:
        before, after = early[name].double().norm().item(), late[name].double().norm().item()
        if not after <= MOST_GROWTH * before:
            yield "errors stay bounded", f"the norm of the error memory of {name} grew from {before:.3g} to {after:.3g}"


def after_training(case: Case, start: int, results: Sequence[dict[str, Trained]]) -> Iterator[Violation]:
    if text := rank_differences([{name: run.gradients for name, run in runs.items()} for runs in results]):
        yield "ranks agree", text
    runs = results[0]
    yield from after_plain_start(start, runs)
    ours = labeled(runs[GRADWIRE].gradients)
    for law, other in (("deterministic", "again"), ("both DDPs", PYTORCH)):
        if lines := differences(ours, labeled(runs[other].gradients)):
            yield law, "; ".join(lines[:5])
    if found := [label for label, each in ours.items() if each.isnan().any()]:
        yield "no new NaN", f"{', '.join(found)} has NaN, although all gradients are finite"
    if text := error_memory_problem(case, [{name: run.errors for name, run in runs.items()} for runs in results]):
        yield "checkpoints resume", text
    for wrapper in WRAPPERS:
        run, steps = runs[wrapper], range(start + case.steps)
        if not run.errors or not_finite(run.gradients):
            continue
        if text := lost(case, len(results), steps, run.gradients, run.errors, {}):
            yield "nothing lost", f"on {wrapper}, {text}"


def after_plain_start(start: int, runs: Mapping[str, Trained]) -> Iterator[Violation]:
    for wrapper in WRAPPERS:
        if lines := differences(labeled(runs[wrapper].gradients[:start]), labeled(runs[wrapper].plain)):
            yield "plain start", f"on {wrapper}, " + "; ".join(lines[:5])


def error_memory_problem(case: Case, results: Sequence[dict[str, dict[str, Tensor]]]) -> str | None:
    """A wrong key in the error memory of several runs, or a difference between ranks; None if there is none."""
    names = [name for errors in results[0].values() for name in errors]
    if unknown := set(names) - set(case.names):
        return f"the error memory has keys {sorted(map(repr, unknown))}; expected parameter names, such as 'weights.0'"
    return rank_differences(results)


def after_poison(case: Case, results: Sequence[tuple[NamedGradients, list[dict[str, Tensor]]]]) -> Iterator[Violation]:
    poison = case.poison
    assert poison is not None
    if text := rank_differences([gradients for gradients, _ in results]):
        yield "ranks agree", text
    (poisoned, next_one), (before, after) = results[0]
    name = case.names[poison.parameter]
    where = f"a gradient of {name} is {poison.value} on rank {poison.rank}"
    if poisoned[name].isfinite().all():
        yield "NaN reaches all", f"{where}, but the reduced gradient is finite"
    if found := [each for each, gradient in next_one.items() if not gradient.isfinite().all()]:
        yield "NaN reaches all", f"{where}; in the step after it, {', '.join(found)} is not finite"
    if found := [each for each, error in after.items() if not error.isfinite().all()]:
        yield "NaN reaches all", f"{where}, and now the error memory of {', '.join(found)} is not finite"
    if lines := differences(after.get(name), before.get(name), f"error memory of {name}"):
        yield "NaN reaches all", f"{where}, and {lines[0]} from before the step"


def after_save(case: Case, results: Sequence[tuple[bytes, NamedGradients]]) -> Iterator[Violation]:
    try:
        saved = [torch.load(io.BytesIO(checkpoint), weights_only=True) for checkpoint, _ in results]
    except Exception as error:
        yield "checkpoints resume", f"torch.load(weights_only=True) raises {type(error).__name__}: {error}"
        return
    if text := error_memory_problem(case, [{"": errors_of(each)} for each in saved]) or rank_differences(saved):
        yield "checkpoints resume", text


def after_resume(
    case: Case,
    first: int,
    checkpoint: bytes,
    results: Sequence[tuple[StateDict, NamedGradients, dict[str, Tensor]]],
) -> Iterator[Violation]:
    if text := rank_differences(results):
        yield "checkpoints resume", f"after the load, {text}"
    loaded, gradients, errors = results[0]
    on_disk = torch.load(io.BytesIO(checkpoint), weights_only=True)
    if lines := differences(without_errors(loaded), without_errors(on_disk), "the loaded state"):
        yield "checkpoints resume", "; ".join(lines[:5])
    saved, resumed = errors_of(on_disk), errors_of(loaded)
    if text := lost(case, len(results), [], [], resumed, saved):
        yield "checkpoints resume", f"in the load, {text}"
    steps = range(first, first + RESUMED_STEPS)
    if saved and not not_finite(gradients) and (text := lost(case, len(results), steps, gradients, errors, saved)):
        yield "nothing lost", f"in the steps after a load, {text}"


def after_loads(results: Sequence[list[NamedGradients]]) -> Iterator[Violation]:
    # A gradient that was zeroed in place, and not set to None, turns the -0 that it accumulates into 0.
    new, used = ({name: each + 0.0 for name, each in labeled(gradients).items()} for gradients in results[0])
    if lines := differences(used, new):
        text = "after a load, a state that had trained continues differently from a new one: " + "; ".join(lines[:5])
        yield "checkpoints resume", text
