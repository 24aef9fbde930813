"""Tables and documents: the same content as Markdown, HTML and LaTeX, in a form that LaTeX accepts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.latex_checks import check_latex

from fedaux.paper import tables
from fedaux.paper.document import Document, Items, write
from fedaux.paper.tables import Table

NASTY = "50 % & more_of {it} \\ #1 ~ ^ <a|b> $5"
SIGNS = "α ε δ λ μ σ τ Σ ² → × ∞ – ±"


def small(*, name: str = "method", caption: str = "") -> Table:
    return Table(
        [name, "figure", "C = 0.4"], [["fedaux", "**best**", 1.5], ["fedaux", "last", "–"]], caption
    )


def wide() -> Table:
    return Table(
        ["", "a", "b"], [["operations", "long words " * 8, "more words " * 8], ["x", "1", "2"]]
    )


def test_signs_are_escaped_and_marks_become_commands() -> None:
    assert tables.to_latex("**71.2 ± 2.1**") == r"\textbf{71.2 $\pm$ 2.1}"
    assert tables.to_latex("`a_b` & 5 %") == r"\texttt{a\_b} \& 5 \%"
    assert tables.to_latex("\\") == r"\textbackslash{}"
    assert tables.to_html("**a** `<b>`") == "<b>a</b> <code>&lt;b&gt;</code>"
    text = small(name="[first]", caption=f"{NASTY} {SIGNS}").to_latex(label="tab:x")
    assert check_latex(text) == [3]
    assert "{}[first]" in text


def test_a_table_has_three_renderers() -> None:
    table = small(caption="one")
    assert table.to_markdown() == (
        "## one\n\n| method | figure | C = 0.4 |\n| --- | --- | --- |\n"
        "| fedaux | **best** | 1.5 |\n| fedaux | last | – |\n"
    )
    html = table.to_html()
    assert html.startswith("<h2>one</h2>")
    assert '<th class="text">fedaux</th><td class="text"><b>best</b></td><td>1.5</td>' in html
    assert html.count("fedaux") == 1, "a name is not repeated"
    latex = table.to_latex(label="tab:x", text="title.")
    assert "\nfedaux & \\textbf{best} & 1.5 \\\\\n & last & -- \\\\\n" in latex
    assert r"\caption{title. one.}" in latex
    assert r"\begin{tabular}{llr}" in latex


def test_long_texts_wrap() -> None:
    latex = wide().to_latex(label="tab:x")
    assert check_latex(latex) == [3]
    assert latex.count("p{") == 2
    assert wide().to_html().count('<td class="text wrap">') == 4
    many = Table([f"column {number}" for number in range(12)], [["0.123 ± 0.456"] * 12])
    assert check_latex(many.to_latex(label="tab:x")) == [12]


def test_an_empty_table_is_accepted() -> None:
    assert check_latex(Table(["a", "b"], []).to_latex(label="tab:x")) == [2]
    assert "<tbody>" in Table(["a", "b"], []).to_html()


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
    packages = tables.PACKAGES.removeprefix("% ")
    (tmp_path / "paper.tex").write_text(
        f"\\documentclass{{article}}{packages}\\begin{{document}}\\input{{tables}}\\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").exists()
