"""The events of random sequences: `EVENTS` by name, each with its values and the sequences that it fits.

An event is a function of a `tests.support.sequence_training.Training` and a value. One registered with `event` makes
steps itself; one registered with `change` happens between two steps.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from threading import Thread
from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st

from gradwire.comm.transport import GroupTransport
from gradwire.exchange import hook_state
from gradwire.exchange.hook_state import HookState
from gradwire.hooks.default_hooks import fp16_compress_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.testing._cases import Parameter
from tests.support.fault_schedules import PHASES, fault
from tests.support.ranks import from_all_ranks
from tests.support.sequences import DDPS, LAWS, REPLAYS, SOME, Weights, gradient_of, resolved
from tests.support.training import Fault, error_of, failing_hook, register


class Kind(NamedTuple):
    """An event: ``make(training, value)``, the strategy of its values in a sequence, and whether it fits."""

    make: Callable
    values: Callable
    fits: Callable


EVENTS: dict[str, Kind] = {}


def event(values=(None,), *conditions):
    """Register a function that makes steps.

    ``values`` is a list, or returns a strategy for a sequence, which must fulfill all ``conditions``.
    """

    def registered(make):
        strategy = values if callable(values) else lambda sequence: st.sampled_from(values)
        EVENTS[make.__name__] = Kind(make, strategy, lambda sequence: all(fits(sequence) for fits in conditions))
        return make

    return registered


def change(values=(None,), *conditions):
    """Register a function that makes no steps: one follows."""

    def registered(act):
        def make(training, value):
            act(training, value)
            training.step()

        make.__name__ = act.__name__
        event(values, *conditions)(make)
        return act

    return registered


# --- conditions


def in_modes(*modes):
    return lambda sequence: sequence.mode in modes


def of_kinds(*kinds):
    return lambda sequence: sequence.kind in kinds


def is_ours(sequence):
    return sequence.is_ours


def is_pytorchs(sequence):
    return sequence.wrapper == "pytorch"


def is_hook_state(sequence):
    return sequence.hook.state_type is not None and issubclass(sequence.hook.state_type, HookState)


def has_memory(sequence):
    return sequence.hook.has_memory


def finds_unused(sequence):
    return sequence.ddp.get("find_unused_parameters", False)


# --- values


def some_parameters(sequence):
    return st.sets(st.integers(0, len(sequence.parameters) - 1), min_size=1).map(sorted).map(tuple)


def unused_parameters(sequence):
    """Unused parameters of three ranks; some rank uses each."""
    sets = st.tuples(*[st.sets(st.integers(0, len(sequence.parameters) - 1)).map(sorted).map(tuple)] * 3)
    return sets.map(lambda sets: (tuple(i for i in sets[0] if i not in sets[1]), *sets[1:]))


def options_of(sequence):
    values = sequence.hook.values
    return st.sampled_from(sorted(values)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(values[name])))


# --- steps


@event([1, 2, 3])
def plain(training, number):
    for _ in range(number):
        training.step()


@event([2, 3], lambda sequence: sequence.is_ours or not sequence.ddp.get("static_graph"))  # with which PyTorch crashes
def accumulate(training, micro_batches):
    training.step(micro_batches=micro_batches)


@event(["twice", "forwards"], is_ours)
def further_backwards(training, passes):
    training.step(passes=passes)


@event([float("nan"), float("inf")])
def poison(training, value):
    training.step(poison=value)


@event([-3, 1, 3])
def other_magnitude(training, exponent):
    training.step(scale=2.0**exponent)


@event(unused_parameters, finds_unused, lambda sequence: not sequence.ddp.get("skip_all_reduce_unused_params"))
def unused(training, by_rank):
    training.step(unused=by_rank[training.rank])


@event(
    some_parameters,
    finds_unused,
    in_modes(REPLAYS, LAWS),
    lambda sequence: sequence.is_ours or sequence.mode == REPLAYS,  # PyTorch's DDP loses their errors
)
def unused_on_all_ranks(training, indices):
    training.step(unused=indices)


@event()
def strided_gradients(training, _):
    """Gradients in other layouts than the parameters'."""
    handles = []
    for parameter in training.trainable.values():
        if parameter.dim() == 2:
            handles.append(parameter.register_hook(lambda gradient: gradient.t().contiguous().t()))
        elif parameter.dim() == 1 and parameter.numel() > 1:
            handles.append(parameter.register_hook(lambda gradient: torch.stack([gradient, gradient], 1)[:, 0]))
    training.step()
    for handle in handles:
        handle.remove()


@event()
def kept_gradients(training, _):
    """Gradients that the user keeps, too, which nobody may overwrite."""
    kept = []

    def keep(gradient):
        kept.append((gradient, gradient.clone()))

    handles = [parameter.register_hook(keep) for parameter in training.trainable.values()]
    training.step()
    for handle in handles:
        handle.remove()
    if not all(torch.equal(gradient, before) for gradient, before in kept):
        training.problems.append(f"step {training.number}: a gradient that the user keeps was overwritten")


