"""A table as data, rendered as Markdown, HTML or LaTeX. Texts may contain `code` and **bold**."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

LONG = 24
"""Characters from which the text of a cell may wrap."""


@dataclass(frozen=True)
class Table:
    """Headers, rows of cells, and a caption, which Markdown and HTML show as a heading."""

    headers: Sequence[object]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[str(cell) for cell in row] for row in self.rows]

    @property
    def grouped(self) -> list[list[str]]:
        """The rows as text, with a name in the first column only where it changes."""
        names = [None, *(row[0] for row in self.cells)]
        return [
            ["" if row[0] == name else row[0], *row[1:]]
            for name, row in zip(names, self.cells, strict=False)
        ]

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which align left; numbers align right."""
        return column == 0 or any(re.search(r"[A-Za-z]{3}", row[column]) for row in self.cells)

    def wraps(self, column: int) -> bool:
        """Whether a column has texts that are long enough to wrap."""
        return column > 0 and any(len(row[column]) > LONG for row in self.cells)

    def to_markdown(self) -> str:
        """Return the table in Markdown, below its caption."""
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        body = "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
        return f"## {self.caption}\n\n{body}" if self.caption else body

    def to_html(self) -> str:
        """Return the table in a box that scrolls, below its caption."""
        columns = range(len(self.headers))
        looks = [
            ' class="text wrap"'
            if self.wraps(column)
            else ' class="text"'
            if self.is_text(column)
            else ""
            for column in columns
        ]

        def line(cells: Sequence[object], *, header: bool = False) -> str:
            tags = ["th" if header or column == 0 else "td" for column in columns]
            return "".join(
                f"<{tag}{look}>{to_html(str(cell))}</{tag}>"
                for tag, look, cell in zip(tags, looks, cells, strict=True)
            )

        body = "\n".join(f"<tr>{line(row)}</tr>" for row in self.grouped)
        heading = f"<h2>{to_html(self.caption)}</h2>\n" if self.caption else ""
        return (
            f'{heading}<div class="scroll" role="region" tabindex="0" aria-label="{escape(self.caption) or "table"}">\n'
            f"<table>\n<thead><tr>{line(self.headers, header=True)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
            "</table>\n</div>\n"
        )

    def to_latex(self, *, label: str = "", text: str = "") -> str:
        """Return a float with booktabs; `text` goes before the caption. Wide tables shrink to the line (adjustbox)."""
        kinds = "".join(
            WRAPPED if self.wraps(column) else "l" if self.is_text(column) else "r"
            for column in range(len(self.headers))
        )
        caption = " ".join(sentence(part) for part in (text, self.caption) if part)
        lines = [
            "\\begin{table}",
            "\\centering",
            "\\small",
            f"\\caption{{{to_latex(caption)}}}",
            *([f"\\label{{{label}}}"] if label else []),
            "\\begin{adjustbox}{max width=\\linewidth}",
            f"\\begin{{tabular}}{{{kinds}}}",
            "\\toprule",
            _latex_row(self.headers),
            "\\midrule",
            *map(_latex_row, self.grouped),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{adjustbox}",
            "\\end{table}",
        ]
        return "\n".join(lines)


PACKAGES = "% \\usepackage{adjustbox,array,booktabs}"
WRAPPED = ">{\\raggedright\\arraybackslash}p{3.5cm}"
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


def to_html(text: str) -> str:
    """Return a line of text in HTML."""
    marks = {"bold": "<b>{}</b>", "code": "<code>{}</code>", "plain": "{}"}
    return "".join(marks[kind].format(escape(piece)) for kind, piece in _inline(text))


def to_latex(text: str) -> str:
    """Return a line of text in LaTeX."""
    marks = {"bold": "\\textbf{%s}", "code": "\\texttt{%s}", "plain": "%s"}
    signs = re.compile("|".join(map(re.escape, SIGNS)))
    return "".join(
        marks[kind] % signs.sub(lambda sign: SIGNS[sign[0]], piece) for kind, piece in _inline(text)
    )


def sentence(text: str) -> str:
    """Return a text that ends in a full stop."""
    text = text.rstrip().removesuffix(":")
    return text if text.endswith(".") else f"{text}."


def _latex_row(cells: Sequence[object]) -> str:
    line = " & ".join(to_latex(str(cell)) for cell in cells) + " \\\\"
    return (
        f"{{}}{line}" if line.startswith(("[", "*")) else line
    )  # otherwise an argument of the \\ before it


def _inline(text: str) -> Iterator[tuple[str, str]]:
    for piece in re.split(r"(\*\*.+?\*\*|`.+?`)", text):
        if piece.startswith("**") and len(piece) > 4:
            yield "bold", piece[2:-2]
        elif piece.startswith("`") and len(piece) > 2:
            yield "code", piece[1:-1]
        elif piece:
            yield "plain", piece
