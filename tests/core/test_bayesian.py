from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import oracles
from helpers.federations import federation
from torch import Tensor, nn

from fedaux.config import Bayesian
from fedaux.core.algorithms.fedbe import (
    FedBE,
    draw_gaussian,
    drawn_members,
    variance,
)
from fedaux.core.messages import Member, Weights
from fedaux.core.round_log import RoundLog
from fedaux.core.server import NO_CLIENT, Server
from fedaux.core.task import State
from fedaux.core.weights import average, snapshot
from fedaux.running.run import NullCallback

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


def members(prototypes: Sequence[str] = ("a", "a", "a")) -> list[Member]:
    return [Member(i, prototypes[i], SIZES[i], WEIGHTS[i]) for i in range(3)]


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


def test_statistics_and_counters_are_averaged_not_drawn() -> None:
    states = []
    for seed in range(3):
        layer = nn.Sequential(nn.BatchNorm1d(4))
        layer(torch.from_numpy(generator(seed).normal(size=(5, 4))).float())
        state = snapshot(layer)
        state["0.weight"] += seed
        state["0.num_batches_tracked"] += seed
        states.append(state)
    mean = average(states, sizes=SIZES)
    for sample in draw_gaussian(states, sizes=SIZES, section=section(), generator=generator()):
        assert sample.keys() == mean.keys()
        for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
            assert torch.equal(sample[name], mean[name])
        assert not torch.allclose(sample["0.weight"], mean["0.weight"], atol=1e-3)
        nn.Sequential(nn.BatchNorm1d(4)).load_state_dict(sample)


def test_drawing_leaves_the_clients_weights_alone() -> None:
    before = [tensor["weight"].clone() for tensor in WEIGHTS]
    list(draw_gaussian(WEIGHTS, sizes=SIZES, section=section(), generator=generator()))
    assert all(torch.equal(old, new["weight"]) for old, new in zip(before, WEIGHTS, strict=True))


def test_the_average_is_asked_before_the_drawn_models() -> None:
    for scale in (0.0, 0.1):
        first, *drawn = drawn_members(
            members(), section=section(scale=scale, samples=2), generator=generator()
        )
        mean = average(WEIGHTS, sizes=SIZES)["weight"]
        assert torch.equal(first.weights["weight"], mean)
        assert {one.num_examples for one in (first, *drawn)} == {sum(SIZES)}
        assert {one.client for one in (first, *drawn)} == {NO_CLIENT}
        assert len(drawn) == 2
        for one in drawn:
            assert torch.allclose(one.weights["weight"], mean, atol=1e-3) == (scale == 0)


@pytest.mark.parametrize("include", [True, False])
def test_soft_labels_are_the_mean_over_clients_and_drawn_models(
    include: bool, tmp_path: Path
) -> None:
    """Each prototype has its own distribution; remembered clients count by their share and are
    not drawn from."""
    prototypes = [{"name": name, "model": "mlp", "options": {"width": 4}} for name in ("a", "b")]
    bayesian = {"samples": 2, "scale": 0.0, "include_clients": include}
    server, state, _, _ = federation(
        tmp_path, method="fedbe", prototypes=prototypes, bayesian=bayesian
    )
    trained = server.predict(server.train(server_state := state_of_round(server, state)))
    remembered = replace(trained[1], weights={}, share=0.5)
    asked = [trained[0], remembered, *trained[2:]]
    method = server.task.method
    assert isinstance(method, FedBE)
    found = method.soft_labels(server, server_state, asked)
    logits, shares = [], []
    for name in ("a", "b"):
        own = [one for one in asked if one.prototype == name]
        able = [one for one in own if one.weights]
        mean = average([one.weights for one in able], sizes=[one.num_examples for one in able])
        logits.append(server.server_models[name].logits(mean).tolist())
        shares.append(3.0)
        for one in own if include else ():
            assert one.logits is not None
            logits.append(one.logits.tolist())
            shares.append(one.share)
    expected = oracles.mean_probabilities_loop(logits, shares)
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-5)


def state_of_round(server: Server, state: State) -> State:
    """Open the first round, so that verbs can be called one by one."""
    server.log = RoundLog(server.task, 1, NullCallback())
    server._select(state)
    return state
