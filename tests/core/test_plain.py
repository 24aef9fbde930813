"""The readable algorithm against the equations as loops, and against the golden run."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import written_out as plain
from helpers import oracles
from helpers.experiments import tiny
from helpers.federations import federation, h0_of, written_out
from helpers.paths import GOLDEN
from torch import Tensor, nn
from written_out import parts as plain_parts

from fedaux import seeding
from fedaux.config import Bayesian, Distillation, ExperimentFields, Local
from fedaux.core.algorithms import METHODS

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(3, 6))
SIZES = [10, 1, 5]
LOGITS = 3 * RNG.normal(size=(3, 7, 4))
SCORES = RNG.uniform(0.01, 2.0, size=(3, 7))
SHARES = [1.0, 0.5, 0.125]


def weights_of(row: Any) -> plain_parts.Weights:
    """A linear classifier of two features into three classes."""
    return {"weight": torch.tensor(np.asarray(row), dtype=torch.float32).reshape(3, 2)}


WEIGHTS = [weights_of(row) for row in VALUES]


def classifier() -> nn.Linear:
    with seeding.initialisation(0, part="test"):
        return nn.Linear(2, 3)


def problem(size: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(1)
    inputs = torch.from_numpy(generator.normal(size=(size, 2))).float()
    return inputs, torch.from_numpy(generator.integers(0, 3, size))


def test_average_is_the_loop_and_counters_stay_whole() -> None:
    counted = [
        {**own, "count": torch.tensor(number)}
        for own, number in zip(WEIGHTS, (7, 9, 8), strict=True)
    ]
    averaged = plain_parts.average(counted, sizes=SIZES)
    expected = oracles.weighted_average_loop(VALUES.tolist(), SIZES)
    assert averaged["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert averaged["count"].dtype == torch.int64
    assert int(averaged["count"]) == 9


def soft_labels(
    scores: np.ndarray[Any, Any] | None, *, shares: list[float], of_probabilities: bool
) -> list[list[float]]:
    log_scores = None if scores is None else torch.from_numpy(np.log(scores))
    weights = plain_parts.teacher_weights(torch.tensor(shares), log_scores=log_scores)
    labels = plain_parts.soft_labels(
        torch.from_numpy(LOGITS), weights, of_probabilities=of_probabilities
    )
    rows: list[list[float]] = labels.tolist()
    return rows


def test_the_mean_of_logits_is_equation_2() -> None:
    labels = soft_labels(None, shares=[1.0, 1.0, 1.0], of_probabilities=False)
    assert np.allclose(labels, oracles.mean_soft_labels_loop(LOGITS.tolist()), atol=1e-6)


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0], SHARES])
def test_certainty_weights_are_equation_3(shares: list[float]) -> None:
    weighted = (np.array(shares)[:, None] * SCORES).tolist()
    logits = soft_labels(SCORES, shares=shares, of_probabilities=False)
    assert np.allclose(
        logits, oracles.weighted_soft_labels_loop(LOGITS.tolist(), weighted), atol=1e-6
    )
    probabilities = soft_labels(SCORES, shares=shares, of_probabilities=True)
    assert np.allclose(
        probabilities, oracles.mixed_probabilities_loop(LOGITS.tolist(), weighted), atol=1e-6
    )


def test_shares_weigh_probabilities() -> None:
    labels = soft_labels(None, shares=SHARES, of_probabilities=True)
    assert np.allclose(labels, oracles.mean_probabilities_loop(LOGITS.tolist(), SHARES), atol=1e-6)


def test_certainty_weights_survive_scores_that_underflow() -> None:
    weights = plain_parts.teacher_weights(
        torch.ones(2), log_scores=torch.tensor([[-2000.0], [-2001.0]])
    )
    assert weights.flatten().tolist() == pytest.approx(oracles.softmax_loop([1.0, 0.0]), abs=1e-6)


def test_the_distillation_loss_is_the_divergence() -> None:
    targets = [oracles.softmax_loop(row) for row in LOGITS[0].tolist()]
    targets[0] = [0.0, 1.0, 0.0, 0.0]
    loss = plain_parts.distillation_loss(
        torch.from_numpy(LOGITS[1]), torch.tensor(targets, dtype=torch.float64)
    )
    assert float(loss) == pytest.approx(
        oracles.kl_divergence_loop(targets, LOGITS[1].tolist()), rel=1e-9
    )


def test_gaussian_samples_have_the_moments_of_the_clients() -> None:
    mean, variance = oracles.moments_loop(VALUES.tolist(), SIZES)
    section = Bayesian(samples=2, scale=0.3)
    generator = seeding.generator(0, "bayesian")
    drawn = list(
        plain_parts.sample_models(WEIGHTS, sizes=SIZES, section=section, generator=generator)
    )
    source = torch.Generator().manual_seed(int(seeding.generator(0, "bayesian").integers(2**63)))
    assert len(drawn) == 2
    for sample in drawn:
        noise = torch.randn(3, 2, generator=source).flatten().tolist()
        expected = [m + (0.3 * v) ** 0.5 * z for m, v, z in zip(mean, variance, noise, strict=True)]
        assert sample["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_samples_keep_the_average_of_statistics() -> None:
    weights = [
        {
            "weight": torch.rand(2),
            "norm.running_var": torch.rand(2),
            "norm.num_batches_tracked": torch.tensor(i),
        }
        for i in range(3)
    ]
    generator = seeding.generator(0, "bayesian")
    (sample,) = plain_parts.sample_models(
        weights, sizes=SIZES, section=Bayesian(samples=1), generator=generator
    )
    mean = plain_parts.average(weights, sizes=SIZES)
    assert torch.equal(sample["norm.running_var"], mean["norm.running_var"])
    assert int(sample["norm.num_batches_tracked"]) == 2
    assert not torch.equal(sample["weight"], mean["weight"])


def flat(weights: Mapping[str, Tensor]) -> list[float]:
    values: list[float] = torch.cat(
        [tensor.double().flatten() for tensor in weights.values()]
    ).tolist()
    return values


def test_the_proximal_term_is_half_the_squared_distance() -> None:
    model = classifier()
    anchors = {name: tensor + 1.5 for name, tensor in plain_parts.snapshot(model).items()}
    term = 0.7 / 2 * float(plain_parts.squared_distance(model, anchors).detach())
    assert term == pytest.approx(
        oracles.proximal_loop(flat(plain_parts.snapshot(model)), flat(anchors), strength=0.7),
        rel=1e-6,
    )


@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_local_training_is_gradient_descent_on_loss_and_proximal_term(proximal: float) -> None:
    """Gradients by central differences of the loss as loops, two epochs of three batches."""
    model, (inputs, labels) = classifier(), problem(10)
    start = plain_parts.snapshot(model)
    anchors = flat(start)

    def loss(values: list[float], rows: Any) -> float:
        total = 0.0
        for row in rows:
            x = inputs[row].double().tolist()
            logits = [
                values[2 * c] * x[0] + values[2 * c + 1] * x[1] + values[6 + c] for c in range(3)
            ]
            total -= np.log(oracles.softmax_loop(logits)[int(labels[row])])
        return total / len(rows) + oracles.proximal_loop(values, anchors, strength=proximal)

    values, generator = list(anchors), seeding.generator(0, "local")
    for _ in range(2):
        order = generator.permutation(10)
        for rows in (order[:4], order[4:8], order[8:]):
            gradient = []
            for index in range(len(values)):
                up, down = list(values), list(values)
                up[index], down[index] = up[index] + 1e-5, down[index] - 1e-5
                gradient.append((loss(up, rows) - loss(down, rows)) / 2e-5)
            values = [value - 0.5 * slope for value, slope in zip(values, gradient, strict=True)]
    section = Local(optimizer="sgd", learning_rate=0.5, batch_size=4, epochs=2)
    trained = plain_parts.train_client(
        model,
        start,
        inputs,
        labels,
        section=section,
        proximal=proximal,
        generator=seeding.generator(0, "local"),
    )
    assert flat(trained) == pytest.approx(values, abs=1e-5)


def test_distillation_fits_the_teacher_and_leaves_the_given_weights_alone() -> None:
    model, (inputs, _) = classifier(), problem(64)
    start = plain_parts.snapshot(model)
    kept = {name: tensor.clone() for name, tensor in start.items()}
    targets = torch.softmax(inputs @ WEIGHTS[0]["weight"].T, dim=1)
    section = Distillation(learning_rate=0.05, epochs=60, batch_size=16)
    learned = plain_parts.distill(
        model, start, inputs, targets, section=section, generator=seeding.generator(0, "x")
    )

    def divergence(weights: plain_parts.Weights) -> float:
        return oracles.kl_divergence_loop(
            targets.tolist(), plain_parts.predict(model, weights, inputs).tolist()
        )

    assert divergence(learned) < 0.01 * divergence(start)
    assert all(torch.equal(start[name], tensor) for name, tensor in kept.items())


@pytest.mark.quickly("fedavg", "fedaux+m")
@pytest.mark.parametrize(
    "method", dict.fromkeys(row["method"] for row in json.loads(GOLDEN.read_text()))
)
def test_whole_runs_have_the_golden_figures(method: str, tmp_path: Path) -> None:
    golden = [row for row in json.loads(GOLDEN.read_text()) if row["method"] == method]
    server, state, _, _ = federation(
        tmp_path, method=method, participation_rate=0.75, split={"alpha": 0.3}
    )
    task, _, _ = written_out(server, state)
    last, rows = plain.run(task, extractors=h0_of(server, state))
    assert last.round == len(rows) == len(golden) == 3
    for row, expected in zip(rows, golden, strict=True):
        assert row["clients"] == expected["clients_answered"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert row["accuracy"] == pytest.approx(
            expected["accuracy"], abs=3 / 359
        )  # three test images


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"local": {"privacy": {}}}, "local.privacy"),
        ({"distillation": {"steps": 3}}, "distillation.steps"),
    ],
)
def test_settings_that_are_left_out_are_refused(changes: dict[str, Any], name: str) -> None:
    plain.require_covered(tiny(method=list(METHODS), mode="full"))
    with pytest.raises(ValueError, match=rf"{name}: not part of the algorithm written out"):
        plain.require_covered(ExperimentFields(**changes))


def test_it_imports_nothing_fast() -> None:
    trees = [ast.parse(inspect.getsource(module)) for module in (plain, plain_parts)]
    imported = {
        node.module
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    own = {name for name in imported if name.startswith(("fedaux", "written_out"))}
    assert own == {
        "fedaux",
        "fedaux.privacy.classes",
        "fedaux.privacy.heads",
        "fedaux.privacy.mechanisms",
        "fedaux.config",
        "written_out.methods",
        "fedaux.core.objectives",
        "written_out.parts",
        "fedaux.models",
    }
