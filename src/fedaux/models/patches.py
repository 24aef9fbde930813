"""Convolutions of small maps as products of matrices, gradients included.

For processors on which torch takes long for the gradients of convolutions. What the kernel sees at an output position
is a row; rows are gathered by whole positions, with all their channels, and gradients are gathered back alike.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Pair = tuple[int, int]


class Walk(NamedTuple):
    """How a kernel walks over maps of one size."""

    size: Pair
    kernel: Pair
    stride: Pair
    padding: Pair

    @property
    def outcome(self) -> Pair:
        """The size of the map that comes out."""
        first, second = (
            (side + 2 * padding - kernel) // stride + 1
            for side, kernel, stride, padding in zip(*self, strict=True)  # of an axis each
        )
        return first, second


def convolve(maps: Tensor, weight: Tensor, *, stride: Pair, padding: Pair) -> Tensor:
    """Return the convolution of maps [N, C, H, W] with a weight [C', C, h, w]: [N, C', H', W']."""
    walk = Walk((maps.shape[2], maps.shape[3]), (weight.shape[2], weight.shape[3]), stride, padding)
    rows: Tensor = _Rows.apply(maps, walk, False)  # type: ignore[no-untyped-call]
    matrix = weight.permute(0, 2, 3, 1).flatten(1)
    output = functional.linear(rows.flatten(0, 1), matrix).reshape(len(maps), rows.shape[1], len(weight))
    return output.transpose(1, 2).contiguous().reshape(len(maps), len(weight), *walk.outcome)


class _Rows(torch.autograd.Function):
    """Maps [N, C, H, W] to what the kernel sees at each output position, [N, H' W', h w C]; or the transpose of that.

    Linear, so that its derivative is itself, and its gradient the transpose.
    """

    @staticmethod
    def forward(values: Tensor, walk: Walk, transposed: bool) -> Tensor:
        return _maps(values, walk) if transposed else _rows(values, walk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Walk, bool], output: Tensor) -> None:
        _, ctx.walk, ctx.transposed = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Rows.apply(gradient, ctx.walk, not ctx.transposed), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        output: Tensor = _Rows.apply(tangent, ctx.walk, ctx.transposed)  # type: ignore[no-untyped-call]
        return output

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], values: Tensor, *how: Any) -> tuple[Tensor, int]:
        """Put the examples of several models side by side, which makes no difference to them."""
        values = values.movedim(in_dims[0], 0)
        output: Tensor = _Rows.apply(values.flatten(0, 1), *how)  # type: ignore[no-untyped-call]
        return output.reshape(*values.shape[:2], *output.shape[1:]), 0


def _rows(maps: Tensor, walk: Walk) -> Tensor:
    count, channels = maps.shape[:2]
    positions = functional.pad(maps.flatten(2).transpose(1, 2), (0, 0, 0, 1))
    rows = positions.index_select(1, torch.from_numpy(_places(walk)[0]))
    return rows.view(count, math.prod(walk.outcome), math.prod(walk.kernel) * channels)


def _maps(rows: Tensor, walk: Walk) -> Tensor:
    """Return at each position the sum of what rows have of it."""
    seen, (first, *others) = _places(walk)
    channels = rows.shape[2] // math.prod(walk.kernel)
    taps = functional.pad(rows.reshape(len(rows), len(seen), channels), (0, 0, 0, 1))
    maps = taps.index_select(1, torch.from_numpy(first))
    for seers in others:
        maps += taps.index_select(1, torch.from_numpy(seers))
    return maps.transpose(1, 2).contiguous().reshape(len(rows), channels, *walk.size)


@lru_cache(maxsize=256)
def _places(walk: Walk) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return who sees whom, with one position more for all beyond the edge; no tensors, which belong to where they
    were made: to a transformation of torch.func, say.

    The position that each (output position, tap) sees [H' W' h w]; and the (output position, tap)s that see each
    position, as many lists [H W] as the most seen one needs.
    """
    (height, width), beyond = walk.size, walk.size[0] * walk.size[1]
    down, across = (
        stride * np.arange(outcome)[:, None] + np.arange(kernel) - padding
        for outcome, kernel, stride, padding in zip(walk.outcome, *walk[1:], strict=True)
    )
    rows, columns = np.broadcast_arrays(down[:, None, :, None], across[None, :, None, :])  # [H', W', h, w]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    seen = np.where(inside, rows * width + columns, beyond).astype(np.int64).ravel()
    seers: list[list[int]] = [[] for _ in range(beyond)]
    for number, position in enumerate(seen.tolist()):
        if position < beyond:
            seers[position].append(number)
    most = max(1, *(len(numbers) for numbers in seers))
    lists = np.array([numbers + [len(seen)] * (most - len(numbers)) for numbers in seers], dtype=np.int64)
    return seen, list(np.ascontiguousarray(lists.T))
