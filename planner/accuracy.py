"""The losses that hooks reached in long trainings, and which hooks are aggressive by them."""

from typing import NamedTuple

from gradwire.planner.hook_registry import CAST, HOOKS


class LossGap(NamedTuple):
    """Training loss above that of no hook, in nats per byte, by optimizer."""

    adamw: float
    muon: float


# A byte-level GPT with 0.7 M parameters after 2,000 steps on two ranks; each hook and no hook with the same batches.
# The means over the seeds in bench/results/converge_long_text.jsonl.
LOSS_GAPS = {
    "bf16": LossGap(-0.001, 0.000),
    "int8": LossGap(-0.003, 0.000),
    "int6": LossGap(-0.003, 0.006),
    "int4": LossGap(-0.001, 0.022),
    "int2": LossGap(0.116, 0.156),
    "sign": LossGap(0.299, 0.331),
    "powersgd-r4": LossGap(0.074, 0.094),
    "powersgd-r16": LossGap(0.009, 0.022),
    "powersgd-r8-int8": LossGap(0.034, 0.048),
    "powersgd-r16-int8": LossGap(0.011, 0.023),
    "powersgd-r32-int8": LossGap(0.000, 0.008),
}
ACCURACY_NOTE = (
    "loss gap: training loss above that of no hook, in nats per byte, after 2,000 steps of a GPT with 0.7 M parameters "
    "on two ranks, with AdamW and with Muon. Your model may differ"
)
TOLERATED_GAP = 0.015  # nats per byte; hooks with a larger one are aggressive
MARK = "!"
MARK_NOTE = (
    f"{MARK}: aggressive: a loss gap over {TOLERATED_GAP} with AdamW, or fewer than 16 bits and no measured gap. "
    "Compare loss curves before you rely on it"
)


def is_aggressive(hook: str) -> bool:
    """Whether the loss gap of a hook with AdamW is above `TOLERATED_GAP`.

    Without a measured gap, whether the hook sends fewer than 16 bits per element.
    """
    if hook in LOSS_GAPS:
        return LOSS_GAPS[hook].adamw > TOLERATED_GAP
    return HOOKS[hook].below_16_bits


def measured_accuracy(hook: str) -> str | None:
    """The end of a sentence on the accuracy of a hook; None if its loss was not measured."""
    if hook not in LOSS_GAPS:
        return None
    gap = LOSS_GAPS[hook]
    return (
        f"ended at a training loss {gap.adamw:+.3f} nats relative to no hook (small GPT, 2,000 steps, AdamW; "
        f"{gap.muon:+.3f} with Muon)"
    )


def accuracy_of(hook: str) -> str:
    """A sentence on the measured accuracy of a hook that is not aggressive, or of the most similar one."""
    if hook == "allreduce":
        return "allreduce sends exact gradients."
    if (found := measured_accuracy(hook)) is not None:
        return f"{hook} {found}. Check the loss of your own model."
    return (  # the others also round to 16 bits
        f"The accuracy of {hook} was not measured; the most similar hook, {CAST}, {measured_accuracy(CAST)}. Check the "
        "loss of your own model."
    )
