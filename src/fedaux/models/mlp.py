"""A multilayer perceptron for inputs of any shape."""

from __future__ import annotations

import math

from torch import nn

from fedaux.models.split import SplitModel


def mlp(image_shape: tuple[int, int, int], num_classes: int, *, width: int = 256) -> SplitModel:
    """Two hidden layers of `width` units; the features are the output of the second."""
    features = nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(image_shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    )
    for module in features:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return SplitModel(features, nn.Linear(width, num_classes), feature_width=width)
