"""Privacy filters against a server that chooses its requests after seeing answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from fedaux.privacy.accounting import query_of, tight_composition
from fedaux.privacy.filters import FILTERS, ROUNDING, orders_of, sampled_divergence
from fedaux.privacy.gaussian import delta_of, noise_multiplier
from fedaux.privacy.ledger import SCORES, UPDATE, LedgerEntry


def release(multiplier: float) -> LedgerEntry:
    return LedgerEntry(0, 100, "mean", SCORES, 0.5, 0.5 * multiplier, 1.0, 1e-5, "secure")


def update(multiplier: float, probability: float, steps: int) -> LedgerEntry:
    return LedgerEntry(
        0, 100, "dp-sgd", UPDATE, 2.0, multiplier, 1.0, 1e-5, "secure", steps, probability
    )


def test_a_release_costs_what_it_states_and_releases_add_up_as_one_gaussian() -> None:
    for epsilon, delta in itertools.product((0.05, 0.1, 1.0, 8.0), (1e-9, 1e-5)):
        entry = release(noise_multiplier(epsilon=epsilon, delta=delta))
        spent = FILTERS["gaussian"](epsilon=epsilon, delta=delta)([entry])[0]
        assert spent == pytest.approx(epsilon, rel=ROUNDING)
    four = FILTERS["gaussian"](epsilon=1.0, delta=1e-5)([release(20.0)] * 4)[0]
    assert delta_of(four, noise_multiplier=10.0) == pytest.approx(1e-5, rel=1e-6)
    assert (
        FILTERS["gaussian"](epsilon=1.0, delta=1e-5)([])[0]
        == FILTERS["renyi"](epsilon=1.0, delta=1e-5)([])[0]
        == 0.0
    )


@pytest.mark.parametrize(
    ("multiplier", "order"), [(1.0, 2.0), (3.0, 17.5), (0.5, 5.0), (20.0, 200.0)]
)
def test_divergences_without_sampling_are_those_of_a_gaussian(
    multiplier: float, order: float
) -> None:
    """Replacing one moves the sum by two clip bounds: D_a = a 2^2 / (2 m^2)."""
    found = sampled_divergence(multiplier, 1.0, order)
    assert found == pytest.approx(2 * order / multiplier**2, rel=1e-7)
    assert found >= 2 * order / multiplier**2


@pytest.mark.parametrize(
    ("multiplier", "probability", "order"), [(1.0, 0.1, 4.0), (2.0, 0.01, 24.0), (0.6, 0.5, 1.7)]
)
def test_divergences_with_sampling_equal_an_integral_by_quadrature(
    multiplier: float, probability: float, order: float
) -> None:
    from scipy.integrate import quad

    def ratio(x: float) -> float:
        p, q = (
            math.log1p(probability * math.expm1((2 * x * shift - 1) / (2 * multiplier**2)))
            for shift in (1.0, -1.0)
        )
        return math.exp(order * p + (1 - order) * q) * float(norm.pdf(x, 0, multiplier))

    points = np.linspace(-12 * multiplier, 2 * order + 12 * multiplier, 100)
    total = sum(
        quad(ratio, low, high, epsabs=0, epsrel=1e-10)[0]
        for low, high in itertools.pairwise(points)
    )
    assert sampled_divergence(multiplier, probability, order) == pytest.approx(
        math.log(total) / (order - 1), rel=1e-6
    )


def test_more_than_integer_orders_agree_with_the_peer() -> None:
    """For adding an example dp-accounting knows the divergence; replacing one costs more, and at
    most two of them."""
    rdp = pytest.importorskip("dp_accounting.rdp")
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    for multiplier, probability, order in ((1.0, 0.1, 4.0), (2.0, 0.01, 16.0)):
        accountant = rdp.RdpAccountant([order])
        accountant.compose(PoissonSampledDpEvent(probability, GaussianDpEvent(multiplier)))
        added = float(accountant._rdp[0])
        assert added < sampled_divergence(multiplier, probability, order) < 8 * added


def deltas(entries: Sequence[LedgerEntry], epsilons: np.ndarray) -> np.ndarray:
    """Return the exact delta of non-adaptive entries at every epsilon, also below 0."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    together = None
    for entry in entries:
        query = query_of(entry)
        sampled = query.sampling_probability is not None
        losses = privacy_loss_distribution.from_gaussian_mechanism(
            query.noise_multiplier,
            value_discretization_interval=2e-4,
            sampling_prob=query.sampling_probability if sampled else 1.0,
            neighboring_relation=(
                NeighboringRelation.REPLACE_ONE
                if sampled
                else NeighboringRelation.ADD_OR_REMOVE_ONE
            ),
        ).self_compose(entry.steps or 1)
        together = losses if together is None else together.compose(losses)
    assert together is not None
    return np.asarray(together.get_delta_for_epsilon(epsilons[::-1]))[::-1]  # it wants them rising


