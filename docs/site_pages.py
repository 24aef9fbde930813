"""What MkDocs does for the site beyond its own: files beside docs/ that pages link to become pages too."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link from docs/ to a file of the checkout, as GitHub understands it."""
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+"""
)
"""What a browser would fetch from another host; a link that a person follows is none."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page links to. Raises PluginError where there is none."""
    linked = {
        target: file.src_uri
        for file in files.documentation_pages()
        for target in OUTSIDE.findall(file.content_string)
    }
    for target, origin in sorted(linked.items()):
        if not (ROOT / target).is_file():
            raise PluginError(f"{origin}: links to ../{target}, which is no file")
        files.append(File.generated(config, page_name(target), content=page_text(target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to files outside docs/ lead to their pages."""
    return OUTSIDE.sub(lambda found: "](" + page_name(found[1]), markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Refuse a page that a browser could not show without asking other hosts."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: would be fetched from another host: {found[0]}")
    return output


def page_name(target: str) -> str:
    """Return the name of the page that shows a file: examples/own_data.py on examples/own_data.md."""
    return str(PurePosixPath(target.lower()).with_suffix(".md"))


def page_text(target: str) -> str:
    """Return a Markdown file with its links as seen from docs/, any other as a block of code."""
    text = (ROOT / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return re.sub(r"\]\((?!\w+:|#)(?:docs/)?", "](", text)
    return f"# {target}\n\n```{PurePosixPath(target).suffix.lstrip('.')}\n{text}```\n"
