"""gradwire's reducer: a subclass of PyTorch's DistributedDataParallel with zero-copy buckets.

distributed         `DistributedDataParallel`: its arguments, and the methods of PyTorch's class that differ
reducer             gradients become ready, buckets are launched, results become gradients
autograd_hooks      which gradients are complete
bucket              a bucket's gradients, flat buffer, launch and result; delayed parameters
bucketing           which parameters share a bucket, and the rebuild of the buckets
unused_parameters   parameters without a gradient in a backward
exchange            errors on one rank, deadlocks, and how a rank leaves
model_sync          comparison and broadcast of models at construction
recovery            `resynchronize()` after an error
drift               ``check_every``: comparison of ranks during training
model_watch         parameters that are replaced, added or unfrozen after wrapping
step_times          the times in PyTorch's logging data
wrappers            nested wrappers, and wrappers that share parameters
arguments, errors   checks of arguments; messages that begin with PyTorch's sentences
logger              the logging data of PyTorch's DDP
torch_internals     PyTorch's private names
"""

from gradwire.reducer.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
