from __future__ import annotations

import copy
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import oracles
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Averaging, Distillation, Stopping
from fedaux.core.compute import Compute, to_float
from fedaux.core.distillation import SCHEDULES, distill, distillation_loss, sharpen
from fedaux.core.messages import Weights
from fedaux.core.steps import Steps
from fedaux.core.weights import snapshot
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.distillation import prepared_steps
from fedaux.fast.inference import FastPredictor

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
    validate: Any = None,
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
        validate=validate,
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


def test_distillation_moves_the_student_to_the_teacher_and_leaves_its_input_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weights = snapshot(model)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    images = torch.from_numpy(RNG.integers(0, 256, (64, 1, 2, 2), dtype=np.uint8))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(64, 3))).float(), dim=1)
    section = Distillation(batch_size=16, learning_rate=0.02, epochs=10)
    after = distill(
        model, weights, images, targets, section=section, generator=seeding.generator(0, "x")
    )

    def loss(state: dict[str, torch.Tensor]) -> float:
        model.load_state_dict(state)
        predict = FastPredictor(model, Compute())
        return float(distillation_loss(predict(snapshot(model), images, batch_size=16), targets))

    assert loss(after) < loss(weights)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


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


def test_sgd_with_momentum_weight_decay_and_clipping_by_hand() -> None:
    """v = 0.9 v + g + 0.1 theta; theta = theta - 0.5 v, with |g| at most 0.05, for two steps on all
    images."""
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
    norms = []
    for clip in (None, 0.05):
        theta, velocity = weights["1.weight"].double(), torch.zeros(3, 4, dtype=torch.float64)
        for _ in range(2):
            gradient = (torch.softmax(inputs @ theta.T, dim=1) - TARGETS.double()).T @ inputs / 20
            norms.append(float(gradient.norm()))
            if clip is not None and norms[-1] > clip:
                gradient = gradient * clip / norms[-1]
            velocity = 0.9 * velocity + gradient + 0.1 * theta
            theta = theta - 0.5 * velocity
        after = distilled(model, weights, clip=clip, **values)
        assert torch.allclose(after["1.weight"].double(), theta, atol=1e-5)
    assert min(norms) > 0.06  # something was clipped


