"""The links of the documentation site, made from those of the repository."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

SOURCE = Path(__file__).parents[1] / "docs" / "mkdocs_hooks.py"
URL = "https://example.org/gradwire"


@pytest.fixture(scope="module")
def site_links():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.site_links


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[laws](laws.md)", "[laws](laws.md)"),
        ("[a](../CONTRIBUTING.md#adding-a-hook)", "[a](contributing.md#adding-a-hook)"),
        ("[a](https://pytorch.org)", "[a](https://pytorch.org)"),
        ("[a](#here)", "[a](#here)"),
        ("![plot](plots/demo.png)", "![plot](plots/demo.png)"),
        ("[a](no_such_page.md)", "[a](no_such_page.md)"),
        ("[a](../no_such_file)", "[a](../no_such_file)"),
    ],
)
def test_link_to_a_page_leads_to_the_page_of_the_site(site_links, link, expected):
    assert site_links(link, "docs", "", URL) == expected


def test_links_and_images_of_readme_lead_to_the_site(site_links):
    assert site_links("[laws](docs/laws.md)", "", "", None) == "[laws](laws.md)"
    assert site_links("![plot](docs/plots/demo.png)", "", "", None) == "![plot](plots/demo.png)"


def test_link_to_an_example_leads_to_its_place_on_the_page_of_examples(site_links):
    link = "[program](../examples/train_ddp.py)"
    assert site_links(link, "docs", "", None) == "[program](examples.md#train_ddppy)"
    assert site_links(link.replace("../", "../../"), "docs/api", "api", URL) == "[program](../examples.md#train_ddppy)"


def test_link_to_a_file_leads_to_the_repository_or_is_its_text(site_links):
    link = "[tests](../tests/conftest.py)"
    assert site_links(link, "docs", "", URL) == f"[tests]({URL}/blob/main/tests/conftest.py)"
    assert site_links(link, "docs", "", None) == "tests"
