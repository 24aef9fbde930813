"""The result of an experiment and its files: a page, Markdown, LaTeX tables, numbers and
figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from fedaux.config import Experiment
from fedaux.files import save_json, save_text
from fedaux.formatting import mean_and_deviation
from fedaux.report import html, svg, tables
from fedaux.report.latex import PACKAGES, pieces, sentence, to_latex
from fedaux.report.tables import Table

# Okabe and Ito's palette, most distinct colours first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
Version = Literal["quick", "paper", "own"]
"""On embedded data, on the paper's recipe and data, or on the user's own recipe."""


@dataclass(frozen=True)
class Context:
    """The base of an experiment, and the folder of its runs."""

    out: Path
    experiment: Experiment
    version: Version = "own"
    sweeping: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `fedaux.sweep.sweep`."""
    on_line: Callable[[str], None] = print
    """Called with a line of progress."""


@dataclass(frozen=True)
class Items:
    """A bullet list with an optional heading."""

    items: Sequence[str]
    heading: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure, its caption, and its numbers, which the page offers as CSV."""

    figure: Figure
    caption: str
    numbers: Table


@dataclass(frozen=True)
class Document:
    """The result of an experiment: numbers, and the paragraphs, lists, tables and figures that
    show them."""

    title: str
    numbers: Mapping[str, Any]
    parts: Sequence[str | Items | Table]
    figures: Mapping[str, Drawing] = field(default_factory=dict)

    def to_markdown(self) -> str:
        """Return the text and tables in Markdown."""
        parts = [f"# {self.title}\n"]
        for part in self.parts:
            if isinstance(part, Table):
                heading = f"## {part.caption}\n\n" if part.caption else ""
                parts.append(heading + tables.to_markdown(part))
            elif isinstance(part, Items):
                heading = f"## {part.heading}\n\n" if part.heading else ""
                parts.append(heading + "".join(f"- {item}\n" for item in part.items))
            else:
                parts.append(f"{part}\n")
        return "\n".join(parts)

    def to_html(self) -> str:
        """Return one self-contained page; figures stand before the first table or heading."""
        before: list[str] = [f"<h1>{html_text(self.title)}</h1>\n"]
        after: list[str] = []
        for part in self.parts:
            if isinstance(part, Table):
                heading = f"<h2>{html_text(part.caption)}</h2>\n" if part.caption else ""
                after.append(heading + tables.to_html(replace(part, caption="")))
            elif isinstance(part, Items):
                heading = f"<h2>{html_text(part.heading)}</h2>\n" if part.heading else ""
                items = "".join(f"<li>{html_text(item)}</li>\n" for item in part.items)
                (after if after or heading else before).append(f"{heading}<ul>\n{items}</ul>\n")
            else:
                (after or before).append(f"<p>{html_text(part)}</p>\n")
        drawn = [
            html.picture(shown.figure, f"figure{number}", shown.caption, shown.numbers, name=name)
            for number, (name, shown) in enumerate(self.figures.items())
        ]
        return html.document(self.title, "".join([*before, *drawn, *after]))

    def to_latex(self, label: str, *, notes: Sequence[str] = ()) -> str:
        """Return every table as a float, captioned with the title and the text above it; empty if
        there is none.

        The first caption also states `notes`, what differs from the paper.
        """
        floats: list[str] = []
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text = part
            elif isinstance(part, Table):
                first = not floats
                stated = [
                    self.title,
                    text,
                    f"What differs from the paper: {'; '.join(notes)}" if first and notes else "",
                ]
                name = label if first else f"{label}-{len(floats) + 1}"
                floats.append(
                    to_latex(part, label=name, text=" ".join(map(sentence, filter(None, stated))))
                )
                text = ""
        return "\n".join([PACKAGES, *floats, ""]) if floats else ""


@dataclass(frozen=True)
class Outcome:
    """The numbers of an experiment, and the files it wrote."""

    numbers: Mapping[str, Any]
    markdown: str
    files: tuple[Path, ...]


def write(
    document: Document, out: Path, name: str, *, version: Version = "own", notes: Sequence[str] = ()
) -> Outcome:
    """Write NAME.html, NAME.md, NAME.json, the tables as NAME.tex, and each figure as PNG and SVG
    into `out`.

    `notes` are differences from the paper; every file except the figures states them.
    """
    parts = list(document.parts)
    if notes and not any(isinstance(part, Items) and part.heading == DIFFERS for part in parts):
        parts.append(Items([sentence(note) for note in notes], DIFFERS))
    title = f"{name}{', quick version' if version == 'quick' else ''}: {document.title}"
    numbers = {**document.numbers, "version": version, "notes": list(notes)}
    document = Document(title, numbers, parts, document.figures)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.html", out / f"{name}.md", out / f"{name}.json"]
    for figure, drawing in document.figures.items():
        for ending in ("png", "svg"):
            written.append(out / f"{figure}.{ending}")
            svg.save(drawing.figure, written[-1])
    markdown = document.to_markdown()
    save_text(
        written[0], document.to_html()
    )  # after the figures: a second drawing moves them slightly
    save_text(written[1], markdown)
    save_json(written[2], numbers)
    if tables := document.to_latex(f"tab:{name}", notes=notes):
        written.append(out / f"{name}.tex")
        save_text(written[-1], tables)
    return Outcome(numbers, markdown, tuple(written))


def html_text(text: str) -> str:
    """Return a line of text in HTML."""
    marks = {"bold": "<b>{}</b>", "code": "<code>{}</code>", "plain": "{}"}
    return "".join(marks[kind].format(escape(piece)) for kind, piece in pieces(text))


DIFFERS = "What differs from the paper"


def unfinished(lines: Sequence[str]) -> list[Items]:
    """Return a list of the runs without a result, if there are any."""
    return [Items([f"`{line}`" for line in lines], "Runs without a result")] if lines else []


def seeds_text(seeds: Sequence[int]) -> str:
    """Return a description of the seeds of a number."""
    over = "mean ± standard deviation over seeds" if len(seeds) > 1 else "seed"
    return f"{over} {', '.join(map(str, seeds))}"


def epsilon_text(epsilon: float | str) -> str:
    """Return "ε = 0.5"."""
    return "ε = ∞" if math.isinf(float(epsilon)) else f"ε = {float(epsilon):g}"


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Return mean, standard deviation (n - 1; None for one value) and the values; None if there
    is none."""
    listed = [round(value, 6) for value in values]
    if not listed:
        return None
    deviation = statistics.stdev(listed) if len(listed) > 1 else None
    return {"mean": statistics.fmean(listed), "deviation": deviation, "values": listed}


def spread_text(value: Mapping[str, Any] | None, *, scale: float = 1) -> str:
    """Return "71.2 ± 2.1", the mean alone for one seed, or a dash."""
    return (
        "–" if value is None else mean_and_deviation(value["mean"], value["deviation"], scale=scale)
    )
