"""The links of the documentation site, made from those of the repository."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

SOURCE = Path(__file__).parents[2] / "docs" / "mkdocs_hooks.py"
URL = "https://example.org/gradwire"


@pytest.fixture(scope="module")
def site_links():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.site_links


@pytest.mark.parametrize(
    ("link", "expected", "folder", "place", "url"),
    [
        ("[laws](guarantees.md)", "[laws](guarantees.md)", "docs", "", URL),
        ("[a](../CONTRIBUTING.md#adding-a-hook)", "[a](contributing.md#adding-a-hook)", "docs", "", URL),
        ("[a](https://pytorch.org)", "[a](https://pytorch.org)", "docs", "", URL),
        ("[a](#here)", "[a](#here)", "docs", "", URL),
        ("![plot](plots/demo.png)", "![plot](plots/demo.png)", "docs", "", URL),
        ("[a](no_such_page.md)", "[a](no_such_page.md)", "docs", "", URL),
        ("[a](../no_such_file)", "[a](../no_such_file)", "docs", "", URL),
        ("[laws](docs/guarantees.md)", "[laws](guarantees.md)", "", "", None),
        ("![plot](docs/plots/demo.png)", "![plot](plots/demo.png)", "", "", None),
        ("[p](../examples/train_ddp.py)", "[p](examples.md#train_ddppy)", "docs", "", None),
        ("[p](../../examples/train_ddp.py)", "[p](../examples.md#train_ddppy)", "docs/api", "api", URL),
        ("[tests](../tests/conftest.py)", f"[tests]({URL}/blob/main/tests/conftest.py)", "docs", "", URL),
        ("[tests](../tests/conftest.py)", "tests", "docs", "", None),
    ],
)
def test_link_leads_to_a_page_of_the_site_or_to_the_repository(site_links, link, expected, folder, place, url):
    assert site_links(link, folder, place, url) == expected
