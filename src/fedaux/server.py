"""What the server does with what it was sent: average, predict, evaluate. Pure functions of weights and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.clients import Weights
from fedaux.data.batches import inference_batch, to_float


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


@torch.no_grad()
def predict(module: nn.Module, images: Tensor, *, batch_size: int | None = None) -> Tensor:
    """Return the module's outputs [N, ...] on uint8 images, in inference mode: no image sees its batch."""
    size = batch_size or inference_batch(images.device)
    with inference(module):
        return torch.cat([module(to_float(batch)) for batch in images.split(size)])


def evaluate(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy of logits [N, C] against labels [N]."""
    accuracy = (logits.argmax(dim=1) == labels).double().mean()
    return float(accuracy), float(functional.cross_entropy(logits, labels))


def snapshot(model: nn.Module) -> Weights:
    """Return a copy of the model's weights that later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
