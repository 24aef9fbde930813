"""Run a sweep: worker processes run the cells that are not finished yet.

sweep.json     the swept keys, and the name, settings and reason of failure of every cell
CELL/          a run directory
logs/CELL.log  output of the cell
recipes/       recipes of cells that a scheduler runs (`commands`)
report.html    report of all cells
"""

from __future__ import annotations

import queue
import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import tomli_w

from fedaux.config import ConfigError
from fedaux.config_errors import DEVICE_PATTERN, PATTERN_MEANING
from fedaux.files import read_json, replacing, save_json
from fedaux.recipes import load_experiment
from fedaux.report import write_report
from fedaux.running import plugins
from fedaux.running.run_directory import STATE, locked, read_header, refuse_other_experiment
from fedaux.sweep.grid import Cell
from fedaux.sweep.processes import STOP_TIMEOUT
from fedaux.sweep.scheduler import CellQueue, Events, Worker, serve
from fedaux.sweep.worker import input_keys

FORMAT = 1


class SweepCallback:
    """Receives the events of a sweep, in the thread that runs it; ignores them by default."""

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        """All cells, the names of those finished before, and the finished rounds of each."""

    def started(self, cell: Cell) -> None:
        """A worker starts or continues a cell."""

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """A cell has finished a round or started a phase: `event["event"]`."""

    def ended(self, cell: Cell, reason: str | None) -> None:
        """A cell has finished, or failed for a reason."""


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep: names of cells by outcome."""

    directory: Path
    finished: tuple[str, ...]
    failed: Mapping[str, str]
    """The reason by name."""
    waiting: tuple[str, ...]
    """Not started because of the time limit."""

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
    time_limit: float | None = None,
    callback: SweepCallback | None = None,
) -> Outcome:
    """Run every unfinished cell in OUT/CELL, several in parallel, and write a report.

    There are `jobs` workers, distributed over `devices` (default: one per device). If a cell fails,
    its reason is recorded and the others continue. With `time_limit` (seconds), a cell is started
    only if it is expected to finish in time. Raises ConfigError or ValueError before anything runs.
    """
    path = Path(out)
    worker_devices = _worker_devices(devices, jobs)
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit = {time_limit}: should be greater than 0 seconds")
    _check_directory(path, resume=resume)
    path.mkdir(parents=True, exist_ok=True)
    with _lock(path) as lock:
        _refuse_other_cells(path, cells)
        done = {cell.name: rounds_done(path / cell.name) for cell in cells}
        finished = [cell.name for cell in cells if is_finished(path / cell.name, cell)]
        left = by_shared_inputs([cell for cell in cells if cell.name not in finished])
        record = _Record(path, name or path.name, cells)
        callback = callback or SweepCallback()
        callback.planned(cells, finished=finished, done=done)
        todo = CellQueue(left, done=done, time_limit=time_limit)
        workers = [
            Worker(path, device, lock=lock.fileno(), at_once=len(worker_devices))
            for device in worker_devices[: len(left)]
        ]
        try:
            _run(todo, workers, record, callback, finished)
        finally:
            for worker in workers:
                worker.close()
        write_report(path)
    waiting = tuple(cell.name for cell in todo.left)
    return Outcome(path, tuple(finished), record.failed, waiting)


def commands(
    cells: Sequence[Cell], out: Path | str, *, name: str | None = None, resume: bool = False
) -> list[str]:
    """Return a `fedaux run` for each unfinished cell, whose recipe is written to OUT/recipes.

    `sweep` with `resume` then finds the finished cells and writes the report. Raises as `sweep`.
    """
    path = Path(out).resolve()
    _check_directory(path, resume=resume)
    path.mkdir(parents=True, exist_ok=True)
    added = [word for plugin in plugins.LOADED for word in ("--plugin", plugin)]
    lines = []
    with _lock(path):
        _refuse_other_cells(path, cells)
        _Record(path, name or path.name, cells)
        for cell in cells:
            if is_finished(path / cell.name, cell):
                continue
            recipe = path / "recipes" / f"{cell.name}.toml"
            with replacing(recipe) as temporary:
                temporary.write_text(tomli_w.dumps(cell.experiment.to_dict()), encoding="utf-8")
            words = ["fedaux", "run", recipe, "--out", path / cell.name, "--resume", *added]
            lines.append(shlex.join(map(str, words)))
    return lines


def by_shared_inputs(cells: Sequence[Cell]) -> list[Cell]:
    """Order cells so that consecutive ones share data, then models, where possible."""
    first: dict[str | tuple[str, str], int] = {}

    def places(cell: Cell) -> tuple[int, int]:
        data, models = input_keys(cell.experiment)
        return first.setdefault(data, len(first)), first.setdefault((data, models), len(first))

    return sorted(cells, key=places)


def is_finished(directory: Path, cell: Cell) -> bool:
    """Return whether a directory contains the complete run of a cell."""
    try:
        summary = read_json(directory / "summary.json")
        return bool(summary["complete"]) and summary["config_sha256"] == cell.experiment.sha256()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def rounds_done(directory: Path) -> int:
    """Return the number of finished rounds of all methods and seeds of a run, for its display.

    Damaged files count nothing here; the run reports them.
    """
    done = 0
    for folder in directory.glob(f"cells/*/{STATE}"):
        with suppress(ValueError):
            done += read_header(folder.parent)["round"]
    return done


class _Record:
    """sweep.json, which also keeps the cells of earlier calls."""

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
        """Record why a cell failed."""
        self.failed[cell.name] = self._rows[cell.name]["failed"] = reason
        save_json(self._file, self._table)


def _run(
    cells: CellQueue,
    workers: Sequence[Worker],
    record: _Record,
    callback: SweepCallback,
    finished: list[str],
) -> None:
    """Run cells on all workers until none is left; this thread calls the callback."""
    events: Events = queue.SimpleQueue()
    for worker in workers:
        threading.Thread(target=serve, args=(worker, cells, events), daemon=True).start()

    def end(cell: Cell, reason: str | None) -> None:
        if reason is None:
            finished.append(cell.name)
        else:
            record.fail(cell, reason)
        callback.ended(cell, reason)

    running = len(workers)
    while running:
        item = events.get()
        if item is None:
            running -= 1
            continue
        cell, event = item
        if event["event"] == "started":
            callback.started(cell)
        elif event["event"] == "ended":
            end(cell, event["reason"])
        else:
            callback.progressed(cell, event)


def _worker_devices(devices: Sequence[str], jobs: int | None) -> list[str | None]:
    """Return the device of each worker; None for the recipe's own."""
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
                    f"devices = {device!r}: {found or 'no'} CUDA devices are available"
                )
    number = jobs or len(devices) or 1
    if devices and number < len(devices):
        raise ValueError(f"jobs = {number}: should be at least {len(devices)}, one per device")
    return [devices[place % len(devices)] if devices else None for place in range(number)]


def _check_directory(path: Path, *, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose a directory with --out (out=)")
    if (path / "config.toml").exists():
        raise ValueError(
            f"{path} contains a single run; choose another directory with --out (out=)"
        )
    if (path / "sweep.json").exists():
        if not resume:
            raise ValueError(
                f"{path} already contains a sweep; continue it or add cells with --resume "
                "(resume=True), or choose another directory with --out (out=)"
            )
    elif path.exists() and any(
        item.name not in (".lock", ".shared", ".once") for item in path.iterdir()
    ):
        raise ValueError(
            f"{path} is not empty and contains no sweep; choose another directory with --out (out=)"
        )


def _lock(path: Path) -> IO[str]:
    """Return the lock file of a sweep; its workers inherit it and release it when they exit."""
    until = time.monotonic() + STOP_TIMEOUT
    while True:
        try:
            return locked(path)
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _refuse_other_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Raise ConfigError for cells whose directories contain runs of other experiments."""
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
            problems, origin=f"{path} contains a sweep of other experiments and cannot be resumed"
        )
