"""The reducer's error messages and warnings, and checks of the arguments of `DistributedDataParallel`.

A message begins with PyTorch's sentences verbatim: scripts search logs for them, and PyTorch's tests match them.
gradwire's additions follow.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks._bucket import GradBucket
from gradwire.hooks._decorators import check_process_group
from gradwire.reducer import torch_internals

HOOK_REGISTERED_TWICE = "register_comm_hook or register_builtin_comm_hook can only be called once."
BUILTIN_HOOK_REGISTERED_TWICE = "register_builtin_comm_hook or register_comm_hook can only be called once."

SWAPPED_HOOK_AND_STATE = (
    "Communication hook must be callable. {hook} is not, and the state is a function: they are swapped. The order is "
    "register_comm_hook(state, hook)."
)
HOOK_WITH_MIXED_PRECISION = (
    f"{HOOK_REGISTERED_TWICE} mixed_precision has a hook of its own, which sums gradients in its reduce_dtype. Leave "
    "out one of the two; with a hook that compresses, use torch.autocast for the computation."
)
JOIN_WITH_MIXED_PRECISION = (
    "join() does not support mixed_precision. Use torch.autocast in its place, or give all ranks as many inputs."
)
COPY_WITH_MIXED_PRECISION = (
    "A DistributedDataParallel with mixed_precision can be neither copied nor pickled. Copy the module, and wrap the "
    "copy."
)

NOT_FINALIZED = (
    "finalize_backward() was not called for the last backward pass, whose gradients are not averaged. Call it after "
    "every synchronized backward pass, or set require_manual_backward_finalization to False."
)

ALL_DELAYED = (
    "delay_all_reduce_named_params names all parameters that are trained: nothing is left to reduce during the "
    "backward, and the first forward of PyTorch's class would fail. Leave out at least one parameter."
)
CANNOT_DELAY = (
    "delay_all_reduce_named_params names {name}, which is {parameter.dtype} on {parameter.device}. The gradients of "
    "delayed parameters are summed in one buffer, {buffer.dtype} on {buffer.device}, which needs parameters of its "
    "dtype on its device. Leave this parameter out, or pass device_ids to sum on its GPU."
)
MIXED_PRECISION_DELAYED = (
    "mixed_precision does not support delay_all_reduce_named_params: delayed parameters keep their own dtype in the "
    "forward. Leave out one of the two, or use torch.autocast."
)
COPY_WITH_OPTIMIZERS = (
    "A DistributedDataParallel with optimizers in backward can be neither copied nor pickled: the copy of a parameter "
    "has no optimizer. Copy the module, call _apply_optimizer_in_backward for the copy, and wrap it."
)
SHARED_VIEWS = (
    "Two wrappers with gradient_as_bucket_view share parameters, and one of them is PyTorch's class: each would make a "
    "gradient a view of its own buffer. Leave gradient_as_bucket_view out of one, or use gradwire's class for both."
)
CREATE_GRAPH = (
    "Using DistributedDataParallel with create_graph=True  is not well-supported. The higher-order gradient will  not "
    "be synchronized across ranks, and backpropagation  through all_reduce operations will not occur. If you require  "
    "DDP to work with higher-order gradients for your use case,  please ping "
    "https://github.com/pytorch/pytorch/issues/63929"
)

NOTHING_UNUSED = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
    "forward pass. This flag results in an extra traversal of the autograd graph every iteration,  which can adversely "
    "affect performance. If your model indeed never has any unused parameters in the forward pass, consider turning "
    "this flag off. Note that this warning may be a false positive if your model has flow control causing later "
    "iterations to have unused parameters."
)

_OUTPUTS = (
    "making sure all `forward` function outputs participate in calculating loss. \n"
    "If you already have done the above, then the distributed data parallel module wasn't able to locate the output "
    "tensors in the return value of your module's `forward` function. Please include the loss function and the "
    "structure of the return value of `forward` of your module when reporting this issue (e.g. list, dict, iterable)."
)
MARKED_TWICE = (
    "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of "
    "a module parameter outside the `forward` function. Please make sure model parameters are not shared across "
    "multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this module "
    "graph does not change during training loop.2) Reused parameters in multiple reentrant backward passes. For "
    "example, if you use multiple `checkpoint` functions to wrap the same part of your model, it would result in "
    "the same set of parameters been used by different reentrant backward passes multiple times, and hence marking "
    "a variable ready multiple times. DDP does not support such use cases in default. You can try to use "
    "_set_static_graph() as a workaround if your module graph does not change over iterations.\n"
    "Parameter at index {index} with name {name} has been marked as ready twice. This means "
    "that multiple autograd engine  hooks have fired for this particular parameter during this iteration.\n"
    "Another possible reason: `find_unused_parameters=True` did not find the parameter in the graph of the outputs "
    "of `forward`, from which the loss must be computed."
)
# With a static graph, a parameter got more gradients than in the first backward.
GRAPH_CHANGED = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
    "got used in the second iteration. this is not compatible with static_graph set to True.\n"
    "Parameter {name} at index {index} got a gradient more than {calls} times, as often as in the first iteration."
)
STATIC_GRAPH_TOO_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
    "constructed. {iterations} iterations have begun already."
)
NO_FUTURE = (
    "DDP communication hook's callback must return a torch.futures.Future object, but got {kind.__module__}."
    "{kind.__qualname__}"
)
DENSE_GRADIENT = (
    "Expected variable to have sparse gradient.\n"
    "The gradient of {name} is dense; expected a sparse one, as its module has sparse=True. Make the module with "
    "sparse=False, or make all gradients of the parameter sparse."
)
GRADIENT_STRIDES = (
    "Grad strides do not match bucket view strides. This may indicate grad was not created according to the "
    "gradient layout contract, or that the param's strides changed since DDP was constructed.  This is not an "
    "error, but may impair performance.\n"
    "grad.sizes() = {sizes}, strides() = {strides}\n"
    "bucket_view.sizes() = {sizes}, strides() = {expected}\n"
    "The gradient of {name} is copied in every step. Let autograd create it, or assign one with the strides of the "
    "parameter."
)

# gradwire's own errors.

# Deadlock: this rank waits in a backward pass, the other one in a forward pass.
BACKWARD_SKIPPED = (
    "Rank {rank} skipped the backward pass that this rank is in and has begun its next forward pass, so each waits for "
    "the other. Its loss may have raised an exception. Call resynchronize() on every rank after a failed step."
)
HOOK_ELSEWHERE = (
    "{hook} for this model, and this rank has no communication hook. Register the same hook on every rank, not only "
    "after `if rank == 0:`."
)
RANKS_LATE = (
    "This rank has waited in synchronized backward pass {number} of this model for {who}, until the process group's "
    "timeout. Make as many forward and backward passes on every rank, or use join() for uneven inputs."
)
CANNOT_REDUCE_AGAIN = (
    "A second backward pass of one synchronized forward pass, or a backward pass of an earlier forward pass than the "
    "latest, cannot be averaged with {feature}. Call backward() once after each forward pass: add up the losses, or "
    "use no_sync() for the forward passes whose gradients another one will average."
)
CANNOT_FINALIZE = (
    "finalize_backward() cannot run: {why}. Set require_manual_backward_finalization to True, and call "
    "finalize_backward() once after every synchronized backward pass."
)
WRAPPED_TWICE = (
    "module {where}, which averages {names} already; their gradients would be averaged twice. Wrap the bare module "
    "once, or give the outer wrapper the names of those parameters as module._ddp_params_and_buffers_to_ignore."
)
# The forward of another wrapper calls this one.
WRAPPED_BY_ANOTHER = (
    "This gradwire.DistributedDataParallel was wrapped in another wrapper, a {kind.__module__}.{kind.__qualname__}: "
    "both average {names}, and the gradients would be averaged twice, once without a hook. Leave the outer wrapper "
    "out. With accelerate, pass accelerator.prepare the optimizer and the data loader only."
)
SHARDED = (
    "module cannot be wrapped: {where} sharded by fully_shard, which averages gradients by itself. Leave out the "
    "wrapper, and use FSDP2 for the whole model: fully_shard for shards, replicate for copies."
)
PARAMETER_UNKNOWN = (
    "{name} was replaced, added or unfrozen after the model was wrapped. Its gradients would not be averaged. "
    "Wrap the model again, or change it before you wrap it; load_state_dict without assign=True keeps parameters. "
    "A parameter that each rank is to train by itself must be named in module._ddp_params_and_buffers_to_ignore "
    "before you wrap the model."
)
PARAMETER_CAST = (
    "{name} was cast to another dtype or moved to another device after the model was wrapped. Its gradients would "
    "no longer be averaged. Cast or move a model before you wrap it."
)
DRIFT = (
    "check_every: {n} of {total} tensors that must be equal on all ranks differ:{lines}\n"
    "Every rank must start from the same values and apply the same updates: the same optimizer, learning rate and "
    "order of steps, and the same kind of device. Call resynchronize(from_rank=0) on every rank to take the "
    "parameters, buffers and hook state of rank 0, or restart from a checkpoint."
)
RESULT_MISFIT = (
    "The communication hook returned {numel} elements for bucket {index}, which has {expected}. Return a tensor of the "
    "size of bucket.buffer()."
)


def unfinished(
    rank: int, names: Sequence[str], missing: Iterable[int], *, static_graph: bool, find_unused: bool
) -> str:
    """The previous backward left parameters without a gradient."""
    missing = list(missing)
    begin = "Expected to have finished reduction in the prior iteration before starting a new one. "
    unused = "This error indicates that your module has parameters that were not used in producing loss. "
    if static_graph:
        cause = (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
            "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
            "set to True."
        )
    elif find_unused:
        cause = (
            f"{unused}Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
            f"outputs participate in computing loss. You can fix this by {_OUTPUTS}"
        )
    else:
        cause = (
            f"{unused}You can enable unused parameter detection by passing the keyword argument "
            f"`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n{_OUTPUTS}"
        )
    indices = f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    without = f"\nParameters which did not receive grad for rank {rank}: "
    without += ", ".join(as_pytorch_names(names[index]) for index in missing)
    if torch_internals.is_debugging():
        which = without + indices
    else:
        which = (
            f"{indices}\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL to print out information about which particular parameters did not receive gradient on this rank "
            f"as part of this error{without}"
        )
    return (
        f"{begin}{cause}{which}\nOr the backward raised an exception. Nothing was reduced for these parameters and for "
        "the buckets after theirs."
    )


def gradient_misfit(name: str, gradient: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A gradient has another dtype or shape than when its model was wrapped."""
    expected, got = (_SCALAR_TYPES.get(each, str(each)) for each in (dtype, gradient.dtype))
    begin = f"Expected {expected}, got {got}\n" if gradient.dtype != dtype else ""
    return (
        f"{begin}The gradient of {name} is {gradient.dtype} {tuple(gradient.shape)}; when the model was wrapped, it "
        f"was {dtype} {tuple(shape)}. Wrap a model after changing its parameters."
    )


