"""SCAFFOLD and FedDyn against the update rules of their papers, as loops with clients that keep
state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import written_out as plain
from helpers.experiments import tiny
from helpers.federations import federation, simulated, written_out
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import fedaux
from fedaux import seeding
from fedaux.core.messages import num_bytes
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")

SETTINGS: dict[str, Any] = {
    "participation_rate": 0.5,
    "seeds": [3],
    "local": {"optimizer": "sgd", "learning_rate": 0.01, "proximal": 0.1, "epochs": 2},
}
Vector = dict[str, Tensor]


def gap(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


class Paper:
    """The clients' and the server's variables of a paper's algorithm, all zero at first."""

    def __init__(self, server: Server, state: State) -> None:
        self.task, self.preparation, _ = written_out(server, state)
        self.model = self.preparation.models["cnn"]
        self.x = dict(state.models["cnn"])
        count = len(self.task.parts)
        zero = {name: torch.zeros_like(tensor) for name, tensor in self.x.items()}
        self.own: list[Vector] = [dict(zero) for _ in range(count)]
        self.server: Vector = dict(zero)

    def gradients(self, client: int, number: int) -> Any:
        """Yield the batches of a client's round as functions of its parameters."""
        local, rows = self.task.experiment.local, self.task.parts[client]
        generator = seeding.generator(self.task.seed, "local", round=number, client=client)
        for _ in range(local.epochs):
            order = rows[torch.from_numpy(generator.permutation(len(rows)))]
            yield from order.split(local.batch_size)

    def gradient(self, y: Vector, batch: Tensor) -> Vector:
        self.model.load_state_dict(y)
        self.model.train()
        self.model.zero_grad()
        logits = self.model(self.task.images[batch].float() / 255)
        functional.cross_entropy(logits, self.task.labels[batch]).backward()
        return {name: own.grad.clone() for name, own in self.model.named_parameters()}  # type: ignore[union-attr]

    def scaffold(self, chosen: list[int], number: int) -> None:
        """Algorithm 1 of Karimireddy et al. 2020, option II, with a global step of 1."""
        x, eta, N = self.x, self.task.experiment.local.learning_rate, len(self.task.parts)
        models, changes = [], []
        for i in chosen:
            y, K = dict(x), 0
            for batch in self.gradients(i, number):
                g = self.gradient(y, batch)
                y = {n: y[n] - eta * (g[n] - self.own[i][n] + self.server[n]) for n in y}
                K += 1
            plus = {n: self.own[i][n] - self.server[n] + (x[n] - y[n]) / (K * eta) for n in y}
            changes.append({n: plus[n] - self.own[i][n] for n in y})
            models.append(y)
            self.own[i] = plus
        self.x = {n: x[n] + sum(y[n] - x[n] for y in models) / len(models) for n in x}
        self.server = {n: self.server[n] + sum(one[n] for one in changes) / N for n in x}

    def feddyn(self, chosen: list[int], number: int) -> None:
        """Algorithm 1 of Acar et al. 2021, with SGD for the local problem."""
        x, local, m = self.x, self.task.experiment.local, len(self.task.parts)
        alpha, eta = local.proximal, local.learning_rate
        models = []
        for i in chosen:
            y = dict(x)
            for batch in self.gradients(i, number):
                g = self.gradient(y, batch)
                total = {n: g[n] - self.own[i][n] + alpha * (y[n] - x[n]) for n in y}
                y = {n: y[n] - eta * total[n] for n in y}
            self.own[i] = {n: self.own[i][n] - alpha * (y[n] - x[n]) for n in y}
            models.append(y)
        moved = {n: sum(y[n] - x[n] for y in models) for n in x}
        self.server = {n: self.server[n] - alpha * moved[n] / m for n in x}
        self.x = {n: sum(y[n] for y in models) / len(models) - self.server[n] / alpha for n in x}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_rounds_follow_the_papers_update_rule(method: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method=method, **SETTINGS)
    paper = Paper(server, state)
    start, taken = paper.x, []
    for number in (1, 2):
        state, row = server.play_round(state)
        getattr(paper, method)(row["clients_answered"], number)
        taken += row["clients_answered"]
        assert gap(state.models["cnn"], paper.x) < 2e-5
        size = num_bytes(paper.x)
        assert row["bytes_up"] == 2 * size
        assert row["bytes_down"] == 2 * row["bytes_up"], "corrections go with the weights"
    assert len(set(taken)) < len(taken), "a client came back, with its control variate"
    assert gap(paper.x, start) > 1e-2
    for client, one in state.memory.items():
        control = {name.removeprefix("control/"): own for name, own in one.tensors.items()}
        assert gap(control, paper.own[client]) < 2e-4
        assert gap(control, dict.fromkeys(control, torch.zeros(()))) > 1e-3


@pytest.mark.usefixtures("double_precision")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold+p", "feddyn+p"])
@pytest.mark.parametrize("mode", ["full", "linear"])
def test_a_second_round_is_the_algorithm_written_out(
    method: str, mode: str, tmp_path: Path
) -> None:
    server, state, _, _ = federation(tmp_path, method=method, mode=mode, **SETTINGS)
    middle, _ = server.play_round(state)
    after, _ = server.play_round(middle)
    task, preparation, before = written_out(server, middle)
    expected, _ = plain.play_round(task, preparation, before)
    assert gap(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    forgetful, _ = plain.play_round(task, preparation, replace(before, memory={}))
    assert gap(expected.weights["cnn"], forgetful.weights["cnn"]) > 5e-4


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_stacked_clients_are_clients_one_by_one(method: str, tmp_path: Path) -> None:
    results = []
    for plainly in (False, True):
        server, state, _ = simulated(
            tmp_path / str(plainly), clients_at_once=4, plain=plainly, method=method, **SETTINGS
        )
        for _ in range(2):
            state, _ = server.play_round(state)
        results.append(state.models["cnn"])
    assert gap(*results) < 2e-5


@pytest.mark.slow
def test_control_variates_survive_an_interruption(tmp_path: Path) -> None:
    experiment = tiny(method="scaffold", **SETTINGS)
    fedaux.run(experiment, out=tmp_path / "whole")
    fedaux.run(tiny(method="scaffold", **SETTINGS, rounds=2), out=tmp_path / "broken")
    fedaux.run(experiment, out=tmp_path / "broken", resume=True)
    whole, resumed = (
        load_file(tmp_path / run / "models" / "scaffold-seed3.safetensors")
        for run in ("whole", "broken")
    )
    assert gap(whole, resumed) == 0


def test_settings_that_exclude_a_correction_are_refused() -> None:
    (line,) = problems_of(tiny(method="scaffold+p"))
    assert "local.optimizer: adam; scaffold+p needs local.optimizer = 'sgd'" in line
    momentum = {"optimizer": "sgd", "momentum": 0.9}
    (line,) = problems_of(tiny(method="scaffold", local=momentum))
    assert "sgd with a momentum of 0.9; scaffold needs" in line
    (line,) = problems_of(tiny(method="feddyn", local={"proximal": 0.0}))
    assert "local.proximal = 0: should be above 0, it is the alpha of feddyn" in line
    lines = problems_of(tiny(method="feddyn", local={"privacy": {}}))
    assert "local.privacy: not supported by feddyn, which corrects gradients" in lines
    assert problems_of(tiny(method=["feddyn", "scaffold"], **SETTINGS)) == []
