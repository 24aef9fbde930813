from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import Wrapped, federation, play, same_weights

from fedaux import seeding
from fedaux.core.algorithms import METHODS
from fedaux.core.compute import Compute
from fedaux.core.messages import ClientRelease, ReleaseRequest, TrainRequest, Update, num_bytes
from fedaux.core.server import Server, select
from fedaux.core.task import Preparation, assign_prototypes, trainable_models
from fedaux.core.weights import average, snapshot
from fedaux.fast.inference import FastPredictor
from fedaux.running.run import NullCallback


class Backwards(Wrapped):
    """Clients that work in the opposite order."""

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        yield from super().release(clients[::-1], request)

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        yield from super().train(clients[::-1], request)


QUICKLY = ("fedavg", "fedbe+p", "fedaux+m", "fedaux2", "fedauxfdp", "scaffold")
"""Methods that average, teach, remember, release and correct in all ways that there are."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS],
)
def test_the_order_of_clients_changes_no_bit(method: str, tmp_path: Path) -> None:
    forward, state, _, _ = federation(tmp_path, method=method)
    backward, other, _, _ = federation(tmp_path, kind=Backwards, method=method)
    state, rows = play(forward, state, 2)
    other, other_rows = play(backward, other, 2)
    assert rows == other_rows
    assert same_weights(state, other)


def test_seeds_change_split_selection_and_result(tmp_path: Path) -> None:
    results = []
    for seed in (0, 1):
        server, state, _, _ = federation(tmp_path / str(seed), seeds=[seed], participation_rate=0.5)
        results.append(play(server, state, 1)[1][0])
    assert results[0]["accuracy"] != results[1]["accuracy"]


def test_fedavg_round_is_training_and_averaging_and_nothing_else(tmp_path: Path) -> None:
    server, state, clients, experiment = federation(tmp_path, method="fedavg")
    after, row = server.play_round(state)
    request = TrainRequest(1, state.models, experiment.local, 0.0, 0)
    updates = sorted(clients.inner.train([0, 1, 2, 3], request), key=lambda update: update.client)
    expected = average([u.weights for u in updates], sizes=[u.num_examples for u in updates])
    assert all(torch.equal(expected[name], tensor) for name, tensor in after.models["cnn"].items())
    assert set(row["seconds"]) == {"train", "average", "evaluate"}


def test_pretrained_start_changes_the_features_and_not_the_head(tmp_path: Path) -> None:
    _, scratch, _, _ = federation(tmp_path, method="fedavg")
    _, pretrained, _, _ = federation(tmp_path / "p", method="fedavg+p")
    for name, tensor in scratch.models["cnn"].items():
        assert torch.equal(tensor, pretrained.models["cnn"][name]) == (
            name.startswith("head.") or not tensor.is_floating_point()
        ), name


def test_fedprox_with_strength_zero_is_fedavg(tmp_path: Path) -> None:
    results = []
    for method, strength in (("fedavg", 0.5), ("fedprox", 0.0), ("fedprox", 0.5)):
        server, state, _, _ = federation(
            tmp_path / f"{method}{strength}", method=method, local={"proximal": strength}
        )
        results.append(play(server, state, 1)[0])
    assert same_weights(results[0], results[1])
    assert not same_weights(results[0], results[2])


def test_fedaux_with_one_client_is_feddf(tmp_path: Path) -> None:
    results = []
    for method in ("fedaux", "feddf+p"):
        server, state, _, _ = federation(tmp_path / method, method=method, split={"num_clients": 1})
        results.append(play(server, state, 1)[1][0])
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)


def test_bytes_are_those_of_the_tensors_that_cross(tmp_path: Path) -> None:
    server, state, _clients, _ = federation(tmp_path, participation_rate=0.5)
    model_bytes = num_bytes(state.models["cnn"])
    _, row = server.play_round(state)
    assert row["bytes_down"] == 2 * model_bytes == row["bytes_up"]
    preparation = server.preparation
    down = num_bytes(preparation.extractors["cnn"]) + num_bytes(preparation.public["cnn"])
    assert preparation.bytes_down == 4 * down
    assert preparation.bytes_up == sum(8 * len(c.vector) for c in state.releases.values())


def test_heads_are_prepared_with_h0_the_map_and_public_examples_once(tmp_path: Path) -> None:
    server, _, _, _ = federation(
        tmp_path, mode="linear", method="fedaux2", rehearsal={"examples": 30}
    )
    preparation = server.preparation
    down = num_bytes(preparation.extractors["cnn"]) + num_bytes(preparation.public["cnn"])
    assert preparation.bytes_down == 4 * (down + 30 * 64)
    server, _, _, _ = federation(tmp_path / "scores", mode="linear", method="fedaux")
    preparation = server.preparation
    down = num_bytes(preparation.extractors["cnn"]) + num_bytes(preparation.public["cnn"])
    assert preparation.bytes_down == 4 * down


class Faulty(Wrapped):
    """Client 0 answers NaN, 1 a wrong shape, 2 nothing; 3 answers twice, and once in the name of a
    stranger."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            name = next(iter(update.weights))
            if update.client == 0:
                update.weights[name].view(-1)[0] = float("nan")
                yield update
            elif update.client == 1:
                yield replace(update, weights=update.weights | {name: torch.zeros(3)})
            elif update.client == 3:
                yield update
                yield replace(
                    update, weights={k: torch.zeros_like(v) for k, v in update.weights.items()}
                )
                yield replace(update, client=99)


