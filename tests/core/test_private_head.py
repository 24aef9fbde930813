"""The private head: the fit against plain least squares, the method against the readable algorithm,
and what leaves a client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import written_out as plain
from helpers.experiments import tiny
from helpers.federations import Wrapped, federation, h0_of, written_out
from sklearn.linear_model import Ridge
from torch import nn

import fedaux
from fedaux.config import ExperimentFields
from fedaux.core.algorithms import METHODS
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.private_head import (
    RIDGE,
    PrivateHead,
    fit_head,
    of_prototype,
    set_head,
    start_with_head,
)
from fedaux.core.asks import Asks
from fedaux.core.messages import ClientRelease, ReleaseRequest, TrainRequest, Update
from fedaux.core.server import Server
from fedaux.core.task import State, extract
from fedaux.privacy.ledger import CLASS_SUMS

pytestmark = pytest.mark.usefixtures("without_pages")


class NeverTrained(Wrapped):
    """Clients that must not be asked to train."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        raise AssertionError("asked to train")


class Silent(Wrapped):
    """Clients that release nothing."""

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        return iter(())


def test_the_fit_is_scikit_learns_ridge() -> None:
    generator = np.random.default_rng(0)
    features, targets = 3 + generator.normal(size=(60, 7)), generator.normal(size=(60, 4))
    weight, bias = fit_head(torch.from_numpy(features), torch.from_numpy(targets))
    penalty = RIDGE * features.var(axis=0).mean() * len(features)
    peer = Ridge(alpha=penalty).fit(features, targets)
    assert weight.numpy() == pytest.approx(peer.coef_, abs=1e-5)
    assert bias.numpy() == pytest.approx(peer.intercept_, abs=1e-5)


def test_a_linear_target_is_fitted_at_any_scale_and_dead_features_do_no_harm() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 5, generator=generator)
    inputs[:, 3] = 0.0
    targets = inputs @ torch.randn(5, 3, generator=generator) + 2.0
    for scale in (1e-4, 1.0, 1e4):
        weight, bias = fit_head(scale * inputs, targets)
        fitted = scale * inputs @ weight.T + bias
        assert float((fitted - targets).abs().max()) < 0.02


def test_heads_that_are_not_linear_are_refused() -> None:
    with pytest.raises(ValueError, match="'x': its head is Sequential"):
        set_head(nn.Sequential(), torch.zeros(2, 2), torch.zeros(2, 2), share=1.0, prototype="x")


def test_a_start_goes_a_share_of_the_way_to_the_private_head() -> None:
    generator = torch.Generator().manual_seed(0)
    features, targets = (torch.randn(50, size, generator=generator) for size in (6, 3))
    weight, bias = fit_head(features, targets)
    for share in (0.0, 0.3, 1.0):
        head = nn.Linear(6, 3)
        before = {name: value.clone() for name, value in head.state_dict().items()}
        set_head(head, features, targets, share=share, prototype="x")
        for name, fitted in (("weight", weight), ("bias", bias)):
            expected = share * fitted + (1 - share) * before[name]
            assert torch.allclose(head.state_dict()[name], expected, atol=1e-6)


def test_a_prototype_without_releases_learns_from_the_others() -> None:
    known = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}
    assert torch.equal(of_prototype(known, "a"), known["a"])
    assert torch.equal(of_prototype(known, "c"), torch.full((2, 3), 0.5))


@pytest.mark.parametrize("mode", ["full", "linear"])
def test_the_method_is_the_algorithm_written_out(tmp_path: Path, mode: str) -> None:
    server, state, _, _ = federation(
        tmp_path,
        kind=NeverTrained,
        method="private-head",
        mode=mode,
        certainty={"epsilon": 100.0, "components": 16},
    )
    task, _, before = written_out(server, state)
    preparation, start = plain.prepare(task, extractors=h0_of(server, state))
    for key, tensor in state.models["cnn"].items():
        assert torch.allclose(tensor, start.weights["cnn"][key], rtol=1e-3, atol=1e-4), key
    after, row = server.play_round(state)
    expected, expected_row = plain.play_round(task, preparation, before)
    assert row["accuracy"] == pytest.approx(expected_row["accuracy"], abs=2 / 359)
    assert row["accuracy"] > 0.4  # h0 of one epoch; a random head has 0.1
    assert (row["clients_asked"], row["bytes_up"], row["model_kept"]) == ([], 0, False)
    for key, tensor in after.models["cnn"].items():
        assert torch.equal(tensor, state.models["cnn"][key])
    assert expected.round == after.round == 1
    assert {one.entry.purpose for one in state.releases.values()} == {CLASS_SUMS}


