from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import oracles
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Distillation
from fedaux.core.compute import Compute, to_float
from fedaux.core.distillation import distill, distillation_loss
from fedaux.core.messages import Weights
from fedaux.core.steps import Steps
from fedaux.core.weights import snapshot
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.distillation import prepared_steps

RNG = np.random.default_rng(0)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (20, 1, 2, 2), dtype=np.uint8))
TARGETS = torch.softmax(torch.from_numpy(RNG.normal(0, 2, size=(20, 3))).float(), dim=1)


def classifier(*, bias: bool = True) -> nn.Sequential:
    """Without the bias, whose gradient is 0 but for rounding, Adam does not make much of how
    numbers are rounded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(4, 5, bias=bias), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
        )


def distilled(
    model: nn.Module,
    weights: Weights,
    *,
    images: Tensor = IMAGES,
    **values: Any,
) -> Weights:
    section = Distillation(**{"batch_size": 8, "learning_rate": 0.01} | values)
    generator = seeding.generator(0, "x")
    return distill(
        model,
        weights,
        images,
        TARGETS[: len(images)],
        section=section,
        generator=generator,
    )


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


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
    """Adam's first step is the learning rate times the sign of the gradient of the KL
    divergence."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weights = snapshot(model)
    images = torch.from_numpy(RNG.integers(0, 256, (8, 1, 2, 2), dtype=np.uint8))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(8, 3))).float(), dim=1)
    section = Distillation(batch_size=8, learning_rate=0.01)
    after = distill(
        model, weights, images, targets, section=section, generator=seeding.generator(0, "x")
    )
    student = torch.softmax(
        images.float().flatten(1) / 255 @ weights["1.weight"].T + weights["1.bias"], dim=1
    )
    gradient = (student - targets).T @ (images.float().flatten(1) / 255) / 8
    assert torch.allclose(
        after["1.weight"], weights["1.weight"] - 0.01 * gradient.sign(), atol=1e-5
    )


def test_the_default_is_a_plain_loop_bit_for_bit() -> None:
    """One epoch of Adam at 5e-5 in batches of 128, the last one of a single image."""
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.integers(0, 256, (257, 1, 2, 2), dtype=np.uint8))
    targets = torch.softmax(torch.from_numpy(rng.normal(size=(257, 3))).float(), dim=1)
    model, weights = classifier(), snapshot(classifier())
    found = distill(
        model, weights, images, targets, section=Distillation(), generator=seeding.generator(0, "x")
    )

    model.load_state_dict(weights)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5, fused=True)
    order = torch.from_numpy(seeding.generator(0, "x").permutation(257))
    for batch in (order[:128], order[128:256], order[256:]):
        if len(batch) == 1:
            model[2].eval()
        loss = functional.kl_div(
            torch.log_softmax(model(images[batch].float() / 255.0), dim=1),
            targets[batch],
            reduction="batchmean",
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert equal(found, snapshot(model))
    assert not torch.equal(found["1.weight"], weights["1.weight"])


def test_epochs_and_steps_count_batches() -> None:
    """20 images in batches of 8 are 3 steps an epoch; 5 steps are an epoch and 2 batches of the
    next."""
    model, weights = classifier(), snapshot(classifier())
    assert equal(distilled(model, weights, epochs=2), distilled(model, weights, steps=6))
    order = seeding.generator(0, "x")
    model.load_state_dict(weights)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    batches = [
        batch for _ in range(2) for batch in torch.from_numpy(order.permutation(20)).split(8)
    ]
    for batch in batches[:5]:
        optimizer.zero_grad()
        distillation_loss(model(to_float(IMAGES[batch])), TARGETS[batch]).backward()
        optimizer.step()
    expected = snapshot(model)
    assert equal(distilled(model, weights, steps=5), expected)


def test_sgd_with_momentum_and_weight_decay_by_hand() -> None:
    """v = 0.9 v + g + 0.1 theta; theta = theta - 0.5 v, for two steps on all images."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    weights = {"1.weight": torch.from_numpy(np.random.default_rng(1).normal(size=(3, 4))).float()}
    values: dict[str, Any] = {
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.1,
    }
    values |= {"epochs": 2, "batch_size": 20}
    inputs = to_float(IMAGES).flatten(1).double()
    theta, velocity = weights["1.weight"].double(), torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(2):
        gradient = (torch.softmax(inputs @ theta.T, dim=1) - TARGETS.double()).T @ inputs / 20
        velocity = 0.9 * velocity + gradient + 0.1 * theta
        theta = theta - 0.5 * velocity
    after = distilled(model, weights, **values)
    assert torch.allclose(after["1.weight"].double(), theta, atol=1e-5)


def test_weight_decay_reaches_adam() -> None:
    """Adam's first step is the learning rate times the sign of g + decay * theta."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    weights = {"1.weight": torch.full((3, 4), -2.0)}
    after = distilled(model, weights, weight_decay=100.0, batch_size=20)
    assert torch.allclose(after["1.weight"], torch.full((3, 4), -1.99), atol=1e-5)


class Held(Steps):
    """Eager steps that are held from one distillation to the next, as captured ones are."""

    orders: list[Tensor]
    sizes: list[int]

    def begin(self, rows: Tensor) -> None:
        self.orders.append(rows)
        super().begin(rows)

    def step(self, size: int) -> None:
        self.sizes.append(size)
        super().step(size)


def test_steps_that_are_held_give_the_same_again_and_see_every_image_once() -> None:
    model, weights = classifier(bias=False), snapshot(classifier(bias=False))
    expected = distilled(model, weights, epochs=2)
    held = Held(
        model,
        IMAGES,
        torch.zeros_like(TARGETS),
        loss=distillation_loss,
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=torch.tensor(0.01), foreach=False
        ),
        compute=Compute(),
    )
    section = Distillation(batch_size=8, learning_rate=0.01, epochs=2)
    for _ in range(2):  # the second time, optimizer and targets are left over from the first
        held.orders, held.sizes = [], []
        after = distill(
            model,
            weights,
            IMAGES,
            TARGETS,
            section=section,
            generator=seeding.generator(0, "x"),
            steps=cast(CapturedSteps, held),
        )
        assert all(torch.allclose(after[name], expected[name], atol=1e-5) for name in expected)
        assert held.sizes == [8, 8, 4] * 2
        assert [sorted(rows.tolist()) for rows in held.orders] == [list(range(20))] * 2
    other = classifier(bias=False)
    with pytest.raises(AssertionError, match="captured with"):
        distill(
            other,
            weights,
            IMAGES,
            TARGETS,
            section=section,
            generator=seeding.generator(0, "x"),
            steps=cast(CapturedSteps, held),
        )


