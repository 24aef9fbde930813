"""Training steps of ResNet-8 as few kernels, each of which does the same work for several clients
at once.

A small model on small batches is a long row of small operations. Here a convolution also makes the
sums that batch normalisation needs, the head includes its loss, and Adam takes all parameters at
once: 53 kernels a step, for one client (a distillation) or for several side by side, in place of
about 200 for each.

They are for bf16 on GPUs with bulk tensor copies (compute capability 9 and above), written in
Triton. Sums are added in any order, so that two runs can differ in the last bits.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from fedaux.core.compute import Compute
from fedaux.fast.convolutions import plain_type
from fedaux.models import SplitModel
from fedaux.models.resnet import ResNetFeatures, resnet8
from fedaux.models.split import has_overrides

INSTALLED = find_spec("triton") is not None
CAPABILITY = (9, 0)
"""Of the first GPUs with bulk tensor copies."""
IMAGE_SIZE = 32
MOST_CHANNELS = 3
"""Of an image: the nine taps of the first convolution share 32 places."""
MOST_CLASSES = 256
MOST_IMAGES = 8192
"""For which there is room in a step of all clients, since kernels count in 32 bits."""
MOST_CLIENTS = 256
"""For the same reason: each has 4.9 million weights."""
IMAGES_TOGETHER = 8
"""Batches have room for a multiple of so many images: where maps are smallest, a tile is eight
of them."""


def available(compute: Compute) -> bool:
    """Say whether these kernels may be used and the GPU has what they need."""
    return (
        INSTALLED
        and compute.compile
        and compute.device.type == "cuda"
        and torch.cuda.get_device_capability(compute.device) >= CAPABILITY
        and compute.precision is torch.bfloat16
    )


def possible(
    model: nn.Module,
    inputs: Tensor,
    *,
    optimizer: str,
    batch_size: int,
    clients: int,
    compute: Compute,
) -> bool:
    """Say whether the kernels can train a model on such inputs here, with so many clients at a
    time."""
    return (
        available(compute)
        and optimizer == "adam"
        and countable(clients, batch_size=batch_size)
        and fits(model, inputs)
    )


def countable(clients: int, *, batch_size: int) -> bool:
    """Say whether 32 bits are enough for where the weights and activations of so many clients
    lie."""
    return clients <= MOST_CLIENTS and clients * padded_batch_size(batch_size) <= MOST_IMAGES


def padded_batch_size(batch_size: int) -> int:
    """Return for how many images of a client there is room in a step."""
    return math.ceil(batch_size / IMAGES_TOGETHER) * IMAGES_TOGETHER


def fits(model: nn.Module, inputs: Tensor) -> bool:
    """Say whether a model is the ResNet-8 that the kernels are written for, part by part, and
    images have its size."""
    if (
        inputs.ndim != 4
        or tuple(inputs.shape[2:]) != (IMAGE_SIZE, IMAGE_SIZE)
        or inputs.shape[1] > MOST_CHANNELS
    ):
        return False
    if not isinstance(model, SplitModel) or type(model.features) is not ResNetFeatures:
        return False
    if type(model.head) is not nn.Linear or model.head.out_features > MOST_CLASSES:
        return False
    with torch.device("meta"):
        expected = resnet8((inputs.shape[1], IMAGE_SIZE, IMAGE_SIZE), model.head.out_features)
    return is_like(model, expected) and all(
        parameter.requires_grad for parameter in model.parameters()
    )


def is_like(module: nn.Module, expected: nn.Module) -> bool:
    """Say whether a module computes what another does, but for its weights: part by part, setting
    by setting.

    Hooks, and a way of computing that somebody gave to a single part, could change anything.
    """
    return str(module) == str(expected) and all(
        plain_type(part) is type(other)
        and _settings(part) == _settings(other)
        and not has_overrides(part)
        for part, other in zip(module.modules(), expected.modules(), strict=True)
    )


def _settings(part: nn.Module) -> dict[str, object]:
    """Return the description of a part, without its training mode."""
    kinds = (bool, int, float, str, tuple, type(None))
    own = {
        name: value
        for name, value in vars(part).items()
        if not name.startswith("_") and isinstance(value, kinds)
    }
    return {name: value for name, value in own.items() if name != "training"}