@event(some_parameters)
def own_gradients(training, indices):
    """Gradients are accumulated into tensors of the user's."""

    def replace_gradients():
        for i, parameter in training.trainable.items():
            if i in indices:
                parameter.grad = torch.zeros_like(parameter)

    training.step(prepare=replace_gradients)


@event((None,), in_modes(DDPS, LAWS))
def thread(training, _):
    """A backward pass in another thread."""

    def backward(loss, **options):
        other = Thread(target=loss.backward, kwargs=options)
        other.start()
        other.join()

    training.step(backward=backward)


@event([True, False])
def another_model(training, is_joint):
    """Train another model on the process group, too: in the same backward pass, or before the step."""
    parameters = Parameter((20, 15)), Parameter((9,))
    if training.other is None:
        training.other = training.wrapper(Weights(parameters), process_group=training.group)
        register(training.other, (training.group, fp16_compress_hook))
    generator = torch.Generator().manual_seed(training.number)
    loss = training.other([gradient_of(parameter, generator) for parameter in parameters])
    if is_joint:
        training.step(backward=lambda first, **options: (first + loss).backward(**options))
    else:
        loss.backward()
        training.step()
    training.note("another model", [parameter.grad.clone() for parameter in training.other.parameters()])
    training.other.zero_grad()


# --- between two steps


@change()
def evaluate(training, _):
    with torch.no_grad():
        training.ddp(training.inputs())


@change()
def other_clearing(training, _):
    """Set gradients to None from now on, or to zeros."""
    training.set_to_none = not training.set_to_none


@change()
def other_order(training, _):
    """Gradients become ready in another order."""
    training.module.order.reverse()


@change()
def moved_parameters(training, _):
    """Parameters get other memory."""
    for parameter in training.module.parameters():
        data = parameter.data
        parameter.data = data.new_empty_strided(data.size(), data.stride()).copy_(data)


@change(some_parameters, is_pytorchs, in_modes(REPLAYS))
def memory_formats(training, indices):
    for i, parameter in enumerate(training.module.parameters()):
        if parameter.dim() == 4:
            memory_format = torch.channels_last if i in indices else torch.contiguous_format
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
        elif parameter.dim() == 2 and i in indices:
            parameter.data = parameter.data.t().contiguous().t()


@change(some_parameters)
def freeze(training, indices):
    """Freeze these parameters but for the first, and unfreeze all others, in a new wrapper."""
    for i, parameter in enumerate(training.module.parameters()):
        parameter.requires_grad_(i not in indices[1:])
    training.wrap(training.state)


@change([-2, -1, 0, 1, 2])
def loss_scale(training, exponent):
    training.scaler.scale = 2.0**exponent


@change([True, False], has_memory, in_modes(REPLAYS, DDPS))  # laws are counted in the scale 1
def follow_scaler(training, is_followed):
    training.state.follow_scaler(training.scaler if is_followed else None)


# Options.


@change(options_of, lambda sequence: sequence.hook.values)
def option(training, pair):
    """Assign an option. Those that exclude each other raise."""
    state, new = training.state, resolved(dict([pair]))

    def assign():
        if hasattr(state, "options"):
            state.options = replace(state.options, **new)
        else:
            setattr(state, *new.popitem())

    training.note("refusal", error_of(assign))


@change(
    lambda sequence: st.tuples(st.just(SOME), st.sampled_from(["int8", "fp32"] if has_wires(sequence) else [0, 1])),
    of_kinds("quantization", "powersgd"),
)
def option_in_place(training, entry):
    """Modify a dictionary among the options."""
    pattern, value = entry
    mapping = "wires" if has_wires(training.sequence) else "ranks"
    getattr(training.state.options, mapping)[pattern] = value


def has_wires(sequence):
    return sequence.kind == "quantization"


@change([0, 1, 3, 999, 1000], is_hook_state)
def step_number(training, number):
    training.state.iter = number


@change([2, 3, 5], has_memory)
def check_of_errors(training, every):
    """Compare the errors with the gradients in one of so many steps."""
    training.patch(hook_state, "CHECK_EVERY", every)


# In comparisons with the exact mean, each rank counts from a handshake, which the two DDPs make at other times.
@change(
    lambda sequence: st.sampled_from([(1, 0), (3, 0)] if sequence.mode == DDPS else [(1, 0), (2, 1), (3, 2)]),
    lambda sequence: sequence.hook.state_type is not None,
)
def observe(training, steps):
    every, exact_every = steps
    training.state.observe(every=every, exact_every=exact_every, report=training.note_metrics)


@change((None,), lambda sequence: sequence.hook.state_type is not None)
def stop_observing(training, _):
    if training.state.telemetry is not None:
        training.state.stop_observing()


@change((None,), of_kinds("two_hooks"))
def other_buckets(training, _):
    """A user's hook passes every bucket to the other hook."""
    training.state["phase"] += 1


@change([True, False], is_pytorchs, is_hook_state)
def other_process_group(training, is_new):
    training.state.process_group = training.new_group() if is_new else training.group


@change((None,), is_ours, of_kinds("none"), in_modes(REPLAYS))
def hook_registered_later(training, _):
    if training.state is None:
        training.state = QuantizationState(training.group, start_iter=0)
        register(training.ddp, (training.state, quantization_hook))


