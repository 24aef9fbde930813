"""`reproduce/results/README.md`: every result beside the printed figure, made from the files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from fedaux.files import save_text
from reproduce import published
from reproduce.cells import Cell, all_cells
from reproduce.results import FOLDER, is_current, read_all
from reproduce.studies import STUDIES

PAGE = FOLDER / "README.md"
INTRODUCTION = """# Results

Test accuracy in %: last round / maximum over rounds.
Where there are several seeds: mean ± standard deviation, and in brackets their number.
"printed" is the paper's figure.
Tiny-ImageNet at 32x32 is the public data where the paper has STL-10 or parts of ImageNet.
Every number comes from the files in this folder, which hold command, settings, commit and curve.
Written by `python -m reproduce --write`.
"""
OLD = "†"


def write() -> int:
    """Write the page; return the exit status."""
    save_text(PAGE, page())
    return 0


def check() -> int:
    """Return 1 if a results file belongs to no cell, or if the page is not what the files give."""
    names = {cell.name for cell in all_cells()}
    problems = [f"{FOLDER / name}.json: no such cell" for name in read_all(FOLDER).keys() - names]
    there = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if there != page():
        problems.append(f"{PAGE}: not what the results give; run python -m reproduce --write")
    print("\n".join(sorted(problems)) or "every number is in a results file", file=sys.stderr)
    return 1 if problems else 0


def page() -> str:
    """Return the page with all tables."""
    found = read_all(FOLDER)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in all_cells():
        if cell.name in found:
            groups.setdefault((cell.table, cell.block.label), []).append(cell)
    parts = [INTRODUCTION]
    for (table, block), cells in groups.items():
        parts.append(f"## {table}, {block}\n\n{_table(cells, found)}")
    if any(OLD in part for part in parts):
        parts.append(f"{OLD} of an earlier version of the method or its settings.\n")
    return "\n".join(parts)


def _table(cells: Sequence[Cell], found: Mapping[str, dict[str, Any]]) -> str:
    axis, used = STUDIES[cells[0].table].grid.columns, {cell.column.label for cell in cells}
    columns = [one.label for one in (*axis.values, *axis.ours) if one.label in used]
    rows = list(dict.fromkeys(cell.row.name for cell in cells))
    lines = [["", *(f"{label} | printed" for label in columns)], ["---"] * (1 + 2 * len(columns))]
    for row in rows:
        line = [f"`{row}`"]
        for column in columns:
            own = [cell for cell in cells if (cell.row.name, cell.column.label) == (row, column)]
            line += [_text(own, found), _printed(own)]
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(cells: Sequence[Cell], found: Mapping[str, dict[str, Any]]) -> str:
    """Return the last round and the maximum over the seeds of one place; the newer ones, if some
    are of an earlier version."""
    current = [cell for cell in cells if is_current(cell, found[cell.name])]
    curves = [found[cell.name]["accuracy"] for cell in current or cells]
    if not curves:
        return "–"
    ends = ([curve[-1] for curve in curves], [max(curve) for curve in curves])
    seeds = f" ({len(curves)})" if len(curves) > 1 else ""
    return " / ".join(map(_spread, ends)) + seeds + ("" if current else f" {OLD}")


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _printed(cells: Sequence[Cell]) -> str:
    if not cells:
        return "–"
    cell = cells[0]
    method = "fedaux" if cell.row.method == "fedaux+logits" else cell.row.method
    figure = published.printed(cell.table, cell.block.label, cell.column.label, method)
    return "–" if figure is None else figure.spaced
