"""One `World` of each size for the whole run; the helper modules of this folder are importable by their own names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("bits")

from harness import World  # noqa: E402


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    opened = {}

    def world_of(size):
        if size not in opened:
            opened[size] = World(size, tmp_path_factory.mktemp(f"world_of_{size}"))
        return opened[size]

    yield world_of
    for world in opened.values():
        world.close()


@pytest.fixture(params=[2, 3], ids=["2-ranks", "3-ranks"])
def world(request, worlds):
    return worlds(request.param)