# Checkpoints and wrappers.


@change((None,), is_hook_state)
def save(training, _):
    training.saved = training.save(), training.scaler.scale


@change((None,), is_hook_state)
def save_prepared(training, _):
    training.state.prepare_checkpoint()
    training.save()


@change((None,), is_hook_state)
def save_and_load(training, _):
    training.state.load_state_dict(copy.deepcopy(training.save()))


@change((None,), is_hook_state)
def load_earlier(training, _):
    """Load the latest `save`."""
    if training.saved is not None:
        saved, training.scaler.scale = training.saved
        training.state.load_state_dict(copy.deepcopy(saved))
        restart_laws(training)


@change()
def wrap_again(training, _):
    training.wrap(training.state)


@change((None,), is_hook_state)
def pickled_state(training, _):
    state = pickle.loads(pickle.dumps(training.state))
    state.process_group = training.group  # which PyTorch's DDP does not tell it
    training.wrap(state)


@change((None,), is_hook_state)
def resume(training, _):
    """Continue from a checkpoint with a new model and a new state."""
    saved, options, order = training.save(), training.state.options, training.module.order
    training.module = Weights(training.sequence.parameters, training.sequence.tied)
    training.module.order = order
    training.wrap()
    training.state.options = options
    training.state.load_state_dict(copy.deepcopy(saved))


# Errors. In replays all ranks fail at once: over NCCL, the others would wait. A user's collectives on the process group
# cannot be repeated.


def start_over(training):
    training.ddp.zero_grad()
    training.ddp.resynchronize()


def restart_laws(training):
    if training.laws is not None:
        training.laws.restart()


@change((None,), is_ours, in_modes(REPLAYS, LAWS))
def resynchronize(training, _):
    start_over(training)


@change(
    lambda sequence: st.tuples(st.sampled_from(PHASES), st.integers(0, 5), st.integers(0, 2)),
    is_ours,
    in_modes(LAWS),
    lambda sequence: sequence.kind != "flat",
)
def failure(training, where):
    """A step that fails on one rank."""
    phase, at, rank = where
    inputs = training.inputs()
    with fault(training.ddp, phase, at) if training.rank == rank % training.size else nullcontext():
        training.ddp.zero_grad(set_to_none=training.set_to_none)
        error = error_of(lambda: training.ddp(inputs).backward())
    if error is None:  # this rank may have finished the step before another one failed
        error = error_of(lambda: training.ddp(inputs).backward())
    start_over(training)
    if len(set(from_all_ranks(error is None))) > 1:
        training.problems.append(f"step {training.number}: not every rank raised; here {error}")
    restart_laws(training)


@change((None,), is_ours, has_memory, in_modes(LAWS))
def failure_in_last_bucket(training, _):
    """The last rank fails before it sends the last bucket. What was sent before must return to the errors."""
    inputs, laws = training.inputs(), training.laws
    own, errors = laws.own([inputs]), laws.errors()
    laws.note_options()
    training.ddp.zero_grad()
    loss = training.ddp(inputs)
    buckets = training.ddp.reducer.buckets  # which this forward may have rebuilt
    last = max(i for i, bucket in enumerate(buckets) if any(p.numel() for p in bucket.parameters()))
    with failing_hook(training.ddp, last if training.rank == training.size - 1 else -1):
        if error_of(loss.backward) is None:
            training.problems.append(f"step {training.number}: no error on rank {training.rank}")
    # Only error memory keeps what was exchanged: plain steps have none, and neither have PowerSGD's vectors.
    parameters = dict(training.module.named_parameters())
    back = {name for name in own if training.state.memory.take_back(name, torch.zeros_like(parameters[name]))}
    if missing := {name for name, error in errors.items() if error.any()} - back:
        training.problems.append(f"law 1: step {training.number}: {sorted(missing)} have errors, and took nothing back")
    laws.is_counted -= {name for bucket in buckets[last:] for name in bucket.parameter_names()}
    laws.is_counted -= own.keys() - back
    start_over(training)
    laws.ledger.add(own, dict.fromkeys(own))


@change([1, 2, 3, 4], is_ours, in_modes(REPLAYS))
def failed_collective(training, number):
    calls, run = [], GroupTransport.run

    def failing(transport, collective):
        calls.append(collective)
        if len(calls) == number:
            raise Fault
        run(transport, collective)

    fail(training, mock.patch.object(GroupTransport, "run", failing))


@change([0, 1, 2], is_ours, in_modes(REPLAYS))
def failed_hook(training, position):
    fail(training, failing_hook(training.ddp, position % len(training.ddp.reducer.buckets)))


def fail(training, failing):
    """Make a step in this context, and start over."""
    inputs = training.inputs()
    training.ddp.zero_grad(set_to_none=training.set_to_none)
    with failing:
        error = error_of(lambda: training.ddp(inputs).backward())
    kind, text = error or (None, "")  # a step may have fewer collectives than the one that would fail
    training.note("error", (kind, text.partition("\n\nAt:\n")[0]))  # a callback of PyTorch's adds the stack
    start_over(training)
