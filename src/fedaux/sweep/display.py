"""What a person sees of a sweep: the plan, its progress, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID, TextColumn
from rich.table import Table

from fedaux.formatting import setting_text
from fedaux.report.results import ranked, results_table, settings_of
from fedaux.report.tables import to_terminal
from fedaux.running.display import QUIET_SECONDS, live_bar
from fedaux.sweep.grid import Cell

MOST_ROWS = 40


class Display:
    """A callback for people: a bar for the sweep and one for each running cell on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cells: Sequence[Cell] = ()
        self._done: dict[str, int] = {}
        self._before = self._ended = 0
        self._began = time.monotonic()
        self._spoke = 0.0
        self._live = live_bar(console, TextColumn("{task.fields[text]}"))
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        """Say what there is to do."""
        self._cells, self._done = cells, dict(done)
        self._ended = len(finished)
        self._before = sum(done.values())
        for line in plan_lines(cells, finished=finished, done=done):
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        self._bars[""] = self._live.add_task(
            "all", total=self._total(), completed=self._before, text=self._standing()
        )
        if self._ended < len(cells):
            self._live.start()

    def started(self, cell: Cell) -> None:
        """Show a cell that runs."""
        self._bars[cell.name] = self._live.add_task(
            escape(cell.name), total=cell.rounds, completed=self._done[cell.name], text="starting"
        )

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """Show how far a cell is."""
        where = f"{event['method']} seed {event['seed']} round {event['round']}/{cell.experiment.rounds}"
        if event["event"] == "round":
            self._done[cell.name] += 1
            self._live.update(
                self._bars[""], completed=sum(self._done.values()), text=self._standing()
            )
            accuracy = event["accuracy"]
            where += "" if accuracy is None else f" {100 * accuracy:.1f} %"
        else:
            where += f" {event['phase']}"
        self._live.update(
            self._bars[cell.name], completed=self._done[cell.name], text=escape(where)
        )
        if not self._console.is_terminal and time.monotonic() - self._spoke >= QUIET_SECONDS:
            self._say(f"{cell.name}: {where}; {self._standing()}")

    def moved(self, cell: Cell, reason: str) -> None:
        """Say that a cell waits for another worker."""
        if (bar := self._bars.pop(cell.name, None)) is not None:
            self._live.remove_task(bar)
        self._say(f"{cell.name}: waits for another worker: {reason}")

    def ended(self, cell: Cell, reason: str | None) -> None:
        """Say how a cell ended."""
        self._ended += 1
        if (bar := self._bars.pop(cell.name, None)) is not None:
            self._live.remove_task(bar)
        self._live.update(self._bars[""], completed=sum(self._done.values()), text=self._standing())
        how = "finished" if reason is None else f"FAILED: {reason}"
        self._say(f"{cell.name}: {how}; {self._standing()}")

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _total(self) -> int:
        return sum(cell.rounds for cell in self._cells)

    def _standing(self) -> str:
        """How many cells and rounds are done, and how long the rest will take at the pace so far."""
        done, total = sum(self._done.values()), self._total()
        text = f"{self._ended}/{len(self._cells)} cells, {done}/{total} rounds"
        if done > self._before and done < total:
            elapsed = time.monotonic() - self._began
            text += f", ETA {_time(elapsed / (done - self._before) * (total - done))}"
        return text


def plan_lines(
    cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
) -> list[str]:
    """Say how many cells there are, what differs between them, and how much is done already."""
    values: dict[str, list[Any]] = {}
    for cell in cells:
        for key, value in cell.settings.items():
            seen = values.setdefault(key, [])
            seen += [value] if value not in seen else []
    rounds = sum(cell.rounds for cell in cells)
    lines = [
        f"Sweep: {len(cells)} cell{'s' if len(cells) != 1 else ''}, {rounds:,} rounds altogether"
    ]
    lines += [f"  {key} = {', '.join(map(_shown, listed))}" for key, listed in values.items()]
    methods = list(dict.fromkeys(method for cell in cells for method in cell.experiment.method))
    seeds = list(dict.fromkeys(seed for cell in cells for seed in cell.experiment.seeds))
    if "method" not in values:
        lines.append(f"  in each: {', '.join(methods)}")
    if "seeds" not in values:
        lines.append(f"  in each: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    begun = [cell.name for cell in cells if done[cell.name] and cell.name not in finished]
    if finished or begun:
        lines.append(f"  {len(finished)} finished before, {len(begun)} to be continued")
    return lines


def result_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the ranking of methods and settings, best last round first."""
    keys = list(dict.fromkeys(key for row in rows for key in settings_of(row)))
    caption = f"{name}: test accuracy in %, mean ± standard deviation over seeds"
    if len(rows) > MOST_ROWS:
        caption += f"; the best {MOST_ROWS} of {len(rows)}, all are in the report"
    names = {key: key.rpartition(".")[2] for key in keys}
    return to_terminal(
        results_table(ranked(rows)[:MOST_ROWS], names=names, caption=caption, without="seconds")
    )


def _shown(value: Any) -> str:
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else setting_text(value)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
