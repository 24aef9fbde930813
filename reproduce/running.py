"""Run one cell, and write its results file."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaux.files import read_json
from reproduce import results
from reproduce.cells import Cell

UNFINISHED = 75
"""Exit status of a cell that stopped after a round, because its time was over."""


@dataclass(frozen=True)
class Work:
    """The places that runs read and write, and what holds for all of them."""

    data: Path
    state: Path
    out: Path
    commit: str
    overrides: tuple[str, ...] = ()
    pretrain: bool = False
    at_once: int = 1

    def folder(self, cell: Cell) -> Path:
        """Return the run directory of an unfinished cell."""
        return self.state / cell.name.replace("/", "-")


class TimeIsOver(Exception):
    """A run stops between two rounds."""


class Until:
    """A callback that stops a run when its time is over, before it starts another round."""

    def __init__(self, until: float | None) -> None:
        self._until = until
        self._round = 0

    def phase(self, task: object, round: int, name: str) -> None:
        """Stop before the first phase of a round; the rounds before are saved."""
        if round > self._round and self._until is not None and time.time() > self._until:
            raise TimeIsOver
        self._round = round

    def round(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""


def run_one(cell: Cell, work: Work, *, until: float | None = None) -> int:
    """Run a cell from its last saved round; return the exit status."""
    import fedaux

    folder = work.folder(cell)
    if why := cell.missing(work.data, pretrain=work.pretrain):
        raise ValueError(f"{cell.name}: missing: {why}")
    experiment = cell.experiment(work.data, work.overrides)
    try:
        fedaux.run(experiment, out=folder, resume=True, callback=Until(until), progress=False)
    except TimeIsOver:
        return UNFINISHED
    results.save(cell, work.out, result_of(cell, work))
    shutil.rmtree(folder)
    return 0


def result_of(cell: Cell, work: Work) -> dict[str, Any]:
    """Return the content of the results file of a finished run."""
    folder = work.folder(cell)
    (state,) = (read_json(file) for file in folder.glob("cells/*/state.json"))
    environment = read_json(folder / "environment.json")
    spent = [state["preparation"]["seconds"], *(row["seconds"] for row in state["rows"])]
    return {
        "cell": cell.name,
        "label": [cell.block.label, cell.column.label, cell.row.name],
        "command": cell.command(),
        "settings": cell.settings(work.overrides),
        "edition": cell.edition,
        "data": cell.data,
        "public": cell.public,
        "h0": _h0_of(cell, work, state),
        "commit": work.commit,
        "device": environment["device"],
        "versions": {key: environment[key] for key in ("fedaux", "torch", "python", "precision")},
        "seconds": round(sum(sum(phases.values()) for phases in spent), 1),
        "side_by_side": work.at_once,
        "accuracy": [round(100 * row["accuracy"], 2) for row in state["rows"]],
    }


def _h0_of(cell: Cell, work: Work, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 digest of the file of h0, or of trained ones the digest of the weights."""
    file = cell.checkpoint(work.data)
    if not file.is_file():
        return dict(state["frozen"])
    with file.open("rb") as stream:
        return {cell.h0: hashlib.file_digest(stream, "sha256").hexdigest()}
