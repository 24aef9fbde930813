"""A linear head on feature vectors, which are data themselves."""

from __future__ import annotations

from torch import nn

from fedaux.models.split import SplitModel


def linear(feature_shape: tuple[int], num_classes: int) -> SplitModel:
    """Logits W x + b of feature vectors x."""
    (width,) = feature_shape
    return SplitModel(nn.Identity(), nn.Linear(width, num_classes), feature_width=width)
