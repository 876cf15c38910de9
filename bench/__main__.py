"""``python -m gradwire.bench``: the same as the ``gradwire`` command."""

from gradwire.bench.cli import main

if __name__ == "__main__":
    main()
