"""ShuffleNet: pointwise group convolutions and channel shuffles (Zhang et al., 2018), two groups.

For 32x32 images the stem has stride 1 and no pooling, so maps are 32, 16, 8 and 4 wide.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fedaux.models.convolutional import (
    DepthwiseConvolution,
    ImageConvolution,
    Normalisation,
    PointwiseConvolution,
    group_norm,
    initialise_convolutions,
)
from fedaux.models.split import SplitModel

GROUPS = 2
STEM = 24
WIDTHS = (200, 400, 800)
UNITS = (4, 8, 4)


fx.wrap("channel_shuffle")  # a leaf for tracing, because it depends on the memory format


def channel_shuffle(inputs: Tensor, *, groups: int) -> Tensor:
    """Shuffle [N, C, H, W]: channel j of group i becomes channel j * groups + i."""
    if inputs.is_contiguous():
        shuffled: Tensor = inputs.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    else:  # keeps the memory format channels last
        shuffled = (
            inputs.movedim(1, -1)
            .unflatten(-1, (groups, -1))
            .transpose(-2, -1)
            .flatten(-2)
            .movedim(-1, 1)
        )
    return shuffled


class ShuffleUnit(nn.Module):
    """relu(shortcut(x) + residual(x)) at stride 1; at stride 2 they are concatenated.

    The residual is a pointwise group convolution to a quarter of the width, a channel shuffle, a
    depthwise 3x3 convolution and a pointwise group convolution; the shortcut at stride 2 is 3x3
    mean pooling. The first convolution of the first unit has no groups.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, norm: Normalisation
    ) -> None:
        super().__init__()
        hidden = out_channels // 4
        residual = out_channels if stride == 1 else out_channels - in_channels
        first_groups = 1 if in_channels == STEM else GROUPS
        self.conv1 = PointwiseConvolution(in_channels, hidden, groups=first_groups)
        self.bn1 = norm(hidden)
        self.conv2 = DepthwiseConvolution(hidden, stride=stride)
        self.bn2 = norm(hidden)
        self.conv3 = PointwiseConvolution(hidden, residual, groups=GROUPS)
        self.bn3 = norm(residual)
        self.relu = nn.ReLU()
        self.pool = None if stride == 1 else nn.AvgPool2d(3, stride=stride, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H', W']."""
        hidden = channel_shuffle(self.relu(self.bn1(self.conv1(inputs))), groups=GROUPS)
        residual = self.bn3(self.conv3(self.bn2(self.conv2(hidden))))
        if self.pool is None:
            output: Tensor = self.relu(inputs + residual)
        else:
            output = self.relu(torch.cat((self.pool(inputs), residual), dim=1))
        return output


class ShuffleNetFeatures(nn.Module):
    """The feature extractor: stem, three stages that each halve the map, mean over positions."""

    def __init__(self, channels: int, *, norm: Normalisation) -> None:
        super().__init__()
        self.conv1 = ImageConvolution(channels, STEM, 3, padding=1, bias=False)
        self.bn1 = norm(STEM)
        self.relu = nn.ReLU()
        self.stage2 = _stage(STEM, WIDTHS[0], units=UNITS[0], norm=norm)
        self.stage3 = _stage(WIDTHS[0], WIDTHS[1], units=UNITS[1], norm=norm)
        self.stage4 = _stage(WIDTHS[1], WIDTHS[2], units=UNITS[2], norm=norm)
        initialise_convolutions(self, nonlinearity="linear")  # residual sums grow anyway

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [N, C, H, W] to features [N, 800]."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.stage4(self.stage3(self.stage2(hidden)))
        features: Tensor = hidden.mean(dim=(2, 3))
        return features


def shufflenet(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ShuffleNet with 0.9 million parameters for ten classes."""
    return _shufflenet(image_shape, num_classes, norm=nn.BatchNorm2d)


def shufflenet_gn(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ShuffleNet with group normalisation, for differentially private training."""
    return _shufflenet(image_shape, num_classes, norm=group_norm)


def _shufflenet(
    image_shape: tuple[int, int, int], num_classes: int, *, norm: Normalisation
) -> SplitModel:
    features = ShuffleNetFeatures(image_shape[0], norm=norm)
    return SplitModel(features, nn.Linear(WIDTHS[-1], num_classes), feature_width=WIDTHS[-1])


def _stage(
    in_channels: int, out_channels: int, *, units: int, norm: Normalisation
) -> nn.Sequential:
    first = ShuffleUnit(in_channels, out_channels, stride=2, norm=norm)
    others = [
        ShuffleUnit(out_channels, out_channels, stride=1, norm=norm) for _ in range(units - 1)
    ]
    return nn.Sequential(first, *others)
