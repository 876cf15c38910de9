"""Entry point of the ``gradwire`` command. It names optional packages that are missing."""

import importlib.util
import sys

EXTRAS = ("matplotlib", "numpy", "rich", "sklearn", "typer")


def main() -> None:
    """Run the command line, or exit with the command that installs the missing packages."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'gradwire: missing {", ".join(missing)}. Run: pip install "gradwire[bench]"')
    from gradwire.bench.commands import app

    app(prog_name="gradwire")
