"""The distinguishing attack on the worst neighbours: it turns too little noise into a bound on
epsilon.

An attacker guesses which of two data sets a noisy release comes from. With p and q the rates of
true and false accusations, (epsilon, delta) demands p <= e^epsilon q + delta, so log((p - delta) /
q) is a lower bound on epsilon. Both rates are replaced by the unfavourable ends of their confidence
intervals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr

from fedaux.privacy.audit.mechanisms import FixedNoise
from fedaux.privacy.audit.neighbours import Neighbours
from fedaux.privacy.mechanisms import SimulatedNoise

CONFIDENCE = 1 - 1e-6
"""Confidence of the bound on epsilon."""
Floats = NDArray[np.float64]


def distinguish(
    found: Neighbours,
    *,
    delta: float,
    trials: int,
    generator: np.random.Generator,
) -> float:
    """Return the lower bound on epsilon that an attacker proves from `trials` releases per
    neighbour.

    The attacker projects a release on the difference of the noiseless vectors, each entry weighted
    by its noise, which is sufficient for Gaussian noise. Noise is drawn for the projection alone,
    at the mechanism's scale; `distribution` checks that real releases have it. Threshold and
    direction are chosen on one half of the draws; the bound comes from the other half.
    """
    centres, scales = (
        [found.release(side, noise=FixedNoise(level)).vector for side in (0, 1)] for level in (0, 1)
    )
    scales = [scale - centre for scale, centre in zip(scales, centres, strict=True)]
    variances = scales[0].square() + scales[1].square()
    least = float(variances.amax()) * 1e-12 or 1.0
    direction = (centres[1] - centres[0]) / variances.clamp_min(least)
    direction = direction / direction.norm().clamp_min(1e-300)
    noise = SimulatedNoise(generator)
    draws = []
    for centre, scale in zip(centres, scales, strict=True):
        spread = float((direction * scale).norm())
        place = torch.full((trials,), float(direction @ (centre - centres[0])), dtype=torch.float64)
        draws.append(noise.perturb(place, sensitivity=1.0, sigma=spread).numpy())
    # Either neighbour may be accused; the second lies above the first.
    contests = [(draws[0], draws[1]), (-draws[1], -draws[0])]
    choices = [
        _best_threshold(innocent[::2], accused[::2], delta=delta) for innocent, accused in contests
    ]
    (_, threshold), contest = max(zip(choices, contests, strict=True), key=lambda choice: choice[0])
    innocent, accused = (draw[1::2] for draw in contest)
    hits, false_alarms = int((accused >= threshold).sum()), int((innocent >= threshold).sum())
    return float(epsilon_bound(hits, false_alarms, trials=len(accused), delta=delta))


def _best_threshold(innocent: Floats, accused: Floats, *, delta: float) -> tuple[float, float]:
    """Return the largest expected bound on epsilon over thresholds, and that threshold.

    Expected counts come from normal distributions fitted to the draws: counts in the tails would
    favour lucky thresholds.
    """
    counts = np.unique(np.geomspace(1, len(accused), 300).astype(int))
    thresholds = np.sort(accused)[-counts]
    hits, false_alarms = (
        len(draws) * ndtr((draws.mean() - thresholds) / max(float(draws.std()), 1e-300))
        for draws in (accused, innocent)
    )
    bounds = epsilon_bound(hits, false_alarms, trials=len(accused), delta=delta)
    best = int(np.argmax(bounds))
    return float(bounds[best]), float(thresholds[best])


def epsilon_bound(
    hits: Any, false_alarms: Any, *, trials: int, delta: float, confidence: float = CONFIDENCE
) -> Floats:
    """Return log((p - delta) / q), at least 0, with p and q the unfavourable ends of their
    intervals.

    Each end fails with half the error probability, so the bound holds with `confidence`
    (Bonferroni).
    """
    rate, _ = clopper_pearson(hits, trials=trials, confidence=confidence)
    _, false_rate = clopper_pearson(false_alarms, trials=trials, confidence=confidence)
    return np.maximum(0.0, np.log(np.maximum(rate - delta, 1e-300) / false_rate))


def clopper_pearson(successes: Any, *, trials: int, confidence: float) -> tuple[Floats, Floats]:
    """Return the exact two-sided confidence interval of a binomial rate (Clopper & Pearson,
    1934)."""
    counts = np.asarray(successes, dtype=np.float64)
    tail = (1 - confidence) / 2
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), trials - counts + 1, tail), 0.0)
    high = np.where(
        counts < trials, betaincinv(counts + 1, np.maximum(trials - counts, 1), 1 - tail), 1.0
    )
    return low, high
