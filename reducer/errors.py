"""Messages that begin with PyTorch's sentences, verbatim: scripts search logs for them, and PyTorch's tests match them.

gradwire's additions follow. Messages of gradwire's own stand where they are raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.reducer import torch_internals

HOOK_REGISTERED_TWICE = "register_comm_hook or register_builtin_comm_hook can only be called once."
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
    "of `forward`, from which the loss must be computed, and outside of `no_sync()`. Without that option, several "
    "forward passes must use the same parameters if each has a backward pass of its own."
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


def unfinished(rank: int, names: Sequence[str], missing: Sequence[int], static_graph: bool, find_unused: bool) -> str:
    """The previous backward left parameters without a gradient."""
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
    without += ", ".join(pytorch_name(names[index]) for index in missing)
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
    names = [torch.empty(0, dtype=each, device="cpu").type() for each in (dtype, gradient.dtype)]  # torch.HalfTensor
    expected, got = (name.removeprefix("torch.").removesuffix("Tensor") for name in names)
    begin = f"Expected {expected}, got {got}\n" if gradient.dtype != dtype else ""
    return (
        f"{begin}The gradient of {name} is {gradient.dtype} {tuple(gradient.shape)}; when the model was wrapped, it "
        f"was {dtype} {tuple(shape)}. Wrap a model after changing its parameters."
    )


def pytorch_name(name: str) -> str:
    """PyTorch's name of a parameter, which begins with a dot where the wrapped module itself owns it."""
    return name if "." in name else f".{name}"
