from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import oracles
from torch import Tensor, nn

from fedaux.config import Bayesian
from fedaux.core.bayesian import draw, draw_dirichlet, draw_gaussian, variance
from fedaux.core.messages import Weights
from fedaux.core.teachers import (
    NO_CLIENT,
    Ensemble,
    Member,
    bayesian_teacher,
    probabilities_teacher,
)
from fedaux.core.weights import average, snapshot

VALUES = np.random.default_rng(0).normal(size=(3, 6))
SIZES = [10, 1, 5]
IMAGES = torch.from_numpy(np.random.default_rng(1).normal(size=(7, 2))).float()


def section(**values: Any) -> Bayesian:
    return Bayesian(**values)


def weights_of(row: Sequence[float]) -> Weights:
    """A linear classifier of two features into three classes: 6 numbers."""
    tensor = torch.tensor(np.asarray(row), dtype=torch.float32)
    return {"weight": tensor.reshape(3, 2)}


WEIGHTS = [weights_of(row) for row in VALUES]


def predict(member: Member) -> Tensor:
    return IMAGES @ member.weights["weight"].T


def ensemble(
    seed: int = 0,
    *,
    order: Sequence[int] = (0, 1, 2),
    weights: Sequence[Weights] = WEIGHTS,
    prototypes: Sequence[str] = ("a", "a", "a"),
    shares: Sequence[float] = (1.0, 1.0, 1.0),
    predict: Callable[[Member], Tensor] = predict,
    **values: Any,
) -> Ensemble:
    members = [Member(i, prototypes[i], SIZES[i], weights[i], share=shares[i]) for i in order]

    def no_scores(ids: Sequence[int]) -> Tensor:
        raise AssertionError("a Bayesian teacher looks at no scores")

    return Ensemble(members, predict, no_scores, np.random.default_rng(seed), section(**values))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise_of(seed: int, samples: int) -> Tensor:
    """The draws that `draw_gaussian` makes from a generator with this seed."""
    source = torch.Generator().manual_seed(int(generator(seed).integers(2**63)))
    return torch.stack([torch.randn(3, 2, generator=source) for _ in range(samples)])


def test_variance_is_weighted_by_examples() -> None:
    mean, expected = oracles.moments_loop(VALUES.tolist(), SIZES)
    found = average(WEIGHTS, sizes=SIZES)
    assert found["weight"].flatten().tolist() == pytest.approx(mean, abs=1e-6)
    spread = variance(WEIGHTS, sizes=SIZES, mean=found)["weight"].flatten().tolist()
    assert spread == pytest.approx(expected, abs=1e-6)
    assert spread != pytest.approx(np.var(VALUES, axis=0), abs=1e-2)  # sizes matter


