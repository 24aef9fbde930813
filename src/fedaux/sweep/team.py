"""The workers of a sweep and the cells they share: who takes which, and what becomes of a cell whose worker is lost."""

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
from fedaux.sweep.processes import PATIENCE, Lost, NoPlace, Process, Seat

Events = queue.SimpleQueue[tuple[Cell, Mapping[str, Any]] | None]
"""What happens to the cells; None where a worker has no more to do."""
MOST_LOSSES = 3
"""How often a cell may lose its worker before it counts as failed: perhaps it is the cell that brings machines down."""


class Work:
    """The cells that are left, taken by several threads."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        done: Mapping[str, int],
        time_limit: float | None,
        may_return: bool = False,
    ) -> None:
        """Where cells ``may_return``, whoever finds none waits for those that others have taken."""
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
        """Return the next cell that is expected to be finished in time."""
        with self._changed:
            while True:
                for place, cell in enumerate(self.left):
                    if self._in_time(cell):
                        self._taken += 1
                        return self.left.pop(place)
                if not self._may_return or not self._taken:
                    return None
                self._changed.wait()

    def took(self, cell: Cell, seconds: float | None) -> None:
        """Learn from a cell that has ended: how long it took, where it is finished."""
        with self._changed:
            if seconds is not None:
                self._rates.append(seconds / max(1, self._rounds(cell)))
            self._taken -= 1
            self._changed.notify_all()

    def lose(self, cell: Cell) -> bool:
        """Count a cell whose worker was lost; return whether it may be tried again."""
        with self._changed:
            self._losses[cell.name] += 1
            return self._losses[cell.name] < MOST_LOSSES

    def give_back(self, cell: Cell) -> None:
        """Leave a cell to another worker."""
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
    """One process that runs cells, started when there is one; a new one takes the place of one that failed."""

    def __init__(self, root: Path, seat: Seat) -> None:
        self._root = root
        self._seat = seat
        self.gone = False
        """Whether it can run no more cells."""
        self._process: Process | None = None
        self._closed = False
        self._starting = threading.Lock()

    def run(self, cell: Cell, events: Events) -> str | None:
        """Run a cell and pass on what happens; return the reason if it failed. Raises Lost if its machine is gone."""
        try:
            return self._run(cell, events)
        except Lost:
            self._process = None
            self.gone = self._seat.gone()
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
            "device": self._seat.device,
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
        except (OSError, ValueError) as error:  # its end of the pipe is gone
            reason = f"the worker does not listen ({error})"
        # Whatever made a cell fail may have left the process in disorder.
        status = process.stop()
        self._process = None
        return (
            reason or f"the worker ended by itself, with status {status}; see {self._root / 'logs'}"
        )

    def close(self) -> None:
        """End the process, if there is one, for good."""
        self._closed = True
        if self._starting.acquire(
            timeout=PATIENCE
        ):  # a machine that is slow to start one is left to the cluster
            self._starting.release()
        if self._process is not None:
            self._process.stop()

    def _start(self) -> Process:
        process = self._seat.start()
        if paths := list(plugins.LOADED):
            process.send(json.dumps({"plugins": [str(path) for path in paths]}))
        return process


def serve(worker: Worker, work: Work, events: Events) -> None:
    """Give a worker cells until there are none, or it is gone."""
    try:
        while (cell := work.take()) is not None:
            events.put((cell, {"event": "started"}))
            began = time.monotonic()
            try:
                reason = worker.run(cell, events)
            except Lost as error:
                if isinstance(error, NoPlace) or work.lose(cell):
                    events.put((cell, {"event": "moved", "reason": str(error)}))
                    work.give_back(cell)
                else:
                    events.put(
                        (
                            cell,
                            {
                                "event": "ended",
                                "reason": f"lost its worker {MOST_LOSSES} times: {error}",
                            },
                        )
                    )
                    work.took(cell, None)
                if worker.gone:
                    return
                continue
            events.put((cell, {"event": "ended", "reason": reason}))
            work.took(cell, time.monotonic() - began if reason is None else None)
    finally:
        events.put(None)
