"""The outcomes on record, one file for each version of PyTorch: a row for each test, a column for each run."""

import csv
from importlib.metadata import version
from pathlib import Path

AGAINST = ("stock", "gradwire")
WORLD_SIZES = (2, 4)


def path():
    """The record for the PyTorch that is installed, whose tests may differ from other versions'."""
    major, minor, *_ = version("torch").split(".")
    return Path(__file__).parent / f"torch-{major}.{minor}.csv"


def column(against, world_size):
    """The heading of a run."""
    return f"{against} {world_size}"


def read():
    """The rows of the record, or none where there is no record."""
    if not path().exists():
        return []
    with path().open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows):
    """Make ``rows`` the record; their keys are the columns."""
    with path().open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
