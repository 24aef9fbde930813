"""The report: one self-contained page about a run, or about a folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedaux.files import save_text

if TYPE_CHECKING:
    from fedaux.report.html import Parts


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory, or into a folder of them, and return its path.

    Raises ValueError if ``directory`` is neither, or has a file that cannot be read.
    """
    from fedaux.report.page import render  # imports matplotlib
    from fedaux.report.results import read_runs

    path = Path(directory) / "report.html"
    save_text(path, render(read_runs(directory)))  # atomic
    return path


def write_figures(directory: Path, out: Path) -> list[Path]:
    """Write every figure of the report into a folder, as PNG, SVG and PDF; return the files.

    Raises ValueError as :func:`write_report` does.
    """
    from fedaux.report.svg import UNDATED, save

    figures = _parts(directory).figures
    files = [Path(out) / f"{name}{kind}" for name in figures for kind in UNDATED]
    for file in files:
        save(figures[file.stem], file)
    return files


def write_tables(directory: Path, out: Path) -> list[Path]:
    """Write every table of the report into a folder, as CSV, LaTeX and Markdown; return the files.

    The numbers that the page offers as CSV are files, too: records.csv has a line for every run,
    method and seed. Raises ValueError as :func:`write_report` does.
    """
    from fedaux.report.latex import PACKAGES, to_latex
    from fedaux.report.tables import to_csv, to_markdown

    parts = _parts(directory)
    texts = {f"{name}.csv": to_csv(own) for name, own in (parts.tables | parts.numbers).items()}
    for name, own in parts.tables.items():
        texts[f"{name}.tex"] = f"{PACKAGES}\n{to_latex(own, label=f'tab:{name}')}\n"
        texts[f"{name}.md"] = f"{own.caption}\n\n{to_markdown(own)}"
    for name, text in texts.items():
        save_text(Path(out) / name, text)
    return [Path(out) / name for name in texts]


def _parts(directory: Path) -> Parts:
    from fedaux.report.html import collected
    from fedaux.report.page import render
    from fedaux.report.results import read_runs

    with collected() as parts:
        render(read_runs(directory))
    return parts
