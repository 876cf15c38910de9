"""``python -m gradwire.bench`` is the ``gradwire`` command."""

from gradwire.bench.cli import main

if __name__ == "__main__":
    main()
