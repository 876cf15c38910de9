"""Entry point of the ``gradwire`` command. It names optional packages that are missing."""

import importlib.util
import sys

EXTRAS = ("matplotlib", "numpy", "rich", "sklearn", "typer", *(("pyroute2",) if sys.platform == "linux" else ()))


def missing_packages() -> list[str]:
    """The packages of the extra `bench` that are not installed, by their import names."""
    return [name for name in EXTRAS if importlib.util.find_spec(name) is None]


def main() -> None:
    """Run the command line, or exit with the command that installs the missing packages."""
    missing = missing_packages()
    if missing and sys.argv[1:2] == ["doctor"]:  # which needs none of them
        from gradwire.bench import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    if missing:
        sys.exit(f'gradwire: missing {", ".join(missing)}. Run: pip install "gradwire[bench]"')
    from gradwire.bench.commands import app

    app(prog_name="gradwire")
