from __future__ import annotations

import numpy as np
import pytest
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaux import seeding
from fedaux.data.splits import client_shares, round_to_sum, split_auxiliary, split_dirichlet


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    clients=st.integers(1, 40),
    classes=st.integers(1, 12),
    alpha=st.floats(0.005, 1000.0),
    size=st.integers(1, 300),
)
def test_every_example_goes_to_exactly_one_client(
    seed: int, clients: int, classes: int, alpha: float, size: int
) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, size)
    parts = split_dirichlet(
        labels,
        num_clients=clients,
        alpha=alpha,
        num_classes=classes,
        generator=seeding.generator(seed, "split"),
    )
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(1, 60),
    classes=st.integers(1, 20),
    alpha=st.floats(0.01, 100),
)
def test_shares_are_finite_and_cover_each_class(
    seed: int, clients: int, classes: int, alpha: float
) -> None:
    shares = client_shares(clients, classes, alpha=alpha, generator=seeding.generator(seed, "x"))
    assert np.isfinite(shares).all()
    assert (shares >= 0).all()
    assert shares.sum(axis=0) == pytest.approx(np.ones(classes))


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_clients_are_of_almost_equal_size(alpha: float) -> None:
    labels = np.repeat(np.arange(10), 500)
    for seed in range(5):
        parts = split_dirichlet(
            labels,
            num_clients=20,
            alpha=alpha,
            num_classes=10,
            generator=seeding.generator(seed, "split"),
        )
        sizes = [len(part) for part in parts]
        assert min(sizes) > 0.85 * 250
        assert max(sizes) < 1.15 * 250


def test_normalisation_equals_plain_loops() -> None:
    generator = seeding.generator(5, "x")
    shape = (6, 4)
    log_shares = np.log(generator.gamma(1.5, size=shape)) + np.log1p(-generator.random(shape)) / 0.5
    plain = np.exp(log_shares)
    expected = oracles.doubly_stochastic_loop((plain / plain.sum(axis=0)).tolist(), iterations=1000)
    shares = client_shares(6, 4, alpha=0.5, generator=seeding.generator(5, "x"))
    assert shares == pytest.approx(np.array(expected), abs=1e-8)


def test_draws_before_normalisation_are_dirichlet() -> None:
    """The gamma trick that survives underflow has the moments of Gamma(alpha): both are alpha."""
    alpha = 0.3
    generator = seeding.generator(0, "moments")
    draws = np.exp(
        np.log(generator.gamma(alpha + 1, size=200_000))
        + np.log1p(-generator.random(200_000)) / alpha
    )
    assert draws.mean() == pytest.approx(alpha, rel=0.02)
    assert draws.var() == pytest.approx(alpha, rel=0.05)


def test_small_alpha_with_a_thousand_clients_works() -> None:
    labels = np.repeat(np.arange(10), 5000)
    parts = split_dirichlet(
        labels,
        num_clients=1000,
        alpha=0.01,
        num_classes=10,
        generator=seeding.generator(0, "split"),
    )
    assert sum(len(part) for part in parts) == 50_000
    assert min(len(part) for part in parts) > 0


def test_small_alpha_separates_classes_and_large_alpha_mixes_them() -> None:
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: float) -> float:
        parts = split_dirichlet(
            labels,
            num_clients=10,
            alpha=alpha,
            num_classes=10,
            generator=seeding.generator(1, "split"),
        )
        return float(
            np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])
        )

    assert largest_share(0.01) > 0.8
    assert largest_share(100.0) < 0.2


def test_same_generator_gives_the_same_split_and_others_another() -> None:
    labels = np.repeat(np.arange(10), 50)

    def split(seed: int) -> list[list[int]]:
        generator = seeding.generator(seed, "split")
        return [
            p.tolist()
            for p in split_dirichlet(
                labels, num_clients=5, alpha=0.1, num_classes=10, generator=generator
            )
        ]

    assert split(0) == split(0)
    assert split(0) != split(1)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"split\.alpha = 0"):
        client_shares(3, 3, alpha=0, generator=seeding.generator(0, "x"))
    with pytest.raises(ValueError, match="no labelled examples"):
        split_dirichlet(
            np.zeros(0, dtype=np.int64),
            num_clients=2,
            alpha=1,
            num_classes=2,
            generator=seeding.generator(0, "x"),
        )


@given(st.lists(st.floats(0, 50), min_size=1, max_size=20))
def test_rounding_keeps_the_sum_and_moves_nobody_by_one(values: list[float]) -> None:
    total = round(sum(values))
    scaled = np.array(values) * (total / sum(values) if sum(values) else 0)
    if sum(values) == 0:
        total = 0
    counts = round_to_sum(scaled, total=total)
    assert counts.sum() == total
    assert (np.abs(counts - scaled) <= 1).all()


@given(size=st.integers(2, 500), fraction=st.floats(0.05, 0.95), seed=st.integers(0, 100))
def test_negatives_and_distill_set_are_disjoint_and_complete(
    size: int, fraction: float, seed: int
) -> None:
    if not 0 < round(fraction * size) < size:
        with pytest.raises(ValueError, match=r"auxiliary\.negatives_fraction"):
            split_auxiliary(
                size, negatives_fraction=fraction, generator=seeding.generator(seed, "x")
            )
        return
    negatives, distill_set = split_auxiliary(
        size, negatives_fraction=fraction, generator=seeding.generator(seed, "x")
    )
    assert len(negatives) == round(fraction * size)
    assert sorted([*negatives.tolist(), *distill_set.tolist()]) == list(range(size))