def test_the_head_is_the_discriminant_on_public_examples(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method="private-head", certainty={"epsilon": 100.0})
    ((members, estimate),) = server.scorer.class_estimates(state.releases).values()
    assert members == sorted(state.releases)
    wanted = estimate.logits(server.scorer.project("cnn", server.task.distill_set))
    logits = server.server_models["cnn"].logits(state.models["cnn"]).double()
    agree = (logits.argmax(dim=1) == wanted.argmax(dim=1)).double().mean()
    assert float(agree) > 0.8
    assert float((logits - wanted).square().mean()) < 0.3 * float(wanted.var())


def test_a_prototype_without_clients_is_a_student(tmp_path: Path) -> None:
    """The clients release class sums of one network, and the server trains another."""
    server, state, _, _ = federation(
        tmp_path,
        kind=NeverTrained,
        method="private-student",
        prototypes=[
            {"name": "cnn", "model": "cnn", "options": {"width": 8}},
            {"name": "student", "model": "cnn", "options": {"width": 4}, "clients": []},
        ],
        certainty={"epsilon": 100.0, "components": None},
    )
    ((name, (_, estimate)),) = server.scorer.class_estimates(state.releases).items()
    assert name == "cnn"
    images = server.task.distill_set
    wanted = estimate.logits(server.scorer.project("cnn", images))
    student = server.preparation.extractors["student"]
    weight, bias = fit_head(extract(server.task, "student", student, images), wanted)
    assert torch.allclose(state.models["student"]["head.weight"], weight, atol=1e-5)
    assert torch.allclose(state.models["student"]["head.bias"], bias, atol=1e-5)
    after, row = server.play_round(state)
    assert row["accuracy_by_prototype"].keys() == {"cnn", "student"}
    assert not torch.equal(
        after.models["student"]["head.weight"], state.models["student"]["head.weight"]
    )


def test_without_any_release_there_is_no_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no client released class sums"):
        federation(tmp_path, kind=Silent, method="private-head")


def test_other_methods_can_start_from_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FromHead(FedAvg):
        def asks(self, settings: ExperimentFields) -> Asks:
            return replace(PrivateHead("").asks(settings), trains=True)

        def prepare(self, server: Server) -> State:
            return start_with_head(server, share=lambda _: 1.0)

    monkeypatch.setitem(METHODS, "fedavg+h", FromHead("fedavg+h"))
    server, state, _, _ = federation(tmp_path, method="fedavg+h", certainty={"epsilon": 100.0})
    head = {key: one for key, one in state.models["cnn"].items() if key.startswith("head.")}
    after, row = server.play_round(state)
    assert len(row["clients_answered"]) == 4
    assert any(not torch.equal(after.models["cnn"][key], one) for key, one in head.items())


def test_a_run_beside_fedaux_has_two_maps_two_prices_and_a_flat_curve(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"certainty": {"epsilon": 2.0, "components": None}, "rounds": 2}
    experiment = tiny(method=["fedaux", "private-head"], **changes)
    result = fedaux.run(experiment, out=tmp_path / "run")
    assert sorted(file.name for file in (tmp_path / "run/public").iterdir()) == [
        "seed0-classes.safetensors",
        "seed0.safetensors",
    ]
    entries = json.loads((tmp_path / "run/ledger.json").read_text())["entries"]
    by_method = {(row["method"], row["mechanism"], row["purpose"]) for row in entries}
    assert by_method == {
        ("fedaux", "mean", "certainty scores"),
        ("private-head", "classes", "class sums"),
    }
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    flat = [row["accuracy"] for row in rows if row["method"] == "private-head"]
    assert len(flat) == 2
    assert len(set(flat)) == 1
    assert result.summary["complete"]


def test_a_run_without_updates_says_that_nothing_is_unprotected_but_n(tmp_path: Path) -> None:
    fedaux.run(tiny(method="private-head", rounds=1), out=tmp_path / "run")
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())
    assert "No model update leaves a client" in ledger["unprotected"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rows"][0]["updates_protected"]