class Elsewhere:
    """Steps that train another model, which the student hears of when they are settled, as kernels
    do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.settled: list[int] = []
        self._taken = 0
        self._own = Held(
            copy.deepcopy(model),
            IMAGES,
            torch.zeros_like(TARGETS),
            loss=distillation_loss,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
            compute=Compute(),
        )
        self._own.orders, self._own.sizes = [], []
        self.set_targets, self.reset, self.begin = (
            self._own.set_targets,
            self._own.reset,
            self._own.begin,
        )

    def start(self) -> None:
        self._own.model.load_state_dict(self.model.state_dict())
        self._own.start()

    def step(self, size: int) -> None:
        self._taken += 1
        self._own.step(size)

    def settle(self) -> None:
        self.settled.append(self._taken)
        self.model.load_state_dict(self._own.model.state_dict())


def test_a_student_trained_elsewhere_is_settled_at_the_end() -> None:
    section = Distillation(batch_size=8, learning_rate=0.01, epochs=3)
    results = []
    steps = Elsewhere(model := classifier(bias=False))
    for held in (None, steps):
        results.append(
            distill(
                model,
                snapshot(classifier(bias=False)),
                IMAGES,
                TARGETS,
                section=section,
                generator=seeding.generator(0, "x"),
                steps=held,
            )
        )
    assert equal(*results)
    assert steps.settled == [9]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "values", [{}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}]
)
def test_captured_steps_equal_eager_ones(values: dict[str, Any]) -> None:
    section = Distillation(**{"batch_size": 8, "learning_rate": 0.01, "epochs": 5} | values)
    model = classifier(bias=False).cuda()
    weights = snapshot(model)
    images, targets = IMAGES.cuda(), TARGETS.cuda()
    compute = Compute(torch.device("cuda"))
    expected = distill(
        model, weights, images, targets, section=section, generator=seeding.generator(0, "x")
    )
    steps = prepared_steps(
        model, images, targets, section=section, compute=compute, key="classifier"
    )
    assert steps is not None
    for _ in range(2):
        generator = seeding.generator(0, "x")
        after = distill(
            model,
            weights,
            images,
            targets,
            section=section,
            generator=generator,
            compute=compute,
            steps=steps,
        )
        assert all(torch.allclose(after[name], expected[name], atol=1e-4) for name in expected)
    assert not torch.allclose(expected["1.weight"], weights["1.weight"], atol=1e-2)
