"""mkdocs hooks: one source for pages of the repository and of the site.

README.md, CONTRIBUTING.md and CHANGELOG.md of the repository become pages of the site, README.md its home page; the
programs of examples/ become one page. Links are written for the repository and translated for the site: a link to a
file that is not on the site, such as a test, leads to ``repo_url``, or becomes plain text without one. Plots link to
their full size. Long test names may break after an underscore. The development log stays out of the search.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = "examples.md"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def site_links(markdown, folder, page_folder, repo_url):
    """Translate the relative links and images of a page.

    Args:
        markdown: the page's text.
        folder: the folder of its source, relative to the repository.
        page_folder: the folder of its page on the site.
        repo_url: URL of the repository, or None.
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
    """Add the pages whose sources are outside docs/."""
    for name, page in FROM_ROOT.items():
        text = site_links((ROOT / name).read_text(), "", "", config.repo_url)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, EXAMPLES, content=examples_page()))
    return files


def examples_page():
    """All programs of examples/, one section each."""
    programs = sorted((ROOT / "examples").glob("*.py"))
    sections = [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in programs]
    introduction = (
        "Complete programs, and checkpointing.py, which some of them import. Their docstrings contain the commands "
        "that run them, on GPUs or CPUs.\n"
    )
    return "\n".join(["# Examples\n", introduction, *sections])


def on_page_markdown(markdown, page, config, files):
    """Translate the links of a page in docs/, and keep the log out of the search."""
    if page.file.src_uri in (*FROM_ROOT.values(), EXAMPLES):
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "log":
        page.meta["search"] = {"exclude": True}
    return site_links(markdown, posixpath.join("docs", folder), folder, config.repo_url)


def on_page_content(html, page, config, files):
    """Link plots to their files, and let test names break."""
    html = re.sub(r'<img [^>]*src="([^"]*plots/[^"]+)"[^>]*/?>', r'<a href="\1" title="Full size">\g<0></a>', html)
    return re.sub(r"(?<=<code>)test_\w+(?=\*?</code>)", lambda name: name[0].replace("_", "_<wbr>"), html)
