"""Who plays the rounds that are timed: fedaux's engine and the plain loop, same clients, same
batches, same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from limits import full_single_precision, wait
from numpy.typing import NDArray
from setting import PROTOTYPE, Settings, experiment_of
from torch import Tensor

from fedaux import seeding
from fedaux.config import Experiment
from fedaux.core.compute import Compute, compute_for
from fedaux.core.messages import Weights
from fedaux.core.plain_backend import PlainBackend
from fedaux.core.releases import Scorer
from fedaux.core.server import Server, clients_per_round, prepare, select
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import State
from fedaux.data import LabelledData
from fedaux.running.run import ExperimentRunner, NullCallback, split_for
from fedaux.running.run_directory import RunDirectory

Seconds = dict[str, float]
"""By phase, and `all`."""
Player = Callable[[int], tuple[Weights, Seconds]]
"""Plays the round of that number after its own last one; returns the server's weights and the
seconds."""


@dataclass(frozen=True)
class Fast:
    """fedaux's engine, prepared; and what the plain loop takes from it."""

    server: Server
    state: State
    parts: Sequence[NDArray[np.int64]]
    precision: str
    chosen: Callable[[int], list[int]]
    """The clients of a round."""
    certainty_weights: Callable[[Sequence[int]], Tensor]
    score: Callable[[], None]
    """Let every client release once more, and compute their scores on the distill set."""
    seconds: float
    """What preparation took, certainty releases included."""


def fast_federation(
    experiment: Experiment,
    data: LabelledData,
    auxiliary: Tensor,
    *,
    parts: Sequence[NDArray[np.int64]] | None = None,
) -> Fast:
    """Prepare fedaux's engine on data in memory, split by fedaux's own split where no parts are
    given."""
    began = time.perf_counter()
    seed = experiment.seeds[0]
    own_parts = split_for(experiment, data, seed) if parts is None else parts
    with (
        TemporaryDirectory() as folder,
        RunDirectory.open(Path(folder) / "run", experiment, resume=False) as directory,
    ):
        compute = compute_for(experiment.engine, data.images.device)
        runner = ExperimentRunner(experiment, directory, data, auxiliary, NullCallback(), compute)
        task = runner.task(experiment.method[0], seed)
        clients = SimulatedClients(task, data.images, data.labels, own_parts)
        state, preparation = prepare(
            task, clients, extractor=runner.extractor(task), callback=NullCallback()
        )
    server = Server(task, preparation, clients, callback=NullCallback())

    def chosen(number: int) -> list[int]:
        generator = seeding.generator(seed, "selection", round=number)
        return select(clients.present(), count=clients_per_round(experiment), generator=generator)

    def certainty_weights(ids: Sequence[int]) -> Tensor:
        return torch.softmax(server.scorer.log_scores(state.releases, ids), dim=0).float()

    def score() -> None:
        again, preparation = prepare(
            task,
            clients,
            extractor=lambda name, _: server.preparation.extractors[name],
            callback=NullCallback(),
        )
        Scorer(task, preparation).log_scores(again.releases, list(again.releases))

    wait(task.device)
    precision = "bf16" if compute.precision is torch.bfloat16 else "fp32"
    took = time.perf_counter() - began
    return Fast(server, state, own_parts, precision, chosen, certainty_weights, score, took)


def scoring_seconds(fast: Fast, *, times: int = 3) -> float | None:
    """Return what it takes to score all clients when all is warm, the least of several; None where
    nobody scores."""
    task = fast.server.task
    if not task.asks.releases:
        return None
    took = []
    for _ in range(times):
        wait(task.device)
        began = time.perf_counter()
        fast.score()
        wait(task.device)
        took.append(time.perf_counter() - began)
    return min(took)


def player_of(server: Server, state: State) -> Player:
    """Play rounds in order, from this state."""

    def play(number: int) -> tuple[Weights, Seconds]:
        nonlocal state
        assert state.round + 1 == number, "rounds are played in order"
        wait(server.task.device)
        began = time.perf_counter()
        state, row = server.play_round(state)
        wait(server.task.device)
        took = time.perf_counter() - began
        return dict(state.models[PROTOTYPE]), {**row["seconds"], "all": took}

    return play


def fast_player(fast: Fast) -> Player:
    """Play rounds with fedaux's engine."""
    return player_of(fast.server, fast.state)


def plain_player(fast: Fast, data: LabelledData, *, precision: str) -> Player:
    """Play the same rounds with the plain backend, from the same initial weights."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    task = replace(fast.server.task, backend=PlainBackend(Compute(data.images.device, kind)))
    clients = SimulatedClients(task, data.images, data.labels, fast.parts)
    server = Server(task, fast.server.preparation, clients, callback=NullCallback())
    return player_of(server, fast.state)


def differences(
    settings: Settings, fast: Fast, data: LabelledData, auxiliary: Tensor
) -> dict[str, float]:
    """Return how far the weights after the first round are apart in single precision, without TF32
    or shortcuts.

    max_difference is the largest of any weight; relative_difference is the norm of all differences
    over the norm of what the round changed.
    """
    exact = replace(settings, precision="fp32")
    experiment = experiment_of(exact, device=data.images.device)
    on_gpu = data.images.device.type == "cuda"
    with full_single_precision():
        if on_gpu or fast.precision != "fp32":  # graphs of a GPU keep their precision
            fast = fast_federation(experiment, data, auxiliary)
        expected, _ = plain_player(fast, data, precision="fp32")(1)
        found, _ = fast_player(fast)(1)
    before = fast.state.models[PROTOTYPE]
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    apart = torch.cat([(expected[name] - found[name]).double().flatten() for name in names])
    moved = torch.cat([(expected[name] - before[name]).double().flatten() for name in names])
    return {
        "max_difference": float(apart.abs().max()),
        "relative_difference": float(apart.norm() / moved.norm()),
    }
