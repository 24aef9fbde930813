"""Local training of one client: the only local loss (cross-entropy and the optional proximal term)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Local
from fedaux.data.batches import shuffled_batches, to_float

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adam": lambda parameters, learning_rate: torch.optim.Adam(parameters, lr=learning_rate),
    "sgd": lambda parameters, learning_rate: torch.optim.SGD(parameters, lr=learning_rate),
}


def train_locally(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    generator: np.random.Generator,
) -> float:
    """Train `model` in place on one client's images (uint8 [n, C, H, W]) and labels [n]; return the mean loss.

    Minimises cross-entropy + proximal / 2 * |theta - theta_0|^2, where theta_0 are the weights it starts from. The
    optimizer starts anew: clients keep nothing between rounds.
    """
    if len(labels) == 0:
        raise ValueError("a client without examples cannot train")
    anchors = [parameter.detach().clone() for parameter in model.parameters()] if proximal > 0 else []
    optimizer = OPTIMIZERS[section.optimizer](model.parameters(), section.learning_rate)
    total = torch.zeros((), device=labels.device)
    model.train()
    for _ in range(section.epochs):
        for batch in shuffled_batches(
            len(labels), batch_size=section.batch_size, generator=generator, device=labels.device
        ):
            with single_example_statistics(model, batch_size=len(batch)):
                loss = functional.cross_entropy(model(to_float(images[batch])), labels[batch])
            total += loss.detach() * len(batch)
            if anchors:
                loss = loss + proximal_term(model.parameters(), anchors, strength=proximal)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return float(total) / (section.epochs * len(labels))


def proximal_term(parameters: Iterable[Tensor], anchors: Iterable[Tensor], *, strength: float) -> Tensor:
    """Return strength / 2 * |theta - theta_0|^2 (FedPROX)."""
    distances = [(parameter - anchor).square().sum() for parameter, anchor in zip(parameters, anchors, strict=True)]
    return 0.5 * strength * torch.stack(distances).sum()


@contextmanager
def single_example_statistics(model: nn.Module, *, batch_size: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics for a batch of one, which has no variance of its own."""
    frozen = [
        module
        for module in model.modules()
        if batch_size == 1 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    for module in frozen:
        module.eval()
    try:
        yield
    finally:
        for module in frozen:
            module.train()
