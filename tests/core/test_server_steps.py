"""Server optimizers and the methods of `examples/methods` against their papers' update rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import WHOLE, tiny
from helpers.federations import Wrapped, federation, same_weights
from helpers.paths import ROOT
from safetensors.torch import load_file
from torch import Tensor

import fedaux
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.messages import TrainRequest, Update
from fedaux.core.objectives import OBJECTIVES
from fedaux.running import plugins
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")
SGD: dict[str, Any] = {"local": {"optimizer": "sgd", "learning_rate": 0.05, "epochs": 2}}
FOREIGN = ("fednova", "fedyogi", "fedper", "fedgkd")


@pytest.fixture(autouse=True)
def _foreign_methods() -> Iterator[None]:
    before = {name: dict(rows) for name, rows in plugins.REGISTRIES.items()}
    for file in FOREIGN:
        fedaux.load_plugin(ROOT / "examples" / "methods" / f"{file}.py")
    yield
    plugins.LOADED.clear()
    for name, rows in before.items():
        plugins.REGISTRIES[name].clear()
        plugins.REGISTRIES[name].update(rows)


class Watched(Wrapped):
    """Clients whose answers are written down."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        self.answers: list[Update] = getattr(self, "answers", [])
        for update in super().train(clients, request):
            self.answers.append(update)
            yield update


Vector = dict[str, list[float]]


def numbers(weights: dict[str, Tensor]) -> Vector:
    return {name: tensor.double().flatten().tolist() for name, tensor in weights.items()}


def gap(found: dict[str, Tensor], expected: Vector) -> float:
    own = numbers(found)
    return max(
        abs(a - b) for name in expected for a, b in zip(own[name], expected[name], strict=True)
    )


def play_by_rule(method: str, tmp_path: Path, rule: Any, rounds: int = 2, **settings: Any) -> None:
    """Play rounds; `rule(x, clients, memory)` is a paper's server update on lists of numbers."""
    server, state, clients, _ = federation(
        tmp_path, kind=Watched, method=method, participation_rate=0.75, **settings
    )
    memory: dict[str, Any] = {}
    for _ in range(rounds):
        clients.answers = []  # type: ignore[attr-defined]
        x = numbers(dict(state.models["cnn"]))
        state, _ = server.play_round(state)
        answers = clients.answers  # type: ignore[attr-defined]
        own = [(one.num_examples, numbers(one.weights)) for one in answers]
        expected = rule(x, own, memory)
        assert gap(dict(state.models["cnn"]), expected) < 2e-5
        assert gap(dict(state.models["cnn"]), x) > 1e-3
        if "final" in memory:
            assert gap(dict(state.final["cnn"]), memory["final"]) < 2e-5


def mean_update(x: Vector, clients: list[tuple[int, Vector]]) -> Vector:
    total = sum(size for size, _ in clients)
    return {
        name: [
            sum(size * own[name][j] for size, own in clients) / total - values[j]
            for j in range(len(values))
        ]
        for name, values in x.items()
    }


def test_fednova_normalises_by_the_number_of_steps(tmp_path: Path) -> None:
    def rule(x: Vector, clients: list[tuple[int, Vector]], memory: dict[str, Any]) -> Vector:
        total = sum(size for size, _ in clients)
        taus = [2 * math.ceil(size / 32) for size, _ in clients]
        assert len(set(taus)) > 1
        effective = sum(size / total * tau for (size, _), tau in zip(clients, taus, strict=True))
        return {
            name: [
                value
                + effective
                * sum(
                    size / total * (own[name][j] - value) / tau
                    for (size, own), tau in zip(clients, taus, strict=True)
                )
                for j, value in enumerate(values)
            ]
            for name, values in x.items()
        }

    play_by_rule("fednova", tmp_path, rule, data=WHOLE, **SGD)
    assert "needs 'sgd' with local.momentum = 0" in problems_of(tiny(method="fednova"))[0]


