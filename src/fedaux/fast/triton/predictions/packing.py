"""Weights as the kernels read them: every number in its place, zeros where there is none, in a
few operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

Packed = dict[str, Tensor]
"""What a kernel reads, by the name of an argument."""
TOGETHER = 16
"""Numbers of any packed tensor are a multiple of so many, so that each begins where loads can be
wide."""


class Packs(Protocol):
    """Knows where a kernel reads the numbers of its weights."""

    name: str
    single: ClassVar[frozenset[str]]
    """Arguments that are in single precision whatever the others are."""

    def packed(self, numbers: Packed) -> Packed:
        """Return numbers in their places; nothing is computed with them."""


class _Places(NamedTuple):
    """Where the numbers of packed tensors, one behind the other, come from: places in the flat
    weights, 0 for zero."""

    sources: Tensor
    tensors: list[tuple[str, str, torch.Size]]
    """Step, argument and shape of each."""


class Packing:
    """Packs the weights of one network after another.

    To put each of them in its place would be hundreds of small operations a client; so places are
    found once, by packing the numbers 1, 2, 3, ... instead of weights, and then all weights are
    picked at a time.
    """

    def __init__(self, steps: Sequence[Packs]) -> None:
        self._steps = list(steps)
        self._places: dict[tuple[torch.device, int], tuple[_Places, _Places]] = {}

    def __call__(self, weights: Mapping[str, Packed], *, dtype: torch.dtype) -> dict[str, Packed]:
        """Return what the kernel of each step reads; `weights` has its numbers, in any
        arrangement."""
        tensors = [tensor for own in weights.values() for tensor in own.values()]
        flat = torch.cat([tensors[0].new_zeros(1), *(tensor.flatten() for tensor in tensors)])
        key = flat.device, len(flat)
        if key not in self._places:
            self._places[key] = self._found(weights, flat.device)
        packed: dict[str, Packed] = {step.name: {} for step in self._steps}
        for places, values in zip(self._places[key], (flat.to(dtype), flat), strict=True):
            picked = values.index_select(0, places.sources).split(
                [shape.numel() for *_, shape in places.tensors]
            )
            for (step, argument, shape), each in zip(places.tensors, picked, strict=True):
                packed[step][argument] = each.view(shape)
        return packed

    def _found(
        self, weights: Mapping[str, Packed], device: torch.device
    ) -> tuple[_Places, _Places]:
        """Return the places of what is in the chosen precision, and of what is in single
        precision."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        named: tuple[list[tuple[str, str, torch.Size]], list[tuple[str, str, torch.Size]]] = [], []
        numbers: dict[str, Packed] = {}
        begin = 1
        for step, own in weights.items():
            numbers[step] = {}
            for argument, tensor in own.items():
                numbers[step][argument] = torch.arange(begin, begin + tensor.numel()).view(
                    tensor.shape
                )
                begin += tensor.numel()
        for each in self._steps:
            for argument, places in each.packed(numbers[each.name]).items():
                assert places.numel() % TOGETHER == 0
                kind = int(argument in each.single)
                found[kind].append(places.flatten())
                named[kind].append((each.name, argument, places.shape))
        half, single = (
            _Places(torch.cat(index).to(device, torch.int32), tensors)
            for index, tensors in zip(found, named, strict=True)
        )
        return half, single


def filled(channels: int) -> int:
    """Return how many channels a matrix has with zeros up to whole blocks of any size."""
    return max(16, power_of_two(channels)) if channels <= 256 else math.ceil(channels / 256) * 256


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is no less than a number."""
    return 1 << (number - 1).bit_length()


def matrix(weight: Tensor) -> Tensor:
    """Return a weight [OUT, C, ...] as [C, OUT], filled up on both sides."""
    rows = weight.flatten(1).t()
    return _filled(rows, filled(rows.shape[0]), filled(rows.shape[1]))


def vector(bias: Tensor) -> Tensor:
    """Return a bias, filled up."""
    return _filled(bias[None], 1, filled(len(bias)))[0]


def taps(weight: Tensor) -> Tensor:
    """Return the weight [C, 1, 3, 3] of a depthwise convolution as [9, C], filled up."""
    rows = weight.flatten(1).t()
    return _filled(rows, 9, filled(rows.shape[1]))


def _filled(rows: Tensor, height: int, width: int) -> Tensor:
    whole = rows.new_zeros(height, width)
    whole[: rows.shape[0], : rows.shape[1]] = rows
    return whole
