"""Whether weights of a file fit a network, checked before it takes any memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

MOST_BUFFERS = 2**24
"""Numbers in tensors of a network that are not in its file."""


class Unfit(ValueError):
    """Weights that do not fit a network."""


def check_weights(build: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> None:
    """Raise Unfit unless `build` makes a network of these weights, which takes no memory here.

    The shape of a network is in a card of a few bytes, and could ask for any amount.
    """
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1
        if counted > len(weights):
            raise Unfit(f"the network has more than the {len(weights)} tensors of the file")

    handle = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            made = build()
    finally:
        handle.remove()
    expected = made.state_dict()
    size = sum(one.numel() for one in made.buffers())
    if size > MOST_BUFFERS + sum(one.numel() for one in weights.values()):
        raise Unfit(f"the network has {size} numbers in buffers; should be at most {MOST_BUFFERS}")
    if names := sorted(expected.keys() ^ weights.keys()):
        place = "file" if names[0] in weights else "network"
        raise Unfit(f"{names[0]} is in the {place} alone")
    for name, tensor in expected.items():
        if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
            raise Unfit(
                f"size mismatch for {name}: {list(weights[name].shape)} of {weights[name].dtype}, "
                f"should be {list(tensor.shape)} of {tensor.dtype}"
            )
