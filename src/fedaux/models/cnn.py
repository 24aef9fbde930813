"""A small convolutional network for small images and quick trials."""

from __future__ import annotations

from torch import nn

from fedaux.models.convolutional import ImageConvolution
from fedaux.models.split import SplitModel


def cnn(image_shape: tuple[int, int, int], num_classes: int, *, width: int = 32) -> SplitModel:
    """Three 3x3 convolutions (width, 2 width, 2 width) with group normalisation, then means over four quarters.

    Two of them halve the image; there are 8 width features. Group normalisation, because its output for an image never
    depends on the batch. Quarters, because where a stroke is tells characters apart.
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
    quarters = (
        nn.AdaptiveAvgPool2d(2)
        if max(image_shape[1:]) > 8 or min(image_shape[1:]) < 5
        else nn.Identity()
    )
    features = nn.Sequential(
        *layers, quarters, nn.Flatten()
    )  # at 5 to 8 pixels a side, quarters are what is left
    return SplitModel(features, nn.Linear(4 * channels, num_classes), feature_width=4 * channels)
