"""The ``gradwire`` command. May import every package of gradwire; no package imports it."""

import importlib.util
import sys

_CLI = ("rich", "typer")
EXTRAS = {
    "cli": _CLI,
    "bench": ("matplotlib", *_CLI, "sklearn", *(("pyroute2",) if sys.platform == "linux" else ())),
}


def missing_packages(extra: str) -> list[str]:
    """The packages of an extra that are not installed, by their import names."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def version_line() -> str:
    """The versions of gradwire and torch."""
    import torch

    from gradwire._version import __version__

    return f"gradwire {__version__} (torch {torch.__version__})"
