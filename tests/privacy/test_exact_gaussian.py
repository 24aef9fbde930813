"""Secret draws of private training: exactly distributed, unpredictable, and summed without
rounding."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from fedaux import seeding
from fedaux.core.dpsgd import LATTICE, lattice_sum, with_noise
from fedaux.privacy import exact_gaussian
from fedaux.privacy.exact_gaussian import (
    RELATIVE_ERROR,
    SecureDraws,
    SimulatedDraws,
    rounded_gaussian,
)


def test_small_scales_have_the_probabilities_of_a_rounded_gaussian() -> None:
    """P[X = n] = Phi((n + 1/2) / s) - Phi((n - 1/2) / s), by a chi-square test at a false alarm of
    1e-6."""
    for scale in (0.3, 1.0, 2.5):
        draws = rounded_gaussian(200_000, scale=scale)
        edge = math.ceil(3 * scale)
        points = np.arange(-edge, edge + 1)
        expected = stats.norm.cdf((points + 0.5) / scale) - stats.norm.cdf((points - 0.5) / scale)
        counts = np.array([(draws == point).sum() for point in points])
        rest = len(draws) - counts.sum()
        result = stats.chisquare(
            [*counts, rest], len(draws) * np.array([*expected, 1 - expected.sum()])
        )
        assert result.pvalue > 1e-6


@pytest.mark.parametrize("scale", [2.0**24, 2.0**34])
def test_large_scales_are_normal_and_hardly_repeat(scale: float) -> None:
    draws = rounded_gaussian(100_000, scale=scale)
    assert stats.kstest(draws / scale, "norm").pvalue > 1e-6
    assert (
        stats.chisquare(np.bincount(draws & 15, minlength=16)).pvalue > 1e-6
    )  # the lowest bits, too
    assert Counter(draws.tolist()).most_common(1)[0][1] <= 4


def test_the_bound_on_the_inverse_normal_holds() -> None:
    generator = np.random.default_rng(0)
    for probability in [*(0.5 * generator.random(150)), *(2.0 ** -generator.uniform(1, 62, 150))]:
        with mpmath.workprec(200):
            exact = -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(probability))
            error = abs(mpmath.mpf(float(ndtri(probability))) - exact)
            assert error < 0.05 * RELATIVE_ERROR * (1 + abs(exact))


def test_draws_near_a_rounding_boundary_are_decided_with_more_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are chosen so that scale * z lies on a boundary of double precision, or in the far
    tail."""
    scale = 2.0**24
    boundary = int(stats.norm.sf((1_000_000 + 0.5) / scale) * 2.0**64)
    bits = [
        (tail << 1) & (2**64 - 1) for tail in (boundary - 1, boundary, boundary + 1, 0, 1, 12345)
    ]
    given = b"".join(value.to_bytes(8, "little") for value in bits)
    refined: list[int] = []
    real = exact_gaussian._refined

    def counted(tail: int, scale: float, near: float | None) -> int:
        refined.append(tail)
        return real(tail, scale, near)

    monkeypatch.setattr(exact_gaussian, "_refined", counted)
    monkeypatch.setattr(os, "urandom", lambda size: given if size == len(given) else b"\x00" * size)
    draws = rounded_gaussian(len(bits), scale=scale)
    assert len(refined) == len(bits)
    for tail, draw in zip(refined, draws.tolist(), strict=True):
        with mpmath.workprec(600):
            exact = mpmath.sqrt(2) * mpmath.erfinv(
                1 - (mpmath.mpf(tail) + mpmath.mpf(2) ** -257) / 2**63
            )
            assert abs(draw) == int(mpmath.nint(scale * exact))


