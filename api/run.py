"""``python -m gradwire.run --hook int4 train.py``: compress the gradients of an unchanged script; see docs/run.md."""

from gradwire.cli.run import main

if __name__ == "__main__":
    main()
