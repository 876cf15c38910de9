"""One `World` of each size for the whole run."""

import pytest

pytest.register_assert_rewrite("tests.support.bits")

from tests.support.harness import World  # noqa: E402


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