def test_fedavgm_is_a_velocity(tmp_path: Path) -> None:
    def rule(x: Vector, clients: list[tuple[int, Vector]], memory: dict[str, Any]) -> Vector:
        for name, update in mean_update(x, clients).items():
            old = memory.get(name, [0.0] * len(update))
            memory[name] = [0.9 * v + d for v, d in zip(old, update, strict=True)]
        return {name: [a + v for a, v in zip(x[name], memory[name], strict=True)] for name in x}

    play_by_rule("fedavgm", tmp_path, rule, **SGD)


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_adaptive_servers_follow_the_papers_update_rule(method: str, tmp_path: Path) -> None:
    """Algorithm 2 of Reddi et al. 2021, without bias correction, v_0 = tau^2."""
    eta, beta_1, beta_2, tau = 0.01, 0.9, 0.99, 1e-3

    def rule(x: Vector, clients: list[tuple[int, Vector]], memory: dict[str, Any]) -> Vector:
        after = {}
        for name, update in mean_update(x, clients).items():
            moments = memory.setdefault(name, [(0.0, tau**2)] * len(update))
            for j, d in enumerate(update):
                m, v = moments[j]
                m = beta_1 * m + (1 - beta_1) * d
                if method == "fedadam":
                    v = beta_2 * v + (1 - beta_2) * d * d
                else:
                    v = v - (1 - beta_2) * d * d * math.copysign(1.0, v - d * d)
                moments[j] = m, v
            after[name] = [
                a + eta * m / (math.sqrt(v) + tau)
                for a, (m, v) in zip(x[name], moments, strict=True)
            ]
        return after

    play_by_rule(method, tmp_path, rule, **SGD)


def test_fedexp_extrapolates_by_how_much_clients_disagree(tmp_path: Path) -> None:
    def rule(x: Vector, clients: list[tuple[int, Vector]], memory: dict[str, Any]) -> Vector:
        mean = mean_update(x, clients)
        squares = [
            sum((own[name][j] - v) ** 2 for name in x for j, v in enumerate(x[name]))
            for _, own in clients
        ]
        norm = sum(d * d for update in mean.values() for d in update)
        eta = max(1.0, sum(squares) / (2 * len(clients) * norm))
        after = {
            name: [a + eta * d for a, d in zip(x[name], mean[name], strict=True)] for name in x
        }
        memory["final"] = {
            name: [(a + b) / 2 for a, b in zip(x[name], after[name], strict=True)] for name in x
        }
        return after

    play_by_rule("fedexp", tmp_path, rule, split={"alpha": 0.01}, **SGD)


def test_fedper_keeps_heads_and_averages_features(tmp_path: Path) -> None:
    server, state, clients, experiment = federation(
        tmp_path, kind=Watched, method="fedper", split={"alpha": 0.1}
    )
    middle, _ = server.play_round(state)
    after, row = server.play_round(middle)
    second = {one.client: one for one in clients.answers[4:]}  # type: ignore[attr-defined]
    assert sorted(second) == [0, 1, 2, 3]
    total, accuracy = sum(one.num_examples for one in second.values()), []
    for client, answer in second.items():
        own = {
            name: after.memory[client].tensors.get(name, tensor)
            for name, tensor in after.models["cnn"].items()
        }
        assert all(
            torch.equal(own[name], answer.weights[name]) == name.startswith("head.")
            for name in own
            if own[name].is_floating_point()
        )
        started = {**middle.models["cnn"], **middle.memory[client].tensors}
        request = TrainRequest(2, {"cnn": started}, experiment.local, 0.0, 0)
        (again,) = clients.inner.train([client], request)
        assert all(torch.equal(again.weights[name], own) for name, own in answer.weights.items())
        logits = server.server_models["cnn"].test_logits(own)
        hits = (logits.argmax(dim=1) == server.task.test_labels).double()
        shares = clients.class_shares(client)
        by_class = [float(hits[server.task.test_labels == c].mean()) for c in range(10)]
        accuracy.append(sum(float(s) * a for s, a in zip(shares, by_class, strict=True)))
    for name, tensor in after.models["cnn"].items():
        if not name.startswith("head.") and tensor.is_floating_point():
            mean = sum(one.num_examples / total * one.weights[name] for one in second.values())
            assert torch.allclose(tensor, mean, atol=1e-6)
    assert row["accuracy"] == pytest.approx(sum(accuracy) / 4)
    lines = problems_of(tiny(method="fedper"), federated=True)
    assert any("'fedper': part of its models stays with the clients" in line for line in lines)


