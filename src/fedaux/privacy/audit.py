"""An attack on the certainty releases: what they claim is put to the test, by search and by statistics.

First a search for the worst neighbours: pairs of data sets that differ in one example and move the noiseless vector as
far as possible, in units of the sensitivity that the mechanism claims. Then a distinguishing attack on the worst pair:
with p and q the rates at which an attacker calls out on noisy releases of the one and of the other, (epsilon, delta)
demands p <= e^epsilon q + delta, so that log((p - delta) / q) is a lower bound on epsilon. Both rates are replaced by
the unfavourable ends of their exact confidence intervals, so the bound errs with a probability of at most 5 %.

An audit refutes; it never proves. The proofs are in docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.mechanisms import MECHANISMS, Noise, Public, Release, SimulatedNoise
from fedaux.privacy.paper import solve
from fedaux.privacy.released_code import ReleasedRegression, claimed_sensitivity, classical_multiplier, regress

CONFIDENCE = 0.95
DIGITS = 9
"""To how many digits a ratio is told: what lies behind them is rounding."""
WHOLE_TRIALS = 300
"""Draws a neighbour that go through the mechanism's whole release; the others through its noise alone."""
NUM_FEATURES = 4

Floats = NDArray[np.float64]
Pair = tuple[Tensor, Tensor]


class Auditable(Protocol):
    """The two verbs of a mechanism that privacy is about."""

    def publish(self, negatives: Tensor) -> Public:
        """Derive from the negatives' features [M, F] what clients need."""
        ...

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release a vector about the client's features [n, F]."""
        ...


@dataclass(frozen=True)
class Audit:
    """What the attack achieved against the claim that a release is (epsilon, delta)-private."""

    mechanism: str
    epsilon: float
    """The claim."""
    delta: float
    stated_epsilon: float
    """What the release itself states; infinite for mechanisms that promise nothing."""
    max_sensitivity_ratio: float
    """The largest distance found, over the sensitivity claimed; above 1 the claim is false."""
    worst_kind: str
    """Which replacement did it: a row of `REPLACEMENTS`."""
    worst_data: str
    """In which data: a row of `SCENES`."""
    pairs: int
    """Neighbours tried."""
    epsilon_lower_bound: float
    """What the attacker proved at 95 % confidence; above `epsilon` the claim is false."""
    epsilon_reachable: float
    """The most that so many trials can prove."""
    trials: int
    """Releases drawn of each of the two worst neighbours."""
    seed: int

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.max_sensitivity_ratio > 1 or self.epsilon_lower_bound > self.epsilon