# The dtypes' names in C++.
_SCALAR_TYPES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def some(names: Sequence[str]) -> str:
    """The first names of many."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def as_pytorch_names(name: str) -> str:
    """PyTorch's name of a parameter, which begins with a dot where the wrapped module itself owns it."""
    return name if "." in name else f".{name}"


def check_ranks(process_group: object, device_mesh: object) -> None:
    """Raise ValueError or TypeError unless ``process_group`` is a process group that this rank is in, or None."""
    if device_mesh is not None:
        return  # PyTorch's class raises if both are given
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is GroupMember.NON_GROUP_MEMBER, which torch.distributed.new_group returns on ranks outside "
            "of the new group; expected a group that this rank is in. Wrap the model on the group's ranks only."
        )
    check_process_group(process_group)


def check_delayed(module: nn.Module, delayed: Collection[torch.Tensor], mixed_precision: object) -> None:
    """Raise NotImplementedError with mixed precision, and ValueError if no other parameter of the module is trained."""
    if mixed_precision is not None:
        raise NotImplementedError(MIXED_PRECISION_DELAYED)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    delayed = set(delayed)
    if not any(p.requires_grad and p not in delayed and name not in ignored for name, p in module.named_parameters()):
        raise ValueError(ALL_DELAYED)


def check_bucket_sizes(bucket_cap_mb: object, bucket_cap_mb_list: object) -> None:
    """Raise ValueError or TypeError unless the bucket sizes are None or numbers of MiB."""
    if bucket_cap_mb is not None:
        check_bucket_size("bucket_cap_mb", bucket_cap_mb)
    if bucket_cap_mb_list is None:
        return
    if not isinstance(bucket_cap_mb_list, Sequence) or isinstance(bucket_cap_mb_list, str):
        raise TypeError(f"bucket_cap_mb_list is {bucket_cap_mb_list!r}; expected a list of sizes in MiB, or None.")
    if not bucket_cap_mb_list:
        raise ValueError(
            "bucket_cap_mb_list is empty; expected the size of one bucket at least, in MiB, or None for bucket_cap_mb."
        )
    for index, size in enumerate(bucket_cap_mb_list):
        check_bucket_size(f"bucket_cap_mb_list[{index}]", size)


def check_bucket_size(name: str, size: object) -> None:
    """Raise ValueError or TypeError unless ``size`` is a number of MiB."""
    expectation = "expected a number of MiB, 0 or larger (0: a bucket for every parameter), or None for the default"
    if isinstance(size, bool) or not isinstance(size, Real):
        raise TypeError(f"{name} is {size!r}; {expectation}.")
    if not 0 <= float(size) * 2**20 < sys.maxsize:  # False for NaN too
        raise ValueError(f"{name} is {size!r}; {expectation}.")


def check_comm_hook(hook: Callable[..., Any]) -> None:
    """Raise TypeError or ValueError, with PyTorch's messages, unless ``hook`` has a communication hook's signature."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    parameters = list(signature.parameters.values())
    try:
        signature.bind(None, None)
    except TypeError:
        raise ValueError(f"Communication hook: takes {signature}; expected hook(state, bucket).") from None
    if len(parameters) > 1 and parameters[1].annotation not in (inspect.Parameter.empty, GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect.Signature.empty, future, "torch.futures.Future[torch.Tensor]"):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