def test_a_second_model_teaches_in_local_training(tmp_path: Path) -> None:
    beliefs = torch.tensor([[0.7, 0.2, 0.1]])
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    term = OBJECTIVES["global-distillation"].term
    assert term is not None
    own = [math.exp(z) / sum(math.exp(y) for y in (1.0, 0.0, -1.0)) for z in (1.0, 0.0, -1.0)]
    expected = sum(q * math.log(q / p) for q, p in zip((0.7, 0.2, 0.1), own, strict=True))
    found = term(logits, torch.tensor([0]), beliefs, torch.ones(3) / 3)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    results = []
    for method in ("fedgkd", "fedavg"):
        server, state, _, _ = federation(tmp_path / method, method=method)
        results.append(server.play_round(state)[0])
    assert not same_weights(*results)


LOSSES = {"fedprox", "fedlc", "fedrs", "fedntd", "fedvls"}
"""Methods that differ from fedavg in the local loss alone: fedavg shows the same."""
LIGHT = [
    name
    for name in (*METHODS, *FOREIGN)
    if name not in ("fedavg+p+m", "feddf+p+m", "fedaux+logits", "fedaux+logits+m")
    and name.removesuffix("+p") not in LOSSES | {"ccvr"}
]


@pytest.mark.quickly(
    *(f"{name}-linear" for name in ("fedexp+p", "fedadam+p", "fedaux+m", "private-student")),
    *(f"{name}-full" for name in ("fedavg+m", "fedbe", "fednova", "fedyogi", "feddyn", "scaffold")),
)
@pytest.mark.parametrize("mode", ["full", "linear"])
@pytest.mark.parametrize("method", LIGHT)
def test_a_run_that_is_extended_equals_one_that_had_the_rounds_from_the_start(
    method: str, mode: str, tmp_path: Path
) -> None:
    if mode == "linear" and not asks_of(method).pretrained:
        pytest.skip("linear mode needs h0")
    settings: dict[str, Any] = {"method": method, "mode": mode, "participation_rate": 0.5, **SGD}
    fedaux.run(tiny(rounds=2, **settings), out=tmp_path / "whole")
    fedaux.run(tiny(rounds=1, **settings), out=tmp_path / "grown")
    fedaux.run(tiny(rounds=2, **settings), out=tmp_path / "grown", resume=True)
    cells = [tmp_path / run / "cells" / f"{method}-seed0" for run in ("whole", "grown")]
    states = [load_file(cell / "round-00002.safetensors") for cell in cells]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    kept = [{file.name: load_file(file) for file in (cell / "memory").glob("*")} for cell in cells]
    assert kept[0].keys() == kept[1].keys()
    for name, tensors in kept[0].items():
        assert all(torch.equal(own, kept[1][name][key]) for key, own in tensors.items())


def test_fedaux2_distills_only_if_its_first_soft_labels_tell_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedaux.core.algorithms import fedaux2

    whole = METHODS["fedaux2"]
    assert isinstance(whole, fedaux2.FedAux2)
    monkeypatch.setitem(METHODS, "untaught", replace(whole, name="untaught", distills=False))

    def models(method: str, out: str, rounds: int, *, resume: bool = False) -> dict[str, Tensor]:
        settings = {"method": method, "participation_rate": 0.5, **SGD}
        fedaux.run(tiny(rounds=rounds, **settings), out=tmp_path / out, resume=resume)
        cell = tmp_path / out / "cells" / f"{method}-seed0"
        found = load_file(cell / f"round-{rounds:05d}.safetensors")
        return {name: tensor for name, tensor in found.items() if not name.startswith("own/told")}

    taught = models("fedaux2", "taught", 2)
    models("fedaux2", "grown", 1)
    monkeypatch.setattr(fedaux2, "LEAST_TOLD", math.inf)
    untaught = models("fedaux2", "untaught", 2)
    assert not (tmp_path / "untaught" / "cells" / "fedaux2-seed0" / "memory").exists()
    expected = models("untaught", "expected", 2)
    assert untaught.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in untaught.items())
    assert not all(torch.equal(tensor, taught[name]) for name, tensor in untaught.items())
    # What the first labels told is kept: the second round does not look at its own.
    monkeypatch.setattr(fedaux2, "information", lambda labels: labels.sum() * 0)
    monkeypatch.setattr(fedaux2, "LEAST_TOLD", 1e-9)
    grown = models("fedaux2", "grown", 2, resume=True)
    assert all(torch.equal(tensor, taught[name]) for name, tensor in grown.items())
