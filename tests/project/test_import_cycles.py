"""Imports within the library form no cycle, and no package imports what another keeps private.

Imports for type checking and in functions count, too.
"""

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


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_no_package_imports_a_private_module_or_name_of_another():
    found, count = [], 0
    for name, path in library_sources().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradwire."):
                _, package, *parts = node.module.split(".")
                count += 1
                if name.split(".")[:2] != ["gradwire", package]:
                    found += [(name, node.module) for part in parts if is_private(part)]
                    found += [(name, f"{node.module}.{each.name}") for each in node.names if is_private(each.name)]
    assert count > 500
    assert found == []
