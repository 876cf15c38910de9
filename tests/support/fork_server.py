"""Imported last by the server from which ranks are forked.

Ranks import this repository's `tests`, but not its other folders: as modules, some of them would hide packages of the
same name.
"""

import sys
from pathlib import Path
from types import ModuleType

tests = sys.modules["tests"] = ModuleType("tests")
tests.__path__ = [str(Path(__file__).parents[1])]