@pytest.mark.parametrize("scale", [1000 * (2.0**24 + 1600), 2.0**24])
def test_a_comparison_decides_as_many_bits_do_and_nearly_always(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """The server chooses the noise multiplier, and an inverse by 1,024 bits takes 36 ms."""
    inverted: list[float] = []
    real = exact_gaussian._inverted

    def counted(probability: Any, scale: float) -> int:
        inverted.append(float(probability))
        return real(probability, scale)

    monkeypatch.setattr(exact_gaussian, "_inverted", counted)
    rounded_gaussian(200_000, scale=scale)
    assert len(inverted) <= 1
    generator = np.random.default_rng(0)
    for boundary in (0.3 + 2.5 * generator.random(12)) * scale:
        near = math.floor(boundary)
        with mpmath.workprec(400):
            edge = mpmath.erfc((mpmath.mpf(near) + 0.5) / mpmath.mpf(scale) / mpmath.sqrt(2))
            across = int(edge * 2**63)  # in few bits it could be a neighbour
        for shift in (-1, 0, 1):
            tail = across + shift
            compared = exact_gaussian._refined(tail, scale, float(near))
            with mpmath.workprec(400):
                middle = (mpmath.mpf(tail) + 0.5) / 2**63
            if shift:
                assert compared == real(middle, scale) == near + (shift < 0)
            assert compared in (near, near + 1)


def test_secret_draws_do_not_look_at_any_seed() -> None:
    torch.manual_seed(0)
    np.random.default_rng(0)
    draws, like = SecureDraws(), torch.zeros(4, 5)
    first = draws.integers(like, scale=LATTICE)
    torch.manual_seed(0)
    assert not torch.equal(first, draws.integers(like, scale=LATTICE))
    assert first.shape == like.shape


def test_a_secret_poisson_sample_has_its_probability() -> None:
    draws = SecureDraws()
    assert draws.sample(7, probability=1.0).tolist() == list(range(7))
    taken = [len(draws.sample(1000, probability=0.013)) for _ in range(300)]
    assert stats.binomtest(sum(taken), 300_000, 0.013).pvalue > 1e-6
    sizes = np.array(taken)
    assert sizes.var() == pytest.approx(13 * 0.987, rel=0.5)


class NoNoise:
    """Shows the sum before noise."""

    kind = "none"
    scale = 0.0

    def integers(self, like: Tensor, *, scale: float) -> Tensor:
        self.scale = scale
        return torch.zeros_like(like)


def noisy_sum(samples: list[Tensor], clip: float, multiplier: float, draws: Any) -> list[Tensor]:
    points = lattice_sum(samples, clip=clip)
    return with_noise(points, clip=clip, noise_multiplier=multiplier, draws=draws)


@pytest.mark.parametrize("clip", [1e-6, 4e-3, 1.0, 1e6])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_replacing_a_gradient_moves_the_sum_by_at_most_what_the_noise_covers(
    clip: float, size: float
) -> None:
    """In lattice units: distance <= 2 (LATTICE + sqrt(d) / 2), and noise over half of that is the
    multiplier."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 50), (6, 3, 7)]
    samples = [size * torch.randn(shape, generator=generator) for shape in shapes]
    worst = 0.0
    for _ in range(20):
        other = [sample.clone() for sample in samples]
        for sample, moved in zip(samples, other, strict=True):
            moved[2] = (
                -sample[2]
                if torch.rand((), generator=generator) < 0.5
                else 1e30 * torch.randn(sample[2].shape)
            )
        source: Any = NoNoise()
        sums = [
            torch.cat([part.flatten() for part in noisy_sum(one, clip, 1.5, source)])
            for one in (samples, other)
        ]
        worst = max(worst, float((sums[0] - sums[1]).norm()) / (clip / LATTICE))
        assert worst <= 2 * source.scale / 1.5
    if size >= 1.0 and clip <= 1.0:
        assert worst > 1.9 * LATTICE  # the bound is nearly attained


def test_clipped_sums_equal_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(5, 4, generator=generator), torch.randn(5, 2, 3, generator=generator)]
    flat = torch.cat([sample.flatten(1) for sample in samples], dim=1).double()
    expected = sum(row * min(1.0, 0.7 / float(row.norm())) for row in flat)
    noisy = noisy_sum(samples, 0.7, 1.0, NoNoise())
    assert torch.allclose(
        torch.cat([part.flatten() for part in noisy]), torch.as_tensor(expected), atol=1e-5
    )


def test_sums_lie_on_the_lattice_whatever_the_gradients() -> None:
    samples = [torch.randn(3, 9)]
    for draws in (
        SecureDraws(),
        SimulatedDraws(seeding.generator(0, "local"), device=torch.device("cpu")),
    ):
        (noisy,) = noisy_sum(samples, 0.1, 1.0, draws)
        steps = noisy / (0.1 / LATTICE)
        assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-6)
