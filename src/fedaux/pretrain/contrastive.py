"""Losses of two views of an image: SimCLR (Chen et al. 2020), Barlow Twins (Zbontar et al.
2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Pretraining

EPSILON = 1e-5
"""Added to the variance of an output, as in batch normalisation."""


def nt_xent(projections: Tensor, *, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross-entropy; rows i and p(i) = i + N of [2N, D] are a pair.

    loss = mean_i -log( exp(z_i . z_p(i) / t) / sum_{j != i} exp(z_i . z_j / t) ), z normalised
    rows.

    Raises:
        ValueError: `projections` is not [2N, D] with N >= 1, or `temperature` is not positive.
    """
    _refuse_no_pairs(projections)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = len(projections)
    unit = functional.normalize(projections, dim=1)
    similarity = (unit @ unit.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(rows, device=projections.device).roll(rows // 2)
    return functional.cross_entropy(similarity, partner)


def barlow_twins(projections: Tensor, *, redundancy: float) -> Tensor:
    """Cross-correlation of two views against the identity; rows i and i + N of [2N, D] are a pair.

    loss = sum_d (1 - C_dd)^2 + redundancy * sum_{d != e} C_de^2, with C_de the correlation over the
    batch of output d of the first view and output e of the second.

    Raises:
        ValueError: `projections` is not [2N, D] with N >= 1, or `redundancy` is not positive.
    """
    _refuse_no_pairs(projections)
    if not redundancy > 0:
        raise ValueError(f"redundancy must be positive, got {redundancy}")
    first, second = (_standardised(view) for view in projections.chunk(2))
    correlation = first.T @ second / len(first)
    diagonal = correlation.diagonal()
    others = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + redundancy * others


LOSSES: dict[str, Callable[[Tensor, Pretraining], Tensor]] = {
    "contrastive": lambda projections, section: nt_xent(
        projections, temperature=section.temperature
    ),
    "barlow": lambda projections, section: barlow_twins(projections, redundancy=section.redundancy),
}
"""The loss of projections [2N, D] by `pretraining.kind`."""


class ProjectionHead(nn.Sequential):
    """Multilayer perceptron from features [N, F] to projections [N, D].

    Initialised as nn.Linear, uniform in +-1/sqrt(fan in), but from `generator`.
    """

    def __init__(
        self,
        feature_width: int,
        *,
        widths: Sequence[int] = (512, 128),
        batch_norm: bool = False,
        generator: torch.Generator,
    ) -> None:
        if feature_width < 1 or not widths or min(widths) < 1:
            raise ValueError(f"widths must be positive, got {feature_width} -> {list(widths)}")
        layers: list[nn.Module] = []
        fan_in = feature_width
        for place, width in enumerate(widths):
            # On "meta", nn.Linear does not use the global generator.
            linear = nn.Linear(fan_in, width, device="meta").to_empty(device=generator.device)
            bound = 1 / math.sqrt(fan_in)
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
            layers.append(linear)
            if place < len(widths) - 1:
                layers += [nn.BatchNorm1d(width, device=generator.device)] if batch_norm else []
                layers.append(nn.ReLU())
            fan_in = width
        super().__init__(*layers)


def _standardised(outputs: Tensor) -> Tensor:
    """Return outputs [N, D] with mean 0 and variance 1 over the batch."""
    variance, mean = torch.var_mean(outputs, dim=0, correction=0)
    return (outputs - mean) * torch.rsqrt(variance + EPSILON)


def _refuse_no_pairs(projections: Tensor) -> None:
    if projections.ndim != 2 or len(projections) < 2 or len(projections) % 2:
        raise ValueError(
            "projections must be [2N, D], two views of N >= 1 images, got "
            f"{list(projections.shape)}"
        )
