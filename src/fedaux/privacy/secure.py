"""Noise for deployments: unpredictable, and safe from floating-point attacks.

A vector is rounded to a public lattice and gets integer noise from OpenDP's exact sampler of the
discrete Gaussian, so that the set of possible outputs does not depend on the data. A little more
noise covers rounding, the difference between discrete and continuous noise, and the error of the
arithmetic behind the vector (proof: docs/proofs.md).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaux.formatting import optional
from fedaux.privacy.bounds import MOST_COMPONENTS
from fedaux.privacy.mechanism import Noise, SimulatedNoise

GRANULARITY = 2.0**-30
"""Largest spacing of the lattice, times sqrt(k), in units of the sensitivity."""
ARITHMETIC = 2.0**-16
"""Share of the sensitivity set aside for the floating-point error of the two vectors that it
compares."""
LEAST_SCALE = 2.0
"""Least noise, in lattice spacings, for which the proof holds."""
MOST_SCALE = 2.0**56
"""Most noise, in lattice spacings: OpenDP clips draws to 64-bit integers, 128 standard
deviations away from it."""


class SecureNoise:
    """Discrete Gaussian noise on a lattice, from the operating system's randomness. It takes no
    seed."""

    kind = "secure"

    def __init__(self) -> None:
        self._opendp = _opendp()

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return a vector [k] on the lattice, for every epsilon >= 0 as private as vector + N(0,
        sigma^2 I).

        The noise is larger than sigma by the factor 1 + ARITHMETIC + 5 g sqrt(k) / sensitivity, g
        being the spacing. Raises ValueError if the proof does not hold: infinite sensitivity, no
        noise, noise that the sampler would clip, too long a vector, NaN or infinity.
        """
        if not (0 < sensitivity < math.inf and 0 < sigma < math.inf):
            raise ValueError(
                f"secure noise of sigma = {sigma} at sensitivity {sensitivity}: both should be "
                "finite and above 0; a mechanism without a proved sensitivity is for simulations"
            )
        if not bool(torch.isfinite(vector).all()):
            raise ValueError("the vector to release holds NaN or infinity")
        if len(vector) > MOST_COMPONENTS:
            raise ValueError(
                f"a release of {len(vector)} numbers: should be at most {MOST_COMPONENTS}"
            )
        spacing = lattice_spacing(sensitivity, size=len(vector))
        scale = enlarged_sigma(sigma, sensitivity=sensitivity, size=len(vector)) / spacing
        if scale < LEAST_SCALE:
            raise ValueError(
                f"sigma = {sigma} is too little noise at sensitivity {sensitivity}: the proof "
                "needs more"
            )
        if not scale <= MOST_SCALE:
            raise ValueError(
                f"sigma = {sigma} at sensitivity {sensitivity}: the sampler would clip this noise; "
                f"sigma / sensitivity should be at most {MOST_SCALE * spacing / sensitivity:.3g}"
            )
        # Division by a power of two is exact, and Python's integers have no largest one.
        points = [round(value) for value in (vector.detach().double().cpu() / spacing).tolist()]
        draws = self._draw(len(points), scale=scale)
        noisy = [(point + draw) * spacing for point, draw in zip(points, draws, strict=True)]
        return torch.tensor(noisy, dtype=torch.float64, device=vector.device)

    def _draw(self, size: int, *, scale: float) -> list[int]:
        """Return independent integers n with probability proportional to exp(-n^2 / (2
        scale^2)), sampled exactly."""
        dp = self._opendp
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
        draws: list[int] = dp.m.make_gaussian(*space, scale=scale)([0] * size)
        return draws


def lattice_spacing(sensitivity: float, *, size: int) -> float:
    """Return the largest power of two g with g sqrt(size) <= GRANULARITY * sensitivity: public
    numbers only."""
    return float(2.0 ** math.floor(math.log2(GRANULARITY * sensitivity / math.sqrt(max(1, size)))))


def enlarged_sigma(sigma: float, *, sensitivity: float, size: int) -> float:
    """Return sigma (1 + ARITHMETIC + 5 g sqrt(k) / sensitivity), which pays for lattice and
    arithmetic."""
    spacing = lattice_spacing(sensitivity, size=size)
    return sigma * (1.0 + ARITHMETIC + 5.0 * spacing * math.sqrt(size) / sensitivity)


def noise_for(*, deployment: bool, generator: np.random.Generator | None = None) -> Noise:
    """Return secure noise for a deployment, seeded noise for a simulation.

    Raises ValueError for a deployment with a seeded generator, and for a simulation without one.
    """
    if deployment:
        if generator is not None:
            raise ValueError(
                "a deployment draws its noise from the operating system; a seeded generator gives "
                "no protection"
            )
        return SecureNoise()
    if generator is None:
        raise ValueError("a simulation needs a seeded generator for its noise, to be reproducible")
    return SimulatedNoise(generator)


def _opendp() -> Any:
    """Return OpenDP, imported late because only deployments need it."""
    dp = optional("opendp.prelude", "secure noise needs OpenDP", extras="privacy")
    dp.enable_features("contrib")
    return dp
