"""The report: one self-contained page about a run, or about a folder of runs."""

from __future__ import annotations

from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory, or into a folder of them, and return its path.

    Raises ValueError if ``directory`` is neither, or holds a file that cannot be read.
    """
    from fedaux.files import save_text
    from fedaux.report.page import render  # matplotlib is loaded only when a report is asked for
    from fedaux.report.results import read_runs

    path = Path(directory) / "report.html"
    save_text(
        path, render(read_runs(directory))
    )  # a reader sees the old page or the new one, never half of it
    return path
