"""`auto_hook`: times several compression methods in the first steps, and chooses one for each bucket."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import executor_for
from gradwire.compress._validation import check_count, check_entries, check_keywords, check_whole_number, wrong
from gradwire.hooks._auto_trial import PLAIN, Method, Methods, Trial, choose, make_method, reason, slowest_times
from gradwire.hooks._bucket import GradBucket, bucket_device, parameter_names, plain_name
from gradwire.hooks._checkpoint import option_values
from gradwire.hooks._handshake import digest
from gradwire.hooks.hook_state import HookState, hook_for, with_option_attributes
from gradwire.kernels import is_capturing

__all__ = ["AutoState", "auto_hook"]


def __dir__() -> list[str]:
    return __all__


logger = logging.getLogger("gradwire.hooks.auto_hook")

DEFAULT_CANDIDATES = (PLAIN, "bf16", "int8", "int4", "powersgd-r4")
# Steps before the first measurement: DDP rebuilds its buckets after the first.
FIRST_STEPS = 2
# The first step of each candidate allocates and compiles; its times are not used.
WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """The options of `AutoState`, documented there.

    Raises:
        ValueError: an option is of another type or out of range.
    """

    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    repeats: int = 3
    min_gain: float = 1.05
    plan: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = tuple(self.candidates)
        object.__setattr__(self, "candidates", names)
        object.__setattr__(self, "plan", dict(self.plan))
        if not names or names[0] != PLAIN or len(set(names)) < len(names):
            expected = f"a list of different names that begins with {PLAIN!r}"
            raise ValueError(f"candidates is {list(names)}; expected {expected}.")
        for name in (*names, *self.plan.values()):
            make_method(name, None, FIRST_STEPS)
        check_whole_number("repeats", self.repeats, "a whole number of steps, at least 1", 1)
        if not isinstance(self.min_gain, int | float) or not self.min_gain >= 1:
            raise ValueError(f"min_gain is {self.min_gain!r}; expected a ratio of times, at least 1.")


@with_option_attributes(AutoOptions)
class AutoState(Methods):
    """Options, measurements and choices of `auto_hook`, for one model.

    The first two steps use the plain all-reduce. Then each candidate is timed for ``1 + repeats`` steps, on copies of
    the gradients. The gradients themselves take the plain all-reduce, so results do not change. These steps are slower
    than others, because each bucket is timed on its own. A model of the overlap with the backward pass then chooses a
    candidate for each bucket, from the times of the slowest rank, and training continues with it. All ranks make
    the same choice. Rank 0 logs it, and `state_dict` saves it, so that a resumed run does not measure again.

    Only time is measured, not accuracy. PowerSGD at a low rank may take more steps to the same loss than quantization;
    list only candidates whose accuracy you trust.

    Args:
        process_group: the ranks to average over; None for the model's.
        candidates: names of compression methods, from the most to the least precise: "plain" first, then any of "bf16",
            "fp16", the wire formats of `QuantizationState` ("int8", "int4", "int2", "fp8_e4m3", ...), "powersgd-rN"
            for PowerSGD with rank N, and "powersgd-rN-int8" with quantized factors, in any ``factor_wire``. By default
            ``("plain", "bf16", "int8", "int4", "powersgd-r4")``.
        repeats: timed steps per candidate, after one warm-up step each.
        min_gain: compress only if the predicted time from the first gradient to the last result gets shorter by this
            factor.
        plan: candidate by parameter name, such as the ``plan`` of another run. Nothing is measured then. Parameters
            that it does not name stay plain.

    Attributes:
        iter: number of steps so far.
        plan: the chosen candidate by parameter name; empty before the choice.

    Raises:
        ValueError: a candidate is unknown, the first is not "plain", or a number is out of range.

    Examples:
        >>> state = AutoState(process_group)
        >>> model.register_comm_hook(state, auto_hook)
    """

    local_options = frozenset({"plan"})  # `replicated` has its digest
    options: AutoOptions
    if TYPE_CHECKING:
        candidates: tuple[str, ...]
        repeats: int
        min_gain: float
        plan: Mapping[str, str]

    @check_keywords
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        candidates: Sequence[str] = DEFAULT_CANDIDATES,
        repeats: int = 3,
        min_gain: float = 1.05,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        options = AutoOptions(candidates=tuple(candidates), repeats=repeats, min_gain=min_gain, plan=plan or {})
        super().__init__("auto_hook", process_group, options)
        self._applied_plan = dict(options.plan)
        self._latest: dict[str, Method] = {}  # the method of each parameter's bucket in its latest step, by name
        self._first_trial = FIRST_STEPS  # the step of the first measurement
        self._checks_plan = True  # whether the plan must be compared with the model
        self._is_first_bucket = False
        self._reason: tuple[Mapping[str, str], str] = {}, ""  # the plan that was measured here, and why it was chosen

    def begin_step(self) -> None:
        """Begin a step, with a plan that was assigned or modified since the last one."""
        super().begin_step()
        self._is_first_bucket = True
        if self.plan != self._applied_plan:
            self.options = replace(self.options)  # validates: the plan may have been modified in place
            self._measure_again()
            self.expect_handshake()

    def apply_settings(self, settings: dict[str, object]) -> None:
        """Apply options that were assigned since the last step; see `HookState.apply_settings`."""
        if self._applied not in (None, settings):
            self._measure_again()
        super().apply_settings(settings)

    def _measure_again(self) -> None:
        self._trials, self._first_trial, self._checks_plan = [], max(self.iter, self._first_trial), True
        self._applied_plan = dict(self.plan)

    def __repr__(self) -> str:
        chosen = ", ".join(f"{len(names)} parameters {name}" for name, names in self._members().items())
        return (
            f"{type(self).__name__}(iter={self.iter}, candidates={list(self.candidates)}, {chosen or 'no choice yet'})"
        )

    def summary(self) -> str:
        """What was chosen and why, in one line; before the choice, in which step it will be made."""
        if len(self.candidates) == 1 and not self.plan:
            return "auto_hook sends all gradients uncompressed: plain is the only candidate"
        if not self.plan:
            step = self._first_trial + (WARM_UP + self.repeats) * len(self.candidates)
            names = ", ".join(self.candidates)
            return f"auto_hook has sent all gradients uncompressed, and chooses from {names} in step {step}"
        members = sorted(self._members().items(), key=lambda item: -len(item[1]))
        what = ", ".join(f"{name} for {len(names)} parameters" for name, names in members)
        plan, why = self._reason
        return f"auto_hook has chosen {what}" + (f": {why}" if plan == self.plan else "")

    def replicated(self) -> dict[str, object]:
        """The number of steps, and a digest of the plan."""
        return {"iter": self.iter, "plan": digest(sorted(self.plan.items())) if self.plan else "none"}

    def needs_names(self) -> str | None:
        """The plan needs names; see `HookState`."""
        return "The choice of a method for each parameter"

    def _method(self, name: str) -> Method:
        """The method of a candidate, created at its first use."""
        if name not in self._methods:
            self._methods[name] = self._make(name)
        return self._methods[name]

    def _make_planned(self) -> None:
        """Create the methods of the plan, which no step may have used yet on this rank."""
        for name in set(self.plan.values()):
            self._method(name)

    def take_back(self, name: str, gradient: Tensor) -> bool:
        """Add a reduced gradient that was not applied to the parameter's error; see `HookState.take_back`."""
        method = self._latest.get(plain_name(name))
        return method is not None and isinstance(method.state, HookState) and method.state.take_back(name, gradient)

    def prepare_checkpoint(self) -> None:
        """Collect the state of all ranks, so that any rank may call `state_dict` alone until the next step.

        A collective call: every rank must make it, between two steps.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within two minutes.
        """
        for _, state in self._to_save():
            state.prepare_checkpoint()

    def state_dict(self) -> dict[str, Any]:
        """Step count, plan, and the state dict of each method in use, for ``torch.load(weights_only=True)``.

        A collective call, unless `prepare_checkpoint` was called since the last step. Any world size can resume from
        it. ``torch.distributed.checkpoint`` loads only entries that the state already has: give it the plan of the
        saved run before you load.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten seconds.
        """
        members = self._members()
        states = {name: _only_members(state.state_dict(), members.get(name, ())) for name, state in self._to_save()}
        return {"iter": self.iter, "plan": dict(self.plan), "chosen": len(self.plan), "states": states}

    def _to_save(self) -> list[tuple[str, HookState]]:
        """The states in a checkpoint, by name: also of planned methods that no step has used yet on this rank."""
        self._names.search()
        self._names.require("A checkpoint of an AutoState")
        self._make_planned()
        if self._names.module is not None:
            self.bind(self._names.module)  # also states made before the model was known
        return self._with_memory()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` with its plan; if it has none, measure.

        Raises:
            ValueError: an entry is missing, has the wrong type, or is out of range. This state is not modified.
        """
        _check_state_dict(state_dict)
        methods = {name: self._make(name) for name in state_dict["states"]}
        for name, method in methods.items():
            if not isinstance(method.state, HookState):
                raise ValueError(
                    f"states has an entry {name!r}, but the candidate {name} has no memory. Remove the entry."
                )
            method.state.load_state_dict(state_dict["states"][name])
        self._restart(state_dict["iter"], state_dict["plan"], methods)

    def replicated_state(self) -> dict[str, Any]:
        """Step count, plan and factors; see `HookState.replicated_state`."""
        self._make_planned()
        states = {name: state.replicated_state() for name, state in self._with_memory()}
        return {"iter": self.iter, "plan": dict(self.plan), "states": states}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Take step count, plan and factors from another rank; keep this rank's errors.

        Methods that only this rank has are dropped: they belong to a step that failed before the other ranks came to
        use them, so their memory is empty.
        """
        for name, state in replicated["states"].items():
            kept = self._method(name).state
            assert isinstance(kept, HookState)
            kept.load_replicated_state(state)
        unknown = {name for name, _ in self._with_memory()} - replicated["states"].keys()
        methods = {name: method for name, method in self._methods.items() if name not in unknown}
        self._restart(replicated["iter"], replicated["plan"], methods)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options, plan and this rank's memory, without the process group."""
        return {"options": option_values(self.options), "iter": self.iter, "states": dict(self._with_memory())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        methods = {name: Method(each, self._make(name).hook) for name, each in state["states"].items()}
        self._restart(state["iter"], self.plan, methods)

    def _make(self, name: str) -> Method:
        method = make_method(name, self.process_group, FIRST_STEPS)
        if isinstance(method.state, HookState):
            method.state.follow_scaler(self._followed)
            if self._names.module is not None:
                method.state.bind(self._names.module)
            elif self._names.layouts:
                method.state.bind_layouts(self._names.layouts)
        return method

    def _restart(self, iteration: int, plan: Mapping[str, str], methods: dict[str, Method]) -> None:
        self.plan = plan  # validates it
        self._methods, self._latest = dict(methods), {}
        self._measure_again()
        self._first_trial = iteration + FIRST_STEPS
        self.continue_at(iteration)
        self.expect_handshake()

    def _members(self) -> dict[str, list[str]]:
        """The parameters of each candidate."""
        members: dict[str, list[str]] = {}
        for name, candidate in self.plan.items():
            members.setdefault(candidate, []).append(name)
        return members

    # The steps of a measurement.

    def _begin_trial(self, bucket: GradBucket) -> None:
        """Start the next trial, or choose once all are over."""
        if self.plan:
            if self._checks_plan and self._names.module is not None:
                _check_plan(self.plan, self._names.module)
                self._checks_plan = False
            return
        if len(self.candidates) == 1:
            return
        steps_of_each = WARM_UP + self.repeats
        if is_capturing(bucket_device(bucket)):
            raise RuntimeError(
                f"Step {self.iter} is captured in a CUDA graph, but auto_hook chooses in step "
                f"{self._first_trial + steps_of_each * len(self.candidates)}. Take these steps before the capture, or "
                "pass AutoState the plan of another run."
            )
        if self.iter < self._first_trial:
            return
        index, step = divmod(self.iter - self._first_trial, steps_of_each)
        if index == len(self.candidates):
            self._choose(bucket)
            return
        candidate = self.candidates[index]
        self._trials.append(Trial(candidate, self._make(candidate) if step == 0 else self._trials[-1].method))

    def count_step(self) -> None:
        """Count a step that has ended."""
        super().count_step()
        if self._trials and self._trials[-1].buckets != self._trials[0].buckets:
            logger.info("The buckets have changed: the candidates are measured again.")
            self._trials, self._first_trial = [], self.iter

    def _choose(self, bucket: GradBucket) -> None:
        """Choose from the slowest rank's times. A collective call."""
        counted = {
            candidate: [trial for trial in self._trials if trial.candidate == candidate][WARM_UP:]
            for candidate in self.candidates
        }
        device = bucket_device(bucket)
        ready_ms, costs_ms = slowest_times(counted, executor_for(self.process_group, device), device)
        chosen = choose(ready_ms, costs_ms, self.min_gain)
        plan: dict[str, str] = {}
        for names, name in zip(self._trials[0].buckets, chosen, strict=True):
            plan |= dict.fromkeys(names, name)
        self.plan = plan
        self._reason = (dict(plan), reason(ready_ms, costs_ms, chosen, self.min_gain))
        if dist.get_rank(self.process_group) == 0:
            logger.info(self.summary())
        self._measure_again()

    def _chosen(self, names: Sequence[str]) -> Method:
        """The method of a bucket: the most precise one that was chosen for any of its parameters."""
        chosen = {self.plan.get(name, PLAIN) for name in names}
        order = (*self.candidates, *sorted(chosen - set(self.candidates)))
        method = self._method(min(chosen, key=order.index))
        self._latest.update(dict.fromkeys(names, method))
        return method


def _check_plan(plan: Mapping[str, str], module: torch.nn.Module) -> None:
    """Raise ValueError if the plan names a parameter that the model lacks."""
    known = parameter_names(module).values()
    if unknown := sorted(plan.keys() - known):
        raise ValueError(
            f"The plan chooses {plan[unknown[0]]} for {unknown[0]!r}, which is not a parameter of this "
            f"{type(module).__name__}; {len(unknown)} of {len(plan)} names are unknown. The names are those of "
            f"model.named_parameters(), such as {min(known)!r}. Pass the plan of this model, or "
            "pass no plan: auto_hook then measures."
        )


def _only_members(saved: Mapping[str, Any], members: Sequence[str]) -> dict[str, Any]:
    """A `state_dict` of a method without the empty memory of parameters that the plan gives another method."""
    kept = {name for name, error in saved["errors"].items() if name in members or error.any()}
    return {
        key: {name: each for name, each in value.items() if name in kept} if isinstance(value, dict) else value
        for key, value in saved.items()
    }


def _check_state_dict(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state`` is an `AutoState.state_dict`, except for its states of hooks."""
    check_entries(state, "AutoState", ("iter", "plan", "chosen", "states"))
    check_count("iter", state["iter"])
    check_count("chosen", state["chosen"])
    for key, kind in (("plan", str), ("states", Mapping)):
        entries = state[key]
        expected = "a dictionary from parameter names to candidates" if key == "plan" else "a dictionary of states"
        if not isinstance(entries, Mapping) or not all(
            isinstance(name, str) and isinstance(value, kind) for name, value in entries.items()
        ):
            raise wrong(key, entries, expected)
    if len(state["plan"]) != state["chosen"]:
        raise ValueError(
            f"The plan has {len(state['plan'])} parameters, but {state['chosen']} were saved. "
            "torch.distributed.checkpoint loads only entries that the state already has: create the state with the "
            "plan of the saved run, AutoState(plan=...)."
        )


@hook_for(AutoState)
def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients: time the candidates in the first steps, then use the fastest per bucket.

    Args:
        state: options, measurements, the plan, and the error memory of the methods in use. Modified.
        bucket: the gradients. Overwritten with their mean, which is approximate if a lossy method was chosen.

    Raises:
        RuntimeError: the names of the parameters are not known, or a CUDA graph is captured before the choice.
        ValueError: the plan names a parameter that the model lacks.
    """
    _, names = state.enter(bucket)
    if state._is_first_bucket:
        state._is_first_bucket = False
        state._begin_trial(bucket)
    if state._trials:
        result = state._trials[-1].run(bucket, names, state.iter, state._method(PLAIN), state._recorder)
    else:
        method = state._method(PLAIN) if state.sends_in_full else state._chosen(names)
        result = method.run(bucket, state.iter, state._recorder)
    state.maybe_increase_iter(bucket)
    return result
