"""`Training`: a run of a `tests.support.sequences.Sequence` on a rank, and what it finds."""

import gc
import math
import warnings
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.comm.stream_executor import StreamExecutor
from gradwire.exchange import plans
from gradwire.exchange.hook_state import HookState
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.kernels import as_real
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.sequence_events import EVENTS
from tests.support.sequences import LAWS, REPLAYS, Event, Weights, gradient_of
from tests.support.states import Ledger, errors_of
from tests.support.training import WRAPPERS, Scaler, gradients, logged, register

TIMEOUT = timedelta(minutes=2)  # of the process groups
LAST_STEPS = 3  # plain steps after the events: a step in full, a recorded one, and a replay


def canonical(tensor):
    """A copy in which all NaN have the same bits."""
    copy = tensor.detach().clone()
    copy[copy.isnan()] = torch.nan
    return copy


class Training:
    """The events of a sequence on this rank.

    Attributes:
        outcome: results by step, which must be equal on both DDPs, and with and without replays.
        shared: those that must be equal on all ranks.
        metrics: metrics without times, by step.
        replays: number of replayed buckets in each step.
        problems: what is wrong, in words.
    """

    def __init__(self, sequence, wrapper, warm_up=plans.WARM_UP_STEPS):
        self.sequence, self.wrapper = sequence, WRAPPERS[wrapper]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.outcome, self.shared, self.metrics, self.replays, self.problems = {}, {}, {}, [], []
        self.number = 0  # of the latest inputs
        self.set_to_none, self.scaler, self.saved, self.other = True, Scaler(), None, None
        self._event, self._kept, self._groups, self._stack = Event("start"), [], [], ExitStack()
        enter = self._stack.enter_context
        self._warnings, self._records = enter(warnings.catch_warnings(record=True)), enter(logged())
        warnings.simplefilter("always")
        if sequence.mode == REPLAYS:
            enter(gpu_on_cpu())
            self.patch(plans, "WARM_UP_STEPS", warm_up)
        replay = mock.patch.object(StreamExecutor, "replay", autospec=True, side_effect=StreamExecutor.replay)
        self._replay = enter(replay)
        self.group = self.new_group()
        self.module = Weights(sequence.parameters, sequence.tied)
        self.wrap()
        self.laws = Laws(self) if sequence.mode == LAWS else None

    def patch(self, owner, name, value):
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def new_group(self):
        backend = register_backend() if self.sequence.mode == REPLAYS else "gloo"
        self._groups.append(dist.new_group(backend=backend, timeout=TIMEOUT))
        return self._groups[-1]

    def wrap(self, state=None):
        """Wrap the model anew, with a new state or an earlier one."""
        self.ddp = self.state = None
        gc.collect()
        self.ddp = self.wrapper(self.module, process_group=self.group, **self.sequence.ddp)
        if self.sequence.hook.make is None:
            return
        made, hook = self.sequence.hook.make(self.group, **self.sequence.options)
        self.state = made if state is None else state
        register(self.ddp, (self.state, hook))
        if self.sequence.mode == LAWS and self.hook_state is not None:
            self.state.follow_scaler(self.scaler)

    @property
    def hook_state(self):
        return self.state if isinstance(self.state, HookState) else None

    @property
    def trainable(self):
        """The parameters that are not frozen, by index."""
        return {i: parameter for i, parameter in enumerate(self.module.parameters()) if parameter.requires_grad}

    @property
    def poisoned(self):
        """Index of the parameter that `step` poisons."""
        return next(i for i, parameter in self.trainable.items() if parameter.numel() > 0)

    def run(self):
        """Let the events happen, and make some steps; returns this training."""
        try:
            for event in self.sequence.events:
                self._event = event
                EVENTS[event.name].make(self, event.value)
            self._event = Event("end")
            for _ in range(LAST_STEPS):
                self.step()
            self._end()
        finally:
            self._stack.close()
            for group in self._groups:
                dist.destroy_process_group(group)
        return self

    # Steps.

    def inputs(self, scale=1.0, unused=()):
        """New inputs on this rank, in the scale of the scaler."""
        self.number += 1
        generator, scale = torch.Generator().manual_seed(1000 * self.number + self.rank), scale * self.scaler.scale
        inputs = [gradient_of(parameter, generator) * scale for parameter in self.sequence.parameters]
        return [None if i in unused else x for i, x in enumerate(inputs)]

    def step(
        self,
        micro_batches=1,
        passes="one",
        scale=1.0,
        poison=None,
        unused=(),
        prepare=None,
        backward=torch.Tensor.backward,
    ):
        """Train a step.

        Args:
            micro_batches: backward passes; all but the last are under ``no_sync``.
            passes: "one" backward of the last forward; two "forwards" and then their backwards, the later one first; or
                the last forward "twice".
            scale: of this step's gradients.
            poison: value of an element of a gradient on rank 0.
            unused: indices of the parameters without inputs on this rank.
            prepare: called after the gradients were cleared.
            backward: makes the last backward pass.
        """
        self.ddp.zero_grad(set_to_none=self.set_to_none)
        if prepare is not None:
            prepare()
        unused = set(unused) - {min(self.trainable)}
        *local, last = batches = [self.inputs(scale, unused) for _ in range(micro_batches)]
        if local:
            with self.ddp.no_sync():
                for inputs in local:
                    self.ddp(inputs).backward()
        if poison is not None and self.rank == 0:
            last[self.poisoned].view(-1)[0] = poison
        loss = self.ddp(last)
        if passes == "forwards":
            batches.append(self.inputs(scale, unused))
            self.ddp(batches[-1]).backward()
        backward(loss, **({"retain_graph": True} if passes == "twice" else {}))
        if passes == "twice":
            loss.backward()
            batches.append(last)
        self._note_step(batches, poison is not None)

    def _note_step(self, batches, is_poisoned):
        found = gradients(self.ddp)
        self._kept = [*self._kept[-1:], [p.grad for p in self.module.parameters()]]  # other addresses in the next step
        self.replays.append(self._replay.call_count - sum(self.replays))
        self.note("gradients", {name: None if g is None else canonical(g) for name, g in found.items()}, is_shared=True)
        self.note("numbers", self._numbers(), is_shared=True)
        if self.laws is not None:
            self.laws.check_step(batches, found, is_poisoned)

    def _numbers(self):
        numbers = {}
        if self.hook_state is not None:
            numbers["iter"] = self.state.iter
        if isinstance(self.state, PowerSGDState):
            numbers["compression_stats"] = self.state.compression_stats()
        return numbers

    # Results.

    def note(self, what, value, is_shared=False):
        """Add a result to the outcome."""
        key = f"step {len(self.replays)}, {self._event.name}: {what}"
        self.outcome[key] = value
        if is_shared:
            self.shared[key] = value

    def note_metrics(self, metrics):
        """The report of telemetry. As strings, NaN are equal."""
        kept = {name: value for name, value in metrics.items() if not name.endswith("_ms")}
        self.metrics[metrics["step"]] = {
            name: value if math.isfinite(value) else str(value) for name, value in kept.items()
        }

    def save(self):
        """The state of the hook, as in a checkpoint, which is noted."""
        if self.hook_state is None:
            return {}
        saved = self.state.state_dict()
        self.note("state_dict", saved)
        # Numbers of elements differ.
        self.shared.update({f"{len(self.shared)}: state_dict": {n: e for n, e in saved.items() if n != "counters"}})
        return saved

    def _end(self):
        memory = getattr(self.state, "memory", None)
        if memory is not None:
            tensors = {
                entry: {name: tensor.clone() for name, tensor in memory.tensors(entry).items()}
                for entry in memory.declared
            }
            self.note("memory", tensors)
            if not all(tensor.isfinite().all() for each in tensors.values() for tensor in each.values()):
                self.problems.append("law 5: the memory is not finite")
        self.save()
        if getattr(self.state, "telemetry", None) is not None:
            self.state.stop_observing()
        self.outcome["log"] = [record.getMessage() for record in self._records]
        # The reducers warn of different things, some of them once in a process.
        of_hooks = [each for each in self._warnings if "/gradwire/hooks/" in each.filename]
        self.outcome["warnings"] = [str(each.message) for each in of_hooks]
        if self.laws is not None:
            self.laws.close()


