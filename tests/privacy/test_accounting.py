from __future__ import annotations

import importlib.util
import itertools
import math
import sys

import numpy as np
import pytest
from scipy.stats import norm

from fedaux.privacy.accounting import (
    Query,
    _composed_epsilon,
    _losses,
    composed_epsilon,
    tight_composition,
    total_cost,
)
from fedaux.privacy.gaussian import delta_of, noise_multiplier
from fedaux.privacy.ledger import SCORES, UPDATE, LedgerEntry, basic_composition, worst_client

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None,
    reason="needs the extra privacy (dp-accounting)",
)


def release(epsilon: float, delta: float = 1e-5, client: int = 0) -> LedgerEntry:
    sigma = 0.2 * noise_multiplier(epsilon=epsilon, delta=delta)
    return LedgerEntry(client, 10, "mean", SCORES, 0.2, sigma, epsilon, delta, "simulated")


def update(
    *,
    multiplier: float = 1.0,
    probability: float = 0.1,
    steps: int = 10,
    epsilon: float = 5.0,
    client: int = 0,
) -> LedgerEntry:
    return LedgerEntry(
        client,
        100,
        "dp-sgd",
        UPDATE,
        2.0,
        multiplier,
        epsilon,
        1e-5,
        "simulated",
        steps,
        probability,
    )


@needs_accountant
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_one_release_costs_what_it_states(epsilon: float) -> None:
    assert tight_composition(delta=1e-5)([release(epsilon)])[0] == pytest.approx(epsilon, rel=2e-3)
    assert tight_composition(delta=1e-5)([release(epsilon)])[0] <= epsilon


@needs_accountant
def test_releases_compose_like_one_gaussian() -> None:
    """Four releases of multiplier m are one of multiplier m / 2, for which the exact delta is
    known."""
    entries = [release(0.5)] * 4
    multiplier = noise_multiplier(epsilon=0.5, delta=1e-5)
    epsilon = tight_composition(delta=1e-5)(entries)[0]
    assert delta_of(epsilon, noise_multiplier=multiplier / 2) == pytest.approx(1e-5, rel=1e-2)
    assert delta_of(epsilon, noise_multiplier=multiplier / 2) <= 1e-5
    assert epsilon < basic_composition(entries)[0]


@needs_accountant
def test_the_result_is_never_above_basic_composition() -> None:
    for epsilons in ((0.1,), (0.1, 0.1), (0.01, 3.0), (20.0, 20.0)):
        entries = [release(epsilon) for epsilon in epsilons]
        epsilon, delta = basic_composition(entries)
        assert tight_composition(delta=delta)(entries)[0] <= epsilon


@needs_accountant
@pytest.mark.parametrize(
    ("multiplier", "probability"), [(1.0, 1.0), (1.0, 0.3), (2.0, 0.05), (0.7, 0.5)]
)
def test_a_step_of_dpsgd_meets_the_definition_for_every_pair_of_gradients(
    multiplier: float, probability: float
) -> None:
    """Integrate delta of (1-q) N(0) + q N(g) against (1-q) N(0) + q N(g') in the plane, for clipped
    g and g'."""
    side = np.linspace(-8 * multiplier - 1, 8 * multiplier + 1, 401)
    x, y = np.meshgrid(side, side, indexing="ij")
    cell = (side[1] - side[0]) ** 2

    def density(gradient: tuple[float, float]) -> np.ndarray:
        def at(a: float, b: float) -> np.ndarray:
            return np.asarray(norm.pdf(x, a, multiplier) * norm.pdf(y, b, multiplier))

        return (1 - probability) * at(0.0, 0.0) + probability * at(*gradient)

    angles = [0.0, math.pi / 2, 0.8 * math.pi, math.pi]
    gradients = [
        (r * math.cos(a), r * math.sin(a)) for r, a in itertools.product((0.5, 1.0), angles)
    ]
    delta = 1e-2
    epsilon = composed_epsilon({Query(multiplier, probability): 1}, delta=delta)
    densities = [density(gradient) for gradient in gradients]
    excesses = {
        (i, j): float(np.maximum(0.0, p - math.exp(epsilon) * q).sum() * cell)
        for (i, p), (j, q) in itertools.product(enumerate(densities), repeat=2)
    }
    opposite = gradients.index((1.0, 0.0)), len(gradients) - 1
    assert max(excesses.values()) <= delta * (1 + 2e-3)
    assert excesses[opposite] == pytest.approx(max(excesses.values()), rel=1e-6)
    assert excesses[opposite] == pytest.approx(delta, rel=1e-2)


@needs_accountant
def test_replacing_one_costs_more_than_adding_one_and_no_more_than_adding_two() -> None:
    from dp_accounting.pld import privacy_loss_distribution

    query = Query(1.0, 0.1)
    ours = composed_epsilon({query: 200}, delta=1e-5)
    added = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.1, value_discretization_interval=1e-3
    ).self_compose(200)
    one = added.get_epsilon_for_delta(1e-5)
    # Group privacy: epsilon, delta for one added example give 2 epsilon, (1 + e^epsilon) delta for
    # a replaced one.
    two = next(
        2 * e
        for e in np.arange(one, 40, 0.05)
        if (1 + math.exp(e)) * added.get_delta_for_epsilon(e) <= 1e-5
    )
    assert one < ours <= two


@needs_accountant
def test_scores_and_updates_come_to_one_number() -> None:
    entries = [release(0.5), *[update(steps=20)] * 5]
    epsilon, delta = total_cost(entries)
    assert delta == 1e-5
    assert epsilon == tight_composition(delta=1e-5)(entries)[0]
    updates = composed_epsilon({Query(1.0, 0.1): 100}, delta=1e-5)
    assert updates < epsilon < 0.5 + updates
    assert worst_client([*entries, update(client=1, steps=1)], accountant=total_cost) == (
        epsilon,
        delta,
    )


@needs_accountant
def test_several_releases_cost_what_their_composition_costs() -> None:
    entries = [release(0.5), release(0.25)]
    epsilon, delta = total_cost(entries)
    assert delta == 1e-5
    assert epsilon == pytest.approx(tight_composition(delta=1e-5)(entries)[0], abs=1e-3)
    assert 0.5 < epsilon < basic_composition(entries)[0] == 0.75
    assert total_cost([release(0.5)]) == (0.5, 1e-5)  # one has its own price, unrounded


def test_what_was_not_protected_stays_so() -> None:
    bare = LedgerEntry(0, 10, "none", SCORES, 0.2, 0.0, math.inf, 0.0, "none")
    assert tight_composition(delta=1e-5)([bare, update()])[0] == math.inf
    assert total_cost([bare, update()])[0] == math.inf


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="several clients"):
        tight_composition(delta=1e-5)([release(1.0), release(1.0, client=1)])[0]
    with pytest.raises(ValueError, match="delta = 0"):
        tight_composition(delta=0)([release(1.0)])[0]


def test_without_the_accountant_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    _losses.cache_clear()
    _composed_epsilon.cache_clear()
    with pytest.raises(ValueError, match=r"pip install -e '\.\[privacy\]'"):
        tight_composition(delta=1e-5)([update()])[0]
    assert total_cost([update(), update()]) == (10.0, 2e-5)
