"""Checkpoints of PowerSGD's memory: functions between `PowerSGDMemory` and the entries of a state_dict."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compress import LowRankBucket, PowerSGDMemory
from gradwire.compress.policy import LowRankPolicy
from gradwire.hooks._error_feedback_state import sum_errors
from gradwire.hooks._parameter_names import ParameterNames, compressible_parameters
from gradwire.hooks._powersgd_options import PowerSGDOptions
from gradwire.hooks._state_validation import Expected
from gradwire.kernels import as_real, compute_dtype, gradient_layout

Memory = Mapping[str, PowerSGDMemory]  # by parameter name
Entries = dict[str, dict[str, Tensor]]


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
        process_group: the ranks; None for the model's.
        parameters: of the model, if it is known. The collectives run on their device.
    """
    entries = entries_of(memory)
    errors = sum_errors(entries["errors"], process_group, parameters, dist.get_world_size(process_group))
    factors = {side: {name: each.to("cpu", copy=True) for name, each in entries[side].items()} for side in ("q", "p")}
    return {"errors": errors, **factors}


def initial_memory(
    module: torch.nn.Module, memory: Memory, options: PowerSGDOptions, iteration: int, batched: bool
) -> dict[str, PowerSGDMemory]:
    """The memory of every compressed parameter that no compressed step has had yet, as that step would create it.

    Without factors for `batched_powerSGD_hook`, whose factors belong to buckets that are not known yet.
    """
    known = entries_of(memory)["errors" if options.use_error_feedback else "q"]
    made = {}
    for parameter, name in compressible_parameters(module).items():
        layout = gradient_layout(parameter)
        if name in known or (batched and not options.use_error_feedback):
            continue
        if batched:
            error = PowerSGDMemory().error_like(as_real(layout), compute_dtype(layout.dtype.to_real()), name)
            made[name] = PowerSGDMemory(error=error)
        elif (shape := options.policy.matrix_shape(name, layout)) is not None:
            of = options.of_buckets(iteration)
            made |= LowRankBucket([as_real(layout)], [shape], names=[name], memory=memory, **of).memory
    return made


def expected_of(parameters: ParameterNames, policy: LowRankPolicy) -> dict[str, Expected]:
    """The shapes that errors and factors must fit, for every parameter known so far."""
    layouts = {name: gradient_layout(parameter) for name, parameter in parameters.known().items()}
    return {
        name: Expected(as_real(layout).shape, policy.matrix_shape(name, layout)) for name, layout in layouts.items()
    }
