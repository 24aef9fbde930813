"""Federations of simulated clients that a test can disturb, and the same task for the readable
algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import written_out as plain
from torch import Tensor
from written_out.methods import METHODS, in_mode

from fedaux.config import Experiment
from fedaux.core.algorithms.scaffold import stored_control
from fedaux.core.compute import Compute
from fedaux.core.messages import (
    ClientRelease,
    ClientState,
    ReleaseRequest,
    TrainRequest,
    Update,
    Weights,
)
from fedaux.core.plain_backend import PlainBackend
from fedaux.core.server import Server, prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import State
from fedaux.data import load_auxiliary, load_labelled
from fedaux.models.standardised import has_map, without_map
from fedaux.running.run import ExperimentRunner, NullCallback, client_parts
from fedaux.running.run_directory import RunDirectory
from helpers.experiments import tiny


class Wrapped:
    """The simulator's clients, with whatever a test does to their answers."""

    def __init__(self, inner: SimulatedClients) -> None:
        self.inner = inner
        self.released: list[int] = []

    def present(self) -> Sequence[int]:
        return self.inner.present()

    def sizes(self, clients: Sequence[int]) -> Sequence[int]:
        return self.inner.sizes(clients)

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        self.released += clients
        yield from self.inner.release(clients, request)

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        yield from self.inner.train(clients, request)

    def reasons(self) -> Mapping[int, str]:
        return self.inner.reasons()

    def class_shares(self, client: int) -> Tensor:
        return self.inner.class_shares(client)

    def client_states(self) -> Mapping[int, ClientState]:
        return self.inner.client_states()

    def load_client_states(self, kept: Mapping[int, ClientState]) -> None:
        self.inner.load_client_states(kept)


def federation(
    tmp_path: Path, *, kind: type[Wrapped] = Wrapped, **changes: Any
) -> tuple[Server, State, Wrapped, Experiment]:
    experiment = tiny(**changes)
    directory = RunDirectory.open(tmp_path / "run", experiment, resume=(tmp_path / "run").exists())
    data, auxiliary = load_labelled(experiment.data), load_auxiliary(experiment.auxiliary)
    runner = ExperimentRunner(experiment, directory, data, auxiliary, NullCallback())
    task = runner.task(experiment.method[0], experiment.seeds[0])
    clients = kind(SimulatedClients(task, data.images, data.labels, client_parts(task, data)))
    state, preparation = prepare(
        task, clients, extractor=runner.extractor(task), callback=NullCallback()
    )
    directory.close()
    return (
        Server(task, preparation, clients, callback=NullCallback()),
        state,
        clients,
        experiment,
    )


def metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def play(server: Server, state: State, rounds: int) -> tuple[State, list[dict[str, Any]]]:
    rows = []
    for _ in range(rounds):
        state, row = server.play_round(state)
        rows.append(metrics(row))
    return state, rows


def same_weights(first: State, second: State) -> bool:
    return all(
        torch.equal(tensor, second.models[prototype][name])
        for prototype, weights in first.models.items()
        for name, tensor in weights.items()
    )


def written_out(server: Server, state: State) -> tuple[plain.Task, plain.Preparation, plain.State]:
    """The same task for the readable algorithm, prepared by itself from the same h0, at the
    product's state."""
    own, experiment = server.task, server.task.experiment
    data = load_labelled(experiment.data)
    parts = [torch.from_numpy(part) for part in client_parts(own, data)]
    task = plain.Task(
        experiment=experiment,
        method=in_mode(METHODS[own.method.name], own.experiment.mode),
        seed=own.seed,
        input_shape=own.input_shape,
        num_classes=own.num_classes,
        prototype_of=own.prototype_of,
        images=data.images,
        labels=data.labels,
        parts=parts,
        negatives=own.negatives,
        distill_set=own.distill_set,
        test_images=own.test_images,
        test_labels=own.test_labels,
    )
    preparation, _ = plain.prepare(task, extractors=h0_of(server, state))
    memory = {
        client: member_of(server, client, stamped, parts)
        for client, stamped in state.memory.items()
    }
    return task, preparation, plain.State(state.round, state.models, memory, state.carried("final"))


def h0_of(server: Server, state: State) -> Mapping[str, Weights]:
    """h0 as preparation keeps it or, of methods that only start from it, as the features they start
    from."""
    prefix = "features."
    if kept := server.preparation.extractors:
        return {name: without_map(own) if has_map(own) else own for name, own in kept.items()}
    return {
        prototype: {
            name.removeprefix(prefix): own
            for name, own in weights.items()
            if name.startswith(prefix)
        }
        for prototype, weights in state.models.items()
    }


def member_of(
    server: Server, client: int, stamped: ClientState, parts: Sequence[Tensor]
) -> plain.Member:
    """What the product remembers of a client, as the readable algorithm has it."""
    tensors, prefix = stamped.tensors, "weights/"
    weights = {
        name.removeprefix(prefix): own for name, own in tensors.items() if name.startswith(prefix)
    }
    prototype, size = server.task.prototype_of[client], len(parts[client])
    return plain.Member(
        client,
        prototype,
        stamped.round,
        size,
        weights,
        tensors.get("logits"),
        control=stored_control(stamped),
    )


def simulated(
    tmp_path: Path, *, clients_at_once: int, workers: int = 1, plain: bool = False, **changes: Any
) -> tuple[Server, State, SimulatedClients]:
    """A federation in this process; `plain` takes the reference backend instead of the best one."""
    experiment = tiny(**changes)
    directory = RunDirectory.open(tmp_path / "run", experiment, resume=(tmp_path / "run").exists())
    data, auxiliary = load_labelled(experiment.data), load_auxiliary(experiment.auxiliary)
    runner = ExperimentRunner(
        experiment,
        directory,
        data,
        auxiliary,
        NullCallback(),
        Compute(clients_at_once=clients_at_once, workers=workers),
    )
    task = runner.task(experiment.method[0], experiment.seeds[0])
    if plain:
        task = replace(task, backend=PlainBackend(task.compute))
    clients = SimulatedClients(task, data.images, data.labels, client_parts(task, data))
    state, preparation = prepare(
        task, clients, extractor=runner.extractor(task), callback=NullCallback()
    )
    directory.close()
    return Server(task, preparation, clients, callback=NullCallback()), state, clients
