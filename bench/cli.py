"""The entry of the ``gradwire`` command. Needs nothing but the library itself, so that it can say what is missing."""

import importlib.util
import sys

EXTRAS = ("matplotlib", "numpy", "rich", "sklearn", "typer")


def main() -> None:
    """Run the command line, or say in one line how to install what it needs."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'gradwire: this command needs {", ".join(missing)}. Run: pip install "gradwire[bench]"')
    from gradwire.bench.commands import app

    app(prog_name="gradwire")
