"""Distillation: the server's student learns the teacher's soft labels on the distill set (Eq. 1).

Nothing waits for the device between two steps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Distillation
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.steps import OPTIMIZERS, Stepping, Steps, batch_sizes, epoch_orders
from fedaux.core.weights import load, snapshot


def distill(
    model: nn.Module,
    weights: Weights,
    images: Tensor,
    targets: Tensor,
    *,
    section: Distillation,
    generator: np.random.Generator,
    compute: Compute | None = None,
    steps: Stepping | None = None,
) -> Weights:
    """Return the weights after minimising D_KL(targets || softmax f(x)) over inputs [N, ...].

    Targets are soft labels [N, C]. Inputs [2N, ...] are N examples and the same ones mirrored, of
    which each epoch sees one or the other at random. `steps` are the model's own prepared ones;
    without them, steps are eager.
    """
    load(model, weights)
    if steps is None:
        steps = Steps(
            model,
            images,
            for_each(images, targets),
            loss=distillation_loss,
            optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
            compute=Compute(images.device) if compute is None else compute,
        )
    else:
        assert steps.model is model, "captured steps change the model that they were captured with"
        steps.set_targets(for_each(images, targets))
        steps.reset()
    steps.start()
    size, left = len(targets), number_of_steps(len(targets), section=section)
    rows, mirrored = torch.arange(size, device=images.device), len(images) - size
    epochs = math.ceil(left / math.ceil(size / section.batch_size))
    for order in epoch_orders(rows, epochs=epochs, generator=generator, mirrored=mirrored):
        steps.begin(order)
        for batch in list(batch_sizes(size, section.batch_size))[:left]:
            steps.step(batch)
            left -= 1
    steps.settle()
    return snapshot(model)


def number_of_steps(size: int, *, section: Distillation) -> int:
    """Return the number of steps on `size` examples."""
    return section.steps or section.epochs * math.ceil(size / section.batch_size)


def for_each(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the targets [N, C] of inputs [N, ...], or twice [2N, C] if mirrored inputs follow."""
    return targets if len(inputs) == len(targets) else targets.repeat(2, 1)


def distillation_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of D_KL(targets || softmax(logits)) over rows [N, C] (Eq. 1)."""
    return functional.kl_div(torch.log_softmax(logits, dim=1), targets, reduction="batchmean")
