"""Running a sweep: worker processes take cells until all are finished; what is finished is never run again.

sweep.json     the swept keys, and the name and settings of every cell, with the reason where one failed
CELL/          an ordinary run directory
logs/CELL.log  what was printed while the cell ran
report.html    the page of all cells
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fedaux.config import DEVICE_PATTERN, PATTERN_MEANING, ConfigError
from fedaux.files import read_json, save_json
from fedaux.recipes import load_experiment
from fedaux.report import write_report
from fedaux.running.run_directory import locked, refuse_other_experiment
from fedaux.sweep.grid import Cell
from fedaux.sweep.processes import PATIENCE, Here, Seat
from fedaux.sweep.team import Events, Work, Worker, serve
from fedaux.sweep.worker import input_keys

FORMAT = 1


class Callback(Protocol):
    """Someone who looks at a sweep; called from the thread that runs it."""

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        """The cells of the sweep, those finished before, and how many rounds of each were played before."""

    def started(self, cell: Cell) -> None:
        """A worker begins or continues a cell."""

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """A cell has finished a round, or is in a phase of one: `event["event"]` says which."""

    def moved(self, cell: Cell, reason: str) -> None:
        """A cell has lost its worker, for a reason, and waits for another one."""

    def ended(self, cell: Cell, reason: str | None) -> None:
        """A cell is finished or, where there is a reason, has failed."""


class NullCallback:
    """A callback that does not look."""

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        """Do nothing."""

    def started(self, cell: Cell) -> None:
        """Do nothing."""

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """Do nothing."""

    def moved(self, cell: Cell, reason: str) -> None:
        """Do nothing."""

    def ended(self, cell: Cell, reason: str | None) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended: the names of the cells by what became of them."""

    directory: Path
    finished: tuple[str, ...]
    failed: Mapping[str, str]
    """With the reason."""
    waiting: tuple[str, ...]
    """Not started, for the time limit."""

    @property
    def complete(self) -> bool:
        """Whether every cell is finished."""
        return not self.failed and not self.waiting


def sweep(
    cells: Sequence[Cell],
    out: Path | str,
    *,
    name: str | None = None,
    resume: bool = False,
    devices: Sequence[str] = (),
    jobs: int | None = None,
    cluster: str | None = None,
    time_limit: float | None = None,
    callback: Callback | None = None,
) -> Outcome:
    """Run every cell that is not finished into OUT/CELL, several at a time, and write the report of all.

    There are `jobs` workers, spread over `devices`, by default one a device; or over the machines of the Ray cluster at
    the address `cluster`, by default one a GPU or, without GPUs, a machine. A cell that fails is recorded and the
    others go on; one that loses its machine goes to another. Within `time_limit` seconds no cell is begun that will not
    be finished by then, judging by those before. Raises ConfigError or ValueError before anything runs where cells
    cannot be run in this place.
    """
    if cluster is not None and devices:
        raise ValueError(
            f"devices = {', '.join(devices)}: on a cluster Ray gives each worker its device; leave it out"
        )
    path = Path(out) if cluster is None else Path(out).resolve()
    places = _places(devices, jobs)
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time limit = {time_limit}: should be greater than 0 seconds")
    _check_place(path, resume=resume)
    path.mkdir(parents=True, exist_ok=True)
    with _held(path) as lock:
        _refuse_other_cells(path, cells)
        done = {cell.name: rounds_done(path / cell.name) for cell in cells}
        finished = [cell.name for cell in cells if is_finished(path / cell.name, cell)]
        left = neighbours([cell for cell in cells if cell.name not in finished])
        with _seats(path, places, lock=lock, cluster=cluster, jobs=jobs, most=len(left)) as seats:
            record = _Record(path, name or path.name, cells)
            callback = callback or NullCallback()
            callback.planned(cells, finished=finished, done=done)
            work = Work(left, done=done, time_limit=time_limit, may_return=cluster is not None)
            team = [Worker(path, seat) for seat in seats]
            try:
                _run(work, team, record, callback, finished)
            finally:
                for worker in team:
                    worker.close()
        write_report(path)
    waiting = tuple(cell.name for cell in work.left)
    return Outcome(path, tuple(finished), record.failed, waiting)


@contextmanager
def _seats(
    path: Path,
    devices: Sequence[str | None],
    *,
    lock: IO[str],
    cluster: str | None,
    jobs: int | None,
    most: int,
) -> Iterator[Sequence[Seat]]:
    """Yield as many places for workers as there is work for, on this machine or on a cluster."""
    if not most or cluster is None:
        yield [
            Here(path, device, lock=lock.fileno(), at_once=len(devices))
            for device in devices[:most]
        ]
    else:
        from fedaux.sweep import cluster as distant

        with distant.seats(cluster, root=path, jobs=jobs, most=most) as seats:
            yield seats


