"""ShuffleNet: pointwise group convolutions and channel shuffles (Zhang et al., 2018), behind a stem for 32x32 images.

The paper's network of two groups, with a stem that keeps the size of the map: stride 1 and no pooling, where the paper
divides it by four. So 32x32 becomes 16, 8 and 4. What normalises is passed in.
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


fx.wrap(
    "channel_shuffle"
)  # one operation to whoever lists them: it looks at the layout of its input


def channel_shuffle(inputs: Tensor, *, groups: int) -> Tensor:
    """Deal the channels of [N, C, H, W] out to the groups: channel j of group i becomes channel j * groups + i."""
    if inputs.is_contiguous():
        shuffled: Tensor = inputs.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    else:  # copied with the channels last, so that a network in that memory format stays in it
        shuffled = (
            inputs.movedim(1, -1)
            .unflatten(-1, (groups, -1))
            .transpose(-2, -1)
            .flatten(-2)
            .movedim(-1, 1)
        )
    return shuffled


class ShuffleUnit(nn.Module):
    """relu(shortcut(x) & residual(x)), where & adds at stride 1 and appends channels at stride 2.

    The residual is a pointwise group convolution to a quarter of the unit's width, a channel shuffle, a depthwise 3x3
    convolution and a pointwise group convolution; the shortcut at stride 2 is a mean over 3x3 positions. The first
    unit behind the stem has too few channels for groups in its first convolution.
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
        joined = (
            inputs + residual
            if self.pool is None
            else torch.cat((self.pool(inputs), residual), dim=1)
        )
        output: Tensor = self.relu(joined)
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
        initialise_convolutions(self, nonlinearity="linear")  # sums of residuals grow by themselves

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [N, C, H, W] to features [N, 800]."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.stage4(self.stage3(self.stage2(hidden)))
        features: Tensor = hidden.mean(dim=(2, 3))
        return features


def shufflenet(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ShuffleNet with, for ten classes, 0.9 million parameters, 3.8 MB in single precision."""
    return _shufflenet(image_shape, num_classes, norm=nn.BatchNorm2d)


def shufflenet_gn(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    """ShuffleNet with group normalisation: no example sees another, as differentially private training needs it."""
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
