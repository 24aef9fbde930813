"""What the convolutional networks share: what may normalise inside them, and how their weights start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

MOST_GROUPS = 32
MATRIX_MULTIPLE = 8
"""Half-precision kernels for the matrix units of a GPU take rows whose length is a multiple of this."""

Normalisation = Callable[[int], nn.Module]
"""Makes the layer that normalises so many channels."""


class ImageConvolution(nn.Conv2d):
    """The first convolution of a network, whose input has few channels; `fedaux.fast` looks for it."""


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
    """Normalise groups of channels of each image on its own, whatever else is in the batch (Wu & He, 2018).

    The number of groups is the largest divisor of the channels, at most 32, that leaves two channels to a group: a
    single channel would have no variance where a map has shrunk to one position.
    """
    most = max(1, min(MOST_GROUPS, channels // 2))
    groups = next(number for number in range(most, 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels)


def initialise_convolutions(module: nn.Module, *, nonlinearity: Literal["linear", "relu"]) -> None:
    """Draw the weights of all convolutions, grouped or not, from N(0, g / (inputs of a group * kernel positions)).

    g is 2 for "relu" and 1 for "linear" (He et al., 2015). Inputs are counted, not outputs, because that keeps
    depthwise layers in scale: features are then neither tiny nor huge while the running statistics of batch
    normalisation are young, as they are in the first rounds of a federation.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity=nonlinearity)
