"""Imported last by the server from which ranks are forked.

Ranks import this repository's `tests`, but not its other folders: as modules, some of them would hide packages of the
same name.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

tests = sys.modules["tests"] = ModuleType("tests")
tests.__path__ = [str(Path(__file__).parents[1])]

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support import fast_interpreter

    fast_interpreter.install()