def test_weight_decay_reaches_adam() -> None:
    """Adam's first step is the learning rate times the sign of g + decay * theta."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    weights = {"1.weight": torch.full((3, 4), -2.0)}
    after = distilled(model, weights, weight_decay=100.0, batch_size=20)
    assert torch.allclose(after["1.weight"], torch.full((3, 4), -1.99), atol=1e-5)


def rates(monkeypatch: pytest.MonkeyPatch, **values: Any) -> list[float]:
    """Return the learning rate that the optimizer has at each step of a distillation."""
    seen: list[float] = []
    original = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *arguments: Any) -> Any:
        seen.append(float(self.param_groups[0]["lr"]))
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    distilled(model, snapshot(model), optimizer="sgd", learning_rate=0.1, **values)
    return seen


def test_cosine_falls_from_the_learning_rate_to_zero_over_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [0.05 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert rates(monkeypatch, schedule="cosine", steps=10) == pytest.approx(expected)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for rate in expected:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        scheduler.step()


def test_cyclic_falls_on_a_line_in_every_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rates(monkeypatch, schedule="cyclic", cycle_steps=4, lowest_learning_rate=0.02, steps=9)
    assert found == pytest.approx([0.08, 0.06, 0.04, 0.02, 0.08, 0.06, 0.04, 0.02, 0.08])


def test_constant_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates(monkeypatch, epochs=2) == [0.1] * 6


def test_rates_change_tensors_in_place() -> None:
    held = torch.tensor(0.1)
    steps = Steps(
        classifier(bias=False),
        IMAGES,
        TARGETS,
        loss=distillation_loss,
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=held, capturable=False, foreach=False
        ),
        compute=Compute(),
    )
    optimizer = steps.optimizer
    held = optimizer.param_groups[0]["lr"]
    steps.set_rate(0.25)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == 0.25
    assert set(SCHEDULES) == {"constant", "cosine", "cyclic"}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_sharpening_raises_to_a_power(temperature: float) -> None:
    expected = [oracles.sharpen_loop(row, temperature=temperature) for row in TARGETS.tolist()]
    found = sharpen(TARGETS, temperature=temperature)
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    sharper = bool((found.amax(dim=1) > TARGETS.amax(dim=1)).all())
    assert sharper == (temperature < 1)
    assert torch.equal(
        sharpen(torch.tensor([[1.0, 0.0]]), temperature=temperature), torch.tensor([[1.0, 0.0]])
    )


def test_sharpening_reaches_the_student() -> None:
    model, weights = classifier(), snapshot(classifier())
    section = Distillation(batch_size=8, learning_rate=0.01)
    sharpened = sharpen(TARGETS, temperature=0.5)
    expected = distill(
        model, weights, IMAGES, sharpened, section=section, generator=seeding.generator(0, "x")
    )
    assert equal(distilled(model, weights, sharpening=0.5), expected)
    assert not equal(distilled(model, weights), expected)
    assert sharpen(TARGETS, temperature=1.0) is TARGETS


def test_averaging_is_the_mean_of_weights_at_steps_that_count() -> None:
    model, weights = classifier(), snapshot(classifier())
    values: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.3}
    at = {
        steps: distilled(model, weights, steps=steps, **values) for steps in (4, 6, 8)
    }  # not 2: start is 3
    after = distilled(model, weights, steps=9, averaging=Averaging(start=3, every=2), **values)
    for name, _ in model.named_parameters():
        expected = torch.stack([state[name] for state in at.values()]).double().mean(dim=0)
        assert torch.allclose(after[name].double(), expected, atol=1e-6)
    assert not torch.allclose(after["4.weight"], at[8]["4.weight"], atol=1e-3)


def test_averaging_computes_statistics_anew_on_the_whole_distill_set() -> None:
    """Means over batches weigh by images: that of all images; the variance is the mean of the
    batches' variances."""
    model, weights = classifier(), snapshot(classifier())
    after = distilled(model, weights, epochs=3, averaging=Averaging(every=1))
    hidden = to_float(IMAGES).flatten(1) @ after["1.weight"].T + after["1.bias"]
    assert torch.allclose(after["2.running_mean"], hidden.mean(dim=0), atol=1e-5)
    variances = [batch.var(dim=0) * len(batch) for batch in hidden.split(8)]
    assert torch.allclose(after["2.running_var"], torch.stack(variances).sum(dim=0) / 20, atol=1e-5)
    assert int(after["2.num_batches_tracked"]) == 3
    assert model.training
    assert model[2].momentum == 0.1


def test_a_last_batch_of_one_does_not_count_for_statistics() -> None:
    model, weights = classifier(), snapshot(classifier())
    after = distilled(model, weights, images=IMAGES[:9], epochs=2, averaging=Averaging(every=1))
    hidden = to_float(IMAGES[:8]).flatten(1) @ after["1.weight"].T + after["1.bias"]
    assert torch.allclose(after["2.running_mean"], hidden.mean(dim=0), atol=1e-5)


def test_averaging_that_no_step_reaches_is_refused() -> None:
    model = classifier()
    with pytest.raises(
        ValueError, match=r"distillation\.averaging\.start = 2: the last of 3 steps .* is 2"
    ):
        distilled(model, snapshot(model), averaging=Averaging(start=2, every=2))


class Script:
    """A validation that returns given scores and keeps the weights it was shown."""

    def __init__(self, *scores: float) -> None:
        self.scores = list(scores)
        self.shown: list[Weights] = []

    def __call__(self, model: nn.Module) -> float:
        model.eval()  # as measuring does; distillation goes on in training mode
        self.shown.append(snapshot(model))
        return self.scores[len(self.shown) - 1]


def test_stopping_returns_the_best_weights_and_ends_after_patience() -> None:
    model, weights = classifier(), snapshot(classifier())
    script = Script(0.1, 0.5, 0.4, 0.5, 0.3, 0.9)
    after = distilled(
        model, weights, steps=100, stopping=Stopping(every=3, patience=9), validate=script
    )
    assert len(script.shown) == 5  # the best, at step 6, is nine steps old at step 15
    assert equal(after, script.shown[1])
    assert equal(after, distilled(model, weights, steps=6))  # measuring changed nothing
    assert not equal(script.shown[0], script.shown[1])


