from __future__ import annotations

import importlib.util
import math
import sys

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.bounds import require_exact_regression, require_size
from fedaux.privacy.gaussian import delta_of, noise_multiplier
from fedaux.privacy.mechanism import integer_mean, within_unit_ball
from fedaux.privacy.mechanisms import MECHANISMS, SimulatedNoise
from fedaux.privacy.secure import (
    GRANULARITY,
    MOST_SCALE,
    SecureNoise,
    enlarged_sigma,
    lattice_spacing,
    noise_for,
)

needs_opendp = pytest.mark.skipif(
    importlib.util.find_spec("opendp") is None, reason="needs the extra privacy (opendp)"
)


def discrete_gaussian(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers that matter and their probabilities."""
    points = np.arange(-math.ceil(40 * scale), math.ceil(40 * scale) + 1)
    weights = np.exp(-(points**2) / (2 * scale**2))
    return points, weights / weights.sum()


@pytest.mark.parametrize("scale", [2.0, 3.0, 10.0])
def test_discrete_noise_stays_within_two_steps_of_continuous_noise(scale: float) -> None:
    """The proof's lemma: P[X >= n] <= P[Z >= n - 2] for every integer n."""
    points, weights = discrete_gaussian(scale)
    upper = weights[::-1].cumsum()[::-1]
    assert (upper <= norm.sf(points - 2, scale=scale) + 1e-15).all()


@pytest.mark.parametrize("scale", [2.0, 4.0, 12.0])
@pytest.mark.parametrize("shift", [(1, 0), (1, 1), (3, 1), (7, 0), (5, 5)])
def test_discrete_noise_is_as_private_as_continuous_noise_of_the_padded_sensitivity(
    scale: float, shift: tuple[int, int]
) -> None:
    """The proof's theorem, with delta by summing over two coordinates: sensitivity |v| + 4 sqrt(k)
    is enough."""
    points, weights = discrete_gaussian(scale)
    inside = np.abs(points) <= 12 * scale
    points, weights = points[inside], weights[inside]
    joint = weights[:, None] * weights[None, :]
    inner = shift[0] * points[:, None] + shift[1] * points[None, :]
    square = shift[0] ** 2 + shift[1] ** 2
    losses = (square + 2 * inner) / (2 * scale**2)
    padded = math.sqrt(square) + 4 * math.sqrt(2)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 8.0):
        exact = float((joint * -np.expm1(np.minimum(0.0, epsilon - losses))).sum())
        assert exact <= delta_of(epsilon, noise_multiplier=scale / padded) + 1e-12


def test_the_lattice_is_public_fine_and_paid_for() -> None:
    for sensitivity, size in ((2.0, 1), (1e-3, 64), (0.37, 512), (1e-9, 10_000)):
        spacing = lattice_spacing(sensitivity, size=size)
        assert math.frexp(spacing)[0] == 0.5  # a power of two
        assert 0.5 * GRANULARITY < spacing * math.sqrt(size) / sensitivity <= GRANULARITY
        assert 1 < enlarged_sigma(1.0, sensitivity=sensitivity, size=size) < 1 + 2e-5


@pytest.mark.chance
@needs_opendp
def test_secure_noise_has_the_stated_spread_and_lands_on_the_lattice() -> None:
    vector = torch.linspace(-1, 1, 2000, dtype=torch.float64)
    noisy = SecureNoise().perturb(vector, sensitivity=0.02, sigma=0.5)
    assert noisy.dtype == torch.float64
    steps = noisy / lattice_spacing(0.02, size=2000)
    assert torch.equal(steps, steps.round())
    error = (noisy - vector) / 0.5
    assert abs(float(error.mean())) < 5 / math.sqrt(2000)
    assert float(error.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * 2000))
    assert float((error**4).mean()) == pytest.approx(3.0, abs=1.5)


@needs_opendp
def test_secure_noise_cannot_be_repeated() -> None:
    vector = torch.zeros(8, dtype=torch.float64)
    torch.manual_seed(0)
    first = SecureNoise().perturb(vector, sensitivity=1.0, sigma=1.0)
    torch.manual_seed(0)
    assert not torch.equal(first, SecureNoise().perturb(vector, sensitivity=1.0, sigma=1.0))


@needs_opendp
def test_the_points_that_can_come_out_do_not_depend_on_the_data() -> None:
    """Mironov's attack asks which floating-point numbers x + noise can reach; on a lattice all x
    reach the same."""
    spacing = lattice_spacing(0.1, size=3)
    for value in (0.1, 1 / 3, math.pi, -1e-7):
        steps = (
            SecureNoise().perturb(torch.full((3,), value).double(), sensitivity=0.1, sigma=1.0)
            / spacing
        )
        assert torch.equal(steps, steps.round())


