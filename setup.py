"""The long description: README.md, for pages outside of the repository. Everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urljoin

from setuptools import setup

ROOT = Path(__file__).parent


def long_description(readme, repository):
    """README with absolute links and pictures; without a URL, with the text of its links and no pictures."""

    def replaced(match):
        mark, text, target = match.groups()
        if not repository:
            return "" if mark else text
        base = f"{repository.rstrip('/')}/{'raw' if mark else 'blob'}/main/README.md"
        return f"{mark}[{text}]({urljoin(base, target)})"

    return re.sub(r"(!?)\[([^\]]+)\]\((?!https?:)([^)\s]+)\)", replaced, readme)


urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
setup(
    long_description=long_description((ROOT / "README.md").read_text(), urls.get("Repository")),
    long_description_content_type="text/markdown",
)
