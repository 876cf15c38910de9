"""`save`, `load` and `latest` of docs/checkpointing.md, from examples/checkpointing.py."""

import runpy
from pathlib import Path

_names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "checkpointing.py"))
save, load, latest = _names["save"], _names["load"], _names["latest"]
