"""What an experiment leaves behind: a page, tables in Markdown and LaTeX, numbers in JSON, figures as PNG and SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedaux.files import save_json, save_text
from fedaux.paper import latex, page
from fedaux.paper.page import Drawing
from fedaux.report import svg

# Okabe and Ito's palette, in the order in which the eye tells its colours apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DIFFERS = "## What differs from the paper"
Version = Literal["quick", "paper", "own"]
"""What an experiment is based on: embedded data, the paper's recipe on your data, or a recipe of one's own."""
TITLES: Mapping[Version, str] = {"quick": ", quick version", "paper": "", "own": ""}
"""What a title says of it."""


@dataclass(frozen=True)
class Outcome:
    """What an experiment found, and the files it wrote."""

    numbers: Mapping[str, Any]
    markdown: str
    files: tuple[Path, ...]


def write(
    out: Path,
    name: str,
    *,
    numbers: Mapping[str, Any],
    markdown: str,
    figures: Mapping[str, Drawing],
    notes: Sequence[str] = (),
) -> Outcome:
    """Write NAME.html, NAME.md, NAME.json, the tables as NAME.tex, and each figure as PNG and SVG into ``out``.

    ``notes`` are what differs from the paper in what was run; they stand in all of them but the figures.
    """
    if notes and DIFFERS not in markdown:
        markdown = "\n".join([markdown, DIFFERS, "", *(f"- {sentence(note)}" for note in notes), ""])
    numbers = {**numbers, "notes": list(notes)}
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.html", out / f"{name}.md", out / f"{name}.json"]
    for title, drawing in figures.items():
        for ending in ("png", "svg"):
            written.append(out / f"{title}.{ending}")
            svg.save(drawing.figure, written[-1])
    save_text(written[0], page.render(markdown, figures))  # last: drawing a figure again moves it by a hair
    save_text(written[1], markdown)
    save_json(written[2], numbers)
    if tables := latex.render(markdown, label=f"tab:{name}", notes=notes):
        written.append(out / f"{name}.tex")
        save_text(written[-1], tables)
    return Outcome(numbers, markdown, tuple(written))


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def sentence(text: str) -> str:
    """Return a text that ends like a sentence."""
    return text if text.endswith(".") else f"{text}."


def unfinished_section(lines: Sequence[str]) -> str:
    """Return the section that names the runs without a result; nothing where there are none."""
    return "\n".join(["", "## Runs without a result", "", *(f"- `{line}`" for line in lines), ""]) if lines else ""


def epsilon_name(epsilon: float) -> str:
    """Return epsilon as people write it."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Return mean, standard deviation (n - 1; None for one value) and the values; None where there is none."""
    listed = [round(value, 6) for value in values]
    if not listed:
        return None
    deviation = statistics.stdev(listed) if len(listed) > 1 else None
    return {"mean": statistics.fmean(listed), "deviation": deviation, "values": listed}
