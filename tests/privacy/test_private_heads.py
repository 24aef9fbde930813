"""Private heads: the solver against scikit-learn, the sensitivity against hostile neighbours, and
the layer that a release stands for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fedaux.config import Certainty
from fedaux.privacy import heads
from fedaux.privacy.audit.mechanisms import FixedNoise
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.heads import (
    NOISE,
    TOLERANCE,
    PrivateHeads,
    largest,
    layer_of,
    penalty_of,
    sensitivity_of,
    solve,
)
from fedaux.privacy.mechanisms import MECHANISMS, SimulatedNoise


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def gradient(weights: Tensor, inputs: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Of J, by automatic differentiation."""
    weights = weights.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        inputs @ weights.T, labels.clamp(0, len(weights) - 1), reduction="none"
    )
    known = (labels >= 0) & (labels < len(weights))
    value = (losses * known).mean() + penalty / 2 * weights.square().sum()
    return torch.autograd.grad(value, weights)[0]


@pytest.mark.parametrize("penalty", [1e-3, 0.1, 5.0])
def test_the_solver_agrees_with_scikit_learn(penalty: float) -> None:
    inputs, labels = unit(normal(90, 6)), torch.arange(90) % 4
    own = solve(inputs, labels, num_classes=4, penalty=penalty)
    peer = LogisticRegression(C=1 / (90 * penalty), fit_intercept=False, tol=1e-10, max_iter=10_000)
    expected = peer.fit(inputs.numpy(), labels.numpy()).coef_
    assert own.numpy() == pytest.approx(expected, abs=1e-5 / penalty**0.5)


@pytest.mark.parametrize("penalty", [1e-3, 0.3, 1e4])
def test_a_fixed_number_of_steps_is_enough_for_any_data(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "ATTEMPTS", 1)
    point = unit(normal(1, 5))
    hostile = {
        "one example": (point, torch.tensor([2])),
        "all at one point": (point.repeat(40, 1), torch.zeros(40, dtype=torch.int64)),
        "opposite": (torch.cat([point, -point]).repeat(20, 1), torch.arange(40) % 2),
        "zeros": (torch.zeros(7, 5, dtype=torch.float64), torch.arange(7) % 3),
        "no known label": (unit(normal(9, 5)), torch.tensor([-1, 3, 2**40] * 3)),
        "some known labels": (unit(normal(9, 5)), torch.tensor([-1, 1, 2] * 3)),
    }
    for name, (inputs, labels) in hostile.items():
        weights = solve(inputs, labels, num_classes=3, penalty=penalty)
        found = gradient(weights, inputs, labels, penalty).norm()
        assert found <= 2 * TOLERANCE, name  # the peer's rounding included
        assert weights.norm() <= largest(3, penalty=penalty)[0] + TOLERANCE / penalty


@pytest.mark.parametrize(
    ("classes", "penalty", "reached"),
    [(2, 0.01, 0.3), (3, 1.0, 0.55), (10, 0.1, 0.45), (10, 5.0, 0.8)],
)
def test_hostile_neighbours_stay_within_the_sensitivity(
    classes: int, penalty: float, reached: float
) -> None:
    """All pairs of a few points and labels, beside examples that pull the head to one class."""
    mechanism = PrivateHeads(Certainty())
    public = mechanism.publish(normal(30, 3), num_classes=classes)
    outliers = 20 * normal(3, 3, seed=1)
    points = mechanism.project(torch.cat([outliers, -outliers]), public)
    rest = points[:1].repeat(30, 1), torch.zeros(30, dtype=torch.int64)
    found = [
        solve(
            torch.cat([point[None], rest[0]]),
            torch.cat([torch.tensor([label]), rest[1]]),
            num_classes=classes,
            penalty=penalty,
        )
        for point in points
        for label in (0, 1, classes - 1, -1)
    ]
    worst = max(float((one - other).norm()) for one, other in itertools.combinations(found, 2))
    bound = sensitivity_of(31, num_classes=classes, penalty=penalty)
    assert reached < worst / bound <= 1


