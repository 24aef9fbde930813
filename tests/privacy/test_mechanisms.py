from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import oracles
from helpers.plain_noise import NoNoise
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.gaussian import delta_of, noise_multiplier
from fedaux.privacy.mean import variance_within, without_errors
from fedaux.privacy.mechanisms import (
    MECHANISMS,
    Mechanism,
    SimulatedNoise,
)
from fedaux.privacy.paper import objective, solve


def normal(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(shift, 1.0, shape)).float()


def section(**values: Any) -> Certainty:
    return Certainty(**({"epsilon": 1.0, "components": 3} | values))


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.01, 1e-6), (0.1, 1e-5), (1.0, 1e-5), (8.0, 1e-3), (20.0, 1e-9)]
)
def test_calibration_meets_the_definition_by_integration(epsilon: float, delta: float) -> None:
    """delta = integral of max(0, p(x) - e^epsilon q(x)), p and q the densities one sensitivity
    apart."""
    multiplier = noise_multiplier(epsilon=epsilon, delta=delta)
    # p > e^epsilon q exactly where x > 1/2 + epsilon m^2, for p centred at 1 and q at 0.
    threshold = 0.5 + epsilon * multiplier**2

    def excess(x: float) -> float:
        return float(norm.pdf(x, 1, multiplier) - math.exp(epsilon + norm.logpdf(x, 0, multiplier)))

    integral = quad(
        excess, threshold, threshold + 12 * multiplier, epsabs=1e-16, epsrel=1e-10, limit=200
    )[0]
    assert integral == pytest.approx(delta, rel=1e-4)
    assert delta_of(epsilon, noise_multiplier=multiplier) <= delta


def test_calibration_equals_the_published_value() -> None:
    assert noise_multiplier(epsilon=0.1, delta=1e-5) == pytest.approx(30.7496, abs=1e-4)


@pytest.mark.parametrize("epsilon", [1e-3, 0.03, 1.0, 30.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_calibration_is_the_least_noise_that_will_do(epsilon: float, delta: float) -> None:
    multiplier = noise_multiplier(epsilon=epsilon, delta=delta)
    assert delta_of(epsilon, noise_multiplier=multiplier) <= delta
    assert delta_of(epsilon, noise_multiplier=0.999 * multiplier) > delta


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1)]
)
def test_calibration_refuses_what_means_nothing(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"certainty\.(epsilon|delta)"):
        noise_multiplier(epsilon=epsilon, delta=delta)


def test_mean_release_equals_plain_loops_and_is_noisy_by_the_stated_sigma() -> None:
    mechanism = MECHANISMS["mean"](section())
    public = mechanism.publish(normal(200, 5))
    features = normal(20, 5, seed=1, shift=1.0)
    release = mechanism.release(features, public, noise=NoNoise())
    expected = oracles.private_mean_loop(
        features.tolist(),
        public["centre"].tolist(),
        public["whitening"].tolist(),
        float(public["bound"]),
    )
    assert release.vector.tolist() == pytest.approx(expected, abs=1e-6)
    assert release.sensitivity == pytest.approx(2 / 20)
    assert release.sigma == pytest.approx(
        release.sensitivity * noise_multiplier(epsilon=1.0, delta=1e-5)
    )
    noise = [
        mechanism.release(
            features, public, noise=SimulatedNoise(seeding.generator(seed, "n"))
        ).vector
        - release.vector
        for seed in range(300)
    ]
    assert float(torch.stack(noise).std()) == pytest.approx(release.sigma, rel=0.1)


def test_public_map_whitens_and_clips_the_negatives() -> None:
    negatives = normal(500, 6) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.1, 1e-9])
    public = MECHANISMS["mean"](section(components=4)).publish(negatives)
    whitened = (negatives - public["centre"]) @ public["whitening"]
    assert torch.allclose(torch.cov(whitened.T), torch.eye(4), atol=1e-3)
    projected = MECHANISMS["mean"](section(components=4)).project(negatives, public)
    assert float(projected.norm(dim=1).max()) <= 1 + 1e-12
    assert (
        0.4 < float((projected.norm(dim=1) > 0.999).double().mean()) < 0.6
    )  # clipped at the median norm


def test_directions_without_variance_are_left_out() -> None:
    negatives = torch.cat([normal(100, 2), torch.zeros(100, 3)], dim=1)
    assert MECHANISMS["mean"](section(components=5)).publish(negatives)["whitening"].shape == (5, 2)
    with pytest.raises(ValueError, match="collapsed"):
        MECHANISMS["mean"](section()).publish(torch.zeros(10, 4))


