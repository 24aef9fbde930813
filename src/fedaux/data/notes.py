"""What loading data found: skipped rows and warnings, printed once and kept for the run
directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

MOST_REASONS = 20
"""Number of reasons kept per place."""


@dataclass
class Notes:
    """Skipped rows and warnings, in the order in which they were found."""

    skipped: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of data.json."""
        return {"skipped": self.skipped, "warnings": self.warnings}


_current: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextmanager
def collected() -> Iterator[Notes]:
    """Collect the notes of everything that is loaded in this context."""
    notes = Notes()
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def skip(name: str, *, skipped: int, rows: int, reasons: Sequence[str], setting: str) -> None:
    """Print and keep how many rows of a place were skipped; `setting` allowed it."""
    say(f"{name}: skipped {skipped} of {rows} rows, first: {reasons[0]}")
    if (notes := _current.get()) is not None:
        found = {"place": name, "setting": setting, "skipped": skipped, "rows": rows}
        entry = found | {"reasons": list(reasons[:MOST_REASONS])}
        if entry not in notes.skipped:
            notes.skipped.append(entry)


def warn(message: str) -> None:
    """Print a warning and keep it; the same one only once in a context."""
    notes = _current.get()
    if notes is not None:
        if message in notes.warnings:
            return
        notes.warnings.append(message)
    say(f"Warning: {message}")


def say(line: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
