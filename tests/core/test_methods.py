"""Each method against the algorithm written out, and the identities between methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import written_out as plain
from helpers.experiments import WHOLE, tiny
from helpers.federations import Wrapped, federation, h0_of, play, same_weights, written_out
from torch import Tensor
from torch.nn import functional

import fedaux
from fedaux import seeding
from fedaux.config import ConfigError
from fedaux.core.algorithms import METHODS, asks_of, fedaux2
from fedaux.core.algorithms.fedaux2 import FedAux2
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.algorithms.scaffold import Scaffold
from fedaux.core.algorithms.server_steps import FedAdam, FedAvgM, FedExP
from fedaux.core.messages import TrainRequest, Update, num_bytes
from fedaux.core.server import Server
from fedaux.core.task import State, build_models
from fedaux.core.weights import own_weights
from fedaux.data import load_labelled
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.run import split_for


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


def same_round(
    server: Server, state: State
) -> tuple[State, dict[str, Any], plain.State, dict[str, Any]]:
    """One round by the product and by the readable algorithm, from the same state."""
    after, row = server.play_round(state)
    expected, expected_row = plain.play_round(*written_out(server, state))
    assert expected_row["clients"] == row["clients_answered"]
    return after, row, expected, expected_row


FROM_H0 = {f"{name}+p" for name in METHODS} - {"fedavg+p"}
"""Methods that differ from another in their start alone."""
FEDERATED = [
    name
    for name, method in METHODS.items()
    if name not in FROM_H0
    and asks_of(name).trains
    and not asks_of(name).is_bound
    and not isinstance(method, FedAvgM | FedAdam | FedExP)  # tests/core/test_server_steps.py
]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", FEDERATED)
def test_a_round_is_the_algorithm_written_out(method: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path,
        method=method,
        participation_rate=0.75,
        bayesian={"samples": 2},
        local={"learning_rate": 2e-3},
    )
    after, row, expected, expected_row = same_round(server, state)
    assert len(row["clients_answered"]) == 3
    assert distance(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    assert distance(after.final["cnn"], (expected.smoothed or expected.weights)["cnn"]) < 5e-5
    assert distance(after.models["cnn"], state.models["cnn"]) > 5e-3
    assert row["accuracy"] == pytest.approx(expected_row["accuracy"], abs=1 / 359)  # one test image
    assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-4)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("enough", [True, False])
def test_fedaux2_learns_soft_labels_as_written_out(
    enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, state, _, _ = federation(tmp_path, method="fedaux2", local={"learning_rate": 2e-3})
    told = plain.play_round(*written_out(server, state))[0].told
    monkeypatch.setattr(plain, "LEAST_TOLD", told * (0.99 if enough else 1.01))
    monkeypatch.setattr(fedaux2, "LEAST_TOLD", plain.LEAST_TOLD)
    after, row, expected, _ = same_round(server, state)
    assert distance(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    assert after.memory.keys() == expected.memory.keys()
    assert bool(after.memory) is enough
    assert ("distill" in row["seconds"]) is enough


@pytest.mark.usefixtures("double_precision")
def test_rounds_of_heads_are_the_algorithm_written_out(tmp_path: Path) -> None:
    """Control variates are remembered from round to round; absent clients keep theirs."""
    server, state, _, _ = federation(
        tmp_path, method="fedaux2", mode="linear", rounds=3, participation_rate=0.75
    )
    for _ in range(3):
        before = state
        state, row, expected, expected_row = same_round(server, before)
        moved = distance(state.models["cnn"], before.models["cnn"])
        assert distance(state.models["cnn"], expected.weights["cnn"]) < 1e-3 * moved
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-4)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "mechanism", [name for name in MECHANISMS if name not in ("heads", "counts")]
)
def test_preparation_is_the_algorithm_written_out(mechanism: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method="fedaux", certainty={"mechanism": mechanism})
    task, preparation, _ = written_out(server, state)
    _, start = plain.prepare(task, extractors=h0_of(server, state))
    assert distance(start.weights["cnn"], state.models["cnn"]) == 0
    assert preparation.releases.keys() == state.releases.keys()
    for client, release in preparation.releases.items():
        released = state.releases[client]
        assert release.sigma == released.entry.sigma
        assert torch.allclose(release.vector, released.vector, rtol=1e-4, atol=1e-5)
    clients = [0, 2, 3]
    scores = plain.log_scores(task, preparation, clients)
    assert torch.allclose(
        scores, server.scorer.log_scores(state.releases, clients), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("first", "second"), [("feddf", "fedbe"), ("fedaux", "fedaux+logits"), ("fedaux", "feddf+p")]
)
def test_methods_differ(first: str, second: str, tmp_path: Path) -> None:
    results = []
    for method in (first, second):
        server, state, _, _ = federation(tmp_path / method, method=method)
        results.append(play(server, state, 1)[0].models["cnn"])
    assert distance(*results) > 1e-4


@pytest.mark.quickly("fedavg", "feddf+m")
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "feddf", "fedbe", "feddf+m"])
def test_a_pretrained_start_is_the_only_difference(method: str, tmp_path: Path) -> None:
    """With h0 the random start itself, `+p` changes no bit."""
    name, _, suffix = method.partition("+")
    results = []
    for one in (method, f"{name}+p" + (f"+{suffix}" if suffix else "")):
        server, state, _, _ = federation(tmp_path / one, method=one, pretraining={"kind": "none"})
        results.append(play(server, state, 2)[0])
    assert same_weights(*results)


REMEMBERING = [
    ("feddf", "feddf+m"),
    ("fedaux", "fedaux+m"),
    ("fedaux+logits", "fedaux+logits+m"),
    ("fedavg", "fedavg+m"),
]


@pytest.mark.quickly("fedaux-fedaux+m")
@pytest.mark.parametrize(("without", "with_memory"), REMEMBERING)
def test_memory_changes_nothing_at_full_participation(
    without: str, with_memory: str, tmp_path: Path
) -> None:
    results = []
    for method in (without, with_memory):
        server, state, _, _ = federation(tmp_path / method, method=method)
        results.append(play(server, state, 2)[0])
    assert same_weights(*results)


def first_two_rounds(
    tmp_path: Path, method: str, **changes: Any
) -> tuple[Server, State, State, dict[str, Any]]:
    server, state, _, _ = federation(tmp_path, method=method, participation_rate=0.5, **changes)
    middle, _ = server.play_round(state)
    after, row = server.play_round(middle)
    return server, middle, after, row


@pytest.mark.usefixtures("double_precision")
@pytest.mark.quickly("fedaux2", "fedavg+m")
@pytest.mark.parametrize(
    "method",
    [
        name
        for name in FEDERATED
        if asks_of(name).remembers and not isinstance(METHODS[name], Scaffold)
    ],
)
def test_absent_clients_are_counted_with_their_last_answers(method: str, tmp_path: Path) -> None:
    server, middle, after, row = first_two_rounds(
        tmp_path, method, memory={"discount": 0.25}, seeds=[3]
    )
    absent = row["clients_remembered"]
    assert absent
    assert set(absent) == set(middle.memory) - set(row["clients_answered"])
    if asks_of(method).distills:
        assert all(
            middle.memory[client].tensors["logits"].dtype == torch.float16 for client in absent
        )
    task, preparation, before = written_out(server, middle)
    expected, _ = plain.play_round(task, preparation, before)
    assert distance(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    assert distance(after.final["cnn"], (expected.smoothed or expected.weights)["cnn"]) < 5e-5
    assert expected.memory.keys() == after.memory.keys()
    assert {client: one.round for client, one in expected.memory.items()} == {
        client: one.round for client, one in after.memory.items()
    }
    forgetful, _ = plain.play_round(task, preparation, replace(before, memory={}))
    assert distance(expected.weights["cnn"], forgetful.weights["cnn"]) > 5e-4


@pytest.mark.quickly("+p")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("start", ["", "+p"])
def test_local_only_is_each_client_trained_by_itself(start: str, tmp_path: Path) -> None:
    """Two rounds, in which every client goes on from its own model and the server's never
    moves."""
    server, state, clients, experiment = federation(
        tmp_path,
        method=f"local-only{start}",
        participation_rate=0.5,
        local={"learning_rate": 2e-3},
    )
    middle, first, own, own_first = same_round(server, state)
    after, second, expected, expected_second = same_round(server, middle)
    assert same_weights(after, state)
    assert first["clients_answered"] == second["clients_answered"] == [0, 1, 2, 3]
    assert first["bytes_up"] == first["bytes_down"] == second["bytes_up"] == 0
    accuracies = []
    for client in range(4):
        weights = state.models
        for number in (1, 2):
            request = TrainRequest(number, weights, experiment.local, 0.0, 0)
            (update,) = clients.inner.train([client], request)
            weights = {"cnn": update.weights}
        kept = {
            name.removeprefix("weights/"): tensor
            for name, tensor in after.memory[client].tensors.items()
            if name.startswith("weights/")
        }
        assert distance(kept, weights["cnn"]) == 0
        assert distance(kept, expected.memory[client].weights) < 5e-5
        assert distance(kept, own.memory[client].weights) > 5e-3  # the second round goes on
        logits = server.server_models["cnn"].test_logits(weights["cnn"])
        accuracies.append(float((logits.argmax(dim=1) == server.task.test_labels).float().mean()))
    assert second["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-6)
    for row, written in ((first, own_first), (second, expected_second)):
        assert row["accuracy"] == pytest.approx(written["accuracy"], abs=1 / 359)
        assert row["loss"] == pytest.approx(written["loss"], rel=1e-4)


@pytest.mark.quickly("")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("start", ["", "+p"])
def test_pooled_is_one_model_trained_on_all_data(start: str, tmp_path: Path) -> None:
    """Two rounds are two fresh optimizers over all examples, however they are split."""
    server, state, _, experiment = federation(
        tmp_path, method=f"pooled{start}", participation_rate=0.25
    )
    middle, row, _, written = same_round(server, state)
    after, _, expected, _ = same_round(server, middle)
    assert row["clients_answered"] == [0]
    assert row["bytes_up"] == row["bytes_down"] == 0
    assert row["accuracy"] == pytest.approx(written["accuracy"], abs=1 / 359)
    assert distance(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    data = load_labelled(experiment.data)
    model = build_models(server.task)["cnn"]
    model.load_state_dict(state.models["cnn"])
    for number in (1, 2):
        optimizer = torch.optim.Adam(model.parameters(), lr=experiment.local.learning_rate)
        generator = seeding.generator(0, "local", round=number, client=0)
        for _ in range(experiment.local.epochs):
            order = generator.permutation(len(data.labels))
            for begin in range(0, len(order), experiment.local.batch_size):
                rows = order[begin : begin + experiment.local.batch_size]
                inputs = data.images[rows].float() / 255
                loss = functional.cross_entropy(model(inputs), data.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert distance(after.models["cnn"], model.state_dict()) < 2e-3
    assert distance(after.models["cnn"], state.models["cnn"]) > 2e-2


@pytest.mark.usefixtures("double_precision")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["pooled", "local-only"])
def test_every_prototype_is_pooled_and_trained_alone(method: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method=method, prototypes=MIXED)
    after, row, expected, written = same_round(server, state)
    assert row["accuracy_by_prototype"].keys() == {"narrow", "flat", "deep"}
    assert row["accuracy_by_prototype"] == pytest.approx(written["accuracy_by_prototype"])
    for name, weights in after.models.items():
        assert distance(weights, expected.weights[name]) < 1e-6
    for client, kept in after.memory.items():
        assert distance(own_weights(kept), expected.memory[client].weights) < 1e-6


@pytest.mark.slow
def test_local_only_survives_an_interruption(tmp_path: Path) -> None:
    whole = fedaux.run(tiny(method="local-only", rounds=2), out=tmp_path / "whole").summary
    fedaux.run(tiny(method="local-only", rounds=1), out=tmp_path / "broken")
    recipe = tmp_path / "broken" / "config.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 1", "rounds = 2"))
    resumed = fedaux.run(
        tiny(method="local-only", rounds=2), out=tmp_path / "broken", resume=True
    ).summary
    assert whole["rows"][0]["accuracy_mean"] == resumed["rows"][0]["accuracy_mean"]


@pytest.mark.parametrize("method", ["pooled+p", "local-only"])
def test_bounds_send_nothing_in_linear_mode(method: str, tmp_path: Path) -> None:
    server, _, _, _ = federation(tmp_path, method=method, mode="linear")
    assert server.preparation.bytes_down == server.preparation.bytes_up == 0


def test_bounds_are_refused_in_a_federation() -> None:
    from fedaux.running.preflight import problems_of

    found = problems_of(tiny(method=["pooled+p", "local-only", "fedavg"]), federated=True)
    refused = [line for line in found if line.startswith("method")]
    assert len(refused) == 2
    assert "method = 'pooled+p': needs all private data in one place" in refused[0]
    assert "method = 'local-only': each client trains alone" in refused[1]


@pytest.mark.quickly("fedaux+m-settings0")
@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedaux+m", {}), ("fedavg+m", {}), ("fedavg", {"local": {"optimizer_state": "kept"}})],
)
def test_memory_and_kept_optimizers_survive_an_interruption(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    experiment = tiny(method=method, participation_rate=0.5, **settings)
    whole = fedaux.run(experiment, out=tmp_path / "whole").summary["rows"]

    class Interrupts:
        def phase(self, task: Any, round: int, name: str) -> None:
            if round == 2 and name == "evaluate":
                raise KeyboardInterrupt

        def round(self, row: Mapping[str, Any]) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        fedaux.run(experiment, out=tmp_path / "broken", callback=Interrupts())
    resumed = fedaux.run(experiment, out=tmp_path / "broken", resume=True).summary["rows"]
    assert [row["accuracy_mean"] for row in whole] == [row["accuracy_mean"] for row in resumed]
    cells = [tmp_path / run / "cells" / f"{method}-seed0" for run in ("whole", "broken")]
    kind = "kept" if settings else "memory"
    files = [sorted(file.name for file in (cell / kind).iterdir()) for cell in cells]
    assert files[0] == files[1]
    assert files[0]
    assert len({name.split("-round")[0] for name in files[0]}) == len(files[0])  # one file a client


@pytest.mark.usefixtures("double_precision")
@pytest.mark.slow
def test_a_kept_optimizer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """One client, no other change between rounds: three rounds of one epoch are one round of
    three."""
    results = {}
    for state, rounds, epochs in (("kept", 3, 1), ("reset", 3, 1)):
        server, start, _, _ = federation(
            tmp_path / state,
            method="fedavg",
            split={"num_clients": 1},
            local={"optimizer_state": state, "epochs": epochs},
        )
        results[state] = play(server, start, rounds)[0].models["cnn"]
    data = load_labelled(tiny().data)
    model = build_models(server.task)["cnn"]
    model.load_state_dict(start.models["cnn"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    part = split_for(server.task.experiment, data, 0)[0]
    for number in (1, 2, 3):
        order = part[seeding.generator(0, "local", round=number, client=0).permutation(len(part))]
        for begin in range(0, len(order), 32):
            rows = order[begin : begin + 32]
            loss = functional.cross_entropy(
                model(data.images[rows].float() / 255), data.labels[rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert distance(results["kept"], model.state_dict()) < 2e-3
    assert distance(results["reset"], model.state_dict()) > 5e-3


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["fedavg+p", "feddf+p", "fedaux", "fedaux+m"])
def test_linear_mode_is_training_on_frozen_features(method: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path, method=method, mode="linear", participation_rate=0.75
    )
    assert set(state.models["cnn"]) == {"head.weight", "head.bias"}
    after, row, expected, _ = same_round(server, state)
    assert row["bytes_up"] == row["bytes_down"] == 3 * num_bytes(state.models["cnn"])
    prepared = server.preparation
    sent = num_bytes(prepared.extractors["cnn"]) + num_bytes(prepared.public.get("cnn", {}))
    assert prepared.bytes_down == 4 * sent, "h0 and, with scores, the public map"
    assert distance(after.models["cnn"], expected.weights["cnn"]) < 5e-5
    assert distance(after.final["cnn"], (expected.smoothed or expected.weights)["cnn"]) < 5e-5
    assert distance(after.models["cnn"], state.models["cnn"]) > 1e-3


def test_linear_mode_needs_methods_that_start_from_h0() -> None:
    from fedaux.running.preflight import check

    with pytest.raises(
        ConfigError, match=r"mode = 'linear': fedavg, feddf should be a method that starts from h0"
    ):
        check(tiny(method=["fedavg", "fedaux", "feddf"], mode="linear"))


def test_heads_that_hardly_leave_their_start_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fedaux.data import load_both
    from fedaux.running.preflight import check_data

    data, public = load_both(tiny(data=WHOLE))
    for rate, mode, warned in (
        (1e-3, "linear", True),
        (1e-2, "linear", False),
        (1e-3, "full", False),
    ):
        check_data(
            tiny(mode=mode, local={"optimizer": "adam", "learning_rate": rate}), data, public
        )
        said = "36 local steps at local.learning_rate = 0.001 hardly move heads"
        assert (said in capsys.readouterr().err) == warned


MIXED = [
    {"name": "narrow", "model": "cnn", "options": {"width": 4}},
    {"name": "flat", "model": "mlp", "options": {"width": 16}},
    {"name": "deep", "model": "mobilenetv2", "options": {"width": 0.1}},
]


@pytest.mark.quickly("fedbe")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["fedavg", "fedbe", "fedaux+m"])
def test_rounds_of_several_prototypes_are_the_algorithm_written_out(
    method: str, tmp_path: Path
) -> None:
    """Without the deep one: batch normalisation in many layers enlarges last bits beyond any
    tolerance."""
    server, state, _, _ = federation(
        tmp_path, method=method, prototypes=MIXED[:2], participation_rate=0.75, data={}
    )
    for _ in range(2):
        state, row, expected, expected_row = same_round(server, state)
        assert row["accuracy_by_prototype"] == pytest.approx(
            expected_row["accuracy_by_prototype"], abs=1 / 359
        )
        assert all(
            distance(own, expected.weights[name]) < 5e-5 for name, own in state.models.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbe", "fedaux+m"])
def test_prototypes_learn_from_all_clients_even_where_a_round_misses_one(
    method: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "split": {"num_clients": 6},
        "participation_rate": 1 / 3,
        "auxiliary": {"size": 60},
    }
    server, state, _, _ = federation(tmp_path, method=method, prototypes=MIXED, **changes)
    for _ in range(2):
        before = state
        state, row = server.play_round(state)
        took_part = {server.task.prototype_of[client] for client in row["clients_answered"]}
        assert len(took_part) < 3
        for name in ("narrow", "flat", "deep"):
            moved = distance(state.models[name], before.models[name]) > 0
            # Without distillation, who is absent stays; with it, every student learns from whoever
            # is there.
            assert moved == (name in took_part or asks_of(method).distills)
        assert set(row["accuracy_by_prototype"]) == {"narrow", "flat", "deep"}
        assert row["accuracy"] == pytest.approx(
            np.mean(list(row["accuracy_by_prototype"].values()))
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "feddf+m", "fedaux"])
def test_clients_with_one_example_or_one_class_work(method: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "split": {"num_clients": 400, "alpha": 0.01},
        "participation_rate": 0.03,
    }
    server, state, _, _ = federation(tmp_path, method=method, **changes)
    state, rows = play(server, state, 1)
    task, _, _ = written_out(server, state)
    sizes = [len(task.parts[client]) for client in rows[0]["clients_answered"]]
    assert min(sizes) == 1
    assert len(sizes) == 12
    assert not rows[0]["clients_dropped"]
    assert rows[0]["accuracy"] is not None


def test_recipes_hold_the_settings_of_their_sources() -> None:
    shot = load_experiment(find_recipe("cifar10-one-shot"))
    assert (shot.rounds, shot.participation_rate, shot.local.epochs, shot.split.num_clients) == (
        1,
        1.0,
        40,
        100,
    )
    table = load_experiment(find_recipe("cifar10"))
    assert (
        table.distillation.epochs,
        table.distillation.learning_rate,
        table.distillation.batch_size,
    ) == (*(1, 5e-5, 128),)
    assert (table.local.epochs, table.local.batch_size, table.local.learning_rate) == (1, 32, 1e-3)


def test_one_shot_is_one_round_of_everybody(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method="fedaux", rounds=1, local={"epochs": 3})
    _, row = server.play_round(state)
    assert row["clients_answered"] == [0, 1, 2, 3]
    assert row["accuracy"] is not None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            lambda: torch.zeros(160),
            r"soft labels are \[160\], should be \[160, 10\]: public examples, classes",
        ),
        (lambda: None, "method own: its soft labels are NoneType, should be a torch.Tensor"),
        (
            lambda: torch.full((161, 10), 0.1),
            r"method own: its soft labels are \[161, 10\], should be \[160, 10\]",
        ),
        (
            lambda: torch.full((160, 5), 0.2),
            r"method own: its soft labels are \[160, 5\], should be \[160, 10\]",
        ),
        (
            lambda: torch.full((160, 10), 0.2),
            "method own: its soft labels have rows that are not distributions",
        ),
        (
            lambda: torch.full((160, 10), float("nan")),
            "method own: its soft labels have rows that are not distributions",
        ),
    ],
)
def test_a_teacher_that_returns_no_distributions_is_named(
    labels: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(FedDF):
        def soft_labels(self, *_: Any) -> Any:
            return labels()

    monkeypatch.setitem(METHODS, "own", Own("own"))
    server, state, _, _ = federation(tmp_path, method="own")
    with pytest.raises(ValueError, match=message):
        server.play_round(state)


class Careless(Wrapped):
    """Clients that send infinity, leave a tensor out, add one, claim no examples, or a loss that is
    no number."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            name = "head.bias"
            if update.client == 0:
                update.weights[name][0] = float("inf")
            if update.client == 1:
                del update.weights[name]
            if update.client == 2:
                update = replace(update, num_examples=0)
            if update.client == 3:
                update = replace(update, loss=float("nan"))
            yield update


