"""Class sums: the release against loops and hostile neighbours, the estimate against what is
known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import oracles
from helpers.plain_noise import NoNoise
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.classes import (
    SENSITIVITY,
    ClassEstimate,
    ClassSums,
    class_prior,
    denoised_counts,
    effective_rank,
    expected_reliability,
    shrinkage,
    shrunk,
    suitable_components,
)
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.mean import PrivateMean
from fedaux.privacy.mechanism import Noise, Release, SimulatedNoise, integer_sums
from fedaux.privacy.secure import SecureNoise

CLASSES = 3
STRANGE_LABELS = (-1, -2, -CLASSES - 1, CLASSES, 2**40)


def normal(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(shift, 1.0, shape)).float()


def made(**values: Any) -> tuple[ClassSums, dict[str, Tensor]]:
    """The mechanism, and its map of five features."""
    mechanism = ClassSums(Certainty(**({"epsilon": 1.0, "components": 4} | values)))
    return mechanism, mechanism.publish(normal(80, 5), num_classes=CLASSES)


def released(
    features: Tensor, labels: list[int], *, noise: Noise | None = None, **values: Any
) -> Release:
    mechanism, public = made(**values)
    own = torch.tensor(labels)
    return mechanism.release(features, public, noise=noise or NoNoise(), labels=own)


def test_the_release_is_the_sum_by_class_written_out() -> None:
    mechanism, public = made()
    features = normal(9, 5, seed=1)
    features[4, 2] = math.nan
    labels = [0, 1, 1, 2, 0, -1, 3, 2, 2]
    release = released(features, labels)
    expected = oracles.class_sums_loop(
        mechanism.project(features, public).tolist(),
        labels,
        classes=CLASSES,
        finite=features.isfinite().all(dim=1).tolist(),
    )
    assert release.vector.tolist() == pytest.approx([*itertools.chain(*expected)], abs=1e-9)
    assert [row[-1] for row in expected] == [1, 2, 3]
    assert (release.mechanism, release.sensitivity) == ("classes", 2.0)
    assert release.sigma == 2.0 * noise_multiplier(epsilon=1.0, delta=1e-5)


def test_every_replacement_moves_the_sums_by_at_most_two_and_some_by_two() -> None:
    """All pairs of hostile features and labels for the example that is replaced."""
    rest, rest_labels = normal(6, 5, seed=1), [0, 1, 2, 0, 1, 2]
    direction = normal(5, seed=2)
    versions = [direction, 1e6 * direction, -1e6 * direction, 0 * direction, direction * math.nan]
    vectors: dict[tuple[int, int], Tensor] = {}
    for index, label in itertools.product(range(len(versions)), (0, 1, *STRANGE_LABELS)):
        features = torch.cat([versions[index][None], rest])
        vectors[index, label] = released(features, [label, *rest_labels]).vector
    distances = {
        (left, right): float((vectors[left] - vectors[right]).norm())
        for left, right in itertools.combinations(vectors, 2)
    }
    assert max(distances.values()) <= SENSITIVITY + 1e-9
    assert distances[(1, 0), (2, 0)] == pytest.approx(2.0, abs=1e-6)  # opposite, in one class
    assert distances[(1, 0), (1, 1)] == pytest.approx(2.0, abs=1e-6)  # between two classes


@pytest.mark.parametrize("label", STRANGE_LABELS)
def test_a_label_out_of_range_contributes_nothing_and_fails_nowhere(label: int) -> None:
    features = normal(5, 5, seed=1)
    with_it = released(features, [0, 1, 2, 0, label])
    without = released(features[:4], [0, 1, 2, 0])
    assert torch.equal(with_it.vector, without.vector)


def test_sums_are_exact_in_any_order() -> None:
    rows, groups = normal(5000, 3).clamp(-1, 1).double(), torch.arange(5000) % 4
    order = torch.from_numpy(np.random.default_rng(0).permutation(5000))
    assert torch.equal(
        integer_sums(rows, groups, count=4), integer_sums(rows[order], groups[order], count=4)
    )


def test_noise_is_on_every_row_also_of_classes_that_nobody_holds() -> None:
    draws = torch.stack(
        [
            released(
                normal(4, 5, seed=1), [0] * 4, noise=SimulatedNoise(seeding.generator(seed, "n"))
            ).vector
            for seed in range(300)
        ]
    )
    spread = draws.std(dim=0) / (2.0 * noise_multiplier(epsilon=1.0, delta=1e-5))
    assert spread.shape == (CLASSES * 5,)
    assert float(spread.min()) > 0.8
    assert float(spread.max()) < 1.2


def test_secure_noise_takes_class_sums() -> None:
    pytest.importorskip("opendp")
    release = released(normal(4, 5, seed=1), [0, 1, 2, 0], noise=SecureNoise())
    assert release.noise == "secure"
    assert bool(release.vector.isfinite().all())


@pytest.mark.parametrize("value", [0.0, -1.0, 2.5, 1e9, math.nan, math.inf])
def test_a_hostile_number_of_classes_is_refused_whatever_the_data(value: float) -> None:
    mechanism, public = made()
    for features in (normal(3, 5), torch.full((3, 5), math.nan)):
        with pytest.raises(ValueError, match="the public map has"):
            mechanism.release(
                features,
                public | {"classes": torch.tensor(value)},
                noise=NoNoise(),
                labels=torch.zeros(3).long(),
            )


@pytest.mark.parametrize("key", ["centre", "whitening", "bound"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300, math.inf, math.nan])
def test_a_hostile_map_can_make_no_client_fail(key: str, value: float) -> None:
    mechanism, public = made()
    hostile = {name: tensor.double() for name, tensor in public.items()}
    hostile[key] = torch.full_like(hostile[key], value)
    features = normal(4, 5, seed=1)
    features[3] = 1e30
    labels = torch.tensor([0, 1, 2, 1])
    base = mechanism.release(features, hostile, noise=NoNoise(), labels=labels)
    features[3], labels[3] = 0.0, 0
    other = mechanism.release(features, hostile, noise=NoNoise(), labels=labels)
    assert bool(base.vector.isfinite().all())
    assert float((base.vector - other.vector).norm()) <= 2.0 + 1e-9


def test_mistakes_are_explained() -> None:
    mechanism, public = made()
    with pytest.raises(ValueError, match="nothing to release"):
        mechanism.release(normal(0, 5), public, noise=NoNoise(), labels=torch.zeros(0).long())
    with pytest.raises(ValueError, match="one label per example"):
        mechanism.release(normal(3, 5), public, noise=NoNoise())
    with pytest.raises(ValueError, match="one label per example"):
        mechanism.release(normal(3, 5), public, noise=NoNoise(), labels=torch.zeros(3, 1))
    with pytest.raises(ValueError, match="num_classes = 0"):
        mechanism.publish(normal(80, 5))
    with pytest.raises(ValueError, match=r"certainty\.components: missing"):
        ClassSums(Certainty()).publish(normal(80, 5), num_classes=3)


# The estimate


def clusters(*, clients: int, held: int, epsilon: float, size: int = 400) -> ClassEstimate:
    """Clients that hold `held` of four classes each, with means at the corners of a square."""
    means = 1.5 * torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    mechanism = ClassSums(Certainty(epsilon=epsilon, components=2))
    public = mechanism.publish(2 * normal(500, 2, seed=9), num_classes=4)
    releases = []
    for client in range(clients):
        labels = (torch.arange(size) % held + client) % 4
        features = means[labels] + normal(size, 2, seed=client)
        noise = SimulatedNoise(seeding.generator(0, "n", client=client))
        releases.append(mechanism.release(features, public, noise=noise, labels=labels))
    vectors = torch.stack([release.vector for release in releases])
    return mechanism.estimate(vectors, torch.tensor([one.sigma for one in releases]), public)


def test_without_noise_to_speak_of_the_estimate_is_the_loops() -> None:
    mechanism, public = made(epsilon=1e6)
    features, labels = normal(40, 5, seed=1), torch.arange(40) % CLASSES
    parts = [slice(0, 25), slice(25, 40)]
    vectors = torch.stack(
        [
            mechanism.release(features[own], public, noise=NoNoise(), labels=labels[own]).vector
            for own in parts
        ]
    )
    estimate = mechanism.estimate(vectors, torch.zeros(2), public)
    points = mechanism.project(normal(6, 5, seed=2), public)
    expected = oracles.class_discriminant_loop(
        [vector.reshape(CLASSES, -1).tolist() for vector in vectors],
        points.tolist(),
        scale=float(public["bound"]) ** 2,
    )
    assert np.allclose(estimate.logits(points).tolist(), expected, atol=1e-9)
    assert estimate.reliability == 1.0
    scores = mechanism.log_scores(vectors, torch.zeros(2), public, points)
    shares = oracles.shares_loop([vector.reshape(CLASSES, -1).tolist() for vector in vectors])
    for client, point in itertools.product(range(2), range(6)):
        belief = oracles.softmax_loop(expected[point])
        score = sum(share * part for share, part in zip(shares[client], belief, strict=True))
        assert float(scores[client, point]) == pytest.approx(math.log(score + 1e-6), abs=1e-9)


@pytest.mark.parametrize("held", [1, 2, 4])
def test_who_holds_what_is_seen_through_the_noise(held: int) -> None:
    estimate = clusters(clients=8, held=held, epsilon=0.5)
    true = torch.zeros(8, 4)
    for client, offset in itertools.product(range(8), range(held)):
        true[client, (client + offset) % 4] = 400 / held
    assert float((estimate.counts - true).abs().max()) < 60  # noise of 13.8, up to 4 sigma
    assert float((estimate.shares.sum(dim=0) - 1).abs().max()) < 1e-9
    assert float(estimate.prior.sum()) == pytest.approx(1.0)
    assert float((estimate.prior - 0.25).abs().max()) < 0.05
    assert estimate.reliability > 0.9


def test_reliability_and_shifts_fall_with_noise() -> None:
    found = [clusters(clients=8, held=4, epsilon=epsilon) for epsilon in (1e3, 0.1, 1e-3)]
    assert found[0].reliability > 0.99 > found[1].reliability > found[2].reliability
    assert found[2].reliability < 0.1
    assert float(found[2].shifts.norm()) < 0.2 * float(found[0].shifts.norm())


def test_posterior_counts_are_nearer_to_the_truth_than_noisy_ones() -> None:
    generator = np.random.default_rng(0)
    for true in (np.full((20, 10), 250.0), 2500.0 * (generator.random((20, 10)) < 0.1)):
        noisy = torch.from_numpy(true + generator.normal(0, 61.5, true.shape))
        sigmas = torch.full((20, 1), 61.5, dtype=torch.float64)
        error = float((denoised_counts(noisy, sigmas) - torch.from_numpy(true)).square().mean())
        assert error < 0.35 * 61.5**2
    few = torch.tensor([[-5.0, -1.0]]).double()
    assert denoised_counts(few, torch.ones(1, 1).double()).tolist() == [[0.0, 0.0]]
    exact = torch.tensor([[1e9, 3.0]]).double()
    assert denoised_counts(exact, torch.ones(1, 1).double()).tolist() == exact.tolist()


def test_shrinkage_brings_class_means_nearer_to_the_truth() -> None:
    generator = np.random.default_rng(0)
    order = np.arange(1, 41)
    for noise in (0.3, 1.0, 3.0):
        true = generator.normal(size=(10, 40)) / np.sqrt(order)
        seen = torch.from_numpy(true + generator.normal(0, noise, true.shape))
        estimated, rho = shrunk(seen, torch.full((10,), noise**2, dtype=torch.float64))
        error, before = (
            float((one - torch.from_numpy(true)).square().mean()) for one in (estimated, seen)
        )
        best = float(np.mean(1 / (order + 1 / noise**2)))  # of a known prior variance 1 / j
        assert error < before
        assert error < 1.5 * best
        signal = float(np.mean(1 / order))
        assert rho == pytest.approx(signal / (signal + noise**2), abs=0.15)


def test_a_prior_that_differs_by_noise_alone_is_uniform() -> None:
    totals = torch.tensor([90.0, 110.0, 105.0, 95.0]).double()
    assert class_prior(totals, variance=400.0).tolist() == pytest.approx([0.25] * 4, abs=0.003)
    negative = torch.tensor([-90.0, 20.0, -30.0, 10.0]).double()
    assert class_prior(negative, variance=400.0).tolist() == pytest.approx([0.25] * 4)
    far = class_prior(torch.tensor([1000.0, 0.0, 10.0, 990.0]).double(), variance=4.0)
    assert far.tolist() == pytest.approx([0.5, 0.0, 0.005, 0.495], abs=0.002)
    assert float(far.min()) > 0
    exact = class_prior(torch.tensor([30.0, 10.0, 60.0]).double(), variance=0.0)
    assert exact.tolist() == pytest.approx([0.3, 0.1, 0.6])


@pytest.mark.parametrize(("spread", "noise"), [(0, 230), (0, 40), (8, 20), (20, 10), (30, 230)])
def test_a_prior_is_nearly_as_good_as_with_a_known_spread(spread: float, noise: float) -> None:
    generator = np.random.default_rng(0)
    own, best = [], []
    for _ in range(300):
        true = np.clip(40 + spread * generator.standard_normal(10), 1, None)
        seen = true + noise * generator.standard_normal(10)
        shares = true / true.sum()
        found = class_prior(torch.from_numpy(seen), variance=noise**2).numpy()
        factor = spread**2 / (spread**2 + noise**2)
        known = np.clip(40 + factor * (seen - seen.mean()), 0.5, None)
        own.append(np.abs(found - shares).sum())
        best.append(np.abs(known / known.sum() - shares).sum())
    assert np.mean(own) < 1.1 * np.mean(best) + 0.08


# Beforehand


def test_the_number_of_components_follows_from_public_numbers() -> None:
    """CIFAR-10, at most 1.5 points below the best choice (notes/successor.md): with ResNet-8
    (effective rank 33) 40 to 60 components at (0.1, 1e-5) and 140 to 512 at (0.6, 2e-5), with
    EfficientNet-lite0 (326) 80 to 128 and 180 to 640."""
    budget = {"epsilon": 0.1, "delta": 1e-5}
    cifar10 = suitable_components([2500] * 20, num_classes=10, **budget)
    for rank, strict, loose in ((33, (40, 60), (140, 512)), (326, (80, 128), (180, 640))):
        for (low, high), own in ((strict, budget), (loose, {"epsilon": 0.6, "delta": 2e-5})):
            found = suitable_components([2500] * 20, num_classes=10, rank=rank, **own)
            assert low <= found <= high
    reliable = [
        expected_reliability(k, [2500] * 20, num_classes=10, held=math.sqrt(10), **budget)
        for k in (1, cifar10)
    ]
    v = (1 / reliable[0] - 1) * 0.07
    assert reliable[1] == pytest.approx(0.07 / (0.07 + cifar10 * v))
    assert suitable_components([144] * 10, num_classes=10, epsilon=0.5, delta=1e-5) == 10
    assert suitable_components([10] * 10, num_classes=100, epsilon=0.1, delta=1e-5) == 16
    assert suitable_components([2500] * 40, num_classes=10, **budget) > cifar10
    assert (
        suitable_components([10**6] * 99, num_classes=1000, **budget) == 64
    )  # what a proof covers
    mechanism = ClassSums(Certainty(epsilon=0.5))
    public = mechanism.publish(normal(200, 30), num_classes=10, sizes=[144] * 10)
    assert public["whitening"].shape == (30, 10)
    equal = torch.eye(8).repeat(50, 1)  # one point less than eight corners
    assert effective_rank(equal) == pytest.approx(7)
    line = torch.arange(40.0)[:, None] * torch.ones(1, 5)
    assert effective_rank(line) == pytest.approx(1, abs=1e-6)


def test_the_public_map_shrinks_the_covariance_of_few_wide_features() -> None:
    """With the weight of scikit-learn's OAS."""
    covariance = pytest.importorskip("sklearn.covariance", reason="needs scikit-learn")
    scales = torch.linspace(0.2, 3, 30)
    few = normal(40, 30) * scales
    _, expected = covariance.oas(few.double().numpy())
    centred = few.double() - few.double().mean(dim=0)
    variances = torch.linalg.eigvalsh(centred.T @ centred / len(few))
    assert shrinkage(variances, len(few)) == pytest.approx(expected)
    public = ClassSums(Certainty(components=30)).publish(few, num_classes=3)
    plain = PrivateMean(Certainty(components=30)).publish(few)
    norms = [own["whitening"].norm(dim=0) for own in (public, plain)]
    assert float(norms[0][-1] / norms[0][0]) < 0.8 * float(norms[1][-1] / norms[1][0])
    with pytest.warns(UserWarning, match=r"20 public examples for 100 features, 0.2 per feature"):
        ClassSums(Certainty(components=5)).publish(normal(20, 100), num_classes=3)
