"""The distinguishing attack on the worst neighbours, which turns noise that is too little into a bound on epsilon.

With p and q the rates at which an attacker calls out on noisy releases of the one and of the other data set,
(epsilon, delta) demands p <= e^epsilon q + delta, so log((p - delta) / q) is a lower bound on epsilon. Both rates are
replaced by the unfavourable ends of their exact confidence intervals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr

from fedaux.privacy.audit.mechanisms import Auditable, FixedNoise
from fedaux.privacy.audit.neighbours import Neighbours
from fedaux.privacy.mechanisms import SimulatedNoise

CONFIDENCE = 1 - 1e-6
"""Of the bound on epsilon: an audit of a correct mechanism practically never errs."""
Floats = NDArray[np.float64]


def distinguish(
    mechanism: Auditable,
    found: Neighbours,
    *,
    delta: float,
    trials: int,
    generator: np.random.Generator,
) -> float:
    """Return the lower bound on epsilon that an attacker proves from `trials` releases of each neighbour.

    The attacker looks at the projection of a release on the difference of the noiseless vectors,
    each entry weighted by its noise, which for Gaussian noise of one scale is all there is to see.
    The noise is drawn for the projection alone, at the scale that the mechanism asks for; the tests
    of `distribution` check that real releases scatter so. The threshold and whom to accuse are
    chosen on one half of the draws; the bound comes from the other half.
    """
    public = mechanism.publish(found.negatives)
    centres, scales = (
        [
            mechanism.release(data, public, noise=FixedNoise(level)).vector
            for data in found.neighbours
        ]
        for level in (0, 1)
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
        nothing = torch.zeros(trials, dtype=torch.float64)
        projected = noise.perturb(nothing, sensitivity=1.0, sigma=spread)
        draws.append((projected + float(direction @ (centre - centres[0]))).numpy())
    # Either neighbour may be the one that is accused; the second lies above the first.
    contests = [(draws[0], draws[1]), (-draws[1], -draws[0])]
    choices = [
        _best_threshold(innocent[::2], accused[::2], delta=delta) for innocent, accused in contests
    ]
    (_, threshold), contest = max(zip(choices, contests, strict=True), key=lambda choice: choice[0])
    innocent, accused = (draw[1::2] for draw in contest)
    hits, false_alarms = int((accused >= threshold).sum()), int((innocent >= threshold).sum())
    return float(epsilon_bound(hits, false_alarms, trials=len(accused), delta=delta))


def _best_threshold(innocent: Floats, accused: Floats, *, delta: float) -> tuple[float, float]:
    """Return the largest bound on epsilon to be expected over thresholds, and that threshold, from as many draws each.

    Normal distributions fitted to the draws say what to expect: counts in the tails would favour lucky thresholds.
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
    """Return log((p - delta) / q), at least 0, with p and q the unfavourable ends of their intervals.

    Each end fails with half the error probability, so the bound holds with `confidence` (Bonferroni).
    """
    rate, _ = clopper_pearson(hits, trials=trials, confidence=confidence)
    _, false_rate = clopper_pearson(false_alarms, trials=trials, confidence=confidence)
    return np.maximum(0.0, np.log(np.maximum(rate - delta, 1e-300) / false_rate))


def clopper_pearson(successes: Any, *, trials: int, confidence: float) -> tuple[Floats, Floats]:
    """Return the exact two-sided confidence interval of a binomial rate (Clopper & Pearson, 1934)."""
    counts = np.asarray(successes, dtype=np.float64)
    tail = (1 - confidence) / 2
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), trials - counts + 1, tail), 0.0)
    high = np.where(
        counts < trials, betaincinv(counts + 1, np.maximum(trials - counts, 1), 1 - tail), 1.0
    )
    return low, high
