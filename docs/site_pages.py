"""MkDocs hooks: files outside docs/ that pages link to become pages; nothing comes from another
host."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+"""
)
"""What a browser would fetch from another host, as opposed to a link that a person follows."""
INCLUDED = re.compile(r"^<!-- (\S+\.md) -->$", flags=re.M)
"""The place in a page of the tables of a generated file."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of notes and measured tables: a search of the site finds the user's pages alone."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for each file of notes/."""
    linked = {f"notes/{note.name}": "mkdocs.yml" for note in (ROOT / "notes").glob("*.md")}
    for file in files.documentation_pages():
        for target in LINK.findall(file.content_string):
            path = posixpath.normpath(f"docs/{target}")
            if not path.startswith("docs/"):
                linked[path] = file.src_uri
    for path, origin in sorted(linked.items()):
        if not (ROOT / path).is_file():
            raise PluginError(f"{origin}: links to {path}, which does not exist")
        files.append(File.generated(config, page_name(path), content=page_text(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ at their pages, and include generated tables."""
    if page.file.generated_by:
        return markdown
    return INCLUDED.sub(tables, relinked(markdown, f"docs/{page.file.src_uri}"))


def tables(place: re.Match[str]) -> str:
    """Return the sections of a generated file, one level lower."""
    _, *sections = (ROOT / place[1]).read_text(encoding="utf-8").split("\n## ")
    return "".join(f"### {section}\n" for section in sections)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Raise PluginError if a browser could not show the page without another host."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: would be fetched from another host: {found[0]}")
    return output


def page_name(path: str) -> str:
    """Return the site's name of a file of the checkout: examples/own_data.py is
    examples/own_data.md."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return str(PurePosixPath(path.lower()).with_suffix(".md"))


def page_text(path: str) -> str:
    """Return a Markdown file with its links adapted, or any other file as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return UNSEARCHED * path.startswith(("notes/", "reproduce/")) + relinked(text, path)
    if path.endswith(".ipynb"):
        return f"{relinked(notebook_text(text), path)}\nThe notebook is `{path}` of the checkout.\n"
    return f"# {path}\n\n```{PurePosixPath(path).suffix.lstrip('.')}\n{text}```\n"


def notebook_text(text: str) -> str:
    """Return the cells of a notebook as Markdown and blocks of code, without outputs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```\n" if code else f"{source}\n")
    return "\n".join(parts)


def relinked(text: str, path: str) -> str:
    """Return Markdown whose links, relative to `path` in the checkout, are relative in the site."""
    folder = posixpath.dirname(path)
    here = posixpath.dirname(page_name(path))

    def site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        return "](" + posixpath.relpath(page_name(target), here or ".")

    return LINK.sub(site, text)