class Laws:
    """Laws 1 and 5, and exact means, over the steps of a `Training`, in the scale 1."""

    def __init__(self, training):
        self._training = training
        self.restart()

    def restart(self):
        """Count law 1 from here, with the errors that there are."""
        self._is_lossy, self._precision = False, 2.0**-24
        if self._training.sequence.hook.has_memory:
            self.ledger = Ledger(self._training.module, self._training.group)
            self.ledger.count(self.errors(), sign=1)
            self.is_counted = set(self.ledger.lost)  # parameters of which no gradient was lost with a failed step

    def errors(self):
        """The errors of all ranks."""
        training = self._training
        return {name: error / training.scaler.scale for name, error in errors_of(training.state.state_dict()).items()}

    def own(self, batches):
        """This rank's gradients, in fp64."""
        training, sums = self._training, {}
        for i, (name, parameter) in enumerate(training.module.named_parameters()):
            used = [inputs[i] for inputs in batches if inputs[i] is not None and parameter.requires_grad]
            factor = (2 if i in training.sequence.tied else 1) / training.scaler.scale
            sums[name] = sum((wide(x) * factor for x in used), start=torch.zeros_like(wide(parameter)))
        return sums

    def check_step(self, batches, found, is_poisoned):
        """Count a step: the inputs of this rank, and the gradients in the end."""
        training, hook = self._training, self._training.sequence.hook
        own, applied = self.own(batches), {n: None if g is None else wide(g) for n, g in found.items()}
        if is_poisoned:
            poisoned = list(own)[training.poisoned]
            self._check_poison(poisoned, found)
            if not training.sequence.has_bucket_per_parameter or training.sequence.kind == "batched_powersgd":
                self.restart()  # it is not known what else the element keeps out of the result
                return
            own[poisoned] = applied[poisoned] = None  # nothing goes in, nothing comes out
        applied = {name: None if g is None else g / training.scaler.scale for name, g in applied.items()}
        # A further backward pass is a step of its own.
        is_plain = training.hook_state is not None and training.state.iter <= training.state._start
        self.note_options(is_plain)
        if hook.has_memory:
            self.ledger.add(own, applied)
        precision = hook.plain_precision if is_plain else hook.precision
        if precision is not None and not is_poisoned:
            wire = getattr(getattr(training.state, "options", None), "dtype", torch.float64)
            self._check_means(own, applied, max(precision, 2 * torch.finfo(wire).eps), len(batches))

    def _check_poison(self, poisoned, found):
        training = self._training
        are_finite = {name: bool(gradient.isfinite().all()) for name, gradient in found.items() if gradient is not None}
        if are_finite.pop(poisoned):
            training.problems.append(f"law 5: step {training.number}: {poisoned} is finite")
        if training.sequence.has_bucket_per_parameter and not all(are_finite.values()):
            training.problems.append(f"law 5: step {training.number}: not finite: {are_finite}")

    def note_options(self, is_plain=False):
        """Note whether this step may lose something, and how precise its errors are."""
        state = self._training.state
        options = getattr(state, "options", None)
        keeps = getattr(options, "keeps_errors", getattr(options, "use_error_feedback", True))
        self._is_lossy |= not (is_plain or keeps)
        if getattr(options, "error_dtype", None) == torch.bfloat16 or self._sums_in_16_bit():
            self._precision = 2.0**-8

    def _sums_in_16_bit(self):
        """Whether PowerSGD's factors are added up in 16 bit, which loses the rounding."""
        sequence, state = self._training.sequence, self._training.state
        if not isinstance(state, PowerSGDState):
            return False
        has_fp16 = torch.float16 in [parameter.dtype for parameter in sequence.parameters]
        return has_fp16 or sequence.kind == "fp16_of_powersgd" or state.factor_dtype == torch.bfloat16

    def _check_means(self, own, applied, precision, n_roundings):
        training = self._training
        for (name, gradient), parameter in zip(own.items(), training.module.parameters(), strict=True):
            rounding = max(precision, 4 * torch.finfo(parameter.dtype).eps)
            sums = torch.stack([gradient, gradient.abs()])
            dist.all_reduce(sums, group=training.group)
            found = torch.zeros_like(gradient) if applied[name] is None else applied[name]
            error = (found - sums[0] / training.size).norm()
            if not error <= n_roundings * rounding * sums[1].norm() / training.size:
                training.problems.append(f"exact means: step {training.number}: {name} is off by {float(error):.3g}")

    def close(self):
        """Check law 1."""
        if self._training.sequence.hook.has_memory and not self._is_lossy:
            self.ledger.count(self.errors(), sign=-1)
            if lost := self.is_counted.intersection(self.ledger.missing(self._precision)):
                self._training.problems.append(f"law 1: lost gradients of {sorted(lost)}")


def wide(tensor):
    """The tensor in fp64, complex numbers as pairs."""
    return as_real(tensor.detach()).double()
