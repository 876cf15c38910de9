"""What the tests of the benches share: made-up provenance, what a terminal shows of tables, a world of one rank."""

import io

import pytest
import torch
import torch.distributed as dist
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


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory):
    """The default process group over gloo with this process as its only rank, which computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = (tmp_path_factory.mktemp("world") / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
