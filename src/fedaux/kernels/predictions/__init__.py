"""Predictions of MobileNetV2 and ShuffleNet as few kernels: 24 and 18 for a batch, which never write the widest maps.

Either network is bound by memory. So a 3x3 convolution of each channel is one kernel with the product behind it, a
whole inverted residual is one where that is faster, and a ShuffleNet unit ends with the next one's first product.
Activations are bf16, channels last; sums are in single precision, always in the same order.

They are for our networks as they are, on 32x32 images. Nothing in them needs more than bf16 matrix units (compute
capability 8) and up to 147 KB of shared memory, but they have been measured on capability 9 alone, so they are used
where the other kernels are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedaux.kernels import IMAGE_SIZE, MOST_CHANNELS
from fedaux.models import SplitModel
from fedaux.models.convolutional import ImageConvolution
from fedaux.models.mobilenet import mobilenetv2
from fedaux.models.shufflenet import shufflenet

NETWORKS = {"mobilenetv2": mobilenetv2, "shufflenet": shufflenet}


def known(module: nn.Module) -> str | None:
    """Return which network a module is, part by part, or whose features it is; None where it is another."""
    whole = isinstance(module, SplitModel)
    stem = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    if not isinstance(stem, ImageConvolution) or stem.in_channels > MOST_CHANNELS:
        return None
    classes = module.head.out_features if isinstance(module, SplitModel) and type(module.head) is nn.Linear else 1
    printed = str(module)
    for name, make in NETWORKS.items():
        with torch.device("meta"):
            expected = make((stem.in_channels, IMAGE_SIZE, IMAGE_SIZE), classes)
        if printed == str(expected if whole else expected.features):
            return name
    return None


def takes(inputs: Tensor) -> bool:
    """Say whether the kernels are for such inputs: images of one size."""
    return inputs.ndim == 4 and tuple(inputs.shape[2:]) == (IMAGE_SIZE, IMAGE_SIZE)
