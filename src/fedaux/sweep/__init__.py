"""Sweeps: a grid of runs from one recipe, each in its own directory (docs/sweeps.md).

`sweep(expand(raw), out)` runs the cells that are not finished; `read_records(out)` is the table of
results.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedaux.report.results import group, read_records
    from fedaux.sweep.grid import Cell, axes_of, cells_of, expand
    from fedaux.sweep.runner import Outcome, SweepCallback, sweep

__all__ = [
    "Cell",
    "Outcome",
    "SweepCallback",
    "axes_of",
    "cells_of",
    "expand",
    "group",
    "read_records",
    "sweep",
]

_HOMES = {
    **dict.fromkeys(("Cell", "axes_of", "cells_of", "expand"), "fedaux.sweep.grid"),
    **dict.fromkeys(("Outcome", "SweepCallback", "sweep"), "fedaux.sweep.runner"),
    **dict.fromkeys(("group", "read_records"), "fedaux.report.results"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedaux.sweep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
