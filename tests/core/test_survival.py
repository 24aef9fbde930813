"""A federation outlives what a client, a user's own part or a setting does to it: nobody's NaN
reaches the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import Wrapped, federation, play, same_weights
from torch import Tensor, nn

from fedaux.config import ConfigError
from fedaux.core.algorithms import METHODS
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.distillation import distill
from fedaux.core.messages import ClientRelease, Member, ReleaseRequest, TrainRequest, Update
from fedaux.core.server import DIVERGED, Server
from fedaux.core.server_model import ServerModel
from fedaux.core.task import State
from fedaux.core.weights import average_by_prototype
from fedaux.data import load_auxiliary, load_labelled
from fedaux.models import MODELS, SplitModel
from fedaux.running import preflight as checks
from fedaux.running.run_directory import Progress, RunDirectory


class Absent(Wrapped):
    """Client 0 trains in the first round and its answer is lost on the way."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            if update.client != 0 or request.round > 1:
                yield update


class Overflowing(Wrapped):
    """In the first round client 0 sends weights that are numbers, but large enough for predictions
    that are none."""

    size = 3e38

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            if update.client == 0 and request.round == 1:
                update.weights["head.weight"].fill_(self.size)
            yield update


class Large(Overflowing):
    """Weights whose squares are no numbers, and with which predictions still are."""

    size = 1e20


class Negative(Wrapped):
    """Client 0 sends a negative variance."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            if update.client == 0:
                update.weights["features.0.1.running_var"].fill_(-1e4)
            yield update


def is_finite(state: State) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for own in state.models.values()
        for tensor in own.values()
    )


TEACHING = ("feddf", "fedaux", "fedaux+m", "fedbe")


@pytest.mark.quickly("fedavg-at once", "fedaux+m-while it teaches")
@pytest.mark.parametrize(
    ("method", "found"),
    [(method, "at once") for method in ("fedavg", "fedprox", *TEACHING)]
    + [(method, "while it teaches") for method in TEACHING],
)
def test_a_client_without_predictions_is_left_out_of_everything(
    method: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "while it teaches":
        # Not on the first examples.
        monkeypatch.setattr(ServerModel, "is_finite", lambda *_: torch.tensor(True))
    server, state, _, _ = federation(tmp_path / "a", kind=Overflowing, method=method)
    other, start, _, _ = federation(tmp_path / "b", kind=Absent, method=method)
    after, row = server.play_round(state)
    expected, _ = other.play_round(start)
    assert "NaN or infinity on public examples" in row["clients_dropped"]["0"]
    assert row["clients_answered"] == [1, 2, 3]
    assert 0 not in after.memory
    assert not row["model_kept"]
    assert same_weights(after, expected)
    after, row = server.play_round(after)
    assert row["clients_answered"] == [0, 1, 2, 3]
    assert is_finite(after)


@pytest.mark.slow
def test_a_negative_variance_is_found(tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path,
        kind=Negative,
        method="fedavg",
        prototypes=[{"name": "deep", "model": "mobilenetv2", "options": {"width": 0.1}}],
    )
    _, row = server.play_round(state)
    assert list(row["clients_dropped"]) == ["0"]
    assert row["loss"] is not None


def test_large_weights_do_not_end_a_bayesian_ensemble(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, kind=Large, method="fedbe", bayesian={"samples": 2})
    after, _ = server.play_round(state)
    assert is_finite(after)


def test_a_round_that_comes_to_nothing_keeps_the_model_and_says_so(tmp_path: Path) -> None:
    server, state, _, _ = federation(
        tmp_path, method="feddf+m", distillation={"learning_rate": 1e30}
    )
    after, row = server.play_round(state)
    assert row["model_kept"]
    assert set(row["clients_dropped"].values()) == {DIVERGED}
    assert len(row["clients_dropped"]) == 4
    assert row["clients_answered"] == []
    assert same_weights(state, after)
    assert after.memory == {}


def test_clients_that_diverge_are_back_when_they_can_be(tmp_path: Path) -> None:
    local = {"optimizer": "adam", "optimizer_state": "kept", "learning_rate": 1e38, "epochs": 2}
    server, state, clients, _ = federation(tmp_path, method="fedavg", local=local)
    after, row = server.play_round(state)
    assert len(row["clients_dropped"]) == 4
    assert row["model_kept"]
    kept = [
        tensor
        for stamped in clients.client_states().values()
        for tensor in stamped.tensors.values()
    ]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept)
    assert is_finite(after)


def test_an_infinite_test_loss_is_no_number_in_the_metrics(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, method="fedavg")
    huge = {name: torch.full_like(tensor, 1e38) for name, tensor in state.models["cnn"].items()}
    assert server.evaluate([("cnn", huge, None)])["loss"] is None
    assert server.evaluate([("cnn", state.models["cnn"], None)])["loss"] > 0


def test_members_too_old_to_count_are_not_averaged() -> None:
    one, old = {"w": torch.ones(2)}, {"w": torch.full((2,), 5.0)}
    averaged = average_by_prototype([Member(0, "a", 3, one), Member(1, "a", 3, old, share=0.0)])
    assert torch.equal(averaged["a"]["w"], one["w"])
    assert average_by_prototype([Member(1, "a", 3, old, share=0.0)]) == {}


class Indecisive(Wrapped):
    """Client 0 answers NaN first and then something usable."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            if update.client == 0:
                yield replace(
                    update,
                    weights={
                        k: v * float("nan") if v.is_floating_point() else v
                        for k, v in update.weights.items()
                    },
                )
            yield update


