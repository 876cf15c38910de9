"""gradwire: gradient compression for PyTorch data-parallel training."""

import importlib
from typing import TYPE_CHECKING, Any

from gradwire import hooks
from gradwire.reducer import DistributedDataParallel
from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire import collectives as collectives
    from gradwire import sharded as sharded
    from gradwire.sharded import attach
else:

    def __getattr__(name: str) -> Any:
        """Import these at their first use: FSDP2 and DTensor take longer than everything else."""
        if name == "attach":
            return importlib.import_module("gradwire.sharded").attach
        if name in ("collectives", "sharded"):
            return importlib.import_module(f"gradwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["DistributedDataParallel", "__version__", "attach", "collectives", "hooks", "sharded"]


def __dir__() -> list[str]:
    return __all__
