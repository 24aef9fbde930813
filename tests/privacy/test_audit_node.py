"""The audit of a node: a correct one passes, and faults between the mechanism and the answer are
found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.broken_mechanisms import BentNoise
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.core.plain_backend import PlainPredictor
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanisms import Noise, SimulatedNoise
from fedaux.privacy.secure import SecureNoise

pytest.importorskip("flwr", reason="needs the extra flower")
pytest.importorskip("opendp", reason="needs the extra privacy")
from fedaux.federation import policy, work
from fedaux.federation.audit import NodeAudit, audit_node
from fedaux.privacy.audit.distribution import alarms

RELEASES = 60
FEW = 6
"""Enough for faults that every answer has."""


def found(releases: int = FEW, *, mechanism: str = "mean") -> str:
    findings: dict[str, str] = {}
    section = Certainty(mechanism=mechanism, epsilon=0.5)
    values = audit_node(section, releases=releases, seed=0, findings=findings)
    return "; ".join(f"{fault}: {where}" for fault, where in (findings | alarms(values)).items())


@pytest.mark.parametrize(
    ("mechanism", "releases"), [("mean", RELEASES), ("paper", FEW), ("counts", FEW)]
)
def test_a_node_keeps_what_its_ledger_promises(mechanism: str, releases: int) -> None:
    assert found(releases, mechanism=mechanism) == ""


def noise(make: Callable[[], Noise]) -> Callable[..., Noise]:
    return lambda *_: make()


def half() -> Noise:
    return BentNoise(SecureNoise(), lambda standard: standard / 2)


def seeded() -> Noise:
    return SimulatedNoise(seeding.generator(0, "t"))


def called_secure() -> Noise:
    seeded_noise = seeded()
    seeded_noise.kind = "secure"
    return seeded_noise


@pytest.mark.chance
@pytest.mark.parametrize(
    ("make", "releases", "words"),
    [
        (half, RELEASES, "noise: total variance"),
        (seeded, FEW, "a node's ledger: noise is simulated, should be secure"),
        (called_secure, FEW, "noise: repeated values"),
    ],
)
def test_wrong_noise_at_a_node_is_found(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Noise], releases: int, words: str
) -> None:
    monkeypatch.setattr(work, "release_noise", noise(make))
    assert words in found(releases)


def test_a_release_that_is_not_booked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.Guard, "store_release", lambda *_, **__: None)
    assert "a release left without an entry" in found()


def test_an_entry_that_understates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = policy.Guard.store_release

    def understate(
        self: policy.Guard, key: str, vector: Tensor, entry: LedgerEntry, **more: Any
    ) -> None:
        store(self, key, vector, replace(entry, epsilon=0.01), **more)

    monkeypatch.setattr(policy.Guard, "store_release", understate)
    assert "does not hold the entry that was sent" in found()


def test_an_answer_that_is_made_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.Guard, "stored_release", lambda *_: None)
    monkeypatch.setattr(policy.Guard, "check_budget", lambda *_: None)
    words = found()
    assert "a node answers the same request twice: with different noise" in words
    assert "a node goes beyond its budget" in words


@pytest.mark.chance
def test_a_node_that_uses_other_features_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that look at other examples: one of them moves all, which the proof excludes."""

    honest = PlainPredictor.alone

    def centred(*arguments: Any, **keywords: Any) -> Tensor:
        features = honest(*arguments, **keywords)
        return features - 4 * features.mean(dim=0)

    monkeypatch.setattr(PlainPredictor, "alone", centred)
    assert "noise: mean" in found(RELEASES)


def test_the_two_nodes_differ_in_one_example(tmp_path: Path) -> None:
    nodes = NodeAudit(Certainty(epsilon=0.5), tmp_path, seed=0)
    left, right = (nodes.noiseless(side) for side in (0, 1))
    assert 0 < float((left.vector - right.vector).norm()) <= left.sensitivity
    assert left.sigma == right.sigma
    answer = nodes.ask(0)
    assert not isinstance(answer, str)
    assert not torch.equal(answer[0], left.vector)