@needs_opendp
def test_secure_noise_refuses_what_it_cannot_prove() -> None:
    noise, vector = SecureNoise(), torch.zeros(3, dtype=torch.float64)
    for sensitivity, sigma in (
        (math.inf, 1.0),
        (1.0, 0.0),
        (0.0, 1.0),
        (1.0, math.inf),
        (math.nan, 1.0),
    ):
        with pytest.raises(ValueError, match="finite and above 0"):
            noise.perturb(vector, sensitivity=sensitivity, sigma=sigma)
    with pytest.raises(ValueError, match="too little noise"):
        noise.perturb(vector, sensitivity=1.0, sigma=1e-12)
    with pytest.raises(ValueError, match="NaN or infinity"):
        noise.perturb(vector / 0, sensitivity=1.0, sigma=1.0)
    with pytest.raises(ValueError, match="should be at most 65536"):
        noise.perturb(torch.zeros(65_537).double(), sensitivity=1.0, sigma=1.0)


@needs_opendp
@pytest.mark.parametrize("multiplier", [2.0**27, 2.0**40, 1e14, 1e300])
def test_noise_that_the_sampler_would_clip_is_refused(multiplier: float) -> None:
    """Clipped draws are all +-2^63: a server would subtract them and have the vector without
    noise."""
    with pytest.raises(ValueError, match="the sampler would clip"):
        SecureNoise().perturb(torch.zeros(3).double(), sensitivity=1e-3, sigma=1e-3 * multiplier)


@needs_opendp
def test_the_largest_noise_that_is_allowed_does_not_saturate() -> None:
    size = 400
    spacing = lattice_spacing(1.0, size=size)
    noisy = SecureNoise().perturb(
        torch.zeros(size).double(), sensitivity=1.0, sigma=0.99 * MOST_SCALE * spacing
    )
    assert len(set(noisy.tolist())) == size
    assert float(noisy.abs().max()) < 2.0**62 * spacing


def test_the_mean_is_summed_exactly_however_many_examples_there_are() -> None:
    """A sum in floating point would be off by more than the proof allows from n = 55,000 on."""
    generator = np.random.default_rng(0)
    row = within_unit_ball(torch.from_numpy(generator.normal(size=(1, 3))))
    rows = row.expand(3_000_000, 3)
    exact = [round(value * 2**32) / 2**32 for value in row[0].tolist()]
    assert integer_mean(rows).tolist() == exact
    shuffled = within_unit_ball(torch.from_numpy(generator.normal(size=(1000, 3))))
    assert torch.equal(integer_mean(shuffled), integer_mean(shuffled.flip(0)))
    assert torch.allclose(integer_mean(shuffled), shuffled.mean(dim=0), atol=1e-9)


def test_the_stated_bounds_on_examples_and_components_are_enforced() -> None:
    with pytest.raises(ValueError, match="67108865 examples"):
        require_size(2**26 + 1, width=3)
    with pytest.raises(ValueError, match="65537 numbers"):
        require_size(10, width=65_537)
    require_exact_regression(22_500, width=512, regularisation=0.1)
    with pytest.raises(ValueError, match="covers 77900"):
        require_exact_regression(100_000, width=512, regularisation=0.1)
    with pytest.raises(
        ValueError, match="covers 2080"
    ):  # inner products of long vectors with long weights
        require_exact_regression(10_000, width=65_536, regularisation=1e-6)


@needs_opendp
@pytest.mark.parametrize("name", ["mean", "paper"])
def test_mechanisms_release_with_secure_noise(name: str) -> None:
    generator = np.random.default_rng(0)
    mechanism = MECHANISMS[name](Certainty(epsilon=1.0, components=4))
    public = mechanism.publish(torch.from_numpy(generator.normal(size=(80, 5))).float())
    features = torch.from_numpy(generator.normal(size=(40, 5))).float()
    release = mechanism.release(features, public, noise=SecureNoise())
    assert (release.noise, release.epsilon) == ("secure", 1.0)
    assert release.sigma == pytest.approx(
        release.sensitivity * noise_multiplier(epsilon=1.0, delta=1e-5)
    )
    assert bool(release.vector.isfinite().all())


@needs_opendp
def test_a_mechanism_without_a_proof_cannot_be_deployed() -> None:
    mechanism = MECHANISMS["released-code"](Certainty(epsilon=1.0))
    public = mechanism.publish(torch.eye(5))
    with pytest.raises(ValueError, match="for simulations"):
        mechanism.release(torch.eye(5)[:3] + 0.1, public, noise=SecureNoise())


def test_deployments_and_simulations_cannot_take_each_others_noise() -> None:
    generator = seeding.generator(0, "certainty noise")
    assert isinstance(noise_for(deployment=False, generator=generator), SimulatedNoise)
    with pytest.raises(ValueError, match="operating system"):
        noise_for(deployment=True, generator=generator)
    with pytest.raises(ValueError, match="needs a seeded generator"):
        noise_for(deployment=False)


@needs_opendp
def test_a_deployment_gets_secure_noise() -> None:
    assert isinstance(noise_for(deployment=True), SecureNoise)


def test_without_opendp_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    monkeypatch.setitem(sys.modules, "opendp", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[privacy\]'"):
        noise_for(deployment=True)
