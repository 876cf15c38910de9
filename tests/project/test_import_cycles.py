"""No module of the library imports itself through others; imports for type checking and in functions count too."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def library_sources():
    """The path of every module of the library, by import name."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    sources = {}
    for package, folder in folders.items():
        for path in (ROOT / folder).glob("*.py"):
            sources[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return sources


def imported_modules(path, known):
    """The modules in ``known`` that a file imports: modules themselves, not the packages around them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def test_imports_form_no_cycle():
    sources = library_sources()
    imports = {name: imported_modules(path, set(sources)) - {name} for name, path in sources.items()}
    assert imports["gradwire.reducer.distributed"] >= {"gradwire.reducer.exchange", "gradwire.hooks.default_hooks"}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")
