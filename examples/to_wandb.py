"""Learning curves in Weights & Biases: one run there per method and seed.

    pip install wandb
    python examples/to_wandb.py

Copy the class; further arguments go to `wandb.init`, such as mode="offline". A resumed run of
fedaux logs its remaining rounds in a new run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

import fedaux
from fedaux.core.task import Task
from fedaux.recipes import flatten


class WandbCallback:
    """Logs every method and seed as a run, in a group named as the experiment."""

    def __init__(self, project: str = "fedaux", **settings: Any) -> None:
        self._settings = {"project": project, **settings}
        self._current: tuple[str, int] | None = None
        self._run: Any = None

    def phase(self, task: Task, round: int, name: str) -> None:
        """Start a run for a new method and seed."""
        method, seed = own = task.method.name, task.seed
        if own == self._current:
            return
        self.close()
        self._current = own
        self._run = wandb.init(
            group=task.experiment.name,
            name=f"{method}-seed{seed}",
            config=task.experiment.to_dict() | {"method": method, "seed": seed},
            **self._settings,
        )

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the measured quantities of a round."""
        numbers = {
            name: value for name, value in flatten(row).items() if isinstance(value, int | float)
        }
        self._run.log(numbers, step=row["round"])

    def close(self) -> None:
        """Finish the current run."""
        if self._run is not None:
            self._run.finish()
        self._run = self._current = None


if __name__ == "__main__":
    fedaux.run(fedaux.load_experiment("demo"), out="runs/to_wandb", callback=WandbCallback())
