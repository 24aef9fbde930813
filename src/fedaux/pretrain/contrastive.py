"""The loss of two views of an image: SimCLR (Chen et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def nt_xent(projections: Tensor, *, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross-entropy; rows i and p(i) = i + N of [2N, D] are a pair.

    loss = mean_i -log( exp(z_i . z_p(i) / t) / sum_{j != i} exp(z_i . z_j / t) ), z normalised
    rows.

    Raises:
        ValueError: `projections` is not [2N, D] with N >= 1, or `temperature` is not positive.
    """
    if projections.ndim != 2 or len(projections) < 2 or len(projections) % 2:
        raise ValueError(
            "projections must be [2N, D], two views of N >= 1 images, got "
            f"{list(projections.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = len(projections)
    unit = functional.normalize(projections, dim=1)
    similarity = (unit @ unit.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(rows, device=projections.device).roll(rows // 2)
    return functional.cross_entropy(similarity, partner)


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