def audit(
    mechanism_name: str,
    *,
    epsilon: float,
    delta: float,
    trials: int = 4_000_000,
    seed: int = 0,
    pairs: int = 2400,
    certainty: Certainty | None = None,
) -> Audit:
    """Attack a mechanism, one of `auditable()`, whose other settings are those of `certainty` or the defaults."""
    mechanisms = auditable()
    if mechanism_name not in mechanisms:
        raise ValueError(f"mechanism {mechanism_name!r}: not known; there are {', '.join(mechanisms)}")
    if trials < 2 * WHOLE_TRIALS:
        raise ValueError(f"trials = {trials}: should be at least {2 * WHOLE_TRIALS}")
    if pairs < len(SCENES) * len(REPLACEMENTS):
        raise ValueError(f"pairs = {pairs}: should be at least {len(SCENES) * len(REPLACEMENTS)}")
    section = Certainty(**((certainty or Certainty()).model_dump() | {"epsilon": epsilon, "delta": delta}))
    mechanism = mechanisms[mechanism_name](section)
    in_claimed_units = _Unfolded(section) if mechanism_name == "release" else mechanism
    with _one_thread():
        worst = search(in_claimed_units, pairs=pairs, generator=seeding.generator(seed, "audit neighbours"))
        reachable = float(epsilon_bound(trials // 2, 0, trials=trials // 2, delta=delta))
        noise = seeding.generator(seed, "audit noise")
        if math.isfinite(worst.ratio):
            bound = distinguish(mechanism, worst, delta=delta, trials=trials, generator=noise)
        else:
            bound = reachable  # a vector that is not finite gives its data away every time
        public = mechanism.publish(worst.negatives)
        stated = mechanism.release(worst.neighbours[0], public, noise=_Fixed(0.0)).epsilon
    return Audit(
        mechanism=mechanism_name,
        epsilon=epsilon,
        delta=delta,
        stated_epsilon=stated,
        max_sensitivity_ratio=round(worst.ratio, DIGITS),
        worst_kind=worst.kind,
        worst_data=worst.scene,
        pairs=pairs,
        epsilon_lower_bound=bound,
        epsilon_reachable=reachable,
        trials=trials,
        seed=seed,
    )


def auditable() -> dict[str, Callable[[Certainty], Auditable]]:
    """Return every registered mechanism, and `published`: the paper's formulas word for word."""
    return {**MECHANISMS, "published": Published}


def to_json(audit: Audit) -> dict[str, Any]:
    """Return the audit as JSON can hold it, with the verdict; infinity is the string "inf"."""
    fields = asdict(audit) | {"violated": audit.violated, "verdict": verdict(audit)}
    return {key: "inf" if value == math.inf else value for key, value in fields.items()}


def verdict(audit: Audit) -> str:
    """Say in plain words what was found."""
    claim = f"({audit.epsilon:g}, {audit.delta:g})-differentially private"
    found = (
        f"Over {audit.pairs} neighbours (data sets of one, public, size), replacing one example moved the release by "
        f"up to {audit.max_sensitivity_ratio:.4g} times the sensitivity claimed ({audit.worst_kind}; data: "
        f"{audit.worst_data}); from {audit.trials} noisy releases of each of the two, an attacker showed "
        f"ε ≥ {audit.epsilon_lower_bound:.3g} at 95 % confidence."
    )
    if audit.violated:
        conclusion = f"`{audit.mechanism}` is not {claim}."
    else:
        conclusion = f"Nothing contradicts that `{audit.mechanism}` is {claim}; that is no proof."
        if audit.epsilon_reachable <= audit.epsilon:
            conclusion += f" So few trials cannot show more than ε = {audit.epsilon_reachable:.3g}: draw more."
    if math.isinf(audit.stated_epsilon):
        conclusion += " Its releases say so themselves: they state ε = ∞."
    return f"{conclusion} {found}"


# The claim as published


class Published:
    """Theorem 1 word for word: averaged loss, features over the largest norm of D_i and D-, classical noise.

    The norm is left out of the vector, in the paper's favour: it is also needed for the scores, and not protected.
    """

    def __init__(self, section: Certainty) -> None:
        self._section = section

    def publish(self, negatives: Tensor) -> Public:
        """Return the negatives' features [M, F]."""
        return {"negatives": negatives.double()}

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release the regression's weights [F] with the claimed sensitivity 2 / (lambda (|D_i| + |D-|))."""
        section, negatives = self._section, public["negatives"]
        largest = torch.cat([features.double(), negatives]).norm(dim=1).amax()
        weights = solve(features.double() / largest, negatives / largest, regularisation=section.regularisation)
        claimed = claimed_sensitivity(len(features) + len(negatives), regularisation=section.regularisation)
        sigma = claimed * classical_multiplier(epsilon=section.epsilon, delta=section.delta)
        vector = noise.perturb(weights, sensitivity=claimed, sigma=sigma)
        return Release(vector, "published", claimed, sigma, section.epsilon, section.delta, noise.kind)


class _Unfolded(ReleasedRegression):
    """(w, b) of the released code in the units of the paper's claim: before the client's norm is folded into w."""

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        negatives = public["negatives"].double()
        vector, _ = regress(features.double(), negatives, regularisation=self._regularisation)
        claimed = claimed_sensitivity(len(features) + len(negatives), regularisation=self._regularisation)
        return Release(vector, "release", claimed, 0.0, math.inf, self._delta, noise.kind)


# Neighbours


@dataclass(frozen=True)
class Neighbours:
    """Two data sets [n, F] that differ in their first example, beside the same public negatives [M, F]."""

    scene: str
    kind: str
    negatives: Tensor
    neighbours: Pair
    ratio: float


def _normal(generator: np.random.Generator, rows: int, *, shift: float = 0.0) -> Tensor:
    return torch.from_numpy(generator.normal(shift, 1.0, (rows, NUM_FEATURES)))


def _clusters(generator: np.random.Generator) -> Pair:
    centres = 4 * _normal(generator, 3)
    return centres.repeat(10, 1) + 0.1 * _normal(generator, 30), _normal(generator, 90)


def _point(generator: np.random.Generator, *, clients: int, negatives: int) -> Pair:
    """All mass of the client at one point, all negatives near the opposite one: the regression at its steepest."""
    point = _normal(generator, 1)
    point = point / point.norm()
    return point.repeat(clients, 1), -point + 1e-3 * _normal(generator, negatives)


SCENES: dict[str, Callable[[np.random.Generator], Pair]] = {
    "one example": lambda generator: (_normal(generator, 1), _normal(generator, 8)),
    "a few examples": lambda generator: (_normal(generator, 5, shift=1.0), _normal(generator, 15)),
    "many examples": lambda generator: (_normal(generator, 200, shift=0.5), _normal(generator, 1800)),
    "clusters": _clusters,
    "few at one point": lambda generator: _point(generator, clients=4, negatives=12),
    "many at one point": lambda generator: _point(generator, clients=200, negatives=1800),
}
"""Client data [n, F] and negatives [M, F] in which neighbours are looked for."""


def _sideways(examples: Tensor, draw: Tensor) -> Pair:
    """Two outliers against the client's mean, where the loss is steepest, and apart at right angles to it."""
    mean = examples.mean(dim=0)
    mean = mean / mean.norm().clamp_min(1e-12)
    across = draw - (draw @ mean) * mean
    across = across / across.norm().clamp_min(1e-12)
    return 20 * (across - 0.5 * mean), 20 * (-across - 0.5 * mean)


REPLACEMENTS: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "another example": lambda examples, draw: (examples[0], draw),
    "zero vector": lambda examples, draw: (examples[0], 0 * draw),
    "20-fold outlier": lambda examples, draw: (examples[0], 20 * draw),
    "million-fold outlier": lambda examples, draw: (examples[0], 1e6 * draw),
    "sign flipped": lambda examples, draw: (examples[0], -examples[0]),
    "opposite outliers": lambda examples, draw: (20 * draw, -20 * draw),
    "sideways outliers": _sideways,
    "largest made smallest": lambda examples, draw: (20 * draw, examples[examples.norm(dim=1).argmin()]),
}
"""The two versions of the example that differs, from the client's examples [n, F] and a random draw [F]."""


def search(mechanism: Auditable, *, pairs: int, generator: np.random.Generator) -> Neighbours:
    """Return the neighbours that lie farthest apart, of `pairs` tried: three quarters by kind, the rest by ascent."""
    best: dict[str, Neighbours] = {}
    cases = [(scene, kind) for scene in SCENES for kind in REPLACEMENTS]
    plain = max(len(cases), 3 * pairs // 4)
    for trial in range(plain):
        scene, kind = cases[trial % len(cases)]
        examples, negatives = SCENES[scene](generator)
        left, right = REPLACEMENTS[kind](examples, _normal(generator, 1)[0])
        neighbours = (_with_first(examples, left), _with_first(examples, right))
        found = Neighbours(scene, kind, negatives, neighbours, ratio=0.0)
        found = _measured(mechanism, found, public=mechanism.publish(negatives))
        if scene not in best or found.ratio > best[scene].ratio:
            best[scene] = found
    leading = sorted(best.values(), key=lambda found: -found.ratio)[:2]
    share = (pairs - plain) // len(leading)
    ascents = [_ascend(mechanism, start, pairs=share, generator=generator) for start in leading]
    return max([*best.values(), *ascents], key=lambda found: found.ratio)


def _ascend(mechanism: Auditable, start: Neighbours, *, pairs: int, generator: np.random.Generator) -> Neighbours:
    """Improve both versions of the example: along the gradient by finite differences, and by random moves."""
    public, best, tried = mechanism.publish(start.negatives), start, 0

    def attempt(versions: Tensor, rest: Pair | None = None) -> Neighbours:
        nonlocal tried, best
        tried += 1
        data = rest or best.neighbours
        moved = (_with_first(data[0], versions[0]), _with_first(data[1], versions[1]))
        return _measured(mechanism, replace(best, neighbours=moved), public=public)

    while tried + 2 * NUM_FEATURES + 6 <= pairs:
        versions = torch.stack([data[0] for data in best.neighbours])  # [2, F]
        size = float(versions.norm()) + 1e-3
        gradient = torch.zeros_like(versions)
        for entry in range(versions.numel()):
            nudge = torch.zeros_like(versions)
            nudge.view(-1)[entry] = 1e-3 * size
            gradient.view(-1)[entry] = attempt(versions + nudge).ratio - best.ratio
        uphill = size * gradient / gradient.norm().clamp_min(1e-30)
        candidates = [attempt(versions + step * uphill) for step in (0.05, 0.5, 5.0)]
        candidates.append(attempt(versions + 0.3 * size * _normal(generator, 2)))
        candidates.append(attempt(versions * float(generator.choice([0.5, 2.0, 10.0]))))
        shift = 0.3 * _normal(generator, 1)
        candidates.append(attempt(versions, (best.neighbours[0] + shift, best.neighbours[1] + shift)))
        best = max([best, *candidates], key=lambda found: found.ratio)
    return best


def _with_first(examples: Tensor, first: Tensor) -> Tensor:
    return torch.cat([first[None], examples[1:]])


def _measured(mechanism: Auditable, found: Neighbours, *, public: Public) -> Neighbours:
    """Return the neighbours with the l2 distance of their noiseless vectors over the sensitivity claimed."""
    left, right = (mechanism.release(features, public, noise=_Fixed(0.0)) for features in found.neighbours)
    ratio = float((left.vector - right.vector).norm()) / left.sensitivity
    return replace(found, ratio=ratio if math.isfinite(ratio) else math.inf)


# The distinguishing attack


class _Fixed:
    """So many standard deviations in every entry, in place of noise: shows what lies under it, and its scale."""

    kind = "none"

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        return vector + self._deviations * sigma


def distinguish(
    mechanism: Auditable, found: Neighbours, *, delta: float, trials: int, generator: np.random.Generator
) -> float:
    """Return the lower bound on epsilon that an attacker proves from `trials` releases of each neighbour.

    The attacker looks at the projection of a release on the difference of the noiseless vectors, each entry weighed by
    its noise, which for Gaussian noise of one scale is all there is to see. Whom to accuse from which threshold on is
    chosen on one half of the draws; the bound comes from the other half.
    """
    public = mechanism.publish(found.negatives)
    centres, scales = (
        [mechanism.release(data, public, noise=_Fixed(level)).vector for data in found.neighbours] for level in (0, 1)
    )
    scales = [scale - centre for scale, centre in zip(scales, centres, strict=True)]
    variances = scales[0].square() + scales[1].square()
    least = float(variances.amax()) * 1e-12 or 1.0
    direction = (centres[1] - centres[0]) / variances.clamp_min(least)
    direction = direction / direction.norm().clamp_min(1e-300)
    noise = SimulatedNoise(generator)
    draws = []
    for data, centre, scale in zip(found.neighbours, centres, scales, strict=True):
        spread = float((direction * scale).norm())
        whole = [mechanism.release(data, public, noise=noise).vector - centre for _ in range(WHOLE_TRIALS)]
        projected = torch.stack(whole) @ direction
        _check_additive(projected, spread=spread)
        rest = torch.zeros(trials - WHOLE_TRIALS, dtype=torch.float64)
        rest = noise.perturb(rest, sensitivity=1.0, sigma=spread)
        draws.append((torch.cat([projected, rest]) + float(direction @ (centre - centres[0]))).numpy())
    # Either neighbour may be the one that is accused; the second lies above the first.
    contests = [(draws[0], draws[1]), (-draws[1], -draws[0])]
    choices = [_best_threshold(innocent[::2], accused[::2], delta=delta) for innocent, accused in contests]
    (_, threshold), contest = max(zip(choices, contests, strict=True), key=lambda choice: choice[0])
    innocent, accused = (draw[1::2] for draw in contest)
    hits, false_alarms = int((accused >= threshold).sum()), int((innocent >= threshold).sum())
    return float(epsilon_bound(hits, false_alarms, trials=len(accused), delta=delta))


def _check_additive(projected: Tensor, *, spread: float) -> None:
    """Raise ValueError where whole releases do not scatter as the rest of the draws will."""
    if spread == 0.0:
        fits = float(projected.abs().amax()) < 10.0**-DIGITS
    else:
        deviations = projected / spread
        fits = abs(float(deviations.mean())) < 5 / math.sqrt(len(deviations))
        fits &= abs(float(deviations.var()) - 1) < 5 * math.sqrt(2 / len(deviations))
    if not fits:
        raise ValueError("the mechanism's releases are not a fixed vector with Gaussian noise added once")


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


def epsilon_bound(hits: Any, false_alarms: Any, *, trials: int, delta: float) -> Floats:
    """Return log((p - delta) / q), at least 0, with p and q the unfavourable ends of the rates' intervals.

    Each end fails with a probability of at most 2.5 %, so the bound holds with 95 % (Bonferroni).
    """
    rate, _ = clopper_pearson(hits, trials=trials, confidence=CONFIDENCE)
    _, false_rate = clopper_pearson(false_alarms, trials=trials, confidence=CONFIDENCE)
    return np.maximum(0.0, np.log(np.maximum(rate - delta, 1e-300) / false_rate))


def clopper_pearson(successes: Any, *, trials: int, confidence: float) -> tuple[Floats, Floats]:
    """Return the exact two-sided confidence interval of a binomial rate (Clopper & Pearson, 1934)."""
    counts = np.asarray(successes, dtype=np.float64)
    tail = (1 - confidence) / 2
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), trials - counts + 1, tail), 0.0)
    high = np.where(counts < trials, betaincinv(counts + 1, np.maximum(trials - counts, 1), 1 - tail), 1.0)
    return low, high


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of tiny regressions run many times slower where threads compete for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