def neighbours(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells in an order that lets one process keep data, then models, for as many as possible in a row."""
    first: dict[str | tuple[str, str], int] = {}

    def places(cell: Cell) -> tuple[int, int]:
        data, models = input_keys(cell.experiment)
        return first.setdefault(data, len(first)), first.setdefault((data, models), len(first))

    return sorted(cells, key=places)


def is_finished(directory: Path, cell: Cell) -> bool:
    """Whether a directory holds the complete run of a cell."""
    try:
        summary = read_json(directory / "summary.json")
        return bool(summary["complete"]) and summary["config_sha256"] == cell.experiment.sha256()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def rounds_done(directory: Path) -> int:
    """Return how many rounds of all methods and seeds a run directory holds."""
    return sum(read_json(state)["round"] for state in directory.glob("cells/*/state.json"))


class _Record:
    """sweep.json, which keeps the cells of earlier calls too."""

    def __init__(self, path: Path, name: str, cells: Sequence[Cell]) -> None:
        self._file = path / "sweep.json"
        before = read_json(self._file) if self._file.exists() else {"keys": [], "cells": []}
        rows = {row["name"]: row | {"failed": None} for row in before["cells"]}
        rows |= {
            cell.name: {"name": cell.name, "settings": dict(cell.settings), "failed": None}
            for cell in cells
        }
        keys = [*before["keys"], *(key for cell in cells for key in cell.settings)]
        self._table = {
            "format": FORMAT,
            "name": name,
            "keys": list(dict.fromkeys(keys)),
            "cells": list(rows.values()),
        }
        self._rows = rows
        self.failed: dict[str, str] = {}
        save_json(self._file, self._table)

    def fail(self, cell: Cell, reason: str) -> None:
        """Write down why a cell failed."""
        self.failed[cell.name] = self._rows[cell.name]["failed"] = reason
        save_json(self._file, self._table)


def _run(
    work: Work, team: Sequence[Worker], record: _Record, callback: Callback, finished: list[str]
) -> None:
    """Let each worker take cells until none is left; everything that is told is told by this thread."""
    events: Events = queue.SimpleQueue()
    for worker in team:
        threading.Thread(target=serve, args=(worker, work, events), daemon=True).start()

    def end(cell: Cell, reason: str | None) -> None:
        if reason is None:
            finished.append(cell.name)
        else:
            record.fail(cell, reason)
        callback.ended(cell, reason)

    at_work = len(team)
    while at_work:
        item = events.get()
        if item is None:
            at_work -= 1
            continue
        cell, event = item
        if event["event"] == "started":
            callback.started(cell)
        elif event["event"] == "moved":
            callback.moved(cell, event["reason"])
        elif event["event"] == "ended":
            end(cell, event["reason"])
        else:
            callback.progressed(cell, event)
    if all(worker.gone for worker in team):
        for cell in work.left:
            end(cell, "no machine is left that could run it")
        work.left.clear()


def _places(devices: Sequence[str], jobs: int | None) -> list[str | None]:
    """Return the device of each worker; None leaves it to the recipe."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs = {jobs}: should be at least 1")
    for device in devices:
        if not re.match(DEVICE_PATTERN, device):
            raise ValueError(f"devices = {device!r}: {PATTERN_MEANING[DEVICE_PATTERN]}")
        if device.startswith("cuda"):
            import torch

            index, found = int(device.partition(":")[2] or 0), torch.cuda.device_count()
            if index >= found:
                raise ValueError(
                    f"devices = {device!r}: torch finds {found or 'no'} CUDA devices here"
                )
    number = jobs or len(devices) or 1
    if devices and number < len(devices):
        raise ValueError(
            f"jobs = {number}: should be at least {len(devices)}, one for each of the devices"
        )
    return [devices[place % len(devices)] if devices else None for place in range(number)]


def _check_place(path: Path, *, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; the sweep needs a directory of another name (--out)")
    if (path / "config.toml").exists():
        raise ValueError(
            f"{path} holds a single run; choose another directory for a sweep with --out (out=)"
        )
    if (path / "sweep.json").exists():
        if not resume:
            raise ValueError(
                f"{path} already holds a sweep; continue it, or add cells to it, with --resume (in Python "
                "resume=True), or choose another directory with --out (out=)"
            )
    elif path.exists() and any(item.name not in (".lock", ".shared") for item in path.iterdir()):
        raise ValueError(
            f"{path} is not empty and holds no sweep; choose another directory with --out (out=)"
        )


def _held(path: Path) -> IO[str]:
    """Return the locked file of a sweep; its workers hold it too, so that it is free when the last one is gone."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return locked(path)
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _refuse_other_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Raise ConfigError naming the cells whose directories hold runs of other experiments, and in what they differ."""
    problems = []
    for cell in cells:
        recipe = path / cell.name / "config.toml"
        if recipe.exists():
            try:
                refuse_other_experiment(path / cell.name, load_experiment(recipe), cell.experiment)
            except ConfigError as error:
                problems += [f"{cell.name}: {line}" for line in error.problems]
    if problems:
        raise ConfigError(
            problems, origin=f"{path} holds a sweep of other experiments and cannot be resumed"
        )
