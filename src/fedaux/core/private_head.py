"""The private head: a linear layer on h0's features that follows the discriminant of class sums.

The discriminant f0 of `privacy/classes.py` is linear in clipped features, hence not in h0's. A
ridge regression on public examples brings it into the form of a network's last layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedaux.privacy.classes import ClassEstimate

RIDGE = 1e-3
"""Penalty, in units of the mean variance of a feature."""
LARGEST_START = 0.5
"""Share of the private head in the start of training where clients hold one class each and their
releases are reliable. A smaller share is a less certain head, which training can still change; with
clients that are alike or releases of noise, a random one is better (notes/successor.md)."""
LARGEST_START_OF_HEADS = 0.25
"""The same where heads alone are trained: a poor start cannot spoil frozen features."""


def fit_head(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [C, F] and bias [C] of the linear layer nearest to targets [N, C].

    Minimises mean_x |W h(x) + b - f0(x)|^2 + r |W|^2 over features h(x) [N, F], in double
    precision; r is RIDGE times the mean variance of a feature, and b is free.
    """
    inputs, outputs = features.double(), targets.double()
    centre, level = inputs.mean(dim=0), outputs.mean(dim=0)
    apart = inputs - centre
    covariance = apart.T @ apart / len(inputs)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean().clamp_min(1e-12))
    weight = torch.linalg.solve(covariance, apart.T @ (outputs - level) / len(inputs)).T
    return weight.float(), (level - weight @ centre).float()


def set_head(
    head: nn.Module, features: Tensor, targets: Tensor, *, share: float, prototype: str
) -> None:
    """Set a linear head to share * fit + (1 - share) * head. Raises ValueError for a head of
    another kind."""
    head = require_linear(head, prototype=prototype)
    weight, bias = fit_head(features, targets)
    with torch.no_grad():
        head.weight.lerp_(weight.to(head.weight), share)
        head.bias.lerp_(bias.to(head.bias), share)


def start_share(estimate: ClassEstimate, *, linear: bool) -> float:
    """Return how far training starts from the private head, in 0 .. 1; `linear` is for heads on
    frozen features."""
    largest = LARGEST_START_OF_HEADS if linear else LARGEST_START
    return largest * estimate.concentration * estimate.trust


def require_linear(head: nn.Module, *, prototype: str) -> nn.Linear:
    """Return a head that is a linear layer. Raises ValueError for a head of another kind."""
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise ValueError(
            f"prototypes.name = {prototype!r}: its head is {type(head).__name__}; a method that "
            "makes or averages heads by class needs a model whose head is a Linear layer with a "
            "bias"
        )
    return head


def of_prototype(known: Mapping[str, Tensor], prototype: str) -> Tensor:
    """Return what is known about a prototype from its clients' class sums or, if none of them has
    released any, the mean of the others. Raises ValueError if nobody has."""
    if not known:
        raise ValueError(
            "no client released class sums, from which the private head is made; "
            "do the nodes allow certainty.mechanism = classes?"
        )
    return known.get(prototype, torch.stack(list(known.values())).mean(dim=0))