def test_who_answers_better_the_second_time_has_answered(tmp_path: Path) -> None:
    server, state, _, _ = federation(tmp_path, kind=Indecisive, method="fedavg")
    _, row = server.play_round(state)
    assert row["clients_answered"] == [0, 1, 2, 3]
    assert row["clients_dropped"] == {}


class Misreleasing(Wrapped):
    """Client 0 releases NaN, client 1 a number too many."""

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        for answer in super().release(clients, request):
            vector = answer.vector.clone()
            if answer.client == 0:
                vector[0] = float("nan")
            if answer.client == 1:
                vector = torch.cat([vector, vector[:1]])
            yield replace(answer, vector=vector)


def test_releases_that_cannot_be_scored_with_are_left_out(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"client (0: released NaN or infinity|1: released \[\d+\] numbers, should)",
    ):
        server, state, _, experiment = federation(tmp_path, kind=Misreleasing)
    assert sorted(state.releases) == [2, 3]
    assert sorted(entry.client for entry in state.ledger) == [
        0,
        1,
    ]  # they have released all the same
    with pytest.warns(UserWarning, match="left out"):
        after, row = server.play_round(state)
    assert row["clients_answered"] == [2, 3]
    assert set(row["clients_dropped"].values()) == {"no certainty release"}
    assert sorted(entry.client for entry in after.ledger) == [0, 0, 1, 1]
    assert is_finite(after)
    with RunDirectory.open(tmp_path / "run", experiment, resume=True) as directory:
        directory.save("fedaux", 0, Progress(state, server.preparation, []))
        directory.save("fedaux", 0, Progress(after, server.preparation, [row]))
        kept = directory.load("fedaux", 0)
    assert kept is not None
    assert (sorted(kept.state.releases), kept.state.ledger) == ([2, 3], after.ledger)


def test_scores_that_a_method_has_not_asked_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(FedDF):
        def soft_labels(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
            return server.log_scores(state, members)

    monkeypatch.setitem(METHODS, "own", Own("own", pretrained=True))
    server, state, _, _ = federation(tmp_path, method="own")
    with pytest.raises(ValueError, match="method own: uses what clients release, and its `asks`"):
        server.play_round(state)


@pytest.mark.parametrize(
    ("outputs", "width", "message"),
    [
        (7, 16, r"returns logits \[2, 7\] .* should be \[2, 10\]"),
        (10, 15, r"returns features \[2, 16\] .* \[2, 15\]"),
    ],
)
def test_own_models_of_other_widths_are_refused_before_any_work(
    outputs: int, width: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
        features = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        return SplitModel(features, nn.Linear(16, outputs), feature_width=width)

    monkeypatch.setitem(MODELS, "own", own)
    experiment = tiny(prototypes=[{"name": "own", "model": "own"}])
    data, auxiliary = load_labelled(experiment.data), load_auxiliary(experiment.auxiliary)
    with pytest.raises(ConfigError, match=message):
        checks.check_data(experiment, data, auxiliary)


class InTuples(nn.Module):
    """Features and something else, as many encoders return them."""

    def forward(self, inputs: Any) -> Any:
        return inputs.flatten(1), inputs


class FirstOf(nn.Module):
    """A head for them."""

    def forward(self, inputs: Any) -> Any:
        return inputs[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(64, 10), "returns a Linear, should be a SplitModel: fedaux.split_model"),
        (
            SplitModel(InTuples(), FirstOf(), feature_width=64),
            "returns features a tuple for two examples, should be",
        ),
    ],
)
def test_models_that_return_something_else_are_refused(
    model: nn.Module, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "own", lambda image_shape, num_classes: model)
    experiment = tiny(prototypes=[{"name": "own", "model": "own"}])
    data, auxiliary = load_labelled(experiment.data), load_auxiliary(experiment.auxiliary)
    with pytest.raises(ConfigError, match=message):
        checks.check_data(experiment, data, auxiliary)


def test_prototypes_are_distilled_on_the_very_same_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def record(*given: Any, **rest: Any) -> Any:
        seen.append(given[3].clone())
        return distill(*given, **rest)

    monkeypatch.setattr("fedaux.core.plain_backend.distill", record)
    prototypes = [
        {"name": "a", "model": "cnn", "options": {"width": 4}},
        {"name": "b", "model": "mlp"},
    ]
    server, state, _, _ = federation(tmp_path, method="feddf", prototypes=prototypes)
    state, (row,) = play(server, state, 1)
    first, second = seen
    assert torch.equal(first, second)
    logits = [server.server_models[name].test_logits(state.models[name]) for name in ("a", "b")]
    together = ((logits[0] + logits[1]) / 2).argmax(dim=1)
    assert row["accuracy_ensemble"] == pytest.approx(
        float((together == server.task.test_labels).double().mean())
    )
