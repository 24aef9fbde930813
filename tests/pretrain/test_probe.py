from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fedaux.pretrain.probe import Probe, accuracy_of, probe, softmax_outputs

CLASSES = 3


def clusters(size: int, *, seed: int, noise: float = 1.0, width: int = 6) -> tuple[Tensor, Tensor]:
    """Features around a centre a class, the first of them always 7, in single precision."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, width)) * 2
    labels = generator.integers(0, CLASSES, size)
    features = centres[labels] + noise * generator.normal(size=(size, width))
    features[:, 0] = 7
    return torch.from_numpy(features).float(), torch.from_numpy(labels)


@pytest.mark.parametrize("strength", [1e-4, 0.01, 3.0])
def test_softmax_regression_is_that_of_scikit_learn(strength: float) -> None:
    (features, labels), (queries, _) = clusters(80, seed=0, noise=3), clusters(30, seed=1, noise=3)
    scaler = StandardScaler().fit(features.double().numpy())
    peer = LogisticRegression(C=1 / (strength * len(labels)), tol=1e-10, max_iter=10_000)
    peer.fit(scaler.transform(features.double().numpy()), labels.numpy())
    expected = peer.predict_proba(scaler.transform(queries.double().numpy()))
    (outputs,) = softmax_outputs(
        features, labels, queries, num_classes=CLASSES, strengths=[strength]
    )
    np.testing.assert_allclose(torch.softmax(outputs, dim=1).numpy(), expected, atol=1e-5)


def test_a_path_of_strengths_ends_where_single_fits_do() -> None:
    (features, labels), (queries, _) = clusters(80, seed=0, noise=3), clusters(30, seed=1, noise=3)
    strengths = [1.0, 0.01, 1e-3]
    path = softmax_outputs(features, labels, queries, num_classes=CLASSES, strengths=strengths)
    for outputs, strength in zip(path, strengths, strict=True):
        (alone,) = softmax_outputs(
            features, labels, queries, num_classes=CLASSES, strengths=[strength]
        )
        torch.testing.assert_close(outputs.softmax(dim=1), alone.softmax(dim=1), atol=1e-5, rtol=0)


def test_more_features_than_examples_are_no_problem() -> None:
    (features, labels), (queries, _) = clusters(10, seed=0, width=30), clusters(5, seed=1, width=30)
    for outputs in softmax_outputs(
        features, labels, queries, num_classes=CLASSES, strengths=[1.0, 1e-6]
    ):
        assert bool(torch.isfinite(outputs).all())


def test_strength_is_chosen_on_held_out_training_labels_only() -> None:
    # Many features of noise and few examples: hardly regularised, the held-out examples go wrong.
    features, labels = clusters(60, seed=0, noise=2)
    noise = torch.from_numpy(np.random.default_rng(5).normal(size=(90, 200))).float()
    queries, truth = clusters(30, seed=1, noise=2)
    train, test = torch.cat([features, noise[:60]], dim=1), torch.cat([queries, noise[60:]], dim=1)

    def run(test_labels: Tensor) -> Probe:
        generator = np.random.default_rng(0)
        return probe(train, labels, test, test_labels, num_classes=CLASSES, generator=generator)

    accuracy, strength = (found := run(truth)).linear, found.strength
    assert strength >= 0.01
    other = run((truth + 1) % CLASSES)
    assert other.strength == strength
    assert other.linear < accuracy
    (outputs,) = softmax_outputs(train, labels, test, num_classes=CLASSES, strengths=[strength])
    assert accuracy == accuracy_of(outputs, truth)  # by all training examples


def test_probe_tells_good_features_from_bad_ones() -> None:
    (features, labels), (queries, truth) = clusters(300, seed=0), clusters(200, seed=1)
    shuffled = features[torch.from_numpy(np.random.default_rng(3).permutation(300))]
    good, bad = (
        probe(
            known, labels, queries, truth, num_classes=CLASSES, generator=np.random.default_rng(0)
        )
        for known in (features, shuffled)
    )
    assert good.linear > 0.9
    assert bad.linear < 0.6


def test_one_example_is_too_few() -> None:
    features, labels = clusters(1, seed=0)
    with pytest.raises(ValueError, match="at least 2"):
        probe(
            features,
            labels,
            features,
            labels,
            num_classes=CLASSES,
            generator=np.random.default_rng(0),
        )
