"""Predictions of MobileNetV2 and ShuffleNet as few kernels: 24 and 18 for a batch, which never
write the widest maps.

Either network is bound by memory. So a 3x3 convolution of each channel is one kernel with the
product behind it, a whole inverted residual is one where that is faster, and a ShuffleNet unit ends
with the next one's first product. Activations are bf16, channels last; sums are in single
precision, always in the same order.

They are for our networks as they are, on 32x32 images. Nothing in them needs more than bf16 matrix
units (compute capability 8) and up to 147 KB of shared memory, but they have been measured on
capability 9 alone, so they are used where the other kernels are.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedaux.fast.triton import IMAGE_SIZE, MOST_CHANNELS, is_like
from fedaux.models import SplitModel
from fedaux.models.convolutional import ImageConvolution
from fedaux.models.mobilenet import mobilenetv2
from fedaux.models.shufflenet import shufflenet

NETWORKS = {"mobilenetv2": mobilenetv2, "shufflenet": shufflenet}


class Known(NamedTuple):
    """A network that there are kernels for."""

    name: str
    channels: int
    """Of an image."""
    whole: bool
    """With its head, or its features alone."""

    def takes(self, inputs: Tensor) -> bool:
        """Say whether the kernels are for such inputs: images of one size."""
        return tuple(inputs.shape[1:]) == (self.channels, IMAGE_SIZE, IMAGE_SIZE)


def known(module: nn.Module) -> Known | None:
    """Return which network a module is, part by part, or whose features it is; None where it is
    another."""
    whole = isinstance(module, SplitModel)
    stem = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    if not isinstance(stem, ImageConvolution) or stem.in_channels > MOST_CHANNELS:
        return None
    classes = (
        module.head.out_features
        if isinstance(module, SplitModel) and type(module.head) is nn.Linear
        else 1
    )
    for name in NETWORKS:
        expected = _expected(name, stem.in_channels, classes)
        if is_like(module, expected if whole else expected.features):
            return Known(name, stem.in_channels, whole)
    return None


@cache
def _expected(name: str, channels: int, classes: int) -> SplitModel:
    """Return a network without weights."""
    with torch.device("meta"):
        return NETWORKS[name]((channels, IMAGE_SIZE, IMAGE_SIZE), classes)