def test_careless_answers_are_left_out_and_the_model_stays(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, kind=Careless, method="fedaux+m")
    after, row = server.play_round(state)
    reasons = row["clients_dropped"]
    assert "head.bias holds NaN or infinity" in reasons["0"]
    assert "head.bias is missing" in reasons["1"]
    assert "claims 0 examples" in reasons["2"]
    assert "loss of nan" in reasons["3"]
    assert row["model_kept"]
    assert same_weights(state, after)
    assert not after.memory


def test_a_gpu_that_is_too_small_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("fedaux.running.run.Server.play_round", overflow)
    with pytest.raises(ValueError, match=r"Reduce engine.clients_at_once \(now 8\).*--resume"):
        fedaux.run(tiny(method="fedavg"), out=tmp_path / "run")
    monkeypatch.setattr("fedaux.fast.FastBackend.extractor", overflow)
    with pytest.raises(
        ValueError, match=r"features of cnn: .* Reduce evaluation.batch_size \(now 256\), in a new"
    ):
        fedaux.run(tiny(method="fedaux"), out=tmp_path / "features")


def test_strengths_and_objectives_of_a_round_reach_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator keeps its way of training between rounds."""

    def trained(*strengths: float, stated: Sequence[str] = ()) -> Mapping[str, Tensor]:
        class Own(FedAvg):
            def round(self, server: Server, state: State) -> State:
                strength = {"not-true": strengths[server.log.round - 1]}
                members = server.train(state, objectives=("not-true",), strengths=strength)
                return state.next(server.average(state, members))

        monkeypatch.setitem(METHODS, "own", Own("own"))
        place = tmp_path / f"{strengths}{stated}"
        server, state, _, _ = federation(place, method="own", local={"objectives": list(stated)})
        for _ in strengths:
            state, _ = server.play_round(state)
        return state.models["cnn"]

    assert distance(trained(0.0, 0.0), trained(0.0, 5.0)) > 1e-4
    twice = trained(5.0, stated=["not-true"])
    assert distance(twice, trained(5.0)) == 0.0


@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_no_client_claims_a_class_where_averages_are_robust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    same: list[bool] = []

    class Own(FedAux2):
        def labels(self, *arguments: Any) -> Tensor:
            found = super().labels(*arguments)
            plainly = FedAux2("plainly", by_class=False).labels(*arguments)
            same.append(torch.equal(found, plainly))
            return found

    monkeypatch.setitem(METHODS, "own", Own("own"))
    server, state, _, _ = federation(tmp_path, method="own", aggregation=aggregation)
    server.play_round(state)
    assert same[-1] == (aggregation == "median")