def test_stopping_measures_the_last_step_and_on_demand_the_first_weights() -> None:
    model, weights = classifier(), snapshot(classifier())
    script = Script(0.1, 0.2)
    after = distilled(model, weights, steps=5, stopping=Stopping(every=4), validate=script)
    assert len(script.shown) == 2
    assert equal(after, distilled(model, weights, steps=5))
    script = Script(0.9, 0.1, 0.2)
    after = distilled(
        model, weights, steps=5, stopping=Stopping(every=4, include_start=True), validate=script
    )
    assert equal(after, weights)
    impatient = Script(0.1, 0.2, 0.3, 0.4, 0.5)
    distilled(model, weights, steps=10, stopping=Stopping(every=2, patience=1), validate=impatient)
    assert len(impatient.shown) == 5  # an improvement each time


def test_scores_that_are_no_numbers_are_never_the_best() -> None:
    model, weights = classifier(), snapshot(classifier())
    script = Script(math.nan, 0.2, math.nan)
    after = distilled(model, weights, steps=3, stopping=Stopping(every=1), validate=script)
    assert equal(after, script.shown[1])


def test_stopping_without_labelled_data_is_refused() -> None:
    model = classifier()
    with pytest.raises(ValueError, match=r"data\.server_validation should be above 0"):
        distilled(model, snapshot(model), stopping=Stopping())


def test_validation_is_not_looked_at_unless_asked_for() -> None:
    model = classifier()
    script = Script()
    distilled(model, snapshot(model), validate=script)
    assert not script.shown


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="not both"):
        Distillation(averaging=Averaging(), stopping=Stopping())
    with pytest.raises(
        ValidationError, match="lowest_learning_rate should be at most learning_rate"
    ):
        Distillation(schedule="cyclic", learning_rate=0.1, lowest_learning_rate=0.2)


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

    def set_targets(self, targets: Tensor) -> None:
        self._targets.copy_(targets)


def test_steps_that_are_held_give_the_same_again_and_see_every_image_once() -> None:
    model, weights = classifier(bias=False), snapshot(classifier(bias=False))
    expected = distilled(model, weights, epochs=2, sharpening=0.5)
    held = Held(
        model,
        IMAGES,
        torch.zeros_like(TARGETS),
        loss=distillation_loss,
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=torch.tensor(7.0), foreach=False
        ),
        compute=Compute(),
    )
    section = Distillation(batch_size=8, learning_rate=0.01, epochs=2, sharpening=0.5)
    for _ in range(
        2
    ):  # the second time, optimizer, targets and learning rate are left over from the first
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
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=7.0, fused=True),
            compute=Compute(),
        )
        self._own.orders, self._own.sizes = [], []
        self.set_targets, self.set_rate = self._own.set_targets, self._own.set_rate
        self.reset, self.begin = self._own.reset, self._own.begin

    def start(self) -> None:
        self._own.model.load_state_dict(self.model.state_dict())
        self._own.start()

    def step(self, size: int) -> None:
        self._taken += 1
        self._own.step(size)

    def settle(self) -> None:
        self.settled.append(self._taken)
        self.model.load_state_dict(self._own.model.state_dict())


@pytest.mark.parametrize(
    ("values", "settled"),
    [
        ({}, [9]),
        ({"averaging": Averaging(start=1, every=3)}, [3, 6, 9, 9]),
        ({"stopping": Stopping(every=2, patience=4, include_start=True)}, [2, 4, 6, 6]),
    ],
)
def test_a_student_trained_elsewhere_is_settled_whenever_it_is_looked_at(
    values: dict[str, Any], settled: list[int]
) -> None:
    section = Distillation(**{"batch_size": 8, "learning_rate": 0.01, "epochs": 3} | values)
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
                validate=Script(
                    0.2, 0.9, 0.1, 0.1, 0.95
                ),  # at the start, and after every two steps
                steps=held,
            )
        )
    assert equal(*results)
    assert steps.settled == settled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"schedule": "cosine", "clip": 0.05},
        {
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 0.01,
            "schedule": "cyclic",
            "cycle_steps": 3,
        },
    ],
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
