"""Methods without client training: fedauxfdp and private-student against the readable algorithm,
and what leaves a client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import written_out as plain
from helpers.experiments import tiny
from helpers.federations import Wrapped, federation, h0_of, written_out

import fedaux
from fedaux.config import ConfigError
from fedaux.core.algorithms import asks_of
from fedaux.core.asks import release_sections
from fedaux.core.messages import ClientRelease, ReleaseRequest, TrainRequest, Update
from fedaux.privacy.accounting import ledger_lines, tight_composition, total_cost
from fedaux.privacy.ledger import HEADS, LedgerEntry
from fedaux.running.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("without_pages")
CERTAINTY: dict[str, Any] = {"epsilon": 20.0, "head_epsilon": 50.0, "components": 16}


class NeverTrained(Wrapped):
    """Clients that must not be asked to train."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        raise AssertionError("asked to train")


class WithoutHeads(Wrapped):
    """Some clients release scores and no head."""

    silent: tuple[int, ...] = (1,)

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        for answer in super().release(clients, request):
            if request.certainty.mechanism != "heads" or answer.client not in self.silent:
                yield answer


class NoHeads(WithoutHeads):
    silent = tuple(range(100))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.quickly("fedauxfdp-linear", "private-student-full")
@pytest.mark.parametrize("mode", ["full", "linear"])
@pytest.mark.parametrize("method", ["fedauxfdp", "private-student"])
def test_two_rounds_are_the_algorithm_written_out(method: str, mode: str, tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path, kind=NeverTrained, method=method, mode=mode, certainty=CERTAINTY
    )
    task, preparation, own = written_out(server, state)
    _, start = plain.prepare(task, extractors=h0_of(server, state))
    expected = plain.State(0, own.weights, start.memory)
    for key, tensor in state.models["cnn"].items():
        assert torch.allclose(tensor, start.weights["cnn"][key], rtol=1e-3, atol=1e-4), key
    for number in (1, 2):
        before = state.models["cnn"]
        state, row = server.play_round(state)
        expected, expected_row = plain.play_round(task, preparation, expected)
        for key, tensor in state.models["cnn"].items():
            assert torch.allclose(tensor, expected.weights["cnn"][key], rtol=1e-3, atol=1e-4), key
        assert row["accuracy"] == pytest.approx(expected_row["accuracy"], abs=2 / 359)
        assert any(not torch.equal(own, state.models["cnn"][key]) for key, own in before.items())
        answered = (row["clients_asked"], row["clients_answered"], row["bytes_up"])
        assert (*answered, row["model_kept"], row["round"]) == ([], [], 0, False, number)
    assert row["accuracy"] > 0.4  # h0 of one epoch; a random head has 0.1


def test_a_client_without_a_head_does_not_teach(tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path, kind=WithoutHeads, method="fedauxfdp", certainty=CERTAINTY
    )
    assert sorted(set(state.releases) - set(state.memory)) == [1]
    _, row = server.play_round(state)
    assert "1" not in row["public_weight_by_client"]
    assert len(row["public_weight_by_client"]) == len(state.memory)
    with pytest.raises(ValueError, match="no client released a head"):
        federation(tmp_path / "none", kind=NoHeads, method="fedauxfdp", certainty=CERTAINTY)


def test_a_run_states_both_releases_and_their_exact_total(tmp_path: Path) -> None:
    section = {"epsilon": 0.1, "head_epsilon": 0.5, "delta": 1e-5}
    experiment = tiny(method=["fedaux", "fedauxfdp"], rounds=2, certainty=section)
    result = fedaux.run(experiment, out=tmp_path / "run")
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())
    rows = [row for row in ledger["entries"] if row["method"] == "fedauxfdp"]
    entries = [
        LedgerEntry.from_json({key: row[key] for key in row if key not in {"method", "seed"}})
        for row in rows
    ]
    assert {(one.mechanism, one.purpose, one.epsilon) for one in entries} == {
        ("mean", "certainty scores", 0.1),
        ("heads", HEADS, 0.5),
    }
    one = [entry for entry in entries if entry.client == entries[0].client]
    epsilon, delta = total_cost(one)
    assert (delta, len(one)) == (1e-5, 2)
    assert 0.5 < epsilon < 0.52  # the sums are (0.6, 2e-5)
    assert epsilon == pytest.approx(tight_composition(delta=delta)(one)[0], abs=2e-3)
    summary = {row["method"]: row for row in result.summary["rows"]}
    assert summary["fedauxfdp"]["epsilon"] == pytest.approx(epsilon)
    text = " ".join(ledger_lines(ledger))
    assert "released one vector of linear heads at (ε, δ) = (0.5, 1e-5)" in text
    assert "all that a client of fedauxfdp released together is at most (ε, δ) = (0.51" in text
    names = sorted(file.name for file in (tmp_path / "run/public").iterdir())
    assert names == ["seed0-heads.safetensors", "seed0.safetensors"]
    with RunDirectory.open(tmp_path / "run", experiment, resume=True) as directory:
        progress = directory.load("fedauxfdp", 0)
    assert progress is not None
    assert {entry.purpose for entry in progress.state.ledger} == {HEADS}
    assert sorted(progress.state.memory) == sorted(progress.state.releases)
    assert {one.entry.mechanism for one in progress.state.releases.values()} == {"mean"}


def test_nothing_unprotected_leaves_a_client(tmp_path: Path) -> None:
    fedaux.run(tiny(method=["fedauxfdp", "private-student"], rounds=1), out=tmp_path / "run")
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())
    assert "No model update leaves a client" in ledger["unprotected"]


def test_noise_of_scores_and_head_is_not_the_same(tmp_path: Path) -> None:
    """Equal streams would let the server subtract one from the other."""
    _, first, _, _ = federation(tmp_path / "a", method="fedauxfdp")
    _, other, _, _ = federation(tmp_path / "b", method="fedaux")
    for client, release in other.releases.items():
        assert torch.equal(release.vector, first.releases[client].vector)
    _, second, clients, _ = federation(tmp_path / "c", method="fedauxfdp")
    section = release_sections([asks_of("fedauxfdp", tiny())])
    first_noise, second_noise = (
        clients.inner.noise(ReleaseRequest({}, {}, own, 0), 0).perturb(
            torch.zeros(4, dtype=torch.float64), sensitivity=1.0, sigma=1.0
        )
        for own in section.values()
    )
    assert not torch.allclose(first_noise, second_noise)
    for client, kept in first.memory.items():
        for key, tensor in kept.tensors.items():
            assert torch.equal(tensor, second.memory[client].tensors[key])


def test_heads_are_no_scores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"certainty\.mechanism = 'heads'"):
        fedaux.run(tiny(method="fedaux", certainty={"mechanism": "heads"}), out=tmp_path / "run")
