"""Privacy filters: whether one more release fits a budget if the server chooses it after seeing
earlier answers.

Composition theorems for fixed mechanisms do not cover that case. Two filters do (proofs:
docs/proofs.md, Budgets); a node's configuration fixes which one it uses, because it must be chosen
before the first answer.

`gaussian` adds up (sensitivity / sigma)^2: exact for releases; steps of DP-SGD count without
amplification by sampling. `renyi` adds up Renyi divergences at three fixed orders, a third of delta
each: right for DP-SGD, and releases cost a little more than they state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp

from fedaux.privacy.accounting import query_of
from fedaux.privacy.gaussian import epsilon_of
from fedaux.privacy.ledger import Accountant, LedgerEntry

ROUNDING = 1e-9
"""Tolerated relative excess over a budget, for rounding; secure noise exceeds its stated sigma
by more."""
SAFETY = 1e-9
"""Relative amount by which numerical integrals are rounded up."""
MOST_POINTS = 2_000_000
"""Points of an integral on either side of 0: a server that asks for little noise cannot exhaust the
memory."""


def gaussian_filter(*, epsilon: float, delta: float) -> Accountant:
    """Return the accountant of adaptively chosen releases as one Gaussian of squared distance
    sum mu_i^2, at `delta`."""

    def cost(entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
        squared = math.fsum(_squared_distance(entry) for entry in entries)
        return 0.0 if squared == 0.0 else epsilon_of(1.0 / math.sqrt(squared), delta=delta), delta

    return cost


def renyi_filter(*, epsilon: float, delta: float) -> Accountant:
    """Return the accountant of adaptively chosen releases and updates, at `delta`.

    The least over the orders a of sum_i D_a(i) + log((a - 1) / a) - (log(delta / 3) + log a) / (a -
    1). The orders follow from the budget (`epsilon`, `delta`) alone.
    """
    orders = orders_of(epsilon, delta)
    share = delta / len(orders)

    def converted(divergence: float, order: float) -> float:
        shares = (math.log(share) + math.log(order)) / (order - 1)
        return divergence + math.log1p(-1 / order) - shares

    def cost(entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
        if not entries:
            return 0.0, delta
        sums = [math.fsum(_divergence_of(entry, order) for entry in entries) for order in orders]
        return max(0.0, min(map(converted, sums, orders))), delta

    return cost


FILTERS: dict[str, Callable[..., Accountant]] = {
    "gaussian": gaussian_filter,
    "renyi": renyi_filter,
}
"""Each takes the budget as epsilon=..., delta=..., and returns what tells how much is spent at its
delta."""


def orders_of(epsilon: float, delta: float) -> tuple[float, float, float]:
    """Return the three orders of a budget: the best one for Gaussians, and smaller ones for
    DP-SGD at little noise."""
    best = 1.0 + 2.0 * math.log(1.0 / delta) / epsilon
    return best, 1.0 + (best - 1.0) / 2, 1.0 + (best - 1.0) / 4


def _squared_distance(entry: LedgerEntry) -> float:
    """Return mu^2 of a release, or of all steps of DP-SGD as if every example took part in each."""
    if entry.steps is None:
        return (entry.sensitivity / entry.sigma) ** 2
    return entry.steps * (entry.sensitivity / entry.sigma) ** 2


def _divergence_of(entry: LedgerEntry, order: float) -> float:
    query = query_of(entry)
    if query.sampling_probability is None:
        return order / (2.0 * query.noise_multiplier**2)
    assert entry.steps is not None, "a sampling probability comes with steps"
    return entry.steps * sampled_divergence(
        query.noise_multiplier, query.sampling_probability, order
    )


@lru_cache(maxsize=4096)
def sampled_divergence(noise_multiplier: float, probability: float, order: float) -> float:
    """Return D_a(P || Q) of a step of DP-SGD in units of its clip bound, m being its noise
    multiplier.

    P, Q = (1 - q) N(0, m^2) + q N(+-1, m^2), the dominating pair for replacing one example. The
    integral of P^a Q^(1-a) is a sum over equidistant points, exponentially accurate for such
    functions; it is rounded up. If that would take very many points, which means so little noise
    that no budget allows it, the divergence without sampling is returned.
    """
    m, a = noise_multiplier, order
    # Far to the right, P^a Q^(1-a) is Gaussian around a if q < 1 and around 2a - 1 if q = 1.
    reach = 2.0 * a + 40.0 * m
    step = m * min(0.05, m / 10)
    if reach / step > MOST_POINTS:
        return 2.0 * a / (m * m)
    x = np.arange(-reach, reach + step, step)

    def log_density(shift: float) -> np.ndarray:
        moved = -((x - shift) ** 2) / (2 * m * m) - math.log(m * math.sqrt(2 * math.pi))
        if probability >= 1.0:
            return moved
        still = -(x**2) / (2 * m * m) - math.log(m * math.sqrt(2 * math.pi))
        return np.logaddexp(math.log1p(-probability) + still, math.log(probability) + moved)

    total = float(logsumexp(a * log_density(1.0) + (1 - a) * log_density(-1.0))) + math.log(step)
    return max(0.0, total) / (a - 1) * (1 + SAFETY) + SAFETY / (a - 1)
