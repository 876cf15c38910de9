"""The hook states, for tests that hold for each of them, and a few steps of training with one."""

import io

import torch
import torch.distributed as dist

from gradwire.exchange.hook_state import HookState
from gradwire.hooks.powerSGD_hook import batched_powerSGD_hook
from gradwire.kernels import as_real
from gradwire.testing._laws import errors_of
from tests.support.training import HOOKS, SMALL, WRAPPERS, build, gradients, register

START = 2  # the first compressed step of every state with error feedback
EARLY = {"start_powerSGD_iter": START, "min_compression_rate": 1}  # options of PowerSGDState
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # half an ulp


# Hooks with error memory; a wrapper's state is that of its hook.
_STATES = {hook: HOOKS[hook](None)[0] for hook in HOOKS if "_of_" not in hook}
_HAVE_ERRORS = [
    hook for hook, state in _STATES.items() if isinstance(state, HookState) and "errors" in state.memory.declared
]
FEEDBACK = (*_HAVE_ERRORS, "batched_powersgd")
STATES = (*FEEDBACK, "scaled_fp16")


def make(kind, module, group=None):
    """A new state of that kind for a model, and its hook."""
    if kind == "batched_powersgd":
        return HOOKS["powersgd"](group)[0], batched_powerSGD_hook
    return HOOKS[kind](group)


def save_and_load(value, **options):
    """A checkpoint, written by `torch.save` and read by `torch.load` with these options."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


class Ledger:
    """Law 1: the exact means that went into some steps, less the gradients that came out and the remaining errors."""

    def __init__(self, module, group=None):
        # By parameter name: lost sums, and sums of the magnitudes of all numbers that were added up.
        named = {name: as_real(p.detach()) for name, p in module.named_parameters()}
        self.lost = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        self.size = {name: torch.zeros_like(each) for name, each in self.lost.items()}
        self._group, self._n_steps = group, 0
        self._precision = {name: torch.finfo(p.dtype).eps / 2 for name, p in named.items()}

    def add(self, own, applied):
        """Count a step: this rank's gradients and the reduced ones, by name; None counts as zeros."""
        self._n_steps += 1
        for name, lost in self.lost.items():
            gradient, reduced = (
                torch.zeros_like(lost) if each[name] is None else as_real(each[name]).double()
                for each in (own, applied)
            )
            sums = torch.stack([gradient, gradient.abs()])
            dist.all_reduce(sums, group=self._group)
            lost += sums[0] / dist.get_world_size(self._group) - reduced
            self.size[name] += sums[1] + reduced.abs()

    def step(self, ddp, local, batch):
        """A step of a wrapped model, and of a local one with the same parameters; then count it."""
        for model in (ddp, local):
            model.zero_grad()
            model(*batch).backward()
        self.add(gradients(local), gradients(ddp))

    def count(self, errors, sign):
        """Count errors of all ranks, by name: those from before the first step (1), or those that remain (-1)."""
        for name, error in errors.items():
            self.lost[name] += sign * error
            self.size[name] += error.abs()

    def missing(self, precision=2.0**-24):
        """The names of the parameters of which more is lost than by rounding."""
        # Per step: M rounds twice, each of n contributions to a sum once, the sum's two errors and E once each.
        roundings = (self._n_steps + 1) * (dist.get_world_size(self._group) + 4)
        bounds = {
            name: roundings * max(precision, self._precision[name]) * (size.max().item() if size.numel() else 0)
            for name, size in self.size.items()
        }
        return [name for name, lost in self.lost.items() if (lost.abs() > bounds[name]).any()]

    def close(self, state, precision=2.0**-24):
        """Count the errors of a state; returns `missing`."""
        self.count(errors_of(state.state_dict()), -1)
        return self.missing(precision)


class Training:
    """A model on this rank's own batches with a state of that kind in `STATES`, or a pair of state and hook.

    The state loads ``load`` before it is registered; ``wrap_hook`` makes the registered hook from the state's.
    """

    def __init__(self, kind, wrapper="gradwire", model="mlp", *, group=None, load=None, wrap_hook=None, **options):
        self.module = build(model) if isinstance(model, str) else model
        self.ddp = WRAPPERS[wrapper](self.module, process_group=group, **({"bucket_cap_mb": SMALL} | options))
        self.state, hook = make(kind, self.module, group) if isinstance(kind, str) else kind
        if load is not None:
            self.state.load_state_dict(load)
        register(self.ddp, (self.state, hook if wrap_hook is None else wrap_hook(hook)))
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def run(self, steps):
        for _ in range(steps):
            self.ddp.zero_grad()
            self.ddp(*self.module.batch(self._generator)).backward()
