from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import oracles
from sklearn import metrics
from torch.nn import functional

from fedaux.core.algorithms.by_class import class_shares, head_by_class, smoothed
from fedaux.core.messages import Member
from fedaux.core.metrics import evaluate, measure
from fedaux.core.task import State
from fedaux.core.weights import AVERAGES, average, clip_updates

RNG = np.random.default_rng(0)


def test_average_is_weighted_by_examples() -> None:
    values = RNG.normal(size=(3, 4))
    sizes = [10, 1, 5]
    averaged = average([{"w": torch.from_numpy(row).float()} for row in values], sizes=sizes)
    assert averaged["w"].tolist() == pytest.approx(
        oracles.weighted_average_loop(values.tolist(), sizes), abs=1e-6
    )


def test_average_of_one_is_that_one_and_counters_stay_whole() -> None:
    weights = {"w": torch.rand(3), "count": torch.tensor(7)}
    averaged = average([weights], sizes=[3])
    assert torch.equal(averaged["w"], weights["w"])
    other = {"w": torch.rand(3), "count": torch.tensor(9)}
    assert average([weights, other], sizes=[3, 1])["count"].dtype == torch.int64
    assert int(average([weights, other], sizes=[3, 1])["count"]) == 9


def test_rows_of_a_head_are_averaged_by_who_holds_their_class() -> None:
    counts = torch.tensor([[5.0, 0.0, 0.0], [3.0, 2.0, 0.0]], dtype=torch.float64)
    discounts = (1.0, 0.5)
    members = [
        Member(client, "x", 8, {"head.weight": torch.rand(3, 4), "head.bias": torch.rand(3)}, share)
        for client, share in enumerate(discounts)
    ]
    before = {"head.weight": torch.rand(3, 4), "head.bias": torch.rand(3)}
    weights = [one.weights for one in members]
    head = head_by_class(weights, class_shares(counts, members), before=before)
    for name, rows in head.items():
        level = before[name].mean(dim=0)
        for row in range(3):
            held = [
                discount * float(counts[client, row]) for client, discount in enumerate(discounts)
            ]
            held = held if sum(held) > 0 else [1.0, 1.0]  # nobody's class
            expected = level + sum(
                part * (own[name][row] - own[name].mean(dim=0)) / sum(held)
                for part, own in zip(held, weights, strict=True)
            )
            assert torch.allclose(rows[row], expected, atol=1e-6)
    shifted = [
        {**weights[0], "head.bias": weights[0]["head.bias"] + 5.0},  # the same predictions
        weights[1],
    ]
    again = head_by_class(shifted, class_shares(counts, members), before=before)
    assert torch.allclose(again["head.bias"], head["head.bias"], atol=1e-5)


def test_the_average_over_rounds_is_that_of_a_loop_and_ignores_swings() -> None:
    values = [0.0, *RNG.normal(size=40).tolist()]
    swings = [0.0, *(3.0 + (-1.0) ** number for number in range(40))]
    for series in (values, swings):
        models = [{"w": torch.tensor([value]), "count": torch.tensor(7)} for value in series]
        state, expected = State(0, {"net": models[0]}), series[1]
        for number in range(1, len(series)):
            (made,) = smoothed(state, {"net": models[number]}, decay=0.8, round=number).values()
            state = state.next({"net": models[number]}).carry("final", {"net": made})
            if number > 1:
                kept = 0.8 * min(1, number / 30)
                middle = (series[number - 1] + series[number]) / 2
                expected = kept * expected + (1 - kept) * middle
            assert float(made["w"]) == pytest.approx(expected, abs=1e-6)
            assert int(made["count"]) == 7
    assert expected == pytest.approx(3.0, abs=1e-4)  # not 2 or 4, the models themselves


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 9, 10])
def test_robust_averages_are_those_of_loops(clients: int) -> None:
    values = RNG.normal(size=(clients, 5))
    models = [{"w": torch.from_numpy(row[:3]), "v": torch.from_numpy(row[3:])} for row in values]
    trims = {
        "trimmed-mean": 0 if clients < 3 else max(1, clients // 5),
        "median": (clients - 1) // 2,
    }
    for name, trim in trims.items():
        made = AVERAGES[name](models, sizes=[2**40, *[1] * (clients - 1)])
        assert [*made["w"].tolist(), *made["v"].tolist()] == pytest.approx(
            oracles.trimmed_mean_loop(values.tolist(), trim)
        )
    before = RNG.normal(size=5)
    start = {"w": torch.from_numpy(before[:3]), "v": torch.from_numpy(before[3:])}
    for made, row in zip(
        clip_updates(models, before=start),
        oracles.clipped_loop(values.tolist(), before.tolist()),
        strict=True,
    ):
        assert [*made["w"].tolist(), *made["v"].tolist()] == pytest.approx(row)


def test_one_of_ten_cannot_move_a_robust_average_far() -> None:
    honest = [{"w": torch.full((4,), 0.9 + 0.02 * i), "n": torch.tensor(5 + i)} for i in range(9)]
    start = {"w": torch.zeros(4), "n": torch.tensor(0)}
    for hostile in (-1e6, 1e6, 1e30):
        models = [*honest, {"w": torch.full((4,), hostile), "n": torch.tensor(2**62)}]
        for name in ("trimmed-mean", "median"):
            made = AVERAGES[name](models, sizes=[1] * 10)
            assert made["w"].tolist() == pytest.approx([0.98] * 4, abs=0.03)
            assert int(made["n"]) <= 13
        shortened = clip_updates(models, before=start)
        assert all(float(own["w"].norm()) <= 2.0 for own in shortened)


def test_evaluation_counts_and_averages() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    accuracy, loss = evaluate(logits, labels)
    assert accuracy == 0.75
    right, wrong = np.log(1 + np.exp(-2)), np.log(1 + np.exp(2))
    assert loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)


@pytest.mark.parametrize("classes", [3, 10])
def test_figures_by_class_are_those_of_scikit_learn(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (200,), generator=generator)
    noise = torch.randn(200, classes, generator=generator)
    logits = (2 * noise + functional.one_hot(labels, classes)).round()  # with ties
    found, probabilities = measure(logits, labels), torch.softmax(logits.double(), dim=1)
    predicted = logits.argmax(dim=1)
    assert found["confusion"].tolist() == metrics.confusion_matrix(labels, predicted).tolist()
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found["balanced_accuracy"] == pytest.approx(
        metrics.balanced_accuracy_score(labels, predicted)
    )
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(labels, predicted, average="macro", zero_division=0)
    )
    assert found["auc"] == pytest.approx(
        metrics.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    )


def test_figures_by_class_leave_out_classes_without_test_examples() -> None:
    labels, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 3, 1, 1])
    probabilities = functional.one_hot(predicted).double()
    logits = probabilities.log()  # probabilities of 0 and 1: what ties does so in every precision
    found = measure(logits, labels)
    assert found["balanced_accuracy"] == pytest.approx((0.5 + 1) / 2)
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(labels, predicted, labels=[0, 1], average="macro")
    )
    areas = [metrics.roc_auc_score(labels == c, probabilities[:, c]) for c in (0, 1)]
    assert found["auc"] == pytest.approx(sum(areas) / 2) == 0.875
    assert measure(logits, torch.zeros(4, dtype=torch.long))["auc"] is None
    assert measure(logits * torch.nan, labels)["auc"] is None