@pytest.mark.parametrize("name", ["mean", "paper"])
def test_no_neighbour_moves_the_vector_beyond_the_stated_sensitivity(name: str) -> None:
    """Replace one example by hostile ones: far outliers, zeros, copies with flipped signs."""
    mechanism = MECHANISMS[name](section(components=4))
    public = mechanism.publish(normal(60, 5))
    features = normal(12, 5, seed=1, shift=0.5)
    base = mechanism.release(features, public, noise=NoNoise())
    largest = 0.0
    for trial, scale in enumerate([0.0, 1.0, 20.0, -20.0, 1e6, -1e6] * 10):
        neighbour = features.clone()
        neighbour[trial % 12] = scale * (
            features[(trial + 1) % 12] if trial % 2 else normal(5, seed=trial)
        )
        other = mechanism.release(neighbour, public, noise=NoNoise())
        largest = max(largest, float((other.vector - base.vector).norm()) / base.sensitivity)
    assert 0.1 < largest <= 1.0


@pytest.mark.parametrize("name", ["mean", "paper"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_features_that_are_no_numbers_move_a_release_no_further_than_others(
    name: str, value: float
) -> None:
    mechanism = MECHANISMS[name](section(components=4))
    public = mechanism.publish(normal(60, 5))
    features = normal(12, 5, seed=1)
    spoiled = features.clone()
    spoiled[3, 2] = value
    base, other = (mechanism.release(rows, public, noise=NoNoise()) for rows in (features, spoiled))
    assert float((other.vector - base.vector).norm()) <= base.sensitivity


@pytest.mark.parametrize("name", ["mean", "paper"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300, math.inf, math.nan])
def test_a_hostile_public_map_can_make_no_client_fail(name: str, value: float) -> None:
    """A map that overflows on some examples alone would tell of them by the failure that it
    causes."""
    mechanism = MECHANISMS[name](section(components=4))
    honest = mechanism.publish(normal(60, 5))
    features = normal(12, 5, seed=1)
    features[3] = 1e30
    for key in honest:
        hostile = {own: tensor.double() for own, tensor in honest.items()}
        hostile[key] = torch.full_like(hostile[key], value)
        base = mechanism.release(features, hostile, noise=NoNoise())
        neighbour = features.clone()
        neighbour[3] = 0.0
        other = mechanism.release(neighbour, hostile, noise=NoNoise())
        assert bool(base.vector.isfinite().all()), key
        assert float((other.vector - base.vector).norm()) <= base.sensitivity, key


def test_negatives_without_spread_are_refused() -> None:
    negatives = torch.cat([torch.zeros(30, 3), normal(10, 3)])
    negatives[30:] -= negatives[30:].mean(dim=0)
    with pytest.raises(ValueError, match="no scale to clip to"):
        MECHANISMS["mean"](section()).publish(negatives)


UNLABELLED = [name for name, build in MECHANISMS.items() if build(Certainty()).scores == "alone"]


@pytest.mark.parametrize("name", UNLABELLED)
def test_a_client_scores_data_like_its_own_higher(name: str) -> None:
    mechanism = MECHANISMS[name](section(components=4, epsilon=100.0))
    public = mechanism.publish(normal(300, 4))
    shift = torch.tensor([2.0, 0.0, 0.0, 0.0])
    releases = [
        mechanism.release(
            normal(100, 4, seed=1) + sign * shift,
            public,
            noise=SimulatedNoise(seeding.generator(1, "n")),
        )
        for sign in (1, -1)
    ]
    vectors = torch.stack([release.vector for release in releases])
    sigmas = torch.tensor([release.sigma for release in releases])
    points = mechanism.project(torch.stack([shift, -shift]), public)
    scores = mechanism.log_scores(vectors, sigmas, public, points)
    assert scores.shape == (2, 2)
    assert scores[0, 0] > scores[1, 0]
    assert scores[1, 1] > scores[0, 1]


def test_scores_of_the_mean_are_the_log_density_ratio() -> None:
    """Without clipping or noise, sharpness 1 gives log N(x; m_i, I) - log N(x; m_0, I)."""
    mechanism = MECHANISMS["none"](section(components=4, sharpness=1.0))
    public = mechanism.publish(normal(400, 4)) | {"bound": torch.tensor(1e3)}
    public["mean"] = torch.zeros(4)
    client, points = normal(50, 4, seed=1, shift=0.7), normal(9, 4, seed=2)
    release = mechanism.release(client, public, noise=NoNoise())
    scores = mechanism.log_scores(
        release.vector[None], torch.zeros(1), public, mechanism.project(points, public)
    )[0]
    white = (points.double() - public["centre"]) @ public["whitening"].double()
    centre = ((client.double() - public["centre"]) @ public["whitening"].double()).mean(dim=0)
    expected = -0.5 * (white - centre).square().sum(dim=1) + 0.5 * white.square().sum(dim=1)
    assert scores.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_clients_that_differ_by_noise_alone_are_weighted_equally() -> None:
    """Shrinkage takes out the noise's share of the differences: all of it here, none without
    noise."""
    generator = np.random.default_rng(0)
    common = generator.normal(size=30)
    noisy = torch.from_numpy(common + generator.normal(0, 0.2, (400, 30)))
    errors = torch.full((400,), 30 * 0.2**2, dtype=torch.float64)
    spread_before = float((noisy - noisy.mean(dim=0)).norm())
    spread_after = float((without_errors(noisy, errors) - noisy.mean(dim=0)).norm())
    assert spread_after < 0.05 * spread_before
    assert torch.allclose(without_errors(noisy, torch.zeros(400).double()), noisy)
    true = torch.from_numpy(generator.normal(0, 0.3, (400, 30)))
    seen = true + torch.from_numpy(generator.normal(0, 0.2, (400, 30)))
    error = float((without_errors(seen, errors) - true).square().mean())
    assert error < 0.85 * float((seen - true).square().mean())
    assert torch.allclose(
        without_errors(seen[:1], errors[:1]), seen[:1], rtol=1e-12
    )  # a lone client keeps what it released


def test_shrinkage_counts_sampling_error_and_unequal_noise() -> None:
    """Nine clients with 200 examples each, one with a single one: the estimates are closer to the
    true shifts than the released ones, and the lone example does not disturb the other clients."""
    generator = np.random.default_rng(0)
    sizes = torch.tensor([200.0] * 9 + [1.0])
    before, after = [], []
    for _ in range(200):
        true = torch.from_numpy(generator.normal(0, 0.1, (10, 8)))
        deviations = (1 / (8 * sizes)).sqrt()[:, None].numpy()
        seen = true + torch.from_numpy(generator.normal(0, 1, (10, 8)) * deviations)
        found = without_errors(seen, 1 / sizes)
        before.append((seen - true).square().sum(dim=1))
        after.append((found - true).square().sum(dim=1))
    errors_before, errors_after = torch.stack(before).mean(dim=0), torch.stack(after).mean(dim=0)
    assert errors_after[9] < 0.15 * errors_before[9]
    assert (errors_after[:9] < 1.02 * errors_before[:9]).all()
    # With equal errors, the factor is 1 - N (1 - 1/K) / mean |e|^2, e about the plain mean.
    differences = seen - seen.mean(dim=0)
    signal = 1 - 0.01 * 0.9 / differences.square().sum(dim=1).mean()
    found = without_errors(seen, torch.full((10,), 0.01))
    assert torch.allclose(found, seen.mean(dim=0) + signal * differences)


def test_the_variance_within_clients_is_that_of_their_examples() -> None:
    generator = np.random.default_rng(0)
    sizes = torch.tensor([1.0, 2.0, 5.0, 20.0, 40.0])
    centres = np.eye(5) * 0.6
    measured = []
    for _ in range(300):
        examples = [
            centre + 0.8 * (drawn / np.linalg.norm(drawn, axis=1, keepdims=True))
            for centre, size in zip(centres, sizes, strict=True)
            # of norm 1: orthogonal to the client's centre
            for drawn in [generator.normal(size=(int(size), 5)) * (centre == 0)]
        ]
        means = torch.stack([torch.from_numpy(own.mean(axis=0)) for own in examples])
        measured.append(variance_within(means, sizes=sizes))
    assert float(torch.stack(measured).mean()) == pytest.approx(0.64, abs=0.02)
    ones = torch.ones(5)
    assert variance_within(torch.eye(5), sizes=ones) == 1.0  # not known


def test_a_client_with_one_example_gets_no_more_weight_than_it_earns() -> None:
    mechanism = MECHANISMS["none"](section(components=8, sharpness=1.0))
    public = mechanism.publish(normal(600, 8))
    centres = 0.8 * torch.eye(8)[:3]
    clients = [normal(150, 8, seed=5 + one) + centre for one, centre in enumerate(centres)]
    clients.append(normal(1, 8, seed=9))
    vectors = torch.stack(
        [mechanism.release(client, public, noise=NoNoise()).vector for client in clients]
    )
    points = mechanism.project(torch.cat([clients[3], normal(400, 8, seed=3)]), public)
    sizes = torch.tensor([float(len(client)) for client in clients])
    plain, counted = (
        torch.softmax(
            mechanism.log_scores(vectors, torch.zeros(4), public, points, sizes=given), dim=0
        )[3]
        for given in (None, sizes)
    )
    assert plain[0] > 0.7  # it would speak for all that resembles its single example
    assert counted[0] < 0.4
    assert 0.2 < counted.mean() < 0.3


def test_paper_objective_equals_plain_loops_and_its_solution_scikit_learn() -> None:
    positives, negatives = normal(15, 4, shift=1.0).double() / 5, normal(40, 4, seed=1).double() / 5
    weights = normal(4, seed=2).double()
    value = float(objective(weights, positives, negatives, regularisation=0.1))
    loops = oracles.certainty_objective_loop(
        weights.tolist(), positives.tolist(), negatives.tolist(), 0.1
    )
    assert value == pytest.approx(loops, rel=1e-12)
    for regularisation in (1.0, 0.1, 1e-3):
        solution = solve(positives, negatives, regularisation=regularisation)
        inputs = torch.cat([positives, negatives]).numpy()
        targets = np.r_[np.ones(15), np.zeros(40)]
        peer = LogisticRegression(
            C=1 / (regularisation * 55), fit_intercept=False, tol=1e-12, solver="newton-cholesky"
        )
        assert solution.numpy() == pytest.approx(peer.fit(inputs, targets).coef_[0], abs=1e-6)


def test_releases_state_their_price() -> None:
    public_features, features = normal(50, 4), normal(10, 4, seed=1)
    for name, mechanism in ((name, MECHANISMS[name](section(epsilon=0.5))) for name in UNLABELLED):
        release = mechanism.release(
            features,
            mechanism.publish(public_features),
            noise=SimulatedNoise(seeding.generator(0, "n")),
        )
        assert release.mechanism == name
        if name == "none":
            assert (release.epsilon, release.sigma, release.noise) == (math.inf, 0.0, "none")
        elif name == "released-code":
            assert (release.epsilon, release.sensitivity, release.noise) == (
                math.inf,
                math.inf,
                "simulated",
            )
        else:
            assert (release.epsilon, release.delta, release.noise) == (0.5, 1e-5, "simulated")
        with pytest.raises(ValueError, match="nothing to release"):
            mechanism.release(features[:0], mechanism.publish(public_features), noise=NoNoise())


@pytest.mark.parametrize("name", sorted(MECHANISMS))
@pytest.mark.parametrize("regularisation", [1e-3, 1.0, 1e3])
def test_honest_releases_lie_within_the_stated_limits_and_swamping_ones_do_not(
    name: str, regularisation: float
) -> None:
    mechanism = MECHANISMS[name](section(components=4, regularisation=regularisation))
    public = mechanism.publish(normal(60, 5), num_classes=3, sizes=[12])
    for num_examples, shift in ((1, 0.0), (12, 3.0), (300, -50.0)):
        labels = torch.arange(num_examples) % 3
        limits = mechanism.limits(num_examples, public)
        features = normal(num_examples, 5, seed=1, shift=shift)
        for seed in range(20):
            noise = SimulatedNoise(np.random.default_rng(seed))
            release = mechanism.release(features, public, noise=noise, labels=labels)
            assert limits.problem(release.vector) is None
            if name != "released-code":  # its sigma is that of w and b, before w is divided by r
                assert (release.sensitivity, release.sigma) == (limits.sensitivity, limits.sigma)
            for hostile in (1e18, -1e200, math.nan):
                changed = release.vector.clone()
                changed[0] = hostile
                assert "should be at most" in str(limits.problem(changed))


def test_a_mechanism_without_limits_is_still_limited() -> None:
    limits = Mechanism().limits(3, {})
    assert limits.problem(torch.full((4,), 1e5)) is None
    assert limits.problem(torch.full((4,), 1e9)) is not None
