"""Exit handlers and finalizers that forked children do not run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def in_this_process(function: Callable[P, object]) -> Callable[P, None]:
    """``function``, which does nothing in a forked child: sockets, files and reports belong to its parent."""
    process = os.getpid()

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == process:
            function(*args, **kwargs)

    return guarded
