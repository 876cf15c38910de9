"""Entry point of the ``gradwire`` command and of ``python -m gradwire.cli``. It names packages that are missing.

``gradwire doctor`` and ``gradwire run`` need no extra, ``gradwire advise`` the extra `cli`, and demo and benchmarks the
extra `bench`.
"""

import sys

from gradwire.cli import missing_packages, version_line

COMMANDS = {
    "run": "train with an unchanged script, and compress its gradients",
    "doctor": "check the installation",
    "advise": "predict the step time with every hook",
    "demo": "train a small network with each hook",
    "bench": "run benchmarks",
}


def main() -> None:
    """Run the command line, or exit with the command that installs the missing packages."""
    command = next(iter(sys.argv[1:]), "--help")
    if command == "doctor" and missing_packages("cli"):
        from gradwire.cli import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    if command == "run":
        from gradwire.cli import run

        run.launch(sys.argv[2:])
        return
    extra = "bench" if command in ("demo", "bench") else "cli"
    if missing := missing_packages(extra):
        remedy = f'missing {", ".join(missing)}. In a checkout of gradwire, run: pip install ".[{extra}]"'
        if command in COMMANDS:
            sys.exit(f"gradwire {command}: {remedy}")
        if command == "--version":
            print(version_line())
            return
        if command != "--help":
            sys.exit(f"gradwire: there is no command {command!r}; expected one of {', '.join(COMMANDS)}")
        from gradwire._version import __version__

        print(f"gradwire {__version__}: gradient compression for PyTorch data-parallel training\n")
        print("\n".join(f"  gradwire {name:8} {what}" for name, what in COMMANDS.items()))
        print(f"\nAll but run and doctor need extras: {remedy}")
        return
    from gradwire.cli.app import app

    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
