from __future__ import annotations

import importlib.util
import itertools
import math

import pytest

from fedaux.privacy.gaussian import delta_of, noise_multiplier

EPSILONS = (1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0)
DELTAS = (1e-12, 1e-9, 1e-6, 1e-5, 1e-3, 0.1)


@pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="needs the extra privacy (dp-accounting)")
def test_calibration_agrees_with_dp_accounting() -> None:
    from dp_accounting import gaussian_mechanism

    compared = 0
    for epsilon, delta in itertools.product(EPSILONS, DELTAS):
        try:
            peer = gaussian_mechanism.get_sigma_gaussian(epsilon, delta)
        except (OverflowError, ValueError):
            continue  # where it works
        assert noise_multiplier(epsilon=epsilon, delta=delta) == pytest.approx(peer, rel=1e-6), (epsilon, delta)
        compared += 1
    assert compared >= 0.9 * len(EPSILONS) * len(DELTAS)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.99])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_the_classical_bound_holds_below_one_and_costs_more_noise(epsilon: float, delta: float) -> None:
    classical = math.sqrt(2 * math.log(1.25 / delta)) / epsilon  # Dwork & Roth, 2014
    assert delta_of(epsilon, noise_multiplier=classical) <= delta
    assert classical > noise_multiplier(epsilon=epsilon, delta=delta)


def test_the_classical_bound_promises_too_much_at_large_epsilon() -> None:
    formula = math.sqrt(2 * math.log(1.25 / 1e-5)) / 100.0
    assert delta_of(100.0, noise_multiplier=formula) > 1e-5