def test_no_example_can_be_predicted_with_more_than_the_bound() -> None:
    for classes, penalty in ((2, 0.01), (4, 0.3), (10, 1.0), (10, 1e-3)):
        norm, most = largest(classes, penalty=penalty)
        point = unit(normal(1, 4))
        weights = solve(point, torch.tensor([1]), num_classes=classes, penalty=penalty)
        assert float(weights.norm()) <= norm * (1 + 1e-9)
        # Any W of that norm, aimed at one class along one direction.
        aim = torch.full((classes,), -1.0 / (classes - 1), dtype=torch.float64)
        aim[0] = 1.0
        logits = norm * aim / aim.norm()
        assert float(torch.softmax(logits, dim=0)[0]) <= most
        assert float(torch.softmax(logits, dim=0)[0]) == pytest.approx(most, rel=1e-3)
    assert largest(1, penalty=1.0) == (0.0, 1.0)


@pytest.mark.slow
def test_noise_is_limited_by_the_penalty_and_calibrated() -> None:
    section = Certainty(epsilon=0.5, delta=1e-5)
    multiplier = noise_multiplier(epsilon=0.5, delta=1e-5)
    mechanism = MECHANISMS["heads"](section)
    public = mechanism.publish(normal(40, 6), num_classes=3)
    for size in (1, 144, 30_000):
        features, labels = normal(size, 6), torch.arange(size) % 3
        release = mechanism.release(features, public, noise=FixedNoise(0), labels=labels)
        penalty = penalty_of(size, multiplier=multiplier)
        expected = sensitivity_of(size, num_classes=3, penalty=penalty)
        assert release.sensitivity == expected
        assert release.sigma == expected * multiplier <= NOISE * (1 + 1e-9)
        assert release.sigma > 0.5 * NOISE or penalty == heads.LEAST_PENALTY
        stated = (release.mechanism, release.epsilon, release.delta)
        assert stated == ("heads", 0.5, 1e-5)
    with pytest.raises(ValueError, match="no scores"):
        mechanism.log_scores(release.vector[None], torch.ones(1), public, features)


def test_the_layer_gives_the_logits_of_unclipped_features() -> None:
    mechanism = PrivateHeads(Certainty(epsilon=50.0))
    negatives = 5 + normal(60, 6)
    public = mechanism.publish(negatives, num_classes=4)
    near = 5 + 0.01 * normal(20, 6, seed=1)
    noise = SimulatedNoise(np.random.default_rng(0))
    released = mechanism.release(near, public, noise=noise, labels=torch.arange(20) % 4)
    weight, bias = layer_of(released.vector, public)
    inside = mechanism.project(near, public) @ released.vector.reshape(4, 7).T
    assert torch.allclose(near.float() @ weight.T + bias, inside.float(), atol=1e-4)


def test_a_hostile_map_is_refused_and_strange_examples_count_for_nothing() -> None:
    mechanism = PrivateHeads(Certainty())
    features, labels = normal(8, 5), torch.arange(8) % 3
    public = mechanism.publish(normal(30, 5), num_classes=3)
    for key, wrong in (
        ("centre", torch.zeros(1)),
        ("bound", torch.ones(8)),
        ("classes", torch.tensor(2.5)),
        ("classes", torch.tensor(2**20)),
    ):
        with pytest.raises(ValueError, match="public map"):
            mechanism.release(features, public | {key: wrong}, noise=FixedNoise(0), labels=labels)
    for bound in (0.0, math.inf, math.nan):
        hostile = public | {"bound": torch.tensor(bound)}
        vector = mechanism.release(features, hostile, noise=FixedNoise(0), labels=labels).vector
        assert bool(vector.isfinite().all())
    strange = features.clone()
    strange[0] = math.nan
    blank = torch.where(torch.arange(8) == 0, -1, labels)
    first, second = (
        mechanism.release(*data, noise=FixedNoise(0), labels=own).vector
        for data, own in (((strange, public), labels), ((features, public), blank))
    )
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="one label per example"):
        mechanism.release(features, public, noise=FixedNoise(0))
    with pytest.raises(ValueError, match="nothing to release"):
        mechanism.release(features[:0], public, noise=FixedNoise(0), labels=labels[:0])
    with pytest.raises(ValueError, match="num_classes = 0"):
        mechanism.publish(features)
