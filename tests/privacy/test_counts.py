"""Label counts: the release against loops and hostile neighbours, and what it tells."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.plain_noise import NoNoise
from torch import Tensor

from fedaux.config import Certainty
from fedaux.privacy.counts import SENSITIVITY, ClassCounts
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.mechanism import Noise, Release, SimulatedNoise
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.privacy.secure import SecureNoise

CLASSES = 3
STRANGE_LABELS = (-1, -2, -CLASSES - 1, CLASSES, 2**40, -(2**62))


def made(epsilon: float = 1.0) -> tuple[ClassCounts, dict[str, Tensor]]:
    mechanism = ClassCounts(Certainty(mechanism="counts", epsilon=epsilon))
    return mechanism, mechanism.publish(torch.zeros(0), num_classes=CLASSES)


def released(labels: list[int], *, noise: Noise | None = None) -> Release:
    mechanism, public = made()
    features = torch.zeros(len(labels), 0)
    return mechanism.release(
        features, public, noise=noise or NoNoise(), labels=torch.tensor(labels)
    )


def test_the_release_is_the_number_of_examples_of_each_class() -> None:
    labels = [0, 1, 1, 2, -1, 0, 3, 2, 2]
    release = released(labels)
    assert release.vector.tolist() == [float(labels.count(c)) for c in range(CLASSES)]
    assert (release.mechanism, release.sensitivity) == ("counts", math.sqrt(2.0))
    assert release.sigma == math.sqrt(2.0) * noise_multiplier(epsilon=1.0, delta=1e-5)
    assert not MECHANISMS["counts"](Certainty()).reads_features
    assert all(MECHANISMS[name](Certainty()).reads_features for name in ("mean", "classes"))


def test_every_replacement_moves_the_counts_by_at_most_the_root_of_two_and_some_by_it() -> None:
    rest = [0, 1, 2, 0, 1, 2]
    vectors = {label: released([label, *rest]).vector for label in (*range(3), *STRANGE_LABELS)}
    distances = {
        (left, right): float((vectors[left] - vectors[right]).norm())
        for left, right in itertools.combinations(vectors, 2)
    }
    assert max(distances.values()) <= SENSITIVITY + 1e-12
    assert distances[0, 1] == pytest.approx(SENSITIVITY)
    assert distances[0, -1] == 1.0
    assert distances[-1, CLASSES] == 0.0


def test_features_do_not_matter() -> None:
    mechanism, public = made()
    labels = torch.tensor([0, 1, 1])
    vectors = [
        mechanism.release(features, public, noise=NoNoise(), labels=labels).vector
        for features in (torch.zeros(3, 0), torch.full((3, 4), math.nan), torch.ones(3, 2))
    ]
    assert torch.equal(vectors[0], vectors[1])
    assert torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize("value", [0.0, -1.0, 2.5, 1e9, math.nan, math.inf])
def test_a_hostile_map_is_refused_whatever_the_data(value: float) -> None:
    mechanism, _ = made()
    for public in ({"classes": torch.tensor(value)}, {"classes": torch.ones(2)}, {}):
        with pytest.raises(ValueError, match="the public map"):
            mechanism.release(
                torch.zeros(3, 0), public, noise=NoNoise(), labels=torch.zeros(3).long()
            )


def test_mistakes_are_explained() -> None:
    mechanism, public = made()
    with pytest.raises(ValueError, match="nothing to release"):
        released([])
    for labels in (None, torch.zeros(3, 1), torch.zeros(2).long()):
        with pytest.raises(ValueError, match="one label per example"):
            mechanism.release(torch.zeros(3, 0), public, noise=NoNoise(), labels=labels)
    with pytest.raises(ValueError, match="num_classes = 0"):
        mechanism.publish(torch.zeros(0))
    with pytest.raises(ValueError, match="has no scores"):
        mechanism.log_scores(torch.zeros(1, 3), torch.ones(1), public, torch.zeros(2, 0))


def test_secure_noise_takes_counts() -> None:
    pytest.importorskip("opendp")
    release = released([0, 1, 2, 0], noise=SecureNoise())
    assert release.noise == "secure"
    assert bool(release.vector.isfinite().all())


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0])
def test_who_holds_what_is_seen_through_the_noise(epsilon: float) -> None:
    """Sixty clients of 400 examples, each of one class; reliability is the share of signal."""
    mechanism, public = made(epsilon)
    true = 400.0 * torch.eye(CLASSES, dtype=torch.float64).repeat(20, 1)
    releases = [
        mechanism.release(
            torch.zeros(400, 0),
            public,
            noise=SimulatedNoise(np.random.default_rng(client)),
            labels=own.argmax().repeat(400),
        )
        for client, own in enumerate(true)
    ]
    vectors = torch.stack([release.vector for release in releases])
    sigma = releases[0].sigma
    estimate = mechanism.estimate(vectors, torch.full((60,), sigma), public)
    error = float((estimate.counts - true).square().mean().sqrt())
    assert error < 0.9 * float((vectors - true).square().mean().sqrt())
    assert float((estimate.shares.sum(dim=0) - 1).abs().max()) < 1e-9
    assert float(estimate.prior.sum()) == pytest.approx(1.0)
    signal = float(true.var(correction=0))
    assert estimate.reliability == pytest.approx(signal / (signal + sigma**2), abs=0.1)


def test_counts_of_noise_alone_are_everybody_alike() -> None:
    mechanism, public = made()
    noisy = torch.from_numpy(np.random.default_rng(0).normal(0, 50.0, (20, CLASSES)))
    estimate = mechanism.estimate(noisy, torch.full((20,), 50.0), public)
    assert estimate.reliability < 0.2
    assert float(estimate.counts.std()) < 10.0
    still = mechanism.estimate(torch.full((2, 3), 5.0), torch.zeros(2), public)
    assert (still.reliability, still.counts.tolist()) == (0.0, [[5.0] * 3] * 2)
