"""gradwire: gradient compression for PyTorch data-parallel training."""

from typing import TYPE_CHECKING, Any

from gradwire import hooks
from gradwire._version import __version__
from gradwire.reducer import DistributedDataParallel

if TYPE_CHECKING:
    from gradwire.sharded import attach

__all__ = ["DistributedDataParallel", "__version__", "attach", "hooks"]


def __getattr__(name: str) -> Any:
    """Import `attach` when it is first used: with FSDP2 and DTensor, it takes longer than all the rest."""
    if name != "attach":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gradwire.sharded import attach

    return attach


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
