"""``python -m tools.import_picture``: draws the imports between packages in docs/architecture.md, from the sources.

An arrow from A to B: a module of A imports one of B, and no package that A imports leads to B. ``--check`` changes
nothing and fails if the page shows other arrows.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
PAGE = "docs/architecture.md"
ARROWS = re.compile(r"(?:^    \w+ --> \w+\n)+", re.MULTILINE)  # the page has one list of them

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def package_imports(root: Path) -> dict[str, set[str]]:
    """The packages that each package of gradwire imports, without itself and without ``gradwire``."""
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    names = {name.removeprefix("gradwire."): folder for name, folder in folders.items() if name != "gradwire"}
    return {
        name: {
            module.split(".")[1]
            for path in sorted((root / folder).rglob("*.py"))
            for node in ast.walk(ast.parse(path.read_text()))
            for module in imported_modules(node)
            if module.split(".")[:1] == ["gradwire"] and module.count(".")
        }
        & names.keys() - {name}
        for name, folder in names.items()
    }


def imported_modules(node: ast.AST) -> list[str]:
    """Dotted names that an import statement imports; none for other nodes."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def arrows(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The transitive reduction of the imports, sorted."""

    def reached(name: str) -> set[str]:
        return imports[name].union(*(reached(each) for each in imports[name]))

    return [
        (name, target)
        for name in sorted(imports)
        for target in sorted(imports[name])
        if not any(target in reached(each) for each in imports[name])
    ]


@app.command()
def main(check: Annotated[bool, typer.Option(help="Only compare, and fail if the page differs.")] = False) -> None:
    """Draw the imports between packages in docs/architecture.md."""
    path = ROOT / PAGE
    page = path.read_text()
    drawn = "".join(f"    {name} --> {target}\n" for name, target in arrows(package_imports(ROOT)))
    found = ARROWS.findall(page)
    if len(found) != 1:
        raise typer.BadParameter(f"{PAGE} has {len(found)} lists of arrows; expected one.")
    if check and found != [drawn]:
        typer.echo(f"{PAGE} shows other imports than the sources have. Run `python -m tools.import_picture`.", err=True)
        raise typer.Exit(1)
    path.write_text(page.replace(found[0], drawn))


if __name__ == "__main__":
    app()
