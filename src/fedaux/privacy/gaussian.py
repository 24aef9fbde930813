"""How much Gaussian noise (epsilon, delta) needs: the analytic Gaussian mechanism (Balle & Wang, 2018)."""

from __future__ import annotations

import math

from scipy.special import log_ndtr


def delta_of(epsilon: float, *, noise_multiplier: float) -> float:
    """Return the smallest delta at which noise of sigma = noise_multiplier * sensitivity is (epsilon, delta)-private.

    delta = Phi(1/(2m) - epsilon m) - e^epsilon Phi(-1/(2m) - epsilon m), exact for every epsilon >= 0. Computed
    from logarithms, because e^epsilon overflows and Phi underflows long before their product does.
    """
    log_first = float(log_ndtr(0.5 / noise_multiplier - epsilon * noise_multiplier))
    log_second = epsilon + float(log_ndtr(-0.5 / noise_multiplier - epsilon * noise_multiplier))
    return max(0.0, -math.exp(log_first) * math.expm1(min(0.0, log_second - log_first)))


def noise_multiplier(*, epsilon: float, delta: float) -> float:
    """Return the least sigma / sensitivity that is (epsilon, delta)-private, by bisection.

    The upper end of the last interval is returned, so rounding never favours the claim.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(f"certainty.epsilon = {epsilon}: should be a finite number above 0")
    if not 0 < delta < 1:
        raise ValueError(f"certainty.delta = {delta}: should lie between 0 and 1")
    low, high = 1e-6, 1.0
    while delta_of(epsilon, noise_multiplier=high) > delta:
        high *= 2.0
    for _ in range(100):  # more than double precision can tell apart
        middle = 0.5 * (low + high)
        if delta_of(epsilon, noise_multiplier=middle) > delta:
            low = middle
        else:
            high = middle
    return high
