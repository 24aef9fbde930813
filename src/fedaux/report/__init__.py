"""The report of a run: figures and one self-contained page."""

from __future__ import annotations

from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path (see :mod:`fedaux.report.page`)."""
    from fedaux.report import page  # drawing is loaded only when a report is asked for

    return page.write_report(directory)
