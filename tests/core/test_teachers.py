from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import written_out as plain
from helpers import oracles
from helpers.federations import federation, written_out
from torch import Tensor

from fedaux.core.methods import METHODS
from fedaux.core.teachers import (
    INFORMATIVE,
    TEACHERS,
    Ensemble,
    Member,
    balanced,
    certainty_teacher,
    certainty_weights,
    mean_teacher,
)

LOGITS = torch.from_numpy(
    np.random.default_rng(0).normal(0, 3, (3, 5, 4))
).float()  # clients, examples, classes
COUNTS = torch.tensor([[5.0, 0.0, 2.0, 1.0], [1.0, 3.0, 0.0, 1.0], [0.0, 4.0, 1.0, 0.0]])
SCORES = torch.from_numpy(np.random.default_rng(1).uniform(0.01, 1, (3, 5)))


def ensemble(
    logits: Tensor = LOGITS,
    scores: Tensor = SCORES,
    order: Sequence[int] = (0, 1, 2),
    shares: Sequence[float] = (1.0, 1.0, 1.0),
) -> Ensemble:
    members = [Member(client, "cnn", 10, {}, share=shares[client]) for client in order]
    return Ensemble(
        members,
        predict=lambda member: logits[member.client],
        log_scores=lambda ids: torch.log(torch.stack([scores[client] for client in ids])),
        beliefs=torch.softmax(logits.sum(dim=0), dim=1),
        class_counts=lambda ids: torch.stack([COUNTS[client] for client in ids]),
        class_prior=lambda: COUNTS.sum(dim=0) / COUNTS.sum(),
    )


def test_mean_teacher_is_equation_2() -> None:
    expected = oracles.mean_soft_labels_loop(LOGITS.tolist())
    assert mean_teacher(ensemble()).numpy() == pytest.approx(np.array(expected), abs=1e-6)


def test_certainty_teacher_is_equation_3() -> None:
    expected = oracles.weighted_soft_labels_loop(LOGITS.tolist(), SCORES.tolist())
    assert certainty_teacher(ensemble()).numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert certainty_teacher(ensemble()).numpy() != pytest.approx(
        mean_teacher(ensemble()).numpy(), abs=1e-2
    )


def test_belief_teacher_weighs_clients_by_the_classes_that_the_server_sees() -> None:
    """w_i(x) = sum_c q(c | x) r_i n_ic / sum_j r_j n_jc, normalised over clients."""
    shares = (1.0, 0.5, 1.0)
    own = ensemble(shares=shares)
    assert own.beliefs is not None
    labels = np.zeros((5, 4))
    for x in range(5):
        weights = [
            sum(
                float(own.beliefs[x, c])
                * shares[i]
                * float(COUNTS[i, c])
                / sum(shares[j] * float(COUNTS[j, c]) for j in range(3))
                for c in range(4)
            )
            for i in range(3)
        ]
        for i in range(3):
            probabilities = oracles.softmax_loop(LOGITS[i, x].tolist())
            labels[x] += weights[i] / sum(weights) * np.array(probabilities)
    assert information(labels) > INFORMATIVE * np.log(4)  # so they stay as they are
    assert TEACHERS["belief"](own).numpy() == pytest.approx(labels, abs=1e-5)


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


def test_mixture_teacher_averages_probabilities() -> None:
    labels = np.zeros((5, 4))
    for x in range(5):
        total = sum(float(SCORES[i, x]) for i in range(3))
        for i in range(3):
            labels[x] += (
                float(SCORES[i, x]) / total * np.array(oracles.softmax_loop(LOGITS[i, x].tolist()))
            )
    assert TEACHERS["mixture"](ensemble()).numpy() == pytest.approx(labels, abs=1e-6)


def test_probabilities_teacher_averages_probabilities_without_scores() -> None:
    expected = oracles.mean_probabilities_loop(LOGITS.tolist(), [1.0, 1.0, 1.0])
    labels = TEACHERS["probabilities"](ensemble())
    assert labels.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert labels.numpy() != pytest.approx(mean_teacher(ensemble()).numpy(), abs=1e-2)
    assert labels.numpy() != pytest.approx(TEACHERS["mixture"](ensemble()).numpy(), abs=1e-2)


SHARES = (1.0, 0.25, 0.6)


def test_shares_weigh_logits() -> None:
    scores = [[share] * 5 for share in SHARES]
    expected = oracles.weighted_soft_labels_loop(LOGITS.tolist(), scores)
    assert mean_teacher(ensemble(shares=SHARES)).numpy() == pytest.approx(
        np.array(expected), abs=1e-6
    )


