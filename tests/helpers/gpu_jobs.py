"""Clients' work on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedaux import seeding
from fedaux.core.backend import ClientJob
from fedaux.fast import triton as kernels

CLASSES = 10


def jobs(states: dict[int, Any] | None = None, *, round: int = 1) -> list[ClientJob]:
    """Five clients of different sizes, one of them with a last batch of a single example, one with
    one example."""
    sizes = (33, 48, 7, 1, 40)
    rows = torch.arange(500).cuda().split(100)
    return [
        ClientJob(
            client,
            rows[client][:size],
            seeding.generator(0, "local", round=round, client=client),
            (states or {}).get(client, {}),
        )
        for client, size in enumerate(sizes)
    ]


def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The distance of two sets of weights: Adam turns rounding of a tiny gradient into a whole step
    of one weight."""
    assert first.keys() == second.keys()
    return math.sqrt(
        sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    )


def can() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= kernels.CAPABILITY
