"""Workers take cells from a common queue."""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaux.running import plugins
from fedaux.sweep.grid import Cell
from fedaux.sweep.processes import WorkerProcess, environment_of

Events = queue.SimpleQueue[tuple[Cell, Mapping[str, Any]] | None]
"""Events of the cells; None when a worker has finished."""


class CellQueue:
    """The cells that are left, shared by several threads."""

    def __init__(
        self, cells: Sequence[Cell], *, done: Mapping[str, int], time_limit: float | None
    ) -> None:
        self.left = list(cells)
        self._done = done
        self._limit = time_limit
        self._began = time.monotonic()
        self._rates: list[float] = []
        self._lock = threading.Lock()

    def take(self) -> Cell | None:
        """Return the next cell that is expected to finish in time."""
        with self._lock:
            for place, cell in enumerate(self.left):
                if self._in_time(cell):
                    return self.left.pop(place)
        return None

    def finished(self, cell: Cell, *, seconds: float) -> None:
        """Note how long a cell took."""
        with self._lock:
            self._rates.append(seconds / self._rounds(cell))

    def _in_time(self, cell: Cell) -> bool:
        if self._limit is None:
            return True
        expected = statistics.median(self._rates) * self._rounds(cell) if self._rates else 0.0
        return time.monotonic() - self._began + expected < self._limit

    def _rounds(self, cell: Cell) -> int:
        return max(1, cell.rounds - self._done[cell.name])


class Worker:
    """A process that runs cells, started on demand and replaced after a failure."""

    def __init__(self, root: Path, device: str | None, *, lock: int, at_once: int) -> None:
        """`lock` is the descriptor of the sweep's lock, which the process inherits and releases
        when it exits; `at_once` workers share the machine."""
        self._root = root
        self._device = device
        self._lock = lock
        self._at_once = at_once
        self._process: WorkerProcess | None = None
        self._closed = False
        self._starting = threading.Lock()

    def run(self, cell: Cell, events: Events) -> str | None:
        """Run a cell and forward its events; return the reason if it failed."""
        with self._starting:
            if self._closed:
                return "the sweep was stopped"
            process = self._process = self._process or self._start()
        order = {
            "experiment": cell.experiment.to_dict(),
            "out": str(self._root / cell.name),
            "log": str(self._root / "logs" / f"{cell.name}.log"),
            "device": self._device,
        }
        reason = None
        try:
            process.send(json.dumps(order))
            for line in process.lines():
                event = json.loads(line)
                if event["event"] == "finished":
                    return None
                if event["event"] == "failed":
                    reason = str(event["reason"])
                    break
                events.put((cell, event))
        except (OSError, ValueError) as error:  # the pipe is closed
            reason = f"the worker does not respond ({error})"
        status = process.stop()  # a failed cell may leave the process in a bad state
        self._process = None
        return reason or f"the worker exited with status {status}; see {self._root / 'logs'}"

    def close(self) -> None:
        """Stop the process, if there is one, and start no other."""
        self._closed = True
        with self._starting:
            pass  # a worker that is starting
        if self._process is not None:
            self._process.stop()

    def _start(self) -> WorkerProcess:
        environment = environment_of(self._root, at_once=self._at_once)
        log = self._root / "logs" / "workers.log"
        process = WorkerProcess(log=log, environment=environment, lock=self._lock)
        if paths := list(plugins.LOADED):
            process.send(json.dumps({"plugins": [str(path) for path in paths]}))
        return process


def serve(worker: Worker, cells: CellQueue, events: Events) -> None:
    """Run cells on a worker until none is left."""
    try:
        while (cell := cells.take()) is not None:
            events.put((cell, {"event": "started"}))
            began = time.monotonic()
            reason = worker.run(cell, events)
            events.put((cell, {"event": "ended", "reason": reason}))
            if reason is None:
                cells.finished(cell, seconds=time.monotonic() - began)
    finally:
        events.put(None)
