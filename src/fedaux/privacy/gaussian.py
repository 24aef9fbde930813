"""The analytic Gaussian mechanism (Balle & Wang, 2018): noise for a given (epsilon, delta)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from scipy.special import log_ndtr


def delta_of(epsilon: float, *, noise_multiplier: float) -> float:
    """Return the least delta at which noise of sigma = m * sensitivity is (epsilon, delta)-private.

    With m the noise multiplier, delta = Phi(1/(2m) - epsilon m) - e^epsilon Phi(-1/(2m) - epsilon
    m), exact for every epsilon >= 0. Computed from logarithms, to avoid overflow and underflow.
    """
    log_first = float(log_ndtr(0.5 / noise_multiplier - epsilon * noise_multiplier))
    log_second = epsilon + float(log_ndtr(-0.5 / noise_multiplier - epsilon * noise_multiplier))
    return max(0.0, -math.exp(log_first) * math.expm1(min(0.0, log_second - log_first)))


@lru_cache  # all clients of a run ask for the same one
def noise_multiplier(*, epsilon: float, delta: float) -> float:
    """Return the least sigma / sensitivity that is (epsilon, delta)-private, rounded up."""
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(f"certainty.epsilon = {epsilon}: should be a finite number above 0")
    if not 0 < delta < 1:
        raise ValueError(f"certainty.delta = {delta}: should lie between 0 and 1")
    return _least(lambda value: delta_of(epsilon, noise_multiplier=value) <= delta, above=1e-6)


def epsilon_of(noise_multiplier: float, *, delta: float) -> float:
    """Return the least epsilon >= 0 that noise of sigma = m * sensitivity gives at `delta`,
    rounded up."""
    if not noise_multiplier > 0:
        return math.inf
    if delta_of(0.0, noise_multiplier=noise_multiplier) <= delta:
        return 0.0
    return _least(
        lambda value: delta_of(value, noise_multiplier=noise_multiplier) <= delta, above=0.0
    )


def _least(private: Callable[[float], bool], *, above: float) -> float:
    """Return the least private value by bisection, rounded up; infinity if it exceeds 1e15."""
    low, high = above, 1.0
    while not private(high):
        if high > 1e15:
            return math.inf
        high *= 2.0
    for _ in range(100):  # beyond double precision
        middle = 0.5 * (low + high)
        low, high = (low, middle) if private(middle) else (middle, high)
    return high
