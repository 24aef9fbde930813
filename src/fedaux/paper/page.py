"""A page for people from an experiment's Markdown and figures: one self-contained HTML file in the report's style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from fedaux.paper.document import LONG, Block, Grid, Heading, Items, inline, read, title_of
from fedaux.report import svg
from fedaux.report.html import CSS, picture

EXTRA = """
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
tbody tr:has(+tr.more),tbody tr.more{border-bottom:0}tr.first td,tr.first th{border-top:1px solid var(--line)}
td,th{border-bottom:0}tr.printed{color:var(--soft)}li{margin:.3rem 0;max-width:42rem}
td.wrap{min-width:8rem}thead th.wrap{white-space:normal;min-width:6rem}.scroll+.scroll{margin-top:1.5rem}
"""


@dataclass(frozen=True)
class Drawing:
    """A figure, what it shows in words, and its numbers, which the page lets one save."""

    figure: Figure
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


def render(markdown: str, figures: Mapping[str, Drawing]) -> str:
    """Return the page; figures stand before the first section and the first table."""
    blocks = list(read(markdown))
    title = title_of(blocks)
    parts = list(map(_part, blocks))
    place = next((number for number, part in enumerate(parts) if part.startswith(("<h2", "<div"))), len(parts))
    drawn = [
        picture(
            svg.as_svg(drawing.figure, prefix=f"figure{number}", label=drawing.caption),
            drawing.caption,
            name,
            drawing.header,
            drawing.rows,
        )
        for number, (name, drawing) in enumerate(figures.items())
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


def _part(block: Block) -> str:
    """Return a heading, paragraph, list or table as HTML."""
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>\n"
    if isinstance(block, Items):
        items = "".join(f"<li>{_inline(item)}</li>\n" for item in block.items)
        return f"<ul>\n{items}</ul>\n"
    if isinstance(block, Grid):
        return _table(block)
    return f"<p>{_inline(block.text)}</p>\n"


def _table(grid: Grid) -> str:
    """Return a table that scrolls in its own box; columns of words stand left, a name is not repeated."""
    words = grid.words()
    long = [any(len(row[column]) > LONG for row in grid.rows) for column in range(len(grid.header))]

    def cell(column: int, text: str, kind: str) -> str:
        wrap = " wrap" if column and long[column] else ""
        look = f' class="text{wrap}"' if words[column] else ""
        return f"<{kind}{look}>{_inline(text)}</{kind}>"

    lines, before = [], ""
    for row in grid.rows:
        same = row[0] == before and len(row) > 1
        looks = ["" if same else "first", "printed" if row[1:2] == ("published",) else ""]
        cells = "".join(
            cell(column, "" if same and column == 0 else text, "td" if column else "th")
            for column, text in enumerate(row)
        )
        lines.append(f'<tr class="{" ".join(filter(None, looks))}">{cells}</tr>')
        before = row[0]
    head = "".join(cell(column, name, "th") for column, name in enumerate(grid.header))
    body_text = "\n".join(lines)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="table">\n<table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body_text}\n</tbody>\n</table>\n</div>\n"
    )


MARKS = {"bold": "<b>{}</b>", "code": "<code>{}</code>", "plain": "{}"}


def _inline(text: str) -> str:
    """Return a line with its bold words and code."""
    return "".join(MARKS[kind].format(escape(piece)) for kind, piece in inline(text))
