"""Images that are easy to tell apart, and an extractor for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(size: int = 64) -> Tensor:
    """Bright squares at random places: easy to tell apart."""
    images = torch.zeros(size, 1, 8, 8, dtype=torch.uint8)
    for index, place in enumerate(torch.randint(0, 6, (size, 2), generator=seeded(7)).tolist()):
        images[index, 0, place[0] : place[0] + 3, place[1] : place[1] + 3] = 255
    return images


def extractor() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16)
        )
