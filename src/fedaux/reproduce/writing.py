"""What every experiment leaves behind: its figures as PNG and SVG, its numbers as JSON, its tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedaux.files import save_json, save_text
from fedaux.report import svg

# Okabe and Ito's palette, in the order in which the eye tells its colours apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Outcome:
    """What an experiment found, and the files it wrote."""

    numbers: Mapping[str, Any]
    markdown: str
    files: tuple[Path, ...]


def write(out: Path, name: str, *, numbers: Mapping[str, Any], markdown: str, figures: Mapping[str, Figure]) -> Outcome:
    """Write NAME.json, NAME.md and each figure as PNG and SVG into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.md", out / f"{name}.json"]
    save_text(written[0], markdown)
    save_json(written[1], numbers)
    for title, figure in figures.items():
        for ending in ("png", "svg"):
            written.append(out / f"{title}.{ending}")
            svg.save(figure, written[-1])
    return Outcome(numbers, markdown, tuple(written))


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def epsilon_name(epsilon: float) -> str:
    """Return epsilon as people write it."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"
