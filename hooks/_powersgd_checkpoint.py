"""Checkpoints of PowerSGD's memory: the entries of `PowerSGDState.state_dict`, and back."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, executor_for
from gradwire.comm.store_collectives import named_barrier
from gradwire.compress import PowerSGDMemory
from gradwire.compress.policy import LowRankPolicy
from gradwire.hooks._parameter_names import ParameterNames, is_number
from gradwire.hooks._state_validation import Expected
from gradwire.kernels.segments import as_real, gradient_layout, memory_order

Memory = Mapping[str, PowerSGDMemory]  # by parameter name
Entries = dict[str, dict[str, Tensor]]

# How long a rank waits for the others. One that waits in `state_dict` was probably the only one to call it.
STATE_DICT_TIMEOUT = timedelta(seconds=10)
PREPARE_TIMEOUT = timedelta(minutes=2)


def entries_of(memory: Memory) -> Entries:
    """The entries "errors", "q" and "p": tensors by parameter name, of this rank and not copied."""
    return {
        "errors": {name: each.error for name, each in memory.items() if each.error is not None},
        "q": {name: each.q for name, each in memory.items() if each.q is not None},
        "p": {name: each.p for name, each in memory.items() if each.p is not None},
    }


def memory_of(entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, PowerSGDMemory]:
    """The memory that the entries of a checkpoint describe, with copies of their tensors."""
    errors, q, p = (
        {name: tensor.detach().clone() for name, tensor in entries[key].items()} for key in ("errors", "q", "p")
    )
    names = dict.fromkeys([*errors, *q, *p])
    return {name: PowerSGDMemory(error=errors.get(name), p=p.get(name), q=q.get(name)) for name in names}


def averaged_entries(memory: Memory, process_group: dist.ProcessGroup | None, parameters: Sequence[Tensor]) -> Entries:
    """Copies of the entries on the CPU, with the mean of each error over the ranks. A collective call.

    PowerSGD is linear in M, so its results depend only on the mean error: ranks that all start from the mean go on as
    those went that had one error each, however many there were and are.

    Args:
        memory: of this rank.
        process_group: the ranks; None for the default group.
        parameters: of the model, as far as it is known. The collectives run on their device.
    """
    entries = entries_of(memory)
    errors = entries["errors"]
    if errors:
        device = next(iter([*parameters, *errors.values()])).device
        executor = executor_for(process_group, device)
        errors = executor.submit(lambda _: _averaged(errors, executor.transport, device)).wait()
    factors = {side: {name: each.to("cpu", copy=True) for name, each in entries[side].items()} for side in ("q", "p")}
    return {"errors": errors, **factors}


async def _averaged(errors: Mapping[str, Tensor], transport: Transport, device: torch.device) -> dict[str, Tensor]:
    means = {}
    for name in sorted(errors):
        mean = errors[name].to(device) / transport.world_size
        await transport.all_reduce(memory_order(mean))
        means[name] = mean.contiguous().cpu()
    return means


def wait_for_state_dict(group: dist.ProcessGroup) -> None:
    """Wait for all ranks in `PowerSGDState.state_dict`.

    Raises:
        RuntimeError: some ranks have not called it within `STATE_DICT_TIMEOUT`.
    """
    try:
        named_barrier(group, "PowerSGDState.state_dict()", timeout=STATE_DICT_TIMEOUT)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
            "state.state_dict() where you save."
        ) from error


def wait_for_prepare_checkpoint(group: dist.ProcessGroup) -> None:
    """Wait for all ranks in `PowerSGDState.prepare_checkpoint`.

    Raises:
        RuntimeError: some ranks have not called it within `PREPARE_TIMEOUT`.
    """
    named_barrier(group, "PowerSGDState.prepare_checkpoint()", timeout=PREPARE_TIMEOUT)


def check_names_fit(loaded: Memory, names: tuple[str, ...]) -> None:
    """Raise ValueError if a loaded memory names parameters and a bucket numbers them, or the other way round."""
    if loaded and set(loaded).isdisjoint(names):
        numbered = [all(is_number(name) for name in some) for some in (loaded, names)]
        if numbered[0] != numbered[1]:
            raise ValueError(
                f"The loaded state remembers {min(loaded)!r}, this bucket has {names[0]!r}: the names of parameters "
                "were known in one of the runs only. Call state.bind(model) before the first step, in both."
            )


def expected_of(parameters: ParameterNames, policy: LowRankPolicy) -> dict[str, Expected]:
    """What errors and factors must fit, for every parameter that is known by now."""
    layouts = {name: gradient_layout(parameter) for name, parameter in parameters.known().items()}
    return {
        name: Expected(as_real(layout).shape, policy.matrix_shape(name, layout)) for name, layout in layouts.items()
    }
