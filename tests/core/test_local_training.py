from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute
from fedaux.core.local_training import train_locally
from fedaux.core.steps import adam
from fedaux.models import MODELS


def linear() -> nn.Module:
    with seeding.initialisation(0, part="test"):
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def problem(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.integers(0, 256, (size, 1, 2, 2), dtype=np.uint8))
    return images, torch.from_numpy(generator.integers(0, 3, size))


def train(model: nn.Module, size: int, *, proximal: float = 0.0, **settings: Any) -> float:
    images, labels = problem(size)
    defaults: dict[str, Any] = {
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "batch_size": 4,
        "epochs": 2,
    }
    section = Local(**(defaults | settings))
    context = TrainContext(model, images, labels, section, proximal, Compute(), key="test")
    job = ClientJob(0, torch.arange(size), seeding.generator(0, "local"), state={})
    return train_locally(context, job).loss


@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_local_training_equals_plain_gradient_descent(proximal: float) -> None:
    """Softmax regression by hand: gradient of cross-entropy is (p - y) x, that of the proximal term
    mu (w - w0)."""
    model = linear()
    layer = model[1]  # type: ignore[index]
    weight, bias = (
        layer.weight.detach().double().numpy().copy(),
        layer.bias.detach().double().numpy().copy(),
    )
    start_weight, start_bias = weight.copy(), bias.copy()
    images, labels = problem(10)
    inputs, targets = images.double().flatten(1).numpy() / 255, np.eye(3)[labels.numpy()]
    generator = seeding.generator(0, "local")
    losses = []
    for _ in range(2):
        order = generator.permutation(10)
        for batch in (order[:4], order[4:8], order[8:]):
            logits = inputs[batch] @ weight.T + bias
            exponentials = np.exp(logits)
            probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
            losses += [-np.log(probabilities[targets[batch] == 1])]
            error = (probabilities - targets[batch]) / len(batch)
            weight_step = error.T @ inputs[batch] + proximal * (weight - start_weight)
            bias_step = error.sum(axis=0) + proximal * (bias - start_bias)
            weight, bias = weight - 0.5 * weight_step, bias - 0.5 * bias_step
    loss = train(model, 10, proximal=proximal)
    assert layer.weight.detach().numpy() == pytest.approx(weight, abs=1e-5)
    assert layer.bias.detach().numpy() == pytest.approx(bias, abs=1e-5)
    assert loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)


@pytest.mark.parametrize("size", [1, 5])
def test_batches_of_one_work_with_batch_normalisation(size: int) -> None:
    with seeding.initialisation(0, part="test"):
        model = MODELS["resnet8"]((1, 2, 2), 3)
    loss = train(model, size, optimizer="adam", learning_rate=1e-3)
    assert np.isfinite(loss)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="without examples"):
        train(linear(), 0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_as_one_operation_is_adam(weight_decay: float) -> None:
    """torch's own Adam, tensor by tensor, in double precision; one operation rounds otherwise."""
    section = Local(learning_rate=0.01, weight_decay=weight_decay)
    model, exact = linear(), linear().double()
    optimizer = adam(model.parameters(), section)
    plain = torch.optim.Adam(
        exact.parameters(), lr=0.01, weight_decay=weight_decay, foreach=False, fused=False
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.double()
        optimizer.step()
        plain.step()
    assert optimizer.param_groups[0]["fused"]
    for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(parameter.double(), other, rtol=0, atol=1e-6)
