"""Layers, normalisation and initialisation of the convolutional networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

MAX_GROUPS = 32
MATRIX_MULTIPLE = 8
"""Half-precision kernels for tensor cores need rows of a multiple of this."""

Normalisation = Callable[[int], nn.Module]
"""Returns a normalisation layer for a number of channels."""


class ImageConvolution(nn.Conv2d):
    """The first convolution of a network, whose input has few channels; `fedaux.fast` looks for
    it."""


class DepthwiseConvolution(nn.Conv2d):
    """A 3x3 convolution of each channel on its own; `fedaux.fast` looks for it."""

    def __init__(self, channels: int, *, stride: int = 1) -> None:
        super().__init__(
            channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False
        )


class PointwiseConvolution(nn.Conv2d):
    """A 1x1 convolution, in groups or not; `fedaux.fast` looks for it."""

    def __init__(self, in_channels: int, out_channels: int, *, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, 1, groups=groups, bias=False)


def group_norm(channels: int) -> nn.Module:
    """Return group normalisation (Wu & He, 2018), which does not depend on the batch.

    The number of groups is the largest divisor of the channels up to 32 with at least two channels
    per group: a single channel has no variance in a map of one position.
    """
    most = max(1, min(MAX_GROUPS, channels // 2))
    groups = next(number for number in range(most, 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels)


def initialise_convolutions(module: nn.Module, *, nonlinearity: Literal["linear", "relu"]) -> None:
    """Draw the weights of all convolutions from N(0, g / fan in), g = 2 for "relu", 1 for "linear".

    (He et al., 2015.) Fan in, not fan out, keeps depthwise layers in scale while the running
    statistics of batch normalisation are inaccurate, as in the first rounds of a federation.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity=nonlinearity)