def test_shares_multiply_certainty_scores() -> None:
    scores = (SCORES * torch.tensor(SHARES, dtype=torch.float64)[:, None]).tolist()
    expected = oracles.weighted_soft_labels_loop(LOGITS.tolist(), scores)
    assert certainty_teacher(ensemble(shares=SHARES)).numpy() == pytest.approx(
        np.array(expected), abs=1e-6
    )
    multiplied = ensemble(scores=torch.tensor(scores, dtype=torch.float64))
    mixture = TEACHERS["mixture"]
    assert torch.allclose(mixture(ensemble(shares=SHARES)), mixture(multiplied), atol=1e-6)


@pytest.mark.parametrize("name", ["probabilities", "bayesian"])
def test_shares_weigh_probabilities(name: str) -> None:
    expected = oracles.mean_probabilities_loop(LOGITS.tolist(), SHARES)
    assert TEACHERS[name](ensemble(shares=SHARES)).numpy() == pytest.approx(
        np.array(expected), abs=1e-6
    )


@pytest.mark.parametrize("name", [name for name in TEACHERS if name != "private-head"])
def test_only_relative_shares_matter_and_they_do(name: str) -> None:
    teacher = TEACHERS[name]
    halves = ensemble(shares=[share / 2 for share in SHARES])
    assert torch.allclose(teacher(halves), teacher(ensemble(shares=SHARES)), atol=1e-6)
    assert not torch.allclose(teacher(ensemble(shares=SHARES)), teacher(ensemble()), atol=1e-3)


def test_whole_shares_change_no_bit_of_the_weights() -> None:
    log_scores = ensemble().log_scores([0, 1, 2])
    assert torch.equal(certainty_weights(ensemble()), torch.softmax(log_scores, dim=0).float())
    total = (
        LOGITS[0] * torch.tensor(1.0 / 3)
        + LOGITS[1] * torch.tensor(1.0 / 3)
        + LOGITS[2] * torch.tensor(1.0 / 3)
    )
    assert torch.equal(mean_teacher(ensemble()), torch.softmax(total, dim=1))


@pytest.mark.parametrize("name", TEACHERS)
def test_other_logits_give_other_labels(name: str) -> None:
    assert not torch.allclose(
        TEACHERS[name](ensemble()), TEACHERS[name](ensemble(logits=-LOGITS)), atol=1e-2
    )


def test_equal_scores_give_the_mean_teacher() -> None:
    equal = ensemble(scores=torch.full((3, 5), 0.3, dtype=torch.float64))
    assert torch.allclose(certainty_teacher(equal), mean_teacher(equal), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in TEACHERS if name != "private-head"])
def test_one_client_gives_that_clients_predictions(name: str) -> None:
    labels = TEACHERS[name](ensemble(order=[1]))
    assert torch.allclose(labels, torch.softmax(LOGITS[1], dim=1), atol=1e-6)


@pytest.mark.parametrize("name", TEACHERS)
def test_order_of_clients_is_irrelevant(name: str) -> None:
    first, second = (TEACHERS[name](ensemble(order=order)) for order in ([0, 1, 2], [2, 0, 1]))
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("name", TEACHERS)
def test_soft_labels_are_distributions(name: str) -> None:
    labels = TEACHERS[name](ensemble())
    assert torch.allclose(labels.sum(dim=1), torch.ones(5), atol=1e-6)
    assert labels.dtype == torch.float32


def test_vanishing_scores_neither_divide_by_zero_nor_overflow() -> None:
    tiny = ensemble()
    extreme = Ensemble(
        tiny.members,
        tiny.predict,
        lambda ids: torch.tensor([[-2000.0], [-2001.0], [3000.0]]).expand(3, 5),
    )
    assert torch.allclose(certainty_teacher(extreme), torch.softmax(LOGITS[2], dim=1), atol=1e-6)


@pytest.mark.parametrize("method", ["fedaux", "fedaux+logits", "feddf+p", "feddf+m", "fedbe"])
def test_a_round_records_how_the_weight_on_public_data_is_spread(
    method: str, tmp_path: Path
) -> None:
    """Mean weight of each client over the public examples, mean soft label of each class."""
    server, state, _, _ = federation(
        tmp_path, method=method, participation_rate=0.75, bayesian={"samples": 2}
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
    if method == "fedbe":
        assert row["public_weight_by_client"] == {}  # most of its teachers are no clients
        return
    expected = [1 / 3] * 3
    if METHODS[method].scores:
        scores = plain.log_scores(task, preparation, clients).double().exp().T.tolist()
        shares = [[score / sum(own) for score in own] for own in scores]
        expected = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
        assert max(expected) > 0.34  # there is something to see
    assert row["public_weight_by_client"] == {
        str(client): pytest.approx(weight, abs=1e-4)
        for client, weight in zip(clients, expected, strict=True)
    }
