"""Quality of frozen features for a labelled task: softmax regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

STRENGTHS = tuple(10.0**power for power in range(0, -5, -1))
"""Strengths of regularisation, descending; each fit starts from the previous one."""
STEPS = 100
"""Maximum number of L-BFGS iterations per fit."""
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Probe:
    """Test accuracy on frozen features."""

    linear: float
    strength: float
    """Strength of the regularisation, chosen on held-out training examples."""


def probe(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    num_classes: int,
    generator: np.random.Generator,
) -> Probe:
    """Measure features [N, F] with labels [N] on test features [M, F] with test labels [M].

    The strength of the regularisation is chosen on a held-out fifth of the training examples, the
    largest of equals; the final fit uses all of them. Raises ValueError for fewer than 2 training
    examples.
    """
    if len(labels) < 2:
        raise ValueError(f"a probe needs at least 2 training examples, got {len(labels)}")
    order = torch.from_numpy(generator.permutation(len(labels))).to(features.device)
    held = order[: max(1, round(HELD_OUT_SHARE * len(order)))]
    rest = order[len(held) :]
    shown = [
        accuracy_of(outputs, labels[held])
        for outputs in softmax_outputs(
            features[rest],
            labels[rest],
            features[held],
            num_classes=num_classes,
            strengths=STRENGTHS,
        )
    ]
    best = max(zip(shown, STRENGTHS, strict=True))[1]
    (outputs,) = softmax_outputs(
        features, labels, test_features, num_classes=num_classes, strengths=[best]
    )
    return Probe(accuracy_of(outputs, test_labels), best)


def softmax_outputs(
    features: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    num_classes: int,
    strengths: Sequence[float],
) -> list[Tensor]:
    """Return logits [M, C] of softmax regression on queries [M, F] for each strength s.

    W, b minimise mean_n -log softmax(W x_n + b)[y_n] + s / 2 |W|^2 with standardised features x
    (constant ones are 0), in double precision by L-BFGS.
    """
    inputs = features.double()
    mean, deviation = inputs.mean(dim=0), inputs.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-12, 1 / deviation.clamp_min(1e-12), 0.0)
    inputs, asked = (inputs - mean) * scale, (queries.double() - mean) * scale
    weight = torch.zeros(
        inputs.shape[1], num_classes, dtype=torch.float64, device=inputs.device, requires_grad=True
    )
    bias = torch.zeros(num_classes, dtype=torch.float64, device=inputs.device, requires_grad=True)
    return [
        _fitted(weight, bias, inputs, labels, strength=strength, queries=asked)
        for strength in strengths
    ]


@torch.enable_grad()
def _fitted(
    weight: Tensor,
    bias: Tensor,
    inputs: Tensor,
    labels: Tensor,
    *,
    strength: float,
    queries: Tensor,
) -> Tensor:
    """Continue a fit in place with this strength; return its logits on queries."""
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        history_size=20,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (
            functional.cross_entropy(inputs @ weight + bias, labels)
            + strength / 2 * weight.square().sum()
        )
        value.backward()
        return value.detach()

    optimizer.step(loss)
    return (queries @ weight + bias).detach()


def accuracy_of(outputs: Tensor, labels: Tensor) -> float:
    """Return the accuracy of outputs [M, C]."""
    return float((outputs.argmax(dim=1) == labels).double().mean())
