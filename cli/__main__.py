"""Entry point of the ``gradwire`` command and of ``python -m gradwire.cli``. It names packages that are missing.

``gradwire doctor`` needs no extra, ``gradwire advise`` the extra `cli`, and demo and benchmarks the extra `bench`.
"""

import sys

from gradwire.cli import missing_packages


def main() -> None:
    """Run the command line, or exit with the command that installs the missing packages."""
    command = sys.argv[1:2]
    if command == ["doctor"] and missing_packages("cli"):
        from gradwire.cli import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    extra = "bench" if command in (["demo"], ["bench"]) else "cli"
    missing = missing_packages(extra)
    if missing:
        sys.exit(f'gradwire: missing {", ".join(missing)}. Run: pip install "gradwire[{extra}]"')
    from gradwire.cli.app import app

    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
