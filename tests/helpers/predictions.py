"""Networks whose predictions show every mistake, and how far predictions are apart."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

RNG = np.random.default_rng(0)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (11, 3, 8, 8), dtype=np.uint8))
FLOATS = IMAGES.float() / 255


def randomised(module: nn.Module) -> nn.Module:
    """Give batch normalisation statistics and parameters that leave nothing as it was."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            if layer.running_mean is not None and layer.running_var is not None:
                layer.running_mean.normal_(0, 0.5, generator=generator)
                layer.running_var.uniform_(0.5, 2.0, generator=generator)
            if layer.affine:
                nn.init.uniform_(layer.weight, -1.5, 1.5, generator=generator)
                nn.init.normal_(layer.bias, 0, 0.3, generator=generator)
    return module


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; folding rounds otherwise, at the seventh digit."""
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


def evaluated(module: nn.Module, inputs: Tensor = FLOATS) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = copy.deepcopy(module).eval()(inputs)
    return outputs
