"""A table as data, and its renderers: terminal, Markdown, HTML; and CSV for its numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from fedaux.formatting import cell

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

COLUMN_GAP = 2
"""Space after a column in a terminal."""
WRAPPED_ABOVE = 18
"""Number of characters above which text may wrap."""


@dataclass(frozen=True)
class Table:
    """Rows under headers; the first column names the row."""

    headers: Sequence[object]
    """If all are empty, there is no header line."""
    rows: Sequence[Sequence[object]]
    align: str = ""
    """One letter per column, ``l`` or ``r``; by default the first column and words are ``l``."""
    caption: str = ""
    bold: Collection[tuple[int, int]] = ()
    """Bold cells, as (row, column)."""
    links: Mapping[int, str] = field(default_factory=dict)
    """Targets of links on the first cell, by row."""
    keys: int = 1
    """The number of first columns that tell rows apart."""

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.rows} | ({len(self.align)} if self.align else set())
        if widths - {len(self.headers)}:
            raise ValueError(f"{len(self.headers)} headers, but {sorted(widths)} columns")

    def left(self, column: int) -> bool:
        """Return whether a column is aligned to the left, as text is."""
        if self.align:
            return self.align[column] == "l"
        return column == 0 or any(re.search(r"[A-Za-z]{3}", str(row[column])) for row in self.rows)

    def cells(self) -> Iterable[list[tuple[str, bool]]]:
        """Yield the rows: text of each cell, and whether it is bold."""
        for number, row in enumerate(self.rows):
            yield [(str(cell), (number, column) in self.bold) for column, cell in enumerate(row)]


def bold_row(number: int, headers: Sequence[object]) -> set[tuple[int, int]]:
    """Return all cells of a row, for :attr:`Table.bold`."""
    return {(number, column) for column in range(len(headers))}


class TerminalTable:
    """A table that rich prints: in a narrow terminal text wraps at words, numbers stay whole, and
    columns that find no room follow in further tables, each with the columns that tell rows
    apart."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the caption and one or several tables."""
        from rich.text import Text

        if self.table.caption:
            yield Text(self.table.caption, style="table.title")
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield Text()
            yield self._part(columns)

    def _widths(self, column: int) -> tuple[int, int]:
        """Return the least width of a column, and the width at which nothing wraps."""
        from rich.cells import cell_len

        cells = [str(row[column]) for row in self.table.rows]
        header = str(self.table.headers[column])
        whole = max(cell_len(line) for text in (header, *cells) for line in text.split("\n"))
        words = header.split()
        for text in cells:
            words += text.split() if self.table.left(column) else text.split("\n")
        return max(map(cell_len, words), default=0), whole

    def _parts(self, room: int) -> Iterator[dict[int, int]]:
        """Yield the columns of each table with their widths."""
        widths = [self._widths(column) for column in range(len(self.table.headers))]
        part: dict[int, int] = {}
        keys = min(self.table.keys, len(widths))
        widest = max((least for least, _ in widths[keys:]), default=0)
        while keys > 1 and sum(own for own, _ in widths[:keys]) + COLUMN_GAP * keys + widest > room:
            keys -= 1  # without room for all of them beside another column, the first ones
        for column, (least, _) in enumerate(widths):
            if len(part) > keys and sum(part.values()) + COLUMN_GAP * len(part) + least > room:
                yield _widened(part, widths, room)
                part = {key: widths[key][0] for key in range(keys)}
            part[column] = least
        yield _widened(part, widths, room)

    def _part(self, columns: Mapping[int, int]) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(show_header=any(self.table.headers))
        shown.box, shown.padding, shown.show_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
        for column, width in columns.items():
            shown.add_column(
                Text(str(self.table.headers[column])),
                justify="left" if self.table.left(column) else "right",
                width=width,
                overflow="fold",
            )
        for row in self.table.cells():
            cells = (row[column] for column in columns)
            shown.add_row(*(Text(text, style="bold" if bold else "") for text, bold in cells))
        return shown


def _widened(
    part: Mapping[int, int], widths: Sequence[tuple[int, int]], room: int
) -> dict[int, int]:
    """Return the columns of a table with the rest of the room, the narrowest first."""
    result, left = dict(part), room - sum(part.values()) - COLUMN_GAP * len(part)
    waiting = sorted(part, key=lambda column: widths[column][1] - part[column])
    for done, column in enumerate(waiting):
        share = max(0, left) // (len(waiting) - done)
        added = min(widths[column][1] - part[column], share)
        result[column] += added
        left -= added
    return result


def to_markdown(table: Table) -> str:
    """Return a Markdown table; the caption is left to the text around it."""

    def line(cells: Iterable[object]) -> str:
        written = (str(cell).replace("|", r"\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(written)} |\n"

    rule = ("---" if table.left(column) else "---:" for column in range(len(table.headers)))
    rows = (
        (f"**{text}**" if bold and text else text for text, bold in row) for row in table.cells()
    )
    return "".join([line(table.headers), line(rule), *map(line, rows)])


def to_html(table: Table) -> str:
    """Return a table that scrolls in its own box, under its caption."""

    def kind(column: int, text: str = "") -> str:
        wrap = " wrap" if column and len(text) > WRAPPED_ABOVE else ""
        return f' class="text{wrap}"' if table.left(column) else ""

    names = (
        f'<th scope="col"{kind(column)}>{escape(str(name))}</th>'
        for column, name in enumerate(table.headers)
    )
    head = f"<thead><tr>{''.join(names)}</tr></thead>\n" if any(table.headers) else ""
    lines = []
    for number, ((name, _), *others) in enumerate(table.cells()):
        best = all((number, column) in table.bold for column in range(len(table.headers)))
        first = escape(name)
        if target := table.links.get(number):
            first = f'<a href="{escape(target)}">{first}</a>'
        cells = "".join(
            f"<td{kind(column, text)}>"
            + (f"<strong>{escape(text)}</strong>" if bold and not best else escape(text))
            + "</td>"
            for column, (text, bold) in enumerate(others, start=1)
        )
        lines.append(
            f'<tr{" class=best" if best else ""}><th scope="row"{kind(0)}>{first}</th>{cells}</tr>'
        )
    caption, body = escape(table.caption), "\n".join(lines)
    above = f'<p class="caption">{caption}</p>\n' if caption else ""
    box = f'<div class="scroll" role="region" tabindex="0" aria-label="{caption or "table"}">'
    return f"{above}{box}\n<table>\n{head}<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"


def to_csv(table: Table) -> str:
    """Return headers and rows as CSV."""
    buffer = io.StringIO()
    rows = [[cell(value) for value in row] for row in (table.headers, *table.rows)]
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
