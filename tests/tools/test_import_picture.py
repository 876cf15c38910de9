"""The picture of the packages in docs/architecture.md."""

import pytest
from typer.testing import CliRunner

from tools import import_picture
from tools.import_picture import arrows, package_imports

PACKAGES = """
[tool.setuptools.package-dir]
"gradwire" = "api"
"gradwire.a" = "a"
"gradwire.b" = "b"
"gradwire.c" = "c"
"""
PAGE = "text\n    a[A]\n    b --> a\nmore\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """a imports b and c, b imports c."""
    (tmp_path / "pyproject.toml").write_text(PACKAGES)
    sources = {
        "a": "from gradwire.b import f\nfrom gradwire import c, hidden\nimport ast",
        "b": "import gradwire.c.d",
        "c": "",
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(source)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text(PAGE)
    monkeypatch.setattr(import_picture, "ROOT", tmp_path)
    return tmp_path


def test_arrow_stands_for_a_direct_import_only(checkout):
    imports = package_imports(checkout)
    assert imports == {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert arrows(imports) == [("a", "b"), ("b", "c")]


def test_arrows_of_the_page_are_replaced_and_checked(checkout):
    page = checkout / "docs" / "architecture.md"
    call = CliRunner().invoke
    failed = call(import_picture.app, ["--check"])
    assert failed.exit_code == 1 and "shows other imports" in failed.output and page.read_text() == PAGE
    assert call(import_picture.app, []).exit_code == 0
    assert page.read_text() == PAGE.replace("    b --> a\n", "    a --> b\n    b --> c\n")
    assert call(import_picture.app, ["--check"]).exit_code == 0
    page.write_text("no arrows")
    assert "has 0 lists of arrows" in call(import_picture.app, []).output
