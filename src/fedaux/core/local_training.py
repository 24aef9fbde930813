"""Local training of one client: cross-entropy and the optional proximal term."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Distillation, Local
from fedaux.core.backend import TrainResult
from fedaux.core.compute import Compute
from fedaux.core.steps import Steps, optimizer_state, restore_optimizer


def adam(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Adam with a section's settings (Kingma & Ba 2015); fused on a CPU."""
    parameters = list(parameters)
    how = (
        {"fused": True} if all(parameter.device.type == "cpu" for parameter in parameters) else {}
    ) | how
    return torch.optim.Adam(
        parameters, lr=section.learning_rate, weight_decay=section.weight_decay, **how
    )


def sgd(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with a section's settings."""
    return torch.optim.SGD(
        parameters,
        lr=section.learning_rate,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        **how,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "sgd": sgd}
"""Called as optimizer(parameters, section, **how), for local training and distillation."""


def train_locally(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    generator: np.random.Generator,
    compute: Compute | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> TrainResult:
    """Train `model` in place on inputs (uint8 [n, C, H, W] or features [n, F]) and labels [n].

    Minimises cross-entropy + proximal / 2 * |theta - theta_0|^2, where theta_0 are the weights at
    the start. The optimizer continues from `state`; without one, it starts fresh.
    """
    if len(labels) == 0:
        raise ValueError("a client without examples cannot train")
    steps = Steps(
        model,
        inputs,
        labels,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
        compute=Compute(labels.device) if compute is None else compute,
        proximal=proximal,
    )
    if state:
        restore_optimizer(steps.optimizer, model, dict(state))
    steps.start()
    for order in epoch_orders(len(labels), epochs=section.epochs, generator=generator):
        steps.run(order.to(labels.device), batch_size=section.batch_size)
    loss = float(steps.total) / (section.epochs * len(labels))
    return TrainResult(
        loss, optimizer_state(steps.optimizer, model) if section.optimizer_state == "kept" else {}
    )


def epoch_orders(size: int, *, epochs: int, generator: np.random.Generator) -> Iterable[Tensor]:
    """Yield a random order of the examples for each epoch, [n]."""
    for _ in range(epochs):
        yield torch.from_numpy(generator.permutation(size))
