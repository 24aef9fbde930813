"""Tables and text in LaTeX. Text may contain `code` and **bold**."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fedaux.report.tables import Table

WRAPPED_ABOVE = 24
"""Number of characters above which the text of a cell may wrap."""
PACKAGES = "% \\usepackage{adjustbox,array,booktabs}"
WRAPPED_COLUMN = ">{\\raggedright\\arraybackslash}p{3.5cm}"
SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"${sign}$" for sign in "<>|"},
    "±": r"$\pm$",
    "†": r"$^\dagger$",
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


def to_latex(table: Table, *, label: str = "", text: str = "") -> str:
    """Return a float with booktabs; `text` goes before the caption. Wide tables shrink (adjustbox).

    Repeated names in the first column are left out.
    """
    rows = [[text for text, _ in row] for row in table.cells()]
    kinds = ""
    for column in range(len(table.headers)):
        wraps = column > 0 and any(len(row[column]) > WRAPPED_ABOVE for row in rows)
        kinds += WRAPPED_COLUMN if wraps else "l" if table.left(column) else "r"
    lines, before = [], None
    for row in table.cells():
        texts = [f"**{text}**" if bold and text else text for text, bold in row]
        lines.append(_row(["" if texts[0] == before else texts[0], *texts[1:]]))
        before = texts[0]
    caption = " ".join(sentence(part) for part in (text, table.caption) if part)
    return "\n".join(
        [
            "\\begin{table}",
            "\\centering",
            "\\small",
            f"\\caption{{{latex_text(caption)}}}",
            *([f"\\label{{{label}}}"] if label else []),
            "\\begin{adjustbox}{max width=\\linewidth}",
            f"\\begin{{tabular}}{{{kinds}}}",
            "\\toprule",
            _row(table.headers),
            "\\midrule",
            *lines,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{adjustbox}",
            "\\end{table}",
        ]
    )


def latex_text(text: str) -> str:
    """Return a line of text in LaTeX."""
    marks = {"bold": "\\textbf{%s}", "code": "\\texttt{%s}", "plain": "%s"}
    signs = re.compile("|".join(map(re.escape, SIGNS)))
    return "".join(
        marks[kind] % signs.sub(lambda sign: SIGNS[sign[0]], piece) for kind, piece in pieces(text)
    )


def sentence(text: str) -> str:
    """Return a text that ends in a full stop."""
    text = text.rstrip().removesuffix(":")
    return text if text.endswith(".") else f"{text}."


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a text, each "bold", "code" or "plain"."""
    for piece in re.split(r"(\*\*.+?\*\*|`.+?`)", text):
        if piece.startswith("**") and len(piece) > 4:
            yield "bold", piece[2:-2]
        elif piece.startswith("`") and len(piece) > 2:
            yield "code", piece[1:-1]
        elif piece:
            yield "plain", piece


def _row(cells: Sequence[object]) -> str:
    line = " & ".join(latex_text(" ".join(str(cell).split("\n"))) for cell in cells) + " \\\\"
    # Otherwise it would be an argument of the \\\\ before it.
    return f"{{}}{line}" if line.startswith(("[", "*")) else line
