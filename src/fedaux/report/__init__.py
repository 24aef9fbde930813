"""The report: one self-contained page about a run, or about a folder of runs."""

from __future__ import annotations

from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory, or into a folder of them, and return its path.

    Raises ValueError if ``directory`` is neither, or has a file that cannot be read.
    """
    from fedaux.files import save_text
    from fedaux.report.page import render  # imports matplotlib
    from fedaux.report.results import read_runs

    path = Path(directory) / "report.html"
    save_text(path, render(read_runs(directory)))  # atomic
    return path


def write_figures(directory: Path, out: Path) -> list[Path]:
    """Write every figure of the report into a folder, as PNG, SVG and PDF; return the files.

    Raises ValueError as :func:`write_report` does.
    """
    from fedaux.report.html import collected_figures
    from fedaux.report.page import render
    from fedaux.report.results import read_runs
    from fedaux.report.svg import UNDATED, save

    with collected_figures() as figures:
        render(read_runs(directory))
    files = [Path(out) / f"{name}{kind}" for name in figures for kind in UNDATED]
    for file in files:
        save(figures[file.stem], file)
    return files