def test_gaussian_samples_are_mean_and_scaled_noise() -> None:
    mean, spread = oracles.moments_loop(VALUES.tolist(), SIZES)
    drawn = list(
        draw_gaussian(
            WEIGHTS, sizes=SIZES, section=section(samples=4, scale=0.3), generator=generator()
        )
    )
    assert len(drawn) == 4
    for sample, noise in zip(drawn, noise_of(0, 4).flatten(1).tolist(), strict=True):
        expected = [m + (0.3 * v) ** 0.5 * n for m, v, n in zip(mean, spread, noise, strict=True)]
        assert sample["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_many_gaussian_samples_have_the_moments_of_the_clients() -> None:
    mean, spread = oracles.moments_loop(VALUES.tolist(), SIZES)
    drawn = draw_gaussian(
        WEIGHTS, sizes=SIZES, section=section(samples=20_000), generator=generator()
    )
    rows = torch.stack([sample["weight"].flatten() for sample in drawn])
    assert rows.mean(dim=0).tolist() == pytest.approx(mean, abs=0.05)
    assert rows.var(dim=0).tolist() == pytest.approx(spread, rel=0.05)


def test_dirichlet_samples_are_convex_combinations() -> None:
    values = section(samples=3, distribution="dirichlet", concentration=0.7)
    drawn = list(draw_dirichlet(WEIGHTS, sizes=SIZES, section=values, generator=generator()))
    same = generator()
    for sample in drawn:
        shares = same.dirichlet([0.7, 0.7, 0.7]).tolist()
        expected = oracles.convex_combination_loop(VALUES.tolist(), SIZES, shares)
        assert sample["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-6)
        assert np.all(sample["weight"].flatten().numpy() <= VALUES.max(axis=0) + 1e-6)


def test_high_concentration_gives_the_average() -> None:
    values = section(samples=2, distribution="dirichlet", concentration=1e8)
    mean = average(WEIGHTS, sizes=SIZES)["weight"]
    for sample in draw(WEIGHTS, sizes=SIZES, section=values, generator=generator()):
        assert torch.allclose(sample["weight"], mean, atol=1e-3)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_statistics_and_counters_are_averaged_not_drawn(distribution: str) -> None:
    states = []
    for seed in range(3):
        layer = nn.Sequential(nn.BatchNorm1d(4))
        layer(torch.from_numpy(generator(seed).normal(size=(5, 4))).float())
        state = snapshot(layer)
        state["0.weight"] += seed
        state["0.num_batches_tracked"] += seed
        states.append(state)
    mean = average(states, sizes=SIZES)
    for sample in draw(
        states, sizes=SIZES, section=section(distribution=distribution), generator=generator()
    ):
        assert sample.keys() == mean.keys()
        for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
            assert torch.equal(sample[name], mean[name])
        assert not torch.allclose(sample["0.weight"], mean["0.weight"], atol=1e-3)
        nn.Sequential(nn.BatchNorm1d(4)).load_state_dict(sample)


def test_drawing_leaves_the_clients_weights_alone() -> None:
    before = [tensor["weight"].clone() for tensor in WEIGHTS]
    for distribution in ("gaussian", "dirichlet"):
        list(
            draw(
                WEIGHTS,
                sizes=SIZES,
                section=section(distribution=distribution),
                generator=generator(),
            )
        )
    assert all(torch.equal(old, new["weight"]) for old, new in zip(before, WEIGHTS, strict=True))


def test_bayesian_teacher_averages_samples_average_and_clients() -> None:
    mean, spread = oracles.moments_loop(VALUES.tolist(), SIZES)
    rows = [*VALUES.tolist(), mean]
    for noise in noise_of(3, 5).flatten(1).tolist():
        rows.append([m + v**0.5 * n for m, v, n in zip(mean, spread, noise, strict=True)])
    logits = [(IMAGES.double().numpy() @ np.reshape(row, (3, 2)).T).tolist() for row in rows]
    expected = oracles.mean_probabilities_loop(logits, [1.0] * 9)
    assert bayesian_teacher(ensemble(3, samples=5)).numpy() == pytest.approx(
        np.array(expected), abs=1e-5
    )
    without = oracles.mean_probabilities_loop(logits[3:], [1.0] * 6)
    labels = bayesian_teacher(ensemble(3, samples=5, include_clients=False))
    assert labels.numpy() == pytest.approx(np.array(without), abs=1e-5)
    assert np.abs(np.array(without) - np.array(expected)).max() > 1e-3


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_equal_clients_give_the_mean_of_their_probabilities(distribution: str) -> None:
    alike = ensemble(weights=[WEIGHTS[1]] * 3, distribution=distribution)
    assert torch.allclose(bayesian_teacher(alike), probabilities_teacher(alike), atol=1e-6)
    differing = ensemble(distribution=distribution)
    assert not torch.allclose(
        bayesian_teacher(differing), probabilities_teacher(differing), atol=1e-2
    )


def test_scale_zero_draws_the_mean_and_other_scales_something_else() -> None:
    drawn: list[Member] = []

    def record(member: Member) -> Tensor:
        if member.client == NO_CLIENT:
            drawn.append(member)
        return predict(member)

    bayesian_teacher(ensemble(predict=record, scale=0.0, samples=2))
    mean = average(WEIGHTS, sizes=SIZES)["weight"]
    assert len(drawn) == 3
    assert all(torch.equal(member.weights["weight"], mean) for member in drawn)
    assert {member.num_examples for member in drawn} == {sum(SIZES)}
    drawn.clear()
    bayesian_teacher(ensemble(predict=record, scale=0.1, samples=2))
    assert torch.equal(drawn[0].weights["weight"], mean)
    assert not torch.allclose(drawn[1].weights["weight"], mean, atol=1e-3)
    assert not torch.allclose(drawn[1].weights["weight"], drawn[2].weights["weight"], atol=1e-3)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_samples_depend_on_the_generator_and_not_on_the_order_of_members(distribution: str) -> None:
    labels = bayesian_teacher(ensemble(0, distribution=distribution))
    assert torch.equal(
        labels, bayesian_teacher(ensemble(0, distribution=distribution, order=[2, 0, 1]))
    )
    assert not torch.allclose(
        labels, bayesian_teacher(ensemble(1, distribution=distribution)), atol=1e-3
    )


def test_each_prototype_has_a_distribution_of_its_own() -> None:
    seen: list[Member] = []

    def record(member: Member) -> Tensor:
        seen.append(member)
        return predict(member)

    bayesian_teacher(ensemble(prototypes=["b", "a", "b"], predict=record, samples=2, scale=0.0))
    assert [(member.client, member.prototype) for member in seen] == [
        *((0, "b"), (1, "a"), (2, "b")),
        *((NO_CLIENT, "a"),) * 3,
        *((NO_CLIENT, "b"),) * 3,
    ]
    assert torch.equal(seen[4].weights["weight"], WEIGHTS[1]["weight"])  # alone in its prototype
    mean = average([WEIGHTS[0], WEIGHTS[2]], sizes=[10, 5])["weight"]
    assert torch.equal(seen[7].weights["weight"], mean)


def test_remembered_clients_count_by_their_share_and_are_not_drawn_from() -> None:
    remembered = torch.from_numpy(generator(9).normal(size=(7, 3))).float()

    def recall(member: Member) -> Tensor:
        return predict(member) if member.weights else remembered

    labels = bayesian_teacher(
        ensemble(
            weights=[WEIGHTS[0], {}, WEIGHTS[2]],
            shares=[1.0, 0.5, 1.0],
            predict=recall,
            samples=2,
            scale=0.0,
        )
    )
    mean = average([WEIGHTS[0], WEIGHTS[2]], sizes=[10, 5])
    logits = [predict(Member(0, "a", 1, weights)) for weights in (WEIGHTS[0], WEIGHTS[2], mean)] + [
        remembered
    ]
    expected = oracles.mean_probabilities_loop(
        [row.tolist() for row in logits], [1.0, 1.0, 3.0, 0.5]
    )
    assert labels.numpy() == pytest.approx(np.array(expected), abs=1e-5)


def test_drawing_without_a_generator_is_refused() -> None:
    drawing = ensemble()
    with pytest.raises(ValueError, match=r"Ensemble\.generator = None"):
        bayesian_teacher(Ensemble(drawing.members, drawing.predict, drawing.log_scores))
