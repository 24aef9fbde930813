"""The Flower app of the server: runs a recipe with the same rounds as the simulator."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedaux.config import Experiment
from fedaux.core.algorithms import asks_of
from fedaux.core.compute import compute_for
from fedaux.core.messages import Clients
from fedaux.core.task import Task
from fedaux.data import load_auxiliary, load_test, notes
from fedaux.encoders import extractor_of
from fedaux.federation.flower_clients import FlowerClients
from fedaux.federation.members import Members
from fedaux.federation.registry import REGISTRY
from fedaux.federation.status import StatusCallback
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running import preflight as checks
from fedaux.running.run import Inputs, Result, prepare_device, run_path, run_with_clients

FOLDER_VARIABLE = "FEDAUX_FOLDER"
"""Environment variable with the federation's folder; `fedaux federate link` sets it."""
LOGGER = logging.getLogger("fedaux.server")


def server_app(folder: Path | None = None) -> ServerApp:
    """Return the server's app; recipes are also searched in `folder` and its parent."""
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, folder=folder)

    return made


app = server_app()


def serve(grid: Grid, run_config: Mapping[str, Any], *, folder: Path | None = None) -> Result:
    """Run the recipe of a run configuration with the nodes of the grid.

    Its keys: `recipe`, `out` (the run directory), `resume`, and `set`, overrides such as
    "rounds=3; local.epochs=2".
    """
    os.umask(0o077)
    log_to_stdout()
    overrides = [one.strip() for one in str(run_config.get("set", "")).split(";") if one.strip()]
    experiment = load_experiment(
        _recipe(str(run_config.get("recipe", "")), folder), overrides=overrides
    )
    out = str(run_config.get("out", "")) or None
    home = os.environ.get(FOLDER_VARIABLE)
    return federate(
        experiment,
        grid,
        path=run_path(experiment, out),
        resume=bool(run_config.get("resume", False)),
        registry=Path(home) / REGISTRY if home else None,
    )


def federate(
    experiment: Experiment, grid: Grid, *, path: Path, resume: bool, registry: Path | None = None
) -> Result:
    """Run an experiment over Flower's grid, with real clients; `registry` says whose key is whose.

    Raises ValueError if every client refuses, or none gives a usable answer.
    """
    checks.check(experiment, federated=True)
    device = prepare_device(experiment)
    compute = compute_for(experiment.engine, device, experiment.data)
    with notes.collected() as found:
        extractor = extractor_of(experiment, compute)
        data = load_test(experiment.data, converter=extractor).to(device)
        auxiliary = load_auxiliary(
            experiment.auxiliary, converter=extractor, shape=data.input_shape
        ).to(device)
    if extractor is not None:
        data = replace(data, encoder=extractor.encoder.card())
    inputs = Inputs(data, auxiliary, compute, found.to_dict())
    callback = ServerCallback(experiment.split.num_clients)
    members: Members | None = None

    def clients(task: Task) -> Clients:
        nonlocal members
        if members is None:  # now the run directory exists, and is locked
            count = experiment.split.num_clients
            status = StatusCallback(path, num_clients=count, rounds=experiment.rounds)
            members = Members(
                grid,
                path,
                section=experiment.federation,
                num_clients=count,
                status=status,
                registry=registry,
            )
            callback.status = status
        callback.clients = FlowerClients(
            task,
            members,
            classes=data.classes,
            encoder=None if data.encoder is None else data.encoder["digest"],
        )
        return callback.clients

    try:
        result = run_with_clients(
            experiment, inputs, clients, path=path, resume=resume, callback=callback
        )
        callback.check_answered()
    except BaseException as error:
        if callback.status is not None:
            callback.status.failed(str(error))
        raise
    if callback.status is not None:
        callback.status.finished()
    return result


def log_to_stdout() -> None:
    """Log to stdout, which Flower forwards to `flwr run --stream` and `flwr log`."""
    logger = logging.getLogger("fedaux")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fedaux: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class ServerCallback:
    """Writes the progress of a run to the log and to the status file."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.status: StatusCallback | None = None
        self.clients: FlowerClients | None = None
        self._unanswered: dict[tuple[str, int], dict[str, str]] = {}
        """Tasks without any usable answer so far: why clients were dropped."""
        self._answered: set[tuple[str, int]] = set()

    def check_answered(self) -> None:
        """Raise ValueError if a task had no usable answer in any of its rounds."""
        for (method, seed), dropped in self._unanswered.items():
            raise ValueError(
                f"{method}, seed {seed}: no client gave a usable answer{_listed(dropped)}"
            )

    def _follow(self, row: Mapping[str, Any]) -> None:
        """Note who answered. Raises ValueError, before the round is stored, if all refuse."""
        task = (row["method"], row["seed"])
        if row["clients_answered"] or not asks_of(row["method"]).trains:
            self._answered.add(task)
            self._unanswered.pop(task, None)
        elif task not in self._answered:
            self._unanswered[task] = row["clients_dropped"]
            refused = {} if self.clients is None else self.clients.refused
            everybody = set(range(self.num_clients))
            if refused and everybody - set(row["clients_absent"]) <= set(refused):
                reasons = {str(client): why for client, why in sorted(refused.items())}
                raise ValueError(f"every client refuses{_listed(reasons)}")

    def phase(self, task: Task, round: int, name: str) -> None:
        """Record the phase of the run."""
        if self.status is not None:
            self.status.phase(task, round, name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Log a finished round. Raises ValueError if every client refuses."""
        if self.status is not None:
            self.status.round(row)
        self._follow(row)
        accuracy = "" if row["accuracy"] is None else f", accuracy {100 * row['accuracy']:.1f} %"
        names = {} if self.status is None else self.status.names()
        dropped = "".join(
            f"; {names.get(int(client), f'client {client}')}: {reason}"
            for client, reason in row["clients_dropped"].items()
        )
        away = [names.get(client, str(client)) for client in row["clients_absent"]]
        absent = f"; absent: {', '.join(away)}" if away else ""
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


def _listed(reasons: Mapping[str, str]) -> str:
    return "".join(f"; client {client}: {reason}" for client, reason in reasons.items())


def _recipe(name: str, folder: Path | None) -> Path:
    if not name:
        raise ValueError(
            "recipe: missing in the run configuration; should be the path or name of a recipe"
        )
    for place in [] if folder is None else [folder, folder.parent]:
        if (place / name).is_file():
            return place / name
    return find_recipe(name)
