"""Tables in LaTeX: every table of a document, with its text, in a form that LaTeX takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from latex_checks import check_latex

from fedaux.paper import latex, page
from fedaux.paper.writing import markdown_table

NASTY = "50 % & more_of {it} \\ #1 ~ ^ <a|b> $5"
SIGNS = "α ε δ λ μ σ τ Σ ² → × ∞ – ±"


def document(*tables: tuple[str, str, str]) -> str:
    """A document of tables, each with a heading, a text and a name of its first column."""
    parts = [f"# title: {NASTY}\n"]
    for heading, text, name in tables:
        parts += [f"## {heading}\n"] if heading else []
        parts += [f"{text}\n"] if text else []
        parts.append(
            markdown_table([name, "figure", "C = 0.4"], [["fedaux", "**best**", 1.5], ["fedaux", "last", "–"]])
        )
    return "\n".join(parts)


def test_signs_are_escaped_and_marks_become_commands() -> None:
    assert latex.tex("**71.2 ± 2.1**") == r"\textbf{71.2 $\pm$ 2.1}"
    assert latex.tex("`a_b` & 5 %") == r"\texttt{a\_b} \& 5 \%"
    assert latex.tex("\\") == r"\textbackslash{}"
    text = latex.render(document(("", f"{NASTY} {SIGNS}", "[first]")), label="tab:x")
    assert check_latex(text) == [3]
    assert "{}[first]" in text


def test_tables_with_the_same_columns_share_a_float_unless_a_page_is_full() -> None:
    tables = [("one", "says", "method"), ("two", "", "method"), ("three", "other text", "method")]
    text = latex.render(document(*tables), label="tab:x")
    assert check_latex(text) == [3, 3]
    first, second = text.split("\\end{table}")[:2]
    assert r"\multicolumn{3}{l}{one}" in first
    assert r"\multicolumn{3}{l}{two}" in first
    assert "says." in first
    assert r"\label{tab:x-2}" in second
    assert "three. other text." in second
    rows = [[f"m{number}", "best"] for number in range(40)]
    long = "\n".join(["# t\n", "says\n", markdown_table(["a", "b"], rows), markdown_table(["a", "b"], rows)])
    text = latex.render(long, label="tab:x")
    assert check_latex(text) == [2, 2]
    assert text.count("t. says.") == 2


def test_a_name_is_said_once_and_long_texts_are_broken() -> None:
    text = latex.render(document(("", "", "method")), label="tab:x")
    assert "\nfedaux & \\textbf{best} & 1.5 \\\\\n & last & -- \\\\\n" in text
    wide = markdown_table(["", "a", "b"], [["operations", "long words " * 8, "more words " * 8], ["x", "1", "2"]])
    text = latex.render(wide, label="tab:x")
    assert check_latex(text) == [3]
    assert text.count("p{0.") == 2
    assert "resizebox" not in text
    many = markdown_table([f"column {number}" for number in range(12)], [["0.123 ± 0.456"] * 12])
    assert "resizebox" in latex.render(many, label="tab:x")
    assert check_latex(latex.render(many, label="tab:x")) == [12]


def test_a_document_without_tables_has_no_latex() -> None:
    assert latex.render("# title\n\nwords\n", label="tab:x") == ""
    assert "<h1>title</h1>" in page.render("# title\n\nwords\n", {})


def test_an_empty_table_is_no_trouble() -> None:
    assert check_latex(latex.render(markdown_table(["a", "b"], []), label="tab:x")) == [2]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_takes_it(tmp_path: Path) -> None:
    wide = markdown_table(["", *"abcdefgh"], [["x", *(["long words " * 8] * 3), *(["0.123 ± 0.456"] * 5)]])
    many = markdown_table([f"column {number}" for number in range(12)], [["0.123 ± 0.456"] * 12])
    text = document(("one", f"{NASTY} {SIGNS}", "[a]"), ("two", "", "[b]")) + f"\n\n{wide}\n\n{many}"
    (tmp_path / "tables.tex").write_text(latex.render(text, label="tab:x"))
    packages = latex.PACKAGES.removeprefix("% ")
    (tmp_path / "paper.tex").write_text(
        f"\\documentclass{{article}}{packages}\\begin{{document}}\\input{{tables}}\\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").exists()
