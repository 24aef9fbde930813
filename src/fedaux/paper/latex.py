"""The tables of an experiment's Markdown in LaTeX, with booktabs, to \\input into a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedaux.paper.document import LONG, Grid, Heading, Paragraph, inline, read, title_of

PACKAGES = "% \\usepackage{array,booktabs,graphicx}"
MOST_LINES = 44
"""Lines that fit a page; more tables become a float of their own."""
MOST_CHARACTERS = 76
"""Characters of a line at \\small; a wider table is made narrower as a whole."""
READABLE = 1.5
"""How many times too wide a table may be before its long texts are broken instead."""
LEAST_SHARE = 0.12
"""Of a line, for a column of long texts."""


@dataclass(frozen=True)
class Titled:
    """A table, the heading above it, and the text that says what it shows."""

    heading: str
    text: str
    grid: Grid


def render(markdown: str, *, label: str, notes: Sequence[str] = ()) -> str:
    """Return every table of a document; neighbours with the same columns share a float. Empty where there is none.

    ``notes`` are what differs from the paper; the first caption tells them.
    """
    blocks = list(read(markdown))
    title = title_of(blocks)
    tables: list[Titled] = []
    heading = text = ""
    for block in blocks:
        if isinstance(block, Heading):
            heading = block.text if block.level > 1 else ""
        elif isinstance(block, Paragraph):
            text = block.text
        elif isinstance(block, Grid):
            tables.append(Titled(heading, text, block))
            heading = text = ""
    floats = [
        _float(
            group,
            title=title,
            label=label if not number else f"{label}-{number + 1}",
            notes=() if number else notes,
        )
        for number, group in enumerate(_groups(tables))
    ]
    return "\n".join([PACKAGES, *floats, ""]) if floats else ""


def _groups(tables: Sequence[Titled]) -> list[list[Titled]]:
    """Return neighbours that have the same columns and no text between them, as many as fit a page."""
    groups: list[list[Titled]] = []
    lines = 0
    for table in tables:
        more = len(table.grid.rows) + 3
        alike = groups and groups[-1][0].grid.header[1:] == table.grid.header[1:] and not table.text
        if alike and lines + more <= MOST_LINES:
            groups[-1].append(table)
            lines += more
        else:
            # A float that goes on where the one before was full has the same to say.
            before = groups[-1][0].text if alike else ""
            groups.append([Titled(table.heading, table.text or before, table.grid)])
            lines = more
    return groups


def _float(group: Sequence[Titled], *, title: str, label: str, notes: Sequence[str]) -> str:
    """Return one float: the caption says what all its tables show, and the heading where there is one table."""
    said = [title, group[0].text]
    if len(group) == 1:
        said.insert(1, group[0].heading)
    if notes:
        said.append(f"What differs from the paper: {'; '.join(note.rstrip('.') for note in notes)}")
    caption = " ".join(_sentence(part) for part in said if part)
    columns, fits = _columns([table.grid for table in group])
    lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule"]
    for number, table in enumerate(group):
        if number:
            lines.append("\\midrule")
        if len(group) > 1 and table.heading:
            look = "l" if len(table.heading) < MOST_CHARACTERS / 2 else "p{0.9\\linewidth}"
            lines.append(f"\\multicolumn{{{len(table.grid.header)}}}{{{look}}}{{{tex(table.heading)}}} \\\\")
        lines += [_row(table.grid.header), "\\midrule"]
        before = ""
        for first, *rest in table.grid.rows:
            lines.append(_row(["" if first == before else first, *rest]))
            before = first
    lines += ["\\bottomrule", "\\end{tabular}"]
    if not fits:
        lines = ["\\resizebox{\\linewidth}{!}{%", *lines[:-1], f"{lines[-1]}}}"]
    start = ["\\begin{table}", "\\centering", "\\small", f"\\caption{{{tex(caption)}}}", f"\\label{{{label}}}"]
    return "\n".join([*start, *lines, "\\end{table}"])


def _columns(grids: Sequence[Grid]) -> tuple[str, bool]:
    """Return the columns of a tabular for tables of one width, and whether they fit a line, long texts broken."""
    numbers = range(len(grids[0].header))
    spans = [max(len(row[column]) for grid in grids for row in (grid.header, *grid.rows)) for column in numbers]
    long = [any(len(row[column]) > LONG for grid in grids for row in grid.rows) for column in numbers]
    gaps = 3 * len(spans)
    if sum(spans) + gaps <= READABLE * MOST_CHARACTERS:
        long = [False] * len(spans)
    narrow = sum(span for span, breaks in zip(spans, long, strict=True) if not breaks)
    share = max(LEAST_SHARE, (1 - (narrow + gaps) / MOST_CHARACTERS) / max(1, sum(long)))
    wide = f">{{\\raggedright\\arraybackslash}}p{{{share:.2f}\\linewidth}}"
    words = [any(grid.words()[column] for grid in grids) for column in numbers]
    columns = [wide if breaks else "l" if left else "r" for breaks, left in zip(long, words, strict=True)]
    fits = narrow + gaps <= MOST_CHARACTERS if not any(long) else share > LEAST_SHARE
    return "".join(columns), fits


def _row(cells: Sequence[str]) -> str:
    line = " & ".join(map(tex, cells)) + " \\\\"
    return f"{{}}{line}" if line.startswith(("[", "*")) else line  # what follows a \\ could be its argument


def _sentence(text: str) -> str:
    text = text.rstrip(":").rstrip()
    return text if text.endswith(".") else f"{text}."


SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"${sign}$" for sign in "<>|"},
    "±": r"$\pm$",
    "α": r"$\alpha$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "τ": r"$\tau$",
    "Σ": r"$\Sigma$",
    "²": "$^2$",
    "→": r"$\rightarrow$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "–": "--",
}
MARKS = {"bold": r"\textbf{%s}", "code": r"\texttt{%s}", "plain": "%s"}


def tex(text: str) -> str:
    """Return a line of Markdown in LaTeX."""
    pieces = [
        (kind, re.sub("|".join(map(re.escape, SIGNS)), lambda sign: SIGNS[sign[0]], t)) for kind, t in inline(text)
    ]
    return "".join(MARKS[kind].replace("%s", piece) for kind, piece in pieces)