def adaptive_delta(
    first: LedgerEntry, choices: Sequence[Sequence[LedgerEntry]], *, epsilon: float
) -> float:
    """Return the true delta of a server that releases once and then picks the worst of `choices`
    for what it saw.

    E over the loss l of the first release of max_j delta_j(epsilon - l): the loss of a Gaussian is
    N(mu^2 / 2, mu^2).
    """
    mu = first.sensitivity / first.sigma
    losses = mu**2 / 2 + mu * np.linspace(-9, 9, 1441)
    weights = norm.pdf(np.linspace(-9, 9, 1441)) * (18 / 1440)
    stop = np.maximum(0.0, -np.expm1(epsilon - losses))  # ask for nothing more
    best = np.maximum.reduce([stop, *(deltas(entries, epsilon - losses) for entries in choices)])
    return float((best * weights).sum())


def largest_updates(
    spent: object, first: LedgerEntry, *, epsilon: float, delta: float
) -> list[list[LedgerEntry]]:
    """Return, for several kinds of DP-SGD, the most steps after `first` that a rule admits."""
    found = []
    for multiplier, probability in (
        (1.0, 0.01),
        (2.0, 0.05),
        (4.0, 0.3),
        (0.8, 0.002),
        (20.0, 1.0),
    ):
        low, high = 0, 4096
        while high - low > 1:
            middle = (low + high) // 2
            entries = [first, update(multiplier, probability, middle)]
            fits = spent(entries) <= epsilon * (1 + ROUNDING)  # type: ignore[operator]
            low, high = (middle, high) if fits else (low, middle)
        if low:
            found.append([update(multiplier, probability, low)])
    return found


@pytest.mark.parametrize("accountant", ["gaussian", "renyi"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_worst_adaptive_server_stays_within_the_budget(accountant: str, share: float) -> None:
    pytest.importorskip("dp_accounting")
    epsilon, delta = 1.0, 1e-5
    first = release(noise_multiplier(epsilon=share * epsilon, delta=delta))

    def spent(entries: Sequence[LedgerEntry]) -> float:
        return FILTERS[accountant](epsilon=epsilon, delta=delta)(entries)[0]

    choices = largest_updates(spent, first, epsilon=epsilon, delta=delta)
    rest = (
        1.0 / noise_multiplier(epsilon=epsilon, delta=delta) ** 2
        - (first.sensitivity / first.sigma) ** 2
    )
    if spent([first, release(1 / math.sqrt(rest))]) <= epsilon:
        choices.append([release(1 / math.sqrt(rest))])
    assert choices, "the rule admits something, or the test shows nothing"
    assert adaptive_delta(first, choices, epsilon=epsilon) <= delta * (
        1 + 1e-5
    )  # the peer rounds losses up


@pytest.mark.slow
def test_the_rule_for_fixed_requests_is_exceeded_by_an_adaptive_server() -> None:
    """What the filters replace: composition of what was asked, as if it had been fixed
    beforehand."""
    pytest.importorskip("dp_accounting")
    epsilon, delta = 1.0, 1e-5
    first = release(noise_multiplier(epsilon=0.7 * epsilon, delta=delta))
    choices = largest_updates(
        lambda entries: tight_composition(delta=delta)(entries)[0],
        first,
        epsilon=epsilon,
        delta=delta,
    )
    assert adaptive_delta(first, choices, epsilon=epsilon) > 1.1 * delta


def test_orders_follow_from_the_budget_alone() -> None:
    best, middle, least = orders_of(1.0, 1e-5)
    assert best == pytest.approx(24.03, abs=0.01)
    assert 1 < least < middle < best


def test_what_renyi_charges_for_a_release_and_saves_on_training() -> None:
    one = release(noise_multiplier(epsilon=1.0, delta=1e-5))
    charged = FILTERS["renyi"](epsilon=1.2, delta=1e-5)([one])[0]
    assert 1.0 < charged < 1.25
    trained = [update(1.0, 32 / 2500, 79)] * 40
    assert FILTERS["renyi"](epsilon=8.0, delta=1e-5)(trained)[0] < 10.0
    assert FILTERS["gaussian"](epsilon=8.0, delta=1e-5)(trained)[0] > 1000.0


def test_little_noise_at_a_small_budget_takes_no_memory() -> None:
    """A hundred million points would; the divergence without sampling bounds it."""
    order = orders_of(1e-3, 1e-12)[0]
    assert sampled_divergence(0.1, 0.5, order) == pytest.approx(2 * order / 0.1**2)
    order = 1000.0
    assert sampled_divergence(0.3, 0.5, order) < 2 * order / 0.3**2
