"""Standardised features, on which heads learn: features of h0, mapped by public examples alone.

z = A (h - mu) with A = s (S + c I)^(-1/4), where mu and S are mean and covariance of the features h
of public examples, c is SHRINKAGE times the mean variance, and s gives |z|^2 the mean SQUARED_NORM.
One learning rate then suits the heads of all networks. A head W z + b of z is a head of h, too:
(W A) h + (b - W A mu).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedaux.models.split import SplitModel

SHRINKAGE = 0.1
SQUARED_NORM = 256.0
MOST_FEATURES = 4096
"""Wider features stay as they are: their map would be larger than most networks."""
CENTRE, MAP, NETWORK = "public_centre", "public_map", "network."
ROWS_AT_ONCE = 8192


class Standardised(nn.Module):
    """Features h of a network as z = A (h - mu); A = I and mu = 0 until others are loaded."""

    public_centre: Tensor
    public_map: Tensor

    def __init__(self, network: nn.Module, *, width: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer(CENTRE, torch.zeros(width))
        self.register_buffer(MAP, torch.eye(width))

    def extra_repr(self) -> str:
        """Say how the network reads its inputs."""
        return self.network.extra_repr()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [N, ...] to standardised features [N, F]."""
        return standardise(self.network(inputs), self.state_dict())


def standardise(features: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return (h - mu) A [N, F] for features h, with the map that is among weights.

    It is computed in double precision, so that the other rows of a batch hardly ever change a bit.
    """
    centre, matrix = weights[CENTRE].double(), weights[MAP].double()
    parts = features.split(ROWS_AT_ONCE)
    return torch.cat([((part.double() - centre) @ matrix).to(weights[MAP]) for part in parts])


def standardised(model: SplitModel) -> SplitModel:
    """Return a model on standardised features; the model itself if these are too wide, or its head
    is no linear layer with a bias, which alone can be a head of h again."""
    width, head = model.feature_width, model.head
    if width > MOST_FEATURES or not isinstance(head, nn.Linear) or head.bias is None:
        return model
    return SplitModel(Standardised(model.features, width=width), head, feature_width=width)


def public_map(features: Tensor) -> dict[str, Tensor]:
    """Return mu and A of public features [N, F]; features that do not vary stay as they are."""
    values = features.double()
    centre = values.mean(dim=0)
    covariance = (values - centre).T @ (values - centre) / len(values)
    level = covariance.diagonal().mean()
    if not 0 < level < torch.inf:
        width = features.shape[1]
        return {CENTRE: torch.zeros(width).to(features), MAP: torch.eye(width).to(features)}
    variances, directions = torch.linalg.eigh(covariance)
    roots = (variances.clamp_min(0) + SHRINKAGE * level) ** -0.25
    roots *= (SQUARED_NORM / (variances.clamp_min(0) * roots.square()).sum()).sqrt()
    return {CENTRE: centre.to(features), MAP: (directions * roots @ directions.T).to(features)}


def with_map(network: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of `Standardised` from the weights of a network and a map."""
    return {f"{NETWORK}{name}": tensor for name, tensor in network.items()} | dict(found)


def has_map(weights: Mapping[str, Tensor]) -> bool:
    """Whether weights belong to `Standardised`, and not to a network alone."""
    return MAP in weights


def without_map(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the network within the weights of `Standardised`."""
    return {
        name.removeprefix(NETWORK): tensor
        for name, tensor in weights.items()
        if name.startswith(NETWORK)
    }


def whole(features: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's weights from the weights of its features and its head, without a map."""
    head = dict(head)
    if has_map(features):
        weight = head["head.weight"].double() @ features[MAP].double().T
        bias = head["head.bias"].double() - weight @ features[CENTRE].double()
        head |= {"head.weight": weight.float(), "head.bias": bias.float()}
        features = without_map(features)
    return {f"features.{name}": tensor for name, tensor in features.items()} | head
