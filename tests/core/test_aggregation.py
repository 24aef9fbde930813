"""Robust averages in whole rounds: one client of ten sends a hostile model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import Wrapped, federation, play

from fedaux.core.algorithms import fedaux2
from fedaux.core.algorithms.by_class import head_by_class
from fedaux.core.messages import Member, TrainRequest, Update
from fedaux.core.server import Server


class Zeros(Wrapped):
    """Client 0 sends zeros and claims more examples than all others have."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in self.inner.train(clients, request):
            if update.client == 0:
                zeros = {name: torch.zeros_like(own) for name, own in update.weights.items()}
                update = replace(update, weights=zeros, num_examples=2**40)
            yield update


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed-mean", "median"])
def test_zeros_with_a_huge_claim_erase_a_mean_and_not_a_robust_average(
    tmp_path: Path, rule: str
) -> None:
    server, state, _, _ = federation(
        tmp_path, kind=Zeros, method=["fedavg"], aggregation=rule, split={"num_clients": 10}
    )
    before = torch.cat([own.flatten() for own in state.models["cnn"].values()])
    state, (row,) = play(server, state, 1)
    after = torch.cat([own.flatten() for own in state.models["cnn"].values()])
    assert 0 in row["clients_answered"]
    kept = float(after.norm() / before.norm())
    assert kept < 0.01 if rule == "mean" else kept > 0.5


def test_clipped_models_teach_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distillation must not see a model that averaging does not see."""
    server, state, _, _ = federation(
        tmp_path, kind=Zeros, method=["feddf"], aggregation="clipped", split={"num_clients": 10}
    )
    norms: list[float] = []
    honest = Server.predict

    def watched(self: Server, members: Sequence[Member]) -> Any:
        for own in (member.weights.values() for member in members):
            norms.append(float(torch.cat([tensor.flatten() for tensor in own]).norm()))
        return honest(self, members)

    monkeypatch.setattr(Server, "predict", watched)
    play(server, state, 1)
    assert len(norms) == 10
    assert min(norms) > 0.5 * max(norms), "the zeros should have been clipped"


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed-mean", "median"])
def test_robust_averages_are_robust_for_heads_too(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged by class, a client that claims to hold a whole class would own its row."""
    server, state, _, _ = federation(
        tmp_path, method=["fedaux2"], aggregation=rule, split={"num_clients": 10}
    )
    found: list[int] = []

    def watched(weights: Sequence[Any], shares: torch.Tensor, **rest: Any) -> Any:
        found.append(len(weights))
        return head_by_class(weights, shares, **rest)

    monkeypatch.setattr(fedaux2, "head_by_class", watched)
    play(server, state, 1)
    assert found == ([10] if rule == "mean" else [])
