"""Soft labels against the paper's equations as loops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import written_out as plain
from helpers import oracles
from helpers.experiments import WHOLE
from helpers.federations import federation, written_out

from fedaux.core.algorithms import asks_of
from fedaux.core.algorithms.by_class import class_shares
from fedaux.core.messages import Member
from fedaux.core.soft_labels import (
    INFORMATIVE,
    balanced,
    mixture,
    score_weights,
    share_weights,
)

LOGITS = torch.from_numpy(
    np.random.default_rng(0).normal(0, 3, (3, 5, 4))
).float()  # clients, examples, classes
COUNTS = torch.tensor([[5.0, 0.0, 2.0, 1.0], [1.0, 3.0, 0.0, 1.0], [0.0, 4.0, 1.0, 0.0]])
SCORES = torch.from_numpy(np.random.default_rng(1).uniform(0.01, 1, (3, 5)))
SHARES = (1.0, 0.25, 0.6)


def members(
    order: Sequence[int] = (0, 1, 2), shares: Sequence[float] = (1.0, 1.0, 1.0)
) -> list[Member]:
    return [Member(client, "cnn", 10, {}, shares[client], LOGITS[client]) for client in order]


def test_mean_logits_are_equation_2() -> None:
    expected = oracles.mean_soft_labels_loop(LOGITS.tolist())
    found = mixture(members(), share_weights(members()), of="logits")
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-6)


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), SHARES])
def test_weighted_logits_are_equation_3(shares: Sequence[float]) -> None:
    scores = SCORES * torch.tensor(shares, dtype=torch.float64)[:, None]
    expected = oracles.weighted_soft_labels_loop(LOGITS.tolist(), scores.tolist())
    own = members(shares=shares)
    found = mixture(own, score_weights(own, SCORES.log()), of="logits")
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-6)


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), SHARES])
def test_a_mixture_averages_probabilities(shares: Sequence[float]) -> None:
    expected = oracles.mean_probabilities_loop(LOGITS.tolist(), shares)
    own = members(shares=shares)
    found = mixture(own, share_weights(own))
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert torch.allclose(found.sum(dim=1), torch.ones(5), atol=1e-6)
    assert found.dtype == torch.float32


def test_weighted_probabilities_are_those_of_a_loop() -> None:
    labels = np.zeros((5, 4))
    for x in range(5):
        total = sum(float(SCORES[i, x]) for i in range(3))
        for i in range(3):
            labels[x] += (
                float(SCORES[i, x]) / total * np.array(oracles.softmax_loop(LOGITS[i, x].tolist()))
            )
    found = mixture(members(), score_weights(members(), SCORES.log()))
    assert found.numpy() == pytest.approx(labels, abs=1e-6)


def test_whole_shares_change_no_bit_of_the_weights() -> None:
    log_scores = SCORES.log()
    expected = torch.softmax(log_scores, dim=0).float()
    assert torch.equal(score_weights(members(), log_scores), expected)


def test_vanishing_scores_neither_divide_by_zero_nor_overflow() -> None:
    extreme = torch.tensor([[-2000.0], [-2001.0], [3000.0]]).expand(3, 5)
    found = mixture(members(), score_weights(members(), extreme), of="logits")
    assert torch.allclose(found, torch.softmax(LOGITS[2], dim=1), atol=1e-6)


def test_clients_count_by_the_classes_they_hold() -> None:
    """P(i | c) = r_i n_ic / sum_j r_j n_jc."""
    found = class_shares(COUNTS, members(shares=SHARES))
    for i in range(3):
        for c in range(4):
            total = sum(SHARES[j] * float(COUNTS[j, c]) for j in range(3))
            assert float(found[i, c]) == pytest.approx(
                SHARES[i] * float(COUNTS[i, c]) / total, abs=1e-6
            )


def information(labels: np.ndarray) -> float:
    """Return sum_xc p(x, c) log(p(x, c) / p(x) p(c)) with p(x) = 1 / N."""
    joint = labels / len(labels)
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0)
    return float((joint * np.log(joint / apart)).sum())


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 1.0, 8.0])
def test_soft_labels_are_balanced_as_far_as_they_tell_nothing(sharpness: float) -> None:
    generator = np.random.default_rng(2)
    leaning = np.array([1.0, 0.0, 0.5, -1.0])
    labels = np.exp(leaning + sharpness * generator.normal(size=(400, 4)))
    labels /= labels.sum(axis=1, keepdims=True)
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    strength = max(0.0, 1 - information(labels) / (INFORMATIVE * np.log(4)))
    expected = labels * (prior / labels.mean(axis=0)) ** strength
    expected /= expected.sum(axis=1, keepdims=True)
    found = balanced(torch.from_numpy(labels), torch.from_numpy(prior)).numpy()
    assert found == pytest.approx(expected, abs=1e-9)
    if sharpness == 0:  # labels that are the same for all examples become the prior
        assert found == pytest.approx(np.tile(prior, (400, 1)))
    assert (strength == 0) == (sharpness == 8)


def test_a_class_without_any_label_and_a_single_class_stay() -> None:
    labels = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    found = balanced(labels, torch.tensor([0.2, 0.3, 0.5]))
    assert found.tolist() == [pytest.approx([0.4, 0.6, 0.0])] * 2
    assert balanced(torch.ones(3, 1), torch.ones(1)).tolist() == [[1.0]] * 3


@pytest.mark.parametrize("method", ["fedaux", "fedaux+logits", "feddf+p", "feddf+m", "fedbe"])
def test_a_round_records_how_the_weight_on_public_data_is_spread(
    method: str, tmp_path: Path
) -> None:
    """Mean weight of each client over the public examples, mean soft label of each class."""
    server, state, _, _ = federation(
        tmp_path, method=method, participation_rate=0.75, bayesian={"samples": 2}, data=WHOLE
    )
    _, row = server.play_round(state)
    task, preparation, before = written_out(server, state)
    beliefs = None
    if task.method.teacher == "belief":
        beliefs = plain.server_beliefs(task, preparation, before)
    members = [
        plain.with_logits(
            preparation, plain.train_member(task, preparation, before, client, beliefs)
        )
        for client in row["clients_answered"]
    ]
    targets = plain.teach(task, preparation, members, 1, beliefs).tolist()
    by_class = [sum(column) / len(targets) for column in zip(*targets, strict=True)]
    assert row["public_weight_by_class"] == pytest.approx(by_class, abs=1e-4)
    clients = row["clients_answered"]
    expected = [1 / 6 if method == "fedbe" else 1 / 3] * 3  # its other teachers are no clients
    if asks_of(method).releases:
        scores = plain.log_scores(task, preparation, clients).double().exp().T.tolist()
        shares = [[score / sum(own) for score in own] for own in scores]
        expected = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
        assert max(expected) > 0.34  # there is something to see
    assert row["public_weight_by_client"] == {
        str(client): pytest.approx(weight, abs=1e-4)
        for client, weight in zip(clients, expected, strict=True)
    }
