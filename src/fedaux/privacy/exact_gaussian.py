"""Secret draws for DP-SGD at a node: unpredictable, exact, and fast enough for millions per step.

All bits come from the operating system. A Gaussian is drawn as the integer X = round(scale * Z)
with Z standard normal. For an integer v, v + X = round(v + scale * Z): adding X is the Gaussian
mechanism followed by rounding, which is post-processing, so its privacy is exactly that of N(0,
scale^2). X is exact: it is computed in double precision if the error cannot change the rounding,
and with more bits otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

RELATIVE_ERROR = 2.0**-45
"""Bound on the error of `ndtri` and of the arithmetic around it, in units of 1 + |z|; its own is
below 2^-50."""
EXTRA_BITS = 256
"""Bits by which a draw is refined if double precision is not sufficient."""
COMPARED_BITS = 192
"""Precision of the comparison with a boundary; its error is far below the last 32 of these bits."""


def rounded_gaussian(size: int, *, scale: float) -> NDArray[np.int64]:
    """Return `size` independent draws of round(scale * Z), Z ~ N(0, 1), exactly distributed."""
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    sign = 1 - 2 * (bits & np.uint64(1)).astype(np.int64)
    tail = bits >> np.uint64(1)  # P[|Z| > z] lies in [tail, tail + 1) / 2^63
    z = -ndtri((tail.astype(np.float64) + 0.5) * 2.0**-64)
    value = scale * z
    nearest = np.rint(value)
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    margin = scale * (RELATIVE_ERROR * (1 + np.abs(z)) + 2.0**-63 / density)
    magnitude = nearest.astype(np.int64)
    for index in np.flatnonzero(np.abs(np.abs(value - nearest) - 0.5) <= margin):
        near = float(np.floor(value[index])) if margin[index] < 0.25 else None
        magnitude[index] = _refined(int(tail[index]), scale, near)
    draws: NDArray[np.int64] = sign * magnitude
    return draws


def _refined(tail: int, scale: float, near: float | None) -> int:
    """Return round(scale * z) for a tail probability in [tail, tail + 1) / 2^63, drawn with
    further bits.

    With `near`, the result is near or near + 1. Since P[|Z| > z] falls with z, one comparison of
    the probability with that of the boundary decides, and needs no inverse.
    """
    import mpmath  # rarely needed

    extra = int.from_bytes(os.urandom(EXTRA_BITS // 8), "little")
    exact = mpmath.MPContext()  # the global precision may change in another thread
    exact.prec = 4 * EXTRA_BITS
    probability = (exact.mpf(tail) + (exact.mpf(extra) + 0.5) / exact.mpf(2) ** EXTRA_BITS) / 2**63
    if near is not None:
        exact.prec = COMPARED_BITS
        boundary = (exact.mpf(near) + 0.5) / exact.mpf(scale)
        above = exact.erfc(boundary / exact.sqrt(2)) - probability
        if abs(above) > probability * exact.mpf(2) ** (32 - COMPARED_BITS):
            return int(near) + int(above > 0)
    return _inverted(probability, scale)


def _inverted(probability: Any, scale: float) -> int:
    """Return round(scale * z) with P[|Z| > z] = probability, by 1,024 bits: about 36 ms."""
    import mpmath

    exact = mpmath.MPContext()
    exact.prec = 4 * EXTRA_BITS
    own = exact.mpf(probability)
    return int(exact.nint(exact.mpf(scale) * exact.sqrt(2) * exact.erfinv(1 - own)))


class SecureDraws:
    """A node's draws for private training: no seed, no state."""

    kind = "secure"

    def sample(self, size: int, *, probability: float) -> NDArray[np.int64]:
        """Return the rows of a Poisson sample: each of `size` rows with a probability of at most
        `probability`."""
        if probability >= 1.0:
            return np.arange(size)
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        return np.flatnonzero(bits < np.uint64(int(probability * 2.0**64)))

    def integers(self, like: Tensor, *, scale: float) -> Tensor:
        """Return round(scale * Z) in the shape of a tensor and on its device, as doubles."""
        draws = rounded_gaussian(like.numel(), scale=scale)
        return torch.from_numpy(draws.astype(np.float64)).reshape(like.shape).to(like.device)


class SimulatedDraws:
    """Draws from a seeded generator: reproducible, so without protection, as the ledger states."""

    kind = "simulated"

    def __init__(self, generator: np.random.Generator, *, device: torch.device) -> None:
        self._generator = generator
        self._noise = torch.Generator(device=device).manual_seed(int(generator.integers(2**63)))

    def sample(self, size: int, *, probability: float) -> NDArray[np.int64]:
        """Return the rows of a Poisson sample."""
        return np.flatnonzero(self._generator.random(size) < probability)

    def integers(self, like: Tensor, *, scale: float) -> Tensor:
        """Return round(scale * Z) in the shape of a tensor and on its device, as doubles."""
        noise = torch.randn(
            like.shape, dtype=torch.float64, device=like.device, generator=self._noise
        )
        return (scale * noise).round()


Draws = SecureDraws | SimulatedDraws
