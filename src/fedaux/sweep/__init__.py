"""Sweeps: a grid of runs from one recipe, each in a directory of its own (docs/sweeps.md).

`sweep(expand(raw), out)` runs what is not finished yet, in parallel where asked; `read_records(out)` is the table of
all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedaux.report.results import group, read_records
    from fedaux.sweep.grid import Cell, axes_of, cells_of, expand
    from fedaux.sweep.runner import Callback, Outcome, sweep

__all__ = [
    "Callback",
    "Cell",
    "Outcome",
    "axes_of",
    "cells_of",
    "expand",
    "group",
    "read_records",
    "sweep",
]

_HOMES = {
    **dict.fromkeys(("Cell", "axes_of", "cells_of", "expand"), "fedaux.sweep.grid"),
    **dict.fromkeys(("Outcome", "Callback", "sweep"), "fedaux.sweep.runner"),
    **dict.fromkeys(("group", "read_records"), "fedaux.report.results"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedaux.sweep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
