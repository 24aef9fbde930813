"""Progress of a run or a sweep, the plan of a sweep, and the table of its results."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID, TextColumn

from fedaux.config import Experiment
from fedaux.core.algorithms import asks_of
from fedaux.formatting import client_label, plural, setting_text
from fedaux.report.results import ranked, results_table, settings_of
from fedaux.report.tables import TerminalTable
from fedaux.running.display import LINE_SECONDS, live_bar
from fedaux.running.remaining import RemainingTime
from fedaux.sweep.grid import Cell
from fedaux.sweep.runner import SweepCallback

if TYPE_CHECKING:
    from fedaux.core.task import Task

MAX_ROWS = 40


class ProgressDisplay(SweepCallback):
    """Bars on a terminal, a line every few seconds elsewhere; callback of a run or a sweep.

    A run (`experiment`, with `done` finished rounds) is displayed as a sweep of one cell.
    """

    def __init__(
        self, console: Console, *, experiment: Experiment | None = None, done: int = 0
    ) -> None:
        self._console = console
        self._cells: Sequence[Cell] = ()
        self._done: dict[str, int] = {}
        self._over: set[str] = set()
        self._remaining = RemainingTime()
        self._printed = 0.0
        self._interrupted = False
        self._live = live_bar(console, TextColumn("{task.fields[text]}"))
        self._bars: dict[str, TaskID] = {}
        self._single = experiment is not None
        if experiment is not None:
            self._start((Cell("", {}, experiment),), done={"": done})

    def __enter__(self) -> ProgressDisplay:
        self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        signal.signal(signal.SIGINT, self._previous_handler)

    def _interrupt(self, *_: object) -> None:
        # Python drops an exception raised in a destructor; the next phase then raises it again.
        self._interrupted = True
        raise KeyboardInterrupt

    def phase(self, task: Task, round: int, name: str) -> None:
        """Display the current phase of a run."""
        if self._interrupted:
            raise KeyboardInterrupt
        event = {"event": "phase", "phase": name, "method": task.method.name, "seed": task.seed}
        self.progressed(self._cells[0], event | {"round": round})

    def round(self, row: Mapping[str, Any]) -> None:
        """Display a finished round of a run."""
        self.progressed(self._cells[0], {"event": "round", **row})

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        """Print the plan of a sweep."""
        for line in plan_lines(cells, finished=finished, done=done):
            self._print(line)
        self._over = set(finished)
        self._start(cells, done=done)

    def _start(self, cells: Sequence[Cell], *, done: Mapping[str, int]) -> None:
        self._cells, self._done = cells, dict(done)
        self._bars[""] = self._live.add_task(
            "starting" if self._single else "all",
            total=sum(cell.rounds for cell in cells),
            completed=sum(done.values()),
            text=self._status(),
        )
        if len(self._over) < len(cells):
            self._live.start()

    def started(self, cell: Cell) -> None:
        """Add a bar for a cell."""
        self._bars[cell.name] = self._live.add_task(
            escape(cell.name), total=cell.rounds, completed=self._done[cell.name], text="starting"
        )

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """Display the progress of a cell."""
        rounds = cell.experiment.rounds
        where = f"{event['method']} seed {event['seed']} round {event['round']}/{rounds}"
        last = False
        if event["event"] == "round":
            last = self._single and event["round"] == rounds
            self._done[cell.name] += 1
            self._remaining.round(event["method"], cell=cell.name)
            if event["accuracy"] is not None:
                where += f" {100 * event['accuracy']:.1f} %"
            if event.get("clients_dropped"):
                names = cell.experiment.data.client_names
                if asks_of(event["method"]).shares == "data":
                    names = ()  # its one client has no name
                labels = [client_label(int(one), names) for one in event["clients_dropped"]]
                where += f", dropped {', '.join(labels)}"
            if event.get("model_kept"):
                where += ", no usable update, the model is unchanged"
        else:
            where += f" {event['phase']}"
            self._remaining.phase(event["round"], cell=cell.name)
        if self._single:
            self._live.update(self._bars[""], description=escape(where))
        else:
            done = self._done[cell.name]
            self._live.update(self._bars[cell.name], completed=done, text=escape(where))
        self._update_total()
        quiet = time.monotonic() - self._printed < LINE_SECONDS
        if not self._console.is_terminal and (last or not quiet):
            name = f"{cell.name}: " if cell.name else ""
            self._print(f"{name}{where}; {self._status()}")

    def ended(self, cell: Cell, reason: str | None) -> None:
        """Report the outcome of a cell."""
        self._over.add(cell.name)
        if reason is None:
            self._done[cell.name] = cell.rounds  # some may belong to another cell
        if (bar := self._bars.pop(cell.name, None)) is not None:
            self._live.remove_task(bar)
        self._update_total()
        how = "finished" if reason is None else f"FAILED: {reason}"
        self._print(f"{cell.name}: {how}; {self._status()}")

    def _update_total(self) -> None:
        done = sum(self._done.values())
        self._live.update(self._bars[""], completed=done, text=self._status())

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _status(self) -> str:
        """Return finished cells and rounds, and the expected remaining time."""
        done, total = sum(self._done.values()), sum(cell.rounds for cell in self._cells)
        text = "" if self._single else f"{len(self._over)}/{len(self._cells)} cells, "
        text += f"{done}/{total} rounds"
        left: Counter[str] = Counter()
        for cell in self._cells:
            if cell.name not in self._over:
                left.update(rounds_left(cell.experiment, done=self._done[cell.name]))
        return text + self._remaining.text(left, at_once=max(1, len(self._bars) - 1))


def rounds_left(experiment: Experiment, *, done: int) -> Counter[str]:
    """Return the rounds left of each method after some rounds of an experiment, in its order."""
    left: Counter[str] = Counter()
    for method in experiment.method * len(experiment.seeds):
        now = min(done, experiment.rounds)
        done -= now
        left[method] += experiment.rounds - now
    return left


def plan_lines(
    cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
) -> list[str]:
    """Return the number of cells, their differences, and the work done before."""
    values: dict[str, list[Any]] = {}
    for cell in cells:
        for key, value in cell.settings.items():
            seen = values.setdefault(key, [])
            seen += [value] if value not in seen else []
    rounds = sum(cell.rounds for cell in cells)
    lines = [f"Sweep: {plural(len(cells), 'cell')}, {rounds:,} rounds in total"]
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


def sweep_table(name: str, rows: Sequence[Mapping[str, Any]]) -> TerminalTable:
    """Return the ranking of methods and settings, by accuracy of the last round."""
    keys = list(dict.fromkeys(key for row in rows for key in settings_of(row)))
    caption = f"{name}: test accuracy in %, mean ± standard deviation over seeds"
    if len(rows) > MAX_ROWS:
        caption += f"; best {MAX_ROWS} of {len(rows)}, all rows are in the report"
    names = {key: key.rpartition(".")[2] for key in keys}
    return TerminalTable(
        results_table(ranked(rows)[:MAX_ROWS], names=names, caption=caption, without="seconds")
    )


def _shown(value: Any) -> str:
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else setting_text(value)
