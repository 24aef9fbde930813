"""Tables of printed and measured figures, and how Markdown writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedaux.paper.running import CENTRAL

PRINTED, BEST, LAST, APART = "published", "best round", "last round", "best less published"


@dataclass(frozen=True)
class Text:
    """A cell of a table: what it says, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A line of a table: what it is about, which kind of figure, and its cells."""

    name: str
    kind: str
    cells: tuple[Text, ...]


@dataclass(frozen=True)
class Table:
    """A table with a title, its columns after the first two, and its lines."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    heads: tuple[str, str] = ("method", "figure")


def block_tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Return a table a block: for each method the printed figure, the best round and the last one."""
    tables = []
    for block in numbers["blocks"]:
        rows = [row for row in numbers["rows"] if row["block"] == block and row["method"] != CENTRAL]
        at = {(row["method"], row["column"]): row for row in rows}
        lines = []
        for method in numbers["methods"]:
            cells = [at.get((method, column)) for column in numbers["columns"]]
            if any(row and row["published"] for row in cells) and not numbers["quick"]:
                lines.append(_line(method, PRINTED, cells, rows))
            for kind, key in ((BEST, "best"), (LAST, "last")):
                if any(row and row[key] for row in cells) and (numbers["rounds"] > 1 or key == "best"):
                    lines.append(_line(method, kind, cells, rows))
            apart = [None if row is None else difference(row) for row in cells]
            if not numbers["quick"] and any(gap is not None for gap in apart):
                texts = tuple(Text("–" if gap is None else f"{gap:+.1f}") for gap in apart)
                lines.append(Line(method, APART, texts))
        tables.append(Table(block, tuple(numbers["columns"]), tuple(lines)))
    central = [row for row in numbers["rows"] if row["method"] == CENTRAL and row["best"]]
    if central:
        lines = [Line(row["block"], kind, (Text(figure(row[key])),)) for row in central for kind, key in KINDS]
        tables.append(Table("All data in one place", ("accuracy",), tuple(lines), heads=("network", "figure")))
    return tables


KINDS = ((BEST, "best"), (LAST, "last"))


def _line(method: str, kind: str, cells: Sequence[Mapping[str, Any] | None], rows: Sequence[Mapping[str, Any]]) -> Line:
    return Line(method, kind, tuple(_text(row, kind, rows) for row in cells))


def _text(row: Mapping[str, Any] | None, kind: str, rows: Sequence[Mapping[str, Any]]) -> Text:
    key = {PRINTED: "published", BEST: "best", LAST: "last"}[kind]
    if row is None or row[key] is None:
        return Text("–")
    peers = [other[key]["mean"] for other in rows if other["column"] == row["column"] and other[key] is not None]
    best = len(peers) > 1 and row[key]["mean"] >= max(peers)
    return Text(row[key]["text"] if kind == PRINTED else figure(row[key]), best)


def difference(row: Mapping[str, Any]) -> float | None:
    """Return measured less printed accuracy of the best round, in points."""
    if row["best"] is None or row["published"] is None:
        return None
    return float(row["best"]["mean"] - row["published"]["mean"])


def figure(value: Mapping[str, Any] | None) -> str:
    """Return mean ± deviation in %, the mean alone for one seed."""
    if value is None:
        return "–"
    return f"{value['mean']:.1f}" + ("" if value["deviation"] is None else f" ± {value['deviation']:.1f}")


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    rows = [
        [line.name, line.kind, *(f"**{cell.text}**" if cell.best else cell.text for cell in line.cells)]
        for line in table.lines
    ]
    lines = [[*table.heads, *table.columns], ["---"] * (2 + len(table.columns)), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
