"""The report of a run, or of a folder of runs: figures and one self-contained page."""

from __future__ import annotations

from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory, or into a folder of them, and return its path.

    Raises ValueError if ``directory`` is neither, or holds a file that cannot be read.
    """
    from fedaux.report import folder_page, page, records  # drawing is loaded only when a report is asked for

    write = folder_page.write_report if records.is_folder(directory) else page.write_report
    return write(directory)
