"""MobileNetV2: inverted residuals with linear bottlenecks (Sandler et al., 2018), for 32x32 images.

The stem and the second stage have stride 1 instead of 2, so maps are 32, 16, 8 and 4 wide, and
there is no dropout; otherwise layers and widths are the paper's. Modules have torchvision's names
(features.0.0.weight, features.2.conv.1.0.weight, ...).
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedaux.models.convolutional import (
    MATRIX_MULTIPLE,
    DepthwiseConvolution,
    ImageConvolution,
    Normalisation,
    group_norm,
    initialise_convolutions,
)
from fedaux.models.split import SplitModel

STEM = 32
LAST = 1280
STAGES = (
    # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def make_divisible(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8 and at least 90 % of the channels."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


class InvertedResidual(nn.Module):
    """x + project(depthwise(expand(x))); the sum only if shapes agree."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        expansion: int,
        stride: int,
        norm: Normalisation,
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_convolution(in_channels, hidden, kernel=1, norm=norm))
        layers += [
            nn.Sequential(DepthwiseConvolution(hidden, stride=stride), norm(hidden), nn.ReLU6()),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            norm(out_channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.adds = stride == 1 and in_channels == out_channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H', W']."""
        output: Tensor = self.conv(inputs)
        return inputs + output if self.adds else output


def mobilenetv2(
    image_shape: tuple[int, int, int], num_classes: int, *, width: float = 0.5
) -> SplitModel:
    """MobileNetV2 with channels multiplied by `width`, the 1280 features only if width > 1.

    0.7 million parameters at width 0.5 and ten classes. Raises ValueError if `width` is not
    positive.
    """
    return _mobilenetv2(image_shape, num_classes, width=width, norm=nn.BatchNorm2d)


def mobilenetv2_gn(
    image_shape: tuple[int, int, int], num_classes: int, *, width: float = 0.5
) -> SplitModel:
    """MobileNetV2 with group normalisation, for differentially private training."""
    return _mobilenetv2(image_shape, num_classes, width=width, norm=group_norm)


def _mobilenetv2(
    image_shape: tuple[int, int, int], num_classes: int, *, width: float, norm: Normalisation
) -> SplitModel:
    number = isinstance(width, int | float) and not isinstance(width, bool)
    if not number or not 0 < width < math.inf:
        raise ValueError(f"width = {width!r}: should be a positive number, such as 0.5")
    channels = make_divisible(STEM * width)
    layers: list[nn.Module] = [_convolution(image_shape[0], channels, kernel=3, norm=norm)]
    for expansion, stage_channels, blocks, stage_stride in STAGES:
        out_channels = make_divisible(stage_channels * width)
        for index in range(blocks):
            stride = stage_stride if index == 0 else 1
            layers.append(
                InvertedResidual(
                    channels, out_channels, expansion=expansion, stride=stride, norm=norm
                )
            )
            channels = out_channels
    feature_width = make_divisible(LAST * max(1.0, width))
    layers.append(_convolution(channels, feature_width, kernel=1, norm=norm))
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    initialise_convolutions(features, nonlinearity="relu")
    return SplitModel(features, nn.Linear(feature_width, num_classes), feature_width=feature_width)


def _convolution(
    in_channels: int, out_channels: int, *, kernel: int, norm: Normalisation
) -> nn.Sequential:
    """Return convolution, normalisation and ReLU6."""
    make = ImageConvolution if in_channels < MATRIX_MULTIPLE else nn.Conv2d
    return nn.Sequential(
        make(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
        norm(out_channels),
        nn.ReLU6(),
    )
