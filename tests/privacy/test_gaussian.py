from __future__ import annotations

import importlib.util
import itertools
import math

import pytest

from fedaux.privacy.gaussian import delta_of, epsilon_of, noise_multiplier

EPSILONS = (1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0)
DELTAS = (1e-12, 1e-9, 1e-6, 1e-5, 1e-3, 0.1)


@pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None,
    reason="needs the extra privacy (dp-accounting)",
)
def test_calibration_agrees_with_dp_accounting() -> None:
    from dp_accounting import gaussian_mechanism

    compared = 0
    for epsilon, delta in itertools.product(EPSILONS, DELTAS):
        try:
            peer = gaussian_mechanism.get_sigma_gaussian(epsilon, delta)
        except (OverflowError, ValueError):
            continue  # where it works
        assert noise_multiplier(epsilon=epsilon, delta=delta) == pytest.approx(peer, rel=1e-6), (
            epsilon,
            delta,
        )
        compared += 1
    assert compared >= 0.9 * len(EPSILONS) * len(DELTAS)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_epsilon_of_inverts_the_calibration(epsilon: float, delta: float) -> None:
    multiplier = noise_multiplier(epsilon=epsilon, delta=delta)
    assert epsilon_of(multiplier, delta=delta) == pytest.approx(epsilon, rel=1e-9)
    assert delta_of(epsilon_of(multiplier, delta=delta), noise_multiplier=multiplier) <= delta


def test_noise_that_is_private_at_epsilon_zero_costs_nothing() -> None:
    assert epsilon_of(1e9, delta=1e-5) == 0.0
    assert epsilon_of(0.0, delta=1e-5) == math.inf
