"""A page for people from an experiment's Markdown and figures: one self-contained HTML file in the report's style."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby

from matplotlib.figure import Figure

from fedaux.report import svg
from fedaux.report.html import CSS

EXTRA = """
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
tbody tr:has(+tr.more),tbody tr.more{border-bottom:0}tr.first td,tr.first th{border-top:1px solid var(--line)}
td,th{border-bottom:0}tr.printed{color:var(--soft)}li{margin:.3rem 0;max-width:42rem}
"""


def render(markdown: str, figures: Mapping[str, Figure]) -> str:
    """Return the page; figures stand before the first section and the first table."""
    title = next((line[2:] for line in markdown.splitlines() if line.startswith("# ")), "fedaux")
    parts = list(_parts(markdown))
    place = next((number for number, part in enumerate(parts) if part.startswith(("<h2", "<div"))), len(parts))
    drawn = [
        f'<figure>\n<div class="scroll">{svg.as_svg(figure, prefix=f"figure{number}", label=name)}</div>\n</figure>\n'
        for number, (name, figure) in enumerate(figures.items())
    ]
    body = "".join([*parts[:place], *drawn, *parts[place:]])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself is told that this page loads nothing and runs nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">\n"
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}{EXTRA}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _parts(markdown: str) -> Iterator[str]:
    """Yield the headings, paragraphs, lists and tables of a document as HTML: as much Markdown as is written here."""
    for block in re.split(r"\n\s*\n", markdown.strip()):
        for kind, group in groupby(block.splitlines(), key=_kind):
            lines = list(group)
            if kind == "heading":
                for line in lines:
                    level = len(line) - len(line.lstrip("#"))
                    yield f"<h{level}>{_inline(line.lstrip('# '))}</h{level}>\n"
            elif kind == "list":
                items = "".join(f"<li>{_inline(line[2:])}</li>\n" for line in lines)
                yield f"<ul>\n{items}</ul>\n"
            elif kind == "table":
                yield _table([[cell.strip() for cell in line.strip()[1:-1].split(" | ")] for line in lines])
            else:
                yield f"<p>{_inline(' '.join(lines))}</p>\n"


def _kind(line: str) -> str:
    for start, kind in (("#", "heading"), ("- ", "list"), ("|", "table")):
        if line.startswith(start):
            return kind
    return "text"


def _table(rows: list[list[str]]) -> str:
    """Return a table that scrolls in its own box; columns of words stand left, a name is not repeated."""
    header, _, *body = rows
    words = [
        column < len(header) and any(re.search(r"[A-Za-z]{3}", row[column]) for row in body if column < len(row))
        for column in range(len(header))
    ]
    words[0] = True

    def cell(column: int, text: str, kind: str) -> str:
        wrap = " wrap" if kind == "td" and len(text) > 24 else ""
        look = f' class="text{wrap}"' if words[column] else ""
        return f"<{kind}{look}>{_inline(text)}</{kind}>"

    lines, before = [], ""
    for row in body:
        same = row[0] == before and len(row) > 1
        looks = ["" if same else "first", "printed" if row[1:2] == ["published"] else ""]
        cells = "".join(
            cell(column, "" if same and column == 0 else text, "td" if column else "th")
            for column, text in enumerate(row)
        )
        lines.append(f'<tr class="{" ".join(filter(None, looks))}">{cells}</tr>')
        before = row[0]
    head = "".join(cell(column, name, "th") for column, name in enumerate(header))
    body_text = "\n".join(lines)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="table">\n<table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body_text}\n</tbody>\n</table>\n</div>\n"
    )


def _inline(text: str) -> str:
    """Return a line with its bold words and code."""
    marked = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", marked)
