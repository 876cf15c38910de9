"""gradwire: gradient compression for PyTorch data-parallel training."""

from gradwire import hooks
from gradwire._version import __version__
from gradwire.reducer import DistributedDataParallel
from gradwire.sharded import attach

__all__ = ["DistributedDataParallel", "__version__", "attach", "hooks"]
