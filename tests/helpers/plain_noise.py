"""Noise that is none, and numbers to release."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class NoNoise:
    """No noise at all, to see what lies under it."""

    kind = "none"

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        return vector


def normal(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    """Return normal numbers in double precision."""
    return torch.from_numpy(np.random.default_rng(seed).normal(shift, 1.0, shape))
