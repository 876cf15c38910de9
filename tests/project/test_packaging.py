"""The package as an index shows it: the long description, and the tag of a release."""

import os
import re
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

import gradwire

ROOT = Path(__file__).parents[2]
URL = "https://example.org/gradwire"
BUILD_METADATA = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"


@pytest.fixture
def checkout(tmp_path):
    """A folder with links to what the package is built from, and a copy of pyproject.toml without URLs."""
    project = (ROOT / "pyproject.toml").read_text()
    packages = tomllib.loads(project)["tool"]["setuptools"]["package-dir"].values()
    for name in ("LICENSE", "README.md", "setup.py", *packages):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "pyproject.toml").write_text(re.sub(r"(?ms)^\[project\.urls\]\n.*?(?=^\[|\Z)", "", project))
    return tmp_path


def description_built_in(folder):
    """The long description in the metadata that setuptools builds in a folder."""
    built = subprocess.run(
        [sys.executable, "-c", BUILD_METADATA], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    metadata = Parser().parsestr((folder / built.stdout.splitlines()[-1] / "METADATA").read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload()


def test_description_without_repository_has_no_relative_link_and_no_picture(checkout):
    description = description_built_in(checkout)
    assert "\nWith these lines, a training step of a 2.3 M-parameter GPT" in description
    assert "the loss of a smaller GPT after 2,000 steps of AdamW is the same (benchmarks)" in description
    assert re.findall(r"!?\[[^\]]+\]\((?!https:)[^)]*\)|!\[", description) == []


def test_description_with_repository_leads_to_its_files(checkout):
    with (checkout / "pyproject.toml").open("a") as project:
        project.write(f'\n[project.urls]\nRepository = "{URL}"\n')
    description = description_built_in(checkout)
    assert f"[results]({URL}/blob/main/docs/benchmarks.md#on-an-h200)" in description
    assert f"([benchmarks]({URL}/blob/main/README.md#benchmarks))" in description
    assert f"]({URL}/raw/main/docs/plots/converge_text.png)" in description
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(links) > 30 and all(link.startswith("https://") for link in links)


@pytest.mark.parametrize(("tag", "is_accepted"), [(f"v{gradwire.__version__}", True), ("v99.0", False)])
def test_release_stops_unless_its_tag_is_the_version(tag, is_accepted):
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]
    check, build = (step["run"] for step in jobs["build"]["steps"] if "run" in step)
    done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}, check=False)
    assert (done.returncode == 0) == is_accepted
    assert (build, jobs["publish"]["needs"]) == ("make wheel", "build")


def test_python_versions_of_the_classifiers_are_those_tested():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    tested = re.findall(r"^\| (3\.\d+)\.\d+ \|", (ROOT / "docs" / "compatibility.md").read_text(), re.MULTILINE)
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert named == sorted(set(tested))


@pytest.mark.parametrize("folder", ["compress", "kernels", "hooks", "tests", "bench"])
def test_top_level_folder_keeps_its_name(folder):
    """Users and documentation refer to these folders by name; the installed packages have the same names."""
    assert any((ROOT / folder).glob("**/*.py"))
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    assert packages.get(f"gradwire.{folder}", folder) == folder