def test_unusable_answers_are_named_and_the_round_goes_on(tmp_path: Path) -> None:
    server, state, clients, experiment = federation(tmp_path, kind=Faulty, method="fedavg")
    after, row = server.play_round(state)
    assert row["clients_asked"] == [0, 1, 2, 3]
    assert row["clients_answered"] == [3]
    assert "NaN" in row["clients_dropped"]["0"]
    assert "should be torch.float32" in row["clients_dropped"]["1"]
    assert row["clients_dropped"]["2"] == "no answer"
    alone = next(
        iter(clients.inner.train([3], TrainRequest(1, state.models, experiment.local, 0.0, 0)))
    )
    # Trained beside others or alone, the same but for rounding.
    assert all(
        torch.allclose(alone.weights[name], t, atol=1e-5) for name, t in after.models["cnn"].items()
    )


class Gone(Wrapped):
    """Clients that never answer."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        yield from ()


def test_a_round_without_answers_keeps_the_model(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, kind=Gone)
    after, row = server.play_round(state)
    assert same_weights(state, after)
    assert after.round == 1
    assert row["clients_answered"] == []
    assert len(row["clients_dropped"]) == 4
    assert row["accuracy"] is not None


class Late(Wrapped):
    """Client 3 cannot be reached during preparation."""

    def present(self) -> Sequence[int]:
        return [0, 1, 2, 3] if self.released else [0, 1, 2]


def test_a_latecomer_releases_once(tmp_path: Path) -> None:
    server, state, clients, _ = federation(tmp_path, kind=Late)
    assert sorted(state.releases) == [0, 1, 2]
    state, rows = play(server, state, 2)
    assert clients.released == [0, 1, 2, 3]
    assert rows[0]["clients_answered"] == [0, 1, 2, 3]
    assert rows[0]["bytes_down"] > rows[1]["bytes_down"]


@pytest.mark.parametrize("method", ["fedaux", "private-head"])
def test_of_many_clients_those_that_train_release_when_they_are_selected(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaux.core.server.FIRST_RELEASES", 2)
    server, state, clients, _ = federation(tmp_path, method=method, participation_rate=0.25)
    assert len(clients.released) == (2 if method == "fedaux" else 4)
    state, rows = play(server, state, 3)
    asked = {client for row in rows for client in row["clients_asked"]}
    assert set(clients.released) == set(state.releases)
    assert set(clients.released) == set(clients.released[:2]) | asked or method != "fedaux"
    assert len(clients.released) == len(state.releases), "nobody is asked twice"


def test_empty_clients_take_no_part(tmp_path: Path) -> None:
    server, state, clients, _experiment = federation(
        tmp_path, split={"num_clients": 470, "alpha": 0.01}, participation_rate=0.05
    )
    present = clients.present()
    assert 0 < len(present) < 470
    assert all(client in present for client in state.releases)
    _, row = server.play_round(state)
    assert row["clients_dropped"] == {}


def test_mixed_prototypes_share_soft_labels_and_survive_an_absent_one(tmp_path: Path) -> None:
    prototypes = [
        {"name": "small", "model": "cnn", "options": {"width": 4}, "clients": [0]},
        {"name": "large", "model": "cnn", "options": {"width": 8}},
    ]
    server, state, _, experiment = federation(
        tmp_path, prototypes=prototypes, participation_rate=0.25
    )
    state, rows = play(server, state, 3)
    assert assign_prototypes(experiment) == ("small", "large", "large", "large")
    assert set(rows[0]["accuracy_by_prototype"]) == {"small", "large"}
    assert rows[0]["accuracy"] == pytest.approx(
        np.mean(list(rows[0]["accuracy_by_prototype"].values()))
    )
    assert any(0 not in row["clients_answered"] for row in rows)


def test_prototypes_are_shared_out_in_turn() -> None:
    prototypes = [
        {"name": name, "model": "cnn", "share": share} for name, share in (("a", 1.0), ("b", 2.0))
    ]
    assignment = assign_prototypes(tiny(split={"num_clients": 9}, prototypes=prototypes))
    assert assignment.count("a") == 3
    assert assignment[:3].count("a") == 1


def test_selection_is_a_fair_subset() -> None:
    counts = np.zeros(10)
    for round in range(400):
        chosen = select(
            range(10), count=4, generator=seeding.generator(0, "selection", round=round)
        )
        assert len(set(chosen)) == 4
        assert chosen == sorted(chosen)
        counts[chosen] += 1
    assert counts.min() > 120
    assert counts.max() < 200


def test_evaluation_can_be_rarer_but_never_misses_the_last_round(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method="fedavg", evaluation={"every": 2})
    _, rows = play(server, state, 3)
    assert [row["accuracy"] is None for row in rows] == [True, False, False]


def test_accuracy_is_that_of_the_returned_model(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path)
    after, row = server.play_round(state)
    predictor = FastPredictor(trainable_models(server.task)["cnn"], Compute())
    logits = predictor(after.models["cnn"], server.task.test_images, batch_size=7)
    right = logits.argmax(dim=1) == server.task.test_labels
    assert row["accuracy"] == pytest.approx(float(right.float().mean()))


def test_scores_leave_the_models_weights_where_they_belong(tmp_path: Path) -> None:
    """Features for scores come from h0, not from the current model."""
    server, state, _, _ = federation(tmp_path)
    before = server.scorer.log_scores(state.releases, [0, 1])
    after, _ = server.play_round(state)
    assert torch.equal(before, server.scorer.log_scores(after.releases, [0, 1]))
    again = Server(
        server.task,
        Preparation(**vars(server.preparation)),
        server._clients,
        callback=NullCallback(),
    )
    assert torch.equal(before, again.scorer.log_scores(state.releases, [0, 1]))
    assert snapshot(trainable_models(server.task)["cnn"]).keys() == after.models["cnn"].keys()
