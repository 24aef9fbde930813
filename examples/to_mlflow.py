"""Learning curves in MLflow: one run there per method and seed.

    pip install mlflow-skinny
    python examples/to_mlflow.py

Copy the class; `tracking_uri` is the address of the server, by default MLflow's own. A resumed run
of fedaux logs its remaining rounds in a new run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

import fedaux
from fedaux.core.task import Task
from fedaux.recipes import flatten


class MLflowCallback:
    """Logs every method and seed as a run, in an experiment named as the one of fedaux."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._current: tuple[str, int] | None = None
        self._run = ""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Start a run for a new method and seed."""
        method, seed = own = task.method.name, task.seed
        if own == self._current:
            return
        self.close()
        self._current, group = own, task.experiment.name
        found = self._client.get_experiment_by_name(group)
        number = found.experiment_id if found else self._client.create_experiment(group)
        self._run = self._client.create_run(number, run_name=f"{method}-seed{seed}").info.run_id
        settings = flatten(task.experiment.to_dict()) | {"method": method, "seed": seed}
        # Every server accepts 500 characters per parameter, and 100 parameters at once.
        parameters = [Param(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(self._run, params=parameters[start : start + 100])

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the measured quantities of a round."""
        now, found = int(1000 * time.time()), flatten(row).items()
        numbers = [(name, value) for name, value in found if isinstance(value, int | float)]
        metrics = [Metric(name, value, now, row["round"]) for name, value in numbers]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """End the current run."""
        if self._current is not None:
            self._client.set_terminated(self._run)
        self._current = None


if __name__ == "__main__":
    fedaux.run(fedaux.load_experiment("demo"), out="runs/to_mlflow", callback=MLflowCallback())
