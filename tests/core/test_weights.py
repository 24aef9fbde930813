from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import oracles

from fedaux.core.weights import average, evaluate

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


def test_evaluation_counts_and_averages() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    accuracy, loss = evaluate(logits, labels)
    assert accuracy == 0.75
    right, wrong = np.log(1 + np.exp(-2)), np.log(1 + np.exp(2))
    assert loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)
