"""Entry point of the ``gradwire`` command and of ``python -m gradwire.cli``. It names packages that are missing.

``gradwire doctor`` and ``gradwire run`` need no extra, ``gradwire advise`` the extra `cli`, and demo and benchmarks the
extra `bench`.
"""

import sys

from gradwire.cli import missing_packages


def main() -> None:
    """Run the command line, or exit with the command that installs the missing packages."""
    command = sys.argv[1:2]
    if command == ["doctor"] and missing_packages("cli"):
        from gradwire.cli import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    if command == ["run"]:
        from gradwire.cli import run

        run.launch(sys.argv[2:])
        return
    extra = "bench" if command in (["demo"], ["bench"]) else "cli"
    missing = missing_packages(extra)
    if missing:
        sys.exit(f'gradwire: missing {", ".join(missing)}. In a checkout of gradwire, run: pip install ".[{extra}]"')
    from gradwire.cli.app import app

    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
