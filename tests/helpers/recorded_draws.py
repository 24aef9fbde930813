"""Draws for private training that show the sums before noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Recorded:
    """Draws of the test's choice: which rows a step takes, and no noise, so that sums show."""

    kind = "secure"

    def __init__(self, steps: list[list[int]]) -> None:
        self._steps = iter(steps)
        self.sums: list[list[Tensor]] = [[] for _ in steps]
        self._step = -1

    def sample(self, size: int, *, probability: float) -> np.ndarray:
        self._step += 1
        return np.array(next(self._steps), dtype=np.int64)

    def integers(self, like: Tensor, *, scale: float) -> Tensor:
        self.sums[self._step].append(like.flatten().clone())
        return torch.zeros_like(like)

    def step(self, number: int) -> Tensor:
        return torch.cat(self.sums[number])
