"""mkdocs hooks: the site's links, which are written so that they also work in the repository.

CONTRIBUTING.md and CHANGELOG.md of the repository become pages of the site; all programs of examples/ become one page.
A link to a file that is not on the site, such as a test, leads to ``repo_url``; without one its text remains. Plots
link to their full size, and long names in tables may break after an underscore.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # page of the site by file
EXAMPLES = "examples.md"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def site_links(markdown, folder, page_folder, repo_url):
    """The text with its relative links turned into those of the site.

    Args:
        markdown: the text.
        folder: that it lies in, relative to the repository.
        page_folder: that its page lies in, relative to docs/.
        repo_url: of the repository, or None.
    """

    def replaced(match):
        text, link, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, link))
        page = FROM_ROOT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is not None:
            return f"[{text}]({posixpath.relpath(page, page_folder or '.')}{anchor})"
        if path.startswith("examples/") and (ROOT / path).exists():
            anchor = "#" + posixpath.basename(path).replace(".", "")
            return f"[{text}]({posixpath.relpath(EXAMPLES, page_folder or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})" if repo_url else text

    return LINK.sub(replaced, markdown)


def on_files(files, config):
    """Add the pages whose files lie outside of docs/."""
    for name, page in FROM_ROOT.items():
        text = site_links((ROOT / name).read_text(), "", "", config.repo_url)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, EXAMPLES, content=examples_page()))
    return files


def examples_page():
    """All programs of examples/, each under its name."""
    programs = sorted((ROOT / "examples").glob("*.py"))
    parts = [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in programs]
    introduction = "Complete programs. The docstring of each tells how to run it, on GPUs or on CPUs.\n"
    return "\n".join(["# Examples\n", introduction, *parts])


def on_page_markdown(markdown, page, config, files):
    """Turn the links of a page of docs/ into those of the site."""
    if page.file.src_uri in (*FROM_ROOT.values(), EXAMPLES):
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    return site_links(markdown, posixpath.join("docs", folder), folder, config.repo_url)


def on_page_content(html, page, config, files):
    """Link plots to their files, and let names of tests break."""
    html = re.sub(r'<img [^>]*src="([^"]*plots/[^"]+)"[^>]*/?>', r'<a href="\1" title="Full size">\g<0></a>', html)
    return re.sub(r"(?<=<code>)test_\w+(?=\*?</code>)", lambda name: name[0].replace("_", "_<wbr>"), html)
