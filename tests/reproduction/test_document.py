"""Tables and documents: the same content as Markdown, HTML and LaTeX, in a form that LaTeX
accepts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.latex_checks import check_latex

from fedaux.report.latex import PACKAGES, latex_text, to_latex
from fedaux.report.tables import Table, to_html, to_markdown
from reproduce.document import Document, Items, html_text, write

NASTY = "50 % & more_of {it} \\ #1 ~ ^ <a|b> $5"
SIGNS = "α ε δ λ μ σ τ Σ ² → × ∞ – ±"


def small(*, name: str = "method", caption: str = "") -> Table:
    rows: list[list[object]] = [["fedaux", "best", 1.5], ["fedaux", "last", "–"]]
    return Table([name, "figure", "C = 0.4"], rows, caption=caption, bold={(0, 1)})


def wide() -> Table:
    return Table(
        ["", "a", "b"], [["operations", "long words " * 8, "more words " * 8], ["x", "1", "2"]]
    )


def test_signs_are_escaped_and_marks_become_commands() -> None:
    assert latex_text("**71.2 ± 2.1**") == r"\textbf{71.2 $\pm$ 2.1}"
    assert latex_text("`a_b` & 5 %") == r"\texttt{a\_b} \& 5 \%"
    assert latex_text("\\") == r"\textbackslash{}"
    assert html_text("**a** `<b>`") == "<b>a</b> <code>&lt;b&gt;</code>"
    text = to_latex(small(name="[first]", caption=f"{NASTY} {SIGNS}"), label="tab:x")
    assert check_latex(text) == [3]
    assert "{}[first]" in text


def test_a_table_has_three_renderers() -> None:
    table = small(caption="one")
    assert to_markdown(table) == (
        "| method | figure | C = 0.4 |\n| --- | --- | ---: |\n| fedaux | **best** | 1.5 |\n| "
        "fedaux | last | – |\n"
    )
    html = Document("title", {}, [table]).to_html()
    assert html.count("<h2>one</h2>") == html.count(">one<") == 1
    assert 'fedaux</th><td class="text"><strong>best</strong></td><td>1.5</td>' in html
    latex = to_latex(table, label="tab:x", text="title.")
    assert "\nfedaux & \\textbf{best} & 1.5 \\\\\n & last & -- \\\\\n" in latex
    assert r"\caption{title. one.}" in latex
    assert r"\begin{tabular}{llr}" in latex


def test_long_texts_wrap() -> None:
    latex = to_latex(wide(), label="tab:x")
    assert check_latex(latex) == [3]
    assert latex.count("p{") == 2
    assert to_html(wide()).count('<td class="text wrap">') == 2
    many = Table([f"column {number}" for number in range(12)], [["0.123 ± 0.456"] * 12])
    assert check_latex(to_latex(many, label="tab:x")) == [12]


def test_an_empty_table_is_accepted() -> None:
    assert check_latex(to_latex(Table(["a", "b"], []), label="tab:x")) == [2]
    assert "<tbody>" in to_html(Table(["a", "b"], []))


def test_a_document_is_written_in_every_form_with_its_notes(tmp_path: Path) -> None:
    document = Document(
        "title",
        {"x": 1},
        [Items(["found"]), "text one", small(), "text two", small(caption="second")],
    )
    outcome = write(document, tmp_path, "name", version="quick", notes=["changed: `a=1`"])
    assert [path.name for path in outcome.files] == [
        "name.html",
        "name.md",
        "name.json",
        "name.tex",
    ]
    assert outcome.markdown.startswith(
        "# name, quick version: title\n\n- found\n\ntext one\n\n| method |"
    )
    assert outcome.markdown.endswith("\n## What differs from the paper\n\n- changed: `a=1`.\n")
    assert outcome.numbers == {"x": 1, "version": "quick", "notes": ["changed: `a=1`"]}
    latex = (tmp_path / "name.tex").read_text()
    assert check_latex(latex) == [3, 3]
    first, second = latex.split("\\end{table}")[:2]
    assert r"text one. What differs from the paper: changed: \texttt{a=1}.}" in first
    assert "title. text two. second.}" in second
    assert r"\label{tab:name-2}" in second
    html = (tmp_path / "name.html").read_text()
    places = [
        html.index(text)
        for text in ("found", "text one", "fedaux", "text two", "second", "changed")
    ]
    assert places == sorted(places)


def test_a_document_without_tables_has_no_latex() -> None:
    document = Document("title", {}, ["words"])
    assert document.to_latex("tab:x") == ""
    assert "<h1>title</h1>" in document.to_html()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_accepts_it(tmp_path: Path) -> None:
    many = Table([f"column {number}" for number in range(12)], [["0.123 ± 0.456"] * 12])
    text = f"{NASTY} {SIGNS}"
    document = Document(
        text, {}, [text, small(name="[a]", caption="one"), small(name="[b]"), wide(), many]
    )
    (tmp_path / "tables.tex").write_text(document.to_latex("tab:x"))
    packages = PACKAGES.removeprefix("% ")
    (tmp_path / "paper.tex").write_text(
        f"\\documentclass{{article}}{packages}\\begin{{document}}\\input{{tables}}\\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").exists()
