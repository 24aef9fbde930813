"""A small convolutional network for small images."""

from __future__ import annotations

from torch import nn

from fedaux.models.convolutional import ImageConvolution
from fedaux.models.split import SplitModel


def cnn(image_shape: tuple[int, int, int], num_classes: int, *, width: int = 32) -> SplitModel:
    """Three 3x3 convolutions (width, 2 width, 2 width) with group normalisation, 2x2 mean pooling.

    The last two have stride 2; there are 8 width features.
    """
    widths = (width, 2 * width, 2 * width)
    layers: list[nn.Module] = []
    channels = image_shape[0]
    for index, out_channels in enumerate(widths):
        stride, convolution = (1, ImageConvolution) if index == 0 else (2, nn.Conv2d)
        layers += [
            convolution(channels, out_channels, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(min(8, out_channels), out_channels),
            nn.ReLU(),
        ]
        channels = out_channels
    # Maps of images with 5 to 8 pixels per side are 2x2 already.
    already = max(image_shape[1:]) <= 8 and min(image_shape[1:]) >= 5
    pool = nn.Identity() if already else nn.AdaptiveAvgPool2d(2)
    features = nn.Sequential(*layers, pool, nn.Flatten())
    return SplitModel(features, nn.Linear(4 * channels, num_classes), feature_width=4 * channels)
