"""Batches formed on the device: examples stay uint8 until they are used, and no Python runs per sample."""

from __future__ import annotations

import torch
from torch import Tensor


def to_float(images: Tensor) -> Tensor:
    """Map uint8 to [0, 1] in single precision; features, which are floats already, and token ids stay as they are."""
    return images.float().div_(255.0) if images.dtype is torch.uint8 else images


def inference_batch(device: torch.device) -> int:
    """Return a good size of batches where nothing is trained, if nobody asks for another."""
    return 4096 if device.type == "cuda" else 256
