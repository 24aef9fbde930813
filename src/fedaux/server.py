"""What the server does with what it was sent: average, evaluate. Pure functions of weights and data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.clients import Weights


def average(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return sum_i |D_i| theta_i / sum_l |D_l| (FedAVG; Algorithm 2, parameter averaging).

    Floating-point buffers (running statistics of batch normalisation) are averaged like parameters; of integer
    buffers (counters) the largest is kept.
    """
    total = float(sum(sizes))
    averaged: Weights = {}
    for name, first in weights[0].items():
        if first.is_floating_point():
            result = torch.zeros_like(first)
            for client_weights, size in zip(weights, sizes, strict=True):
                result.add_(client_weights[name], alpha=size / total)
            averaged[name] = result
        else:
            averaged[name] = torch.stack([client_weights[name] for client_weights in weights]).amax(dim=0)
    return averaged


def evaluate(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy of logits [N, C] against labels [N]."""
    accuracy = (logits.argmax(dim=1) == labels).double().mean()
    return float(accuracy), float(functional.cross_entropy(logits, labels))


def snapshot(model: nn.Module) -> Weights:
    """Return a copy of the model's weights that later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
