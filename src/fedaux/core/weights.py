"""What the server does with what it was sent: average, evaluate. Pure functions of weights and data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.core import foreach as many
from fedaux.core.messages import Weights


def average(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return sum_i |D_i| theta_i / sum_l |D_l| (FedAVG; Algorithm 2, parameter averaging).

    Floating-point buffers (running statistics of batch normalisation) are averaged like parameters; of integer
    buffers (counters) the largest is kept.
    """
    total = float(sum(sizes))
    first = weights[0]
    floats = [name for name, tensor in first.items() if tensor.is_floating_point()]
    shares = [size / total for size in sizes]
    sums = list(torch._foreach_mul([first[name] for name in floats], shares[0])) if floats else []
    for own, share in zip(weights[1:], shares[1:], strict=True) if floats else ():
        torch._foreach_add_(sums, [own[name] for name in floats], alpha=share)
    averaged = dict(zip(floats, sums, strict=True))
    return {
        name: averaged[name] if name in averaged else torch.stack([own[name] for own in weights]).amax(dim=0)
        for name in first
    }


def evaluate(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy of logits [N, C] against labels [N]."""
    accuracy = (logits.argmax(dim=1) == labels).double().mean()
    return float(accuracy), float(functional.cross_entropy(logits, labels))


def snapshot(model: nn.Module) -> Weights:
    """Return a copy of the model's weights that later training does not change."""
    return many.clones(model.state_dict())


def load(model: nn.Module, weights: Weights) -> None:
    """Give a model weights, in place, as `load_state_dict` does. Raises RuntimeError where they are another model's."""
    own = model.state_dict()
    if own.keys() != weights.keys() or any(tensor.shape != weights[name].shape for name, tensor in own.items()):
        model.load_state_dict(weights)  # which says what is missing, unknown or of another shape
    many.copy_into(list(own.values()), [weights[name] for name in own])
