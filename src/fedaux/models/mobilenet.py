"""MobileNetV2: inverted residuals with linear bottlenecks (Sandler et al., 2018), with strides for 32x32 images.

The stem and the second stage keep the size of the map, which they halve in the paper, and nothing is dropped before the
head; layers and widths are the paper's. So 32x32 becomes 16, 8 and 4. Parts carry torchvision's names
(features.0.0.weight, features.2.conv.1.0.weight, ...). What normalises is passed in.
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
    """Return the multiple of 8 nearest to a number of channels, at least 8 and never less than nine tenths of it."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


class InvertedResidual(nn.Module):
    """x + project(depthwise(expand(x))), the sum only where shapes agree; no nonlinearity after the projection."""

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
    """MobileNetV2 with all channels multiplied by `width`, but the last layer's 1280 features only where width > 1.

    At half width and ten classes 0.7 million parameters, 2.8 MB in single precision. Raises ValueError where `width`
    is not a positive number.
    """
    return _mobilenetv2(image_shape, num_classes, width=width, norm=nn.BatchNorm2d)


def mobilenetv2_gn(
    image_shape: tuple[int, int, int], num_classes: int, *, width: float = 0.5
) -> SplitModel:
    """MobileNetV2 with group normalisation: no example sees another, as differentially private training needs it."""
    return _mobilenetv2(image_shape, num_classes, width=width, norm=group_norm)


def _mobilenetv2(
    image_shape: tuple[int, int, int], num_classes: int, *, width: float, norm: Normalisation
) -> SplitModel:
    if (
        isinstance(width, bool)
        or not isinstance(width, int | float)
        or not (math.isfinite(width) and width > 0)
    ):
        raise ValueError(
            f"width = {width!r}: should be a positive number, such as 0.5 for half of the channels"
        )
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
    """Convolve, normalise and cut to between 0 and 6."""
    make = ImageConvolution if in_channels < MATRIX_MULTIPLE else nn.Conv2d
    return nn.Sequential(
        make(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
        norm(out_channels),
        nn.ReLU6(),
    )
