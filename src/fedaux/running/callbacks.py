"""Callbacks for Python: several at once, a progress bar.

A callback has `phase(task, round, name)`, called when a phase begins, and `round(row)`, called with
the metrics of a finished round; a third method `close()` is called at the end, if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from fedaux.config import Experiment
from fedaux.core.task import Callback, Task
from fedaux.running.remaining import RemainingTime


class Callbacks:
    """Forwards events to several callbacks, in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def phase(self, task: Task, round: int, name: str) -> None:
        """Forward the beginning of a phase."""
        for callback in self._callbacks:
            callback.phase(task, round, name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Forward a finished round."""
        for callback in self._callbacks:
            callback.round(row)

    def close(self) -> None:
        """Close the callbacks that can be closed."""
        for callback in self._callbacks:
            if (close := getattr(callback, "close", None)) is not None:
                close()


@contextmanager
def watched(
    experiment: Experiment, callback: Callback | Iterable[Callback] | None, *, progress: bool
) -> Iterator[Callback]:
    """Yield one callback for all, with a progress bar if it can be shown; close them at the end."""
    given: list[Any] = [] if callback is None else [callback]
    if isinstance(callback, Iterable):
        given = list(callback)
    for one in given:
        if missing := [name for name in ("phase", "round") if not hasattr(one, name)]:
            raise ValueError(
                f"callback: {type(one).__name__} has no {' and no '.join(missing)}; should have "
                "phase(task, round, name) and round(row)"
            )
    if progress and (bar := _progress_bar(experiment)) is not None:
        given.append(bar)
    both = Callbacks(given)
    try:
        yield both
    finally:
        both.close()


def _progress_bar(experiment: Experiment) -> Callback | None:
    """Return a bar for a notebook or a terminal, or None elsewhere."""
    from rich.console import Console  # a slow import

    console = Console()
    if console.is_jupyter:
        return NotebookBar(experiment)
    return TerminalBar(experiment, console) if console.is_terminal else None


class _Bar:
    """Counts the finished rounds of all methods and seeds."""

    def __init__(self, experiment: Experiment) -> None:
        self._rounds = experiment.rounds
        self._remaining = RemainingTime()
        self._tasks = [
            (method, seed) for seed in experiment.seeds for method in experiment.method
        ]  # the order of a run
        self._total = len(self._tasks) * experiment.rounds

    def phase(self, task: Task, round: int, name: str) -> None:
        """Show a phase."""
        self._remaining.phase(round)
        self._show_round(task.method.name, task.seed, round, done=max(0, round - 1), text=name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Show a finished round."""
        self._remaining.round(row["method"])
        accuracy = row["accuracy"]
        text = "" if accuracy is None else f"{100 * accuracy:.1f} %"
        self._show_round(row["method"], row["seed"], row["round"], done=row["round"], text=text)

    def _show_round(self, method: str, seed: int, round: int, *, done: int, text: str) -> None:
        place = self._tasks.index((method, seed))
        left = Counter({method: self._rounds - done})
        for later, _ in self._tasks[place + 1 :]:
            left[later] += self._rounds
        line = f"{method} seed {seed} round {round}/{self._rounds} {text}"
        self.show(done + place * self._rounds, line + self._remaining.text(left))

    def show(self, done: int, line: str) -> None:
        """Show the number of finished rounds and what goes on."""
        raise NotImplementedError


class TerminalBar(_Bar):
    """A bar on a terminal, which disappears at the end."""

    def __init__(self, experiment: Experiment, console: Any) -> None:
        from fedaux.running.display import live_bar

        super().__init__(experiment)
        self._live = live_bar(console)
        self._bar = self._live.add_task("starting", total=self._total)
        self._live.start()

    def show(self, done: int, line: str) -> None:
        """Update the bar."""
        from rich.markup import escape as plain

        self._live.update(self._bar, completed=done, description=plain(line))

    def close(self) -> None:
        """Remove the bar."""
        self._live.stop()


class NotebookBar(_Bar):
    """A bar below a notebook's cell, without widgets."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        display: Any = import_module("IPython.display")
        self._html = display.HTML
        self._handle = display.display(self._html("starting"), display_id=True)

    def show(self, done: int, line: str) -> None:
        """Update the bar."""
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        self._handle.update(self._html(f"{bar} {escape(line)}"))

    def close(self) -> None:
        """Remove the bar."""
        self._handle.update(self._html(""))
