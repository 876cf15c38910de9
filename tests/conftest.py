"""Slow tests, the import of `tools`, and fixtures: made-up provenance, a world of one rank.

On a machine with a GPU and nothing but torch, triton, pytest and gradwire, only `tests/gpu` is collected.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pairwise import mark_surplus_cases

# The repository's tools, but not its other folders: as modules, some of them would hide packages of the same name.
_spec = spec_from_file_location("tools", Path(__file__).parents[1] / "tools" / "__init__.py")
sys.modules["tools"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["tools"])

MISSING = [
    name for name in ("hypothesis", "matplotlib", "numpy", "rich", "sklearn", "typer") if find_spec(name) is None
]
collect_ignore = (
    [path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "gpu"] if MISSING else []
)
if not MISSING:
    from hypothesis import Phase, settings

    import tests.support.harness  # noqa: F401 - whatever starts the first rank, the ranks can import `tests`

    settings.register_profile("no shrinking", phases=set(Phase) - {Phase.shrink, Phase.explain})  # for tools.mutants


def pytest_configure(config):
    config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, where it is installed")


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook, which deselects slow cases
def pytest_collection_modifyitems(items):
    mark_surplus_cases(items)


def pytest_report_header():
    return f"not installed: {', '.join(MISSING)}; collecting tests/gpu alone" if MISSING else []


@pytest.fixture
def facts():
    """Made-up provenance."""
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
