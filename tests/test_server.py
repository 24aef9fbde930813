from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from torch import nn

from fedaux import seeding
from fedaux.config import Distillation
from fedaux.server import average, distill, distillation_loss, evaluate, predict, snapshot

RNG = np.random.default_rng(0)


def test_average_is_weighted_by_examples() -> None:
    values = RNG.normal(size=(3, 4))
    sizes = [10, 1, 5]
    averaged = average([{"w": torch.from_numpy(row).float()} for row in values], sizes=sizes)
    assert averaged["w"].tolist() == pytest.approx(oracles.weighted_average_loop(values.tolist(), sizes), abs=1e-6)


def test_average_of_one_is_that_one_and_counters_stay_whole() -> None:
    weights = {"w": torch.rand(3), "count": torch.tensor(7)}
    averaged = average([weights], sizes=[3])
    assert torch.equal(averaged["w"], weights["w"])
    other = {"w": torch.rand(3), "count": torch.tensor(9)}
    assert average([weights, other], sizes=[3, 1])["count"].dtype == torch.int64
    assert int(average([weights, other], sizes=[3, 1])["count"]) == 9


def test_distillation_loss_is_kl_from_teacher_to_student() -> None:
    logits = torch.from_numpy(RNG.normal(size=(6, 3))).float()
    targets = torch.softmax(torch.from_numpy(RNG.normal(0, 3, size=(6, 3))).float(), dim=1)
    forward = oracles.kl_divergence_loop(targets.tolist(), logits.tolist())
    backward = oracles.kl_divergence_loop(torch.softmax(logits, 1).tolist(), targets.log().tolist())
    assert float(distillation_loss(logits, targets)) == pytest.approx(forward, rel=1e-5)
    assert abs(forward - backward) > 0.1  # the two directions differ here, so the test can tell


def test_distillation_loss_has_the_right_gradient_and_vanishes_at_the_teacher() -> None:
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(4, 3))), dim=1)
    logits = torch.from_numpy(RNG.normal(size=(4, 3))).requires_grad_()
    assert torch.autograd.gradcheck(lambda value: distillation_loss(value, targets), (logits,))
    assert float(distillation_loss(targets.log(), targets)) == pytest.approx(0.0, abs=1e-12)


def test_one_distillation_step_is_equation_1() -> None:
    """Adam's first step is the learning rate times the sign of the gradient of the KL divergence."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weights = snapshot(model)
    images = torch.from_numpy(RNG.integers(0, 256, (8, 1, 2, 2), dtype=np.uint8))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(8, 3))).float(), dim=1)
    section = Distillation(batch_size=8, learning_rate=0.01)
    after = distill(model, weights, images, targets, section=section, generator=seeding.generator(0, "x"))
    student = torch.softmax(images.float().flatten(1) / 255 @ weights["1.weight"].T + weights["1.bias"], dim=1)
    gradient = (student - targets).T @ (images.float().flatten(1) / 255) / 8
    assert torch.allclose(after["1.weight"], weights["1.weight"] - 0.01 * gradient.sign(), atol=1e-5)


def test_distillation_moves_the_student_to_the_teacher_and_leaves_its_input_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weights = snapshot(model)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    images = torch.from_numpy(RNG.integers(0, 256, (64, 1, 2, 2), dtype=np.uint8))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(64, 3))).float(), dim=1)
    section = Distillation(batch_size=16, learning_rate=0.02, epochs=10)
    after = distill(model, weights, images, targets, section=section, generator=seeding.generator(0, "x"))

    def loss(state: dict[str, torch.Tensor]) -> float:
        model.load_state_dict(state)
        return float(distillation_loss(predict(model, images, batch_size=16), targets))

    assert loss(after) < loss(weights)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_prediction_is_in_evaluation_mode_and_restores_training_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    images = torch.from_numpy(RNG.integers(0, 256, (7, 1, 2, 2), dtype=np.uint8))
    buffers = snapshot(model)
    assert torch.equal(predict(model, images, batch_size=3), predict(model, images, batch_size=7))
    assert model.training
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.state_dict().items())


def test_evaluation_counts_and_averages() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    accuracy, loss = evaluate(logits, labels)
    assert accuracy == 0.75
    right, wrong = np.log(1 + np.exp(-2)), np.log(1 + np.exp(2))
    assert loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)
