"""The accuracy that hooks reached in trainings, and which hooks are aggressive by it."""

import math

from gradwire.planner.hook_registry import HOOKS

# Steps until a byte-level GPT with 2.3 M parameters reached a validation loss of 2.5 on two ranks, relative to no hook:
# the medians in bench/results/converge_text.jsonl.
STEPS_TO_TARGET = {
    "fp16": 1.00,
    "int8": 1.03,
    "int4": 1.03,
    "int2": 1.03,
    "sign": 1.25,
    "powersgd-r4": 1.50,
    "powersgd-r16": 1.14,
    "powersgd-r8-int8": 1.17,
    "powersgd-r16-int8": 1.03,
    "powersgd-r32-int8": 1.00,
}
# Training loss of a byte-level GPT with 0.7 M parameters after 2,000 steps on two ranks, in nats per byte above that of
# no hook with the same batches: the means over the seeds in bench/results/converge_long_text.jsonl.
LOSS_GAPS = {
    "int8": -0.003,
    "int6": -0.003,
    "int4": -0.001,
    "int2": 0.116,
    "sign": 0.299,
    "powersgd-r4": 0.074,
    "powersgd-r16": 0.009,
    "powersgd-r16-int8": 0.011,
    "powersgd-r32-int8": 0.000,
}
ACCURACY_NOTE = (
    "loss gap: training loss above that of no hook, in nats per byte, after 2,000 steps of a GPT with 0.7 M "
    "parameters. Steps to target: relative to no hook, until a GPT with 2.3 M parameters reached a validation loss of "
    "2.5. Both on two ranks. Your model may differ"
)
TOLERATED_GAP = 0.015  # nats per byte; hooks with a larger one are aggressive
TOLERATED_STEPS = 1.1  # relative to no hook, for hooks without a measured gap
MARK = "!"
MARK_NOTE = (
    f"{MARK}: aggressive: a loss gap over {TOLERATED_GAP}; without one, over {100 * (TOLERATED_STEPS - 1):.0f} % more "
    "steps to target, or not trained. Compare loss curves before you rely on it"
)


def is_aggressive(hook: str) -> bool:
    """Whether the loss gap of a hook is above `TOLERATED_GAP`. Without one, its steps to the target decide.

    Hooks that only round gradients to 16 bits are never aggressive.
    """
    if hook in LOSS_GAPS:
        return LOSS_GAPS[hook] > TOLERATED_GAP
    return HOOKS[hook].below_16_bits and STEPS_TO_TARGET.get(hook, math.inf) > TOLERATED_STEPS


def measured_accuracy(hook: str) -> str | None:
    """The end of a sentence on the accuracy of a hook; None if it was not trained."""
    if hook in LOSS_GAPS:
        return f"changed the training loss of a small GPT after 2,000 steps by {LOSS_GAPS[hook]:+.3f} nats"
    if hook in STEPS_TO_TARGET:
        return f"took {STEPS_TO_TARGET[hook]:.2f} times the steps to the same loss on a GPT with 2.3 M parameters"
    return None


def accuracy_of(hook: str) -> str:
    """A sentence on the measured accuracy of a hook that is not aggressive, or of the most similar one."""
    if hook == "allreduce":
        return "allreduce sends exact gradients."
    if (found := measured_accuracy(hook)) is not None:
        return f"{hook} {found}. Check the loss of your own model."
    measured, steps = "fp16", measured_accuracy("fp16")  # the others also round to 16 bits
    return (
        f"The accuracy of {hook} was not measured; the most similar hook, {measured}, {steps}. Check the loss of "
        "your own model."
    )
