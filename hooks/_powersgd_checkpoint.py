"""Checkpoints of PowerSGD's memory: functions between `PowerSGDMemory` and the entries of a state_dict."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport, executor_for
from gradwire.comm.store_collectives import named_barrier
from gradwire.compress import LowRankBucket, PowerSGDMemory
from gradwire.compress.policy import LowRankPolicy
from gradwire.hooks._parameter_names import ParameterNames, is_number, parameter_names
from gradwire.hooks._powersgd_options import PowerSGDOptions
from gradwire.hooks._state_validation import Expected
from gradwire.kernels import as_real, compute_dtype, gradient_layout, memory_order

Memory = Mapping[str, PowerSGDMemory]  # by parameter name
Entries = dict[str, dict[str, Tensor]]

# How long a rank waits for the others. Short for `state_dict`: a rank that waits is probably the only one to call it.
STATE_DICT_TIMEOUT = timedelta(seconds=10)
PREPARE_TIMEOUT = timedelta(minutes=2)


def entries_of(memory: Memory) -> Entries:
    """The entries "errors", "q" and "p" of this rank: tensors by parameter name, not copied."""
    return {
        "errors": {name: each.error for name, each in memory.items() if each.error is not None},
        "q": {name: each.q for name, each in memory.items() if each.q is not None},
        "p": {name: each.p for name, each in memory.items() if each.p is not None},
    }


def memory_of(entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, PowerSGDMemory]:
    """The memory with copies of the tensors in ``entries``; the inverse of `entries_of`."""
    errors, q, p = (
        {name: tensor.detach().clone() for name, tensor in entries[key].items()} for key in ("errors", "q", "p")
    )
    names = dict.fromkeys([*errors, *q, *p])
    return {name: PowerSGDMemory(error=errors.get(name), p=p.get(name), q=q.get(name)) for name in names}


def averaged_entries(memory: Memory, process_group: dist.ProcessGroup | None, parameters: Sequence[Tensor]) -> Entries:
    """Copies of the entries on the CPU, with the mean of each error over the ranks. A collective call.

    The all-reduced M Q and M' P are linear in M, so the results depend only on the mean error: any
    number of ranks that start from the mean continue like the ranks that had one error each.

    Args:
        memory: of this rank.
        process_group: the ranks; None for the default group.
        parameters: of the model, if it is known. The collectives run on their device.
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


def initial_memory(
    module: torch.nn.Module, memory: Memory, options: PowerSGDOptions, iteration: int, batched: bool
) -> dict[str, PowerSGDMemory]:
    """The memory of every compressed parameter before the first compressed step; empty if ``memory`` has it already.

    Without factors for `batched_powerSGD_hook`, whose factors belong to buckets that are not known yet.
    """
    if entries_of(memory)["errors" if options.use_error_feedback else "q"]:
        return {}
    made = {}
    for parameter, name in parameter_names(module).items():
        layout = gradient_layout(parameter)
        if parameter.requires_grad and batched:
            error = PowerSGDMemory().error_like(as_real(layout), compute_dtype(layout.dtype.to_real()), name)
            made[name] = PowerSGDMemory(error=error)
        elif parameter.requires_grad and (shape := options.policy.matrix_shape(name, layout)) is not None:
            of = options.of_buckets(iteration)
            made |= LowRankBucket([as_real(layout)], [shape], names=[name], memory=memory, **of).memory
    return made


def check_can_be_saved(names: ParameterNames, has_begun: bool) -> None:
    """Raise RuntimeError if a checkpoint would hold numbers instead of names, or no entries.

    Args:
        names: of the parameters. Their model is searched for if it is unknown.
        has_begun: whether the state has made a step or was loaded.
    """
    names.search()
    names.require("A checkpoint of a PowerSGDState")
    if names.module is None and not has_begun:
        raise RuntimeError(
            "This PowerSGDState belongs to no model yet, so the entries of its checkpoint are not known. Register "
            "it with model.register_comm_hook(state, powerSGD_hook), or call state.bind(model), before it is saved "
            "or loaded."
        )


def check_loaded_names(loaded: Memory, names: Sequence[str]) -> None:
    """Raise ValueError if a loaded memory has names and a bucket has numbers, or vice versa."""
    if loaded and set(loaded).isdisjoint(names):
        numbered = [all(is_number(name) for name in some) for some in (loaded, names)]
        if numbered[0] != numbered[1]:
            raise ValueError(
                f"The loaded state remembers {min(loaded)!r}, this bucket has {names[0]!r}: the names of parameters "
                "were known in one of the runs only. Call state.bind(model) before the first step, in both."
            )


def expected_of(parameters: ParameterNames, policy: LowRankPolicy) -> dict[str, Expected]:
    """The shapes that errors and factors must fit, for every parameter known so far."""
    layouts = {name: gradient_layout(parameter) for name, parameter in parameters.known().items()}
    return {
        name: Expected(as_real(layout).shape, policy.matrix_shape(name, layout)) for name, layout in layouts.items()
    }
