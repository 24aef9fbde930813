"""The Flower app of the server: a recipe, the run directory, and the same rounds as in the simulator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedaux.config import Experiment
from fedaux.core.compute import compute_for
from fedaux.core.messages import Clients
from fedaux.core.task import Task
from fedaux.data import load_auxiliary, load_test
from fedaux.federation.grid import FlowerClients
from fedaux.federation.members import Members
from fedaux.federation.status import NodeBoard
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running import preflight as checks
from fedaux.running import tensorboard
from fedaux.running.run import Inputs, Result, prepare_device, run_path, run_with_clients

LOGGER = logging.getLogger("fedaux.core.weights")


def server_app(folder: Path | None = None) -> ServerApp:
    """Return the server's app; recipes are looked for beside `folder` and above it, too."""
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, folder=folder)

    return made


app = server_app()


def serve(grid: Grid, run_config: Mapping[str, Any], *, folder: Path | None = None) -> Result:
    """Run the recipe of a run configuration with whatever nodes the grid has.

    Its keys: `recipe`, `out` (the run directory), `resume`, and `set`, changes such as "rounds=3; local.epochs=2".
    """
    log_to_stdout()
    overrides = [one.strip() for one in str(run_config.get("set", "")).split(";") if one.strip()]
    experiment = load_experiment(
        _recipe(str(run_config.get("recipe", "")), folder), overrides=overrides
    )
    out = str(run_config.get("out", "")) or None
    return federate(
        experiment,
        grid,
        path=run_path(experiment, out),
        resume=bool(run_config.get("resume", False)),
    )


def federate(experiment: Experiment, grid: Grid, *, path: Path, resume: bool) -> Result:
    """Run an experiment over a grid: what the simulator does, with real clients."""
    checks.check(experiment, federated=True)
    tensorboard.check(experiment)
    device = prepare_device(experiment)
    data = load_test(experiment.data).to(device)
    compute = compute_for(experiment.engine, device, experiment.data)
    auxiliary = load_auxiliary(experiment.auxiliary, shape=data.input_shape).to(device)
    inputs = Inputs(data, auxiliary, compute)
    watching = Watching()
    members: Members | None = None

    def clients(task: Task) -> Clients:
        nonlocal members
        if members is None:  # now the run directory is there, and is ours
            watching.board = NodeBoard(
                path, num_clients=experiment.split.num_clients, rounds=experiment.rounds
            )
            members = Members(
                grid,
                path,
                section=experiment.federation,
                num_clients=experiment.split.num_clients,
                board=watching.board,
            )
        return FlowerClients(task, members, classes=data.classes)

    try:
        result = run_with_clients(
            experiment, inputs, clients, path=path, resume=resume, callback=watching
        )
    except BaseException as error:
        if watching.board is not None:
            watching.board.failed(str(error))
        raise
    if watching.board is not None:
        watching.board.finished()
    return result


def log_to_stdout() -> None:
    """Let fedaux's own lines be seen: Flower passes this process's output on to `flwr run --stream` and `flwr log`."""
    logger = logging.getLogger("fedaux")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fedaux: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class Watching:
    """A callback that tells the log and the board of nodes."""

    def __init__(self) -> None:
        self.board: NodeBoard | None = None

    def phase(self, task: Task, round: int, name: str) -> None:
        """Show what is being done."""
        if self.board is not None:
            self.board.phase(task, round, name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Tell of a finished round."""
        if self.board is not None:
            self.board.round(row)
        accuracy = "" if row["accuracy"] is None else f", accuracy {100 * row['accuracy']:.1f} %"
        dropped = "".join(
            f"; client {client}: {reason}" for client, reason in row["clients_dropped"].items()
        )
        absent = (
            f"; not there: {', '.join(map(str, row['clients_absent']))}"
            if row["clients_absent"]
            else ""
        )
        answered = f"{len(row['clients_answered'])} of {len(row['clients_asked'])} clients answered"
        LOGGER.info(
            "%s, round %d: %s%s%s%s",
            row["method"],
            row["round"],
            answered,
            accuracy,
            dropped,
            absent,
        )


def _recipe(name: str, folder: Path | None) -> Path:
    if not name:
        raise ValueError(
            "recipe: missing in the run configuration; the path or the name of a recipe"
        )
    for place in [] if folder is None else [folder, folder.parent]:
        if (place / name).is_file():
            return place / name
    return find_recipe(name)
