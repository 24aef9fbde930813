"""Workers take cells from a common queue; a cell whose worker is lost returns to the queue."""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaux.running import plugins
from fedaux.sweep.grid import Cell
from fedaux.sweep.processes import STOP_TIMEOUT, Process, Slot, SlotUnavailable, WorkerLost

Events = queue.SimpleQueue[tuple[Cell, Mapping[str, Any]] | None]
"""Events of the cells; None when a worker has finished."""
MAX_LOSSES = 3
"""Times a cell may lose its worker before it counts as failed: the cell may be the cause."""


class CellQueue:
    """The cells that are left, shared by several threads."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        done: Mapping[str, int],
        time_limit: float | None,
        may_return: bool = False,
    ) -> None:
        """``may_return``: if no cell is left, wait for those that are running elsewhere."""
        self.left = list(cells)
        self._done = done
        self._limit = time_limit
        self._may_return = may_return
        self._began = time.monotonic()
        self._rates: list[float] = []
        self._taken = 0
        self._losses: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self) -> Cell | None:
        """Return the next cell that is expected to finish in time."""
        with self._changed:
            while True:
                for place, cell in enumerate(self.left):
                    if self._in_time(cell):
                        self._taken += 1
                        return self.left.pop(place)
                if not self._may_return or not self._taken:
                    return None
                self._changed.wait()

    def done(self, cell: Cell, *, seconds: float | None) -> None:
        """Remove a cell that has ended; ``seconds`` is its duration if it succeeded."""
        with self._changed:
            if seconds is not None:
                self._rates.append(seconds / max(1, self._rounds(cell)))
            self._taken -= 1
            self._changed.notify_all()

    def count_loss(self, cell: Cell) -> bool:
        """Count the loss of a cell's worker; return whether the cell may be tried again."""
        with self._changed:
            self._losses[cell.name] += 1
            return self._losses[cell.name] < MAX_LOSSES

    def put_back(self, cell: Cell) -> None:
        """Return a cell to the queue for another worker."""
        with self._changed:
            self.left.insert(0, cell)
            self._taken -= 1
            self._changed.notify_all()

    def _in_time(self, cell: Cell) -> bool:
        if self._limit is None:
            return True
        expected = statistics.median(self._rates) * self._rounds(cell) if self._rates else 0.0
        return time.monotonic() - self._began + expected < self._limit

    def _rounds(self, cell: Cell) -> int:
        return max(1, cell.rounds - self._done[cell.name])


class Worker:
    """A process that runs cells, started on demand and replaced after a failure."""

    def __init__(self, root: Path, slot: Slot) -> None:
        self._root = root
        self._slot = slot
        self.gone = False
        """Whether its slot is gone."""
        self._process: Process | None = None
        self._closed = False
        self._starting = threading.Lock()

    def run(self, cell: Cell, events: Events) -> str | None:
        """Run a cell and forward its events; return the reason if it failed.

        Raises WorkerLost if the worker's machine is gone.
        """
        try:
            return self._run(cell, events)
        except WorkerLost:
            self._process = None
            self.gone = self._slot.gone()
            raise

    def _run(self, cell: Cell, events: Events) -> str | None:
        with self._starting:
            if self._closed:
                return "the sweep was stopped"
            process = self._process = self._process or self._start()
        order = {
            "experiment": cell.experiment.to_dict(),
            "out": str(self._root / cell.name),
            "log": str(self._root / "logs" / f"{cell.name}.log"),
            "device": self._slot.device,
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
        if self._starting.acquire(timeout=STOP_TIMEOUT):  # Ray stops a worker that starts slowly
            self._starting.release()
        if self._process is not None:
            self._process.stop()

    def _start(self) -> Process:
        process = self._slot.start()
        if paths := list(plugins.LOADED):
            process.send(json.dumps({"plugins": [str(path) for path in paths]}))
        return process


def serve(worker: Worker, cells: CellQueue, events: Events) -> None:
    """Run cells on a worker until none is left or its slot is gone."""
    try:
        while (cell := cells.take()) is not None:
            events.put((cell, {"event": "started"}))
            began = time.monotonic()
            try:
                reason = worker.run(cell, events)
            except WorkerLost as error:
                if isinstance(error, SlotUnavailable) or cells.count_loss(cell):
                    events.put((cell, {"event": "moved", "reason": str(error)}))
                    cells.put_back(cell)
                else:
                    reason = f"lost its worker {MAX_LOSSES} times: {error}"
                    events.put((cell, {"event": "ended", "reason": reason}))
                    cells.done(cell, seconds=None)
                if worker.gone:
                    return
                continue
            events.put((cell, {"event": "ended", "reason": reason}))
            cells.done(cell, seconds=time.monotonic() - began if reason is None else None)
    finally:
        events.put(None)
