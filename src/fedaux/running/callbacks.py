"""Callbacks for Python: several at once, a progress bar, Weights & Biases, MLflow.

A callback has `phase(task, round, name)`, called when a phase begins, and `round(row)`, called with
the metrics of a finished round; a third method `close()` is called at the end, if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from fedaux.config import Experiment
from fedaux.core.task import Callback, Task
from fedaux.recipes import flatten
from fedaux.running.remaining import RemainingTime
from fedaux.running.tensorboard import round_points

LONGEST_PARAMETER = 500
"""Characters of a parameter that every MLflow server accepts."""
MOST_PARAMETERS = 100
"""Parameters that a MLflow server accepts at once."""
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "pandas": "pandas"}
"""The package of each optional module."""


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
        self._experiment = experiment
        self._rounds = experiment.rounds
        self._remaining = RemainingTime()
        self._tasks = [
            (method, seed) for seed in experiment.seeds for method in experiment.method
        ]  # the order of a run
        self._total = len(self._tasks) * experiment.rounds

    def phase(self, task: Task, round: int, name: str) -> None:
        """Show a phase."""
        self._remaining.phase("", task.method.name, task.seed, round)
        self._show_round(task.method.name, task.seed, round, done=max(0, round - 1), text=name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Show a finished round."""
        self._remaining.round("", row["method"], row["seed"], row["round"])
        accuracy = row["accuracy"]
        text = "" if accuracy is None else f"{100 * accuracy:.1f} %"
        self._show_round(row["method"], row["seed"], row["round"], done=row["round"], text=text)

    def _show_round(self, method: str, seed: int, round: int, *, done: int, text: str) -> None:
        before = self._tasks.index((method, seed)) * self._rounds
        line = f"{method} seed {seed} round {round}/{self._rounds} {text}"
        self.show(
            before + done, line + self._remaining.text({"": (self._experiment, before + done)})
        )

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


class WandbCallback:
    """Logs every method and seed as a run of Weights & Biases, in a group named as the experiment.

    `settings` are further arguments of `wandb.init`, such as mode="offline". Needs the extra
    `wandb`. A resumed run logs its remaining rounds only.
    """

    def __init__(self, project: str = "fedaux", **settings: Any) -> None:
        self._wandb = imported("wandb", extra="wandb")
        self._settings = {"project": project, **settings}
        self._current: tuple[str, int] | None = None
        self._run: Any = None

    def phase(self, task: Task, round: int, name: str) -> None:
        """Start a run for a new method and seed."""
        own = (task.method.name, task.seed)
        if own != self._current:
            self.close()
            self._current = own
            self._run = self._wandb.init(
                group=task.experiment.name,
                name=f"{own[0]}-seed{own[1]}",
                config=task.experiment.to_dict() | {"method": own[0], "seed": own[1]},
                **self._settings,
            )

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the measured quantities of a round."""
        self._run.log(round_points(row), step=row["round"])

    def close(self) -> None:
        """Finish the current run."""
        if self._run is not None:
            self._run.finish()
            self._run = self._current = None


class MLflowCallback:
    """Logs every method and seed as a run of MLflow, in an experiment named as this one.

    `tracking_uri` is the place of the store; by default MLflow's own. Needs the extra `mlflow`. A
    resumed run logs its remaining rounds only.
    """

    def __init__(self, tracking_uri: str | None = None) -> None:
        client: Any = imported("mlflow", extra="mlflow").MlflowClient
        self._client = client(tracking_uri=tracking_uri)
        self._entities: Any = import_module("mlflow.entities")
        self._current: tuple[str, int] | None = None
        self._run = ""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Start a run for a new method and seed."""
        own = (task.method.name, task.seed)
        if own == self._current:
            return
        self.close()
        self._current, called = own, task.experiment.name
        found = self._client.get_experiment_by_name(called)
        group = found.experiment_id if found else self._client.create_experiment(called)
        self._run = self._client.create_run(group, run_name=f"{own[0]}-seed{own[1]}").info.run_id
        settings = flatten(task.experiment.to_dict()) | {"method": own[0], "seed": own[1]}
        parameters = [
            self._entities.Param(key, str(value)[:LONGEST_PARAMETER])
            for key, value in settings.items()
        ]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            chunk = parameters[start : start + MOST_PARAMETERS]
            self._client.log_batch(self._run, params=chunk)

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the measured quantities of a round."""
        now = int(1000 * time.time())
        points = [
            self._entities.Metric(name, value, now, row["round"])
            for name, value in round_points(row).items()
        ]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        """End the current run."""
        if self._current is not None:
            self._client.set_terminated(self._run)
            self._current = None


def imported(module: str, *, extra: str) -> Any:
    """Import an optional module. Raises ValueError with the extra that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} is not installed; install fedaux with the extra {extra}, or `pip install "
            f"{PACKAGES[module]}`"
        ) from error
