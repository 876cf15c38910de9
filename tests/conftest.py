"""What the tests of the benches share: made-up provenance, and what a terminal shows of tables."""

import io

import pytest
from rich.console import Console


@pytest.fixture
def facts():
    """Where, when and with what numbers were made."""
    return {
        "date": "2000-01-01T00:00:00+00:00",
        "gradwire": "1",
        "torch": "2",
        "cpu": "a CPU",
        "cpu_count": 2,
        "gpu": None,
        "backend": "gloo",
        "command": "gradwire bench",
        "commit": None,
    }


@pytest.fixture
def printed():
    """What 80 columns show of tables."""

    def text_of(*tables):
        console = Console(file=io.StringIO(), width=80)
        console.print(*tables)
        return console.file.getvalue()

    return text_of
