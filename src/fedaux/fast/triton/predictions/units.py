"""Steps of ShuffleNet: a unit, with the next one's first product, is one kernel; shuffles are in
the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedaux.fast.depthwise import out_size
from fedaux.fast.triton.predictions.packing import Packed, filled, power_of_two
from fedaux.fast.triton.predictions.steps import Maps, Parts, Pointwise, launch, room
from fedaux.fast.triton.predictions.tiling import Tile


def quarter_of(hidden: int) -> int:
    """Return the room of a quarter of a unit's hidden channels."""
    return max(16, power_of_two(math.ceil(hidden / 4)))


def places(hidden: int) -> Tensor:
    """Return where each channel of a unit's first product lies: j of group i there is in quarter 2c
    + i.

    Behind the shuffle it is channel 2j + i, of group c of the second product, which so finds its
    own side by side.
    """
    group = torch.arange(hidden) // (hidden // 2)
    dealt = 2 * (torch.arange(hidden) % (hidden // 2)) + group
    after = dealt // (hidden // 2)
    return (2 * after + group) * quarter_of(hidden) + (dealt - after * (hidden // 2)) // 2


@dataclass(kw_only=True)
class Opening(Pointwise):
    """The first product of the first unit, whose channels go to their quarters."""

    def packed(self, numbers: Packed) -> Packed:
        weight, bias = numbers["weight"].flatten(1), numbers["bias"]
        place = places(len(weight))
        rows = weight.new_zeros(filled(self.inputs), self.outputs)
        rows[: self.inputs, place] = weight.t()
        biases = bias.new_zeros(self.outputs)
        biases[place] = bias
        return {"weight": rows, "bias": biases}


@dataclass(kw_only=True)
class Unit:
    """A ShuffleNet unit behind its first product, and the first product of the next unit,
    `following`."""

    single: ClassVar[frozenset[str]] = frozenset({"bias", "following_bias"})
    name: str
    tile: Tile
    convolutions: tuple[str, str]
    """The depthwise one and the product behind it."""
    hidden_source: str
    source: str
    goal: str
    inputs: int
    hidden: int
    outputs: int
    size: int
    """Height and width of the input."""
    stride: int
    following: str = ""
    following_hidden: int = 0
    area: int = 0
    """Means over so many positions, an image's, are its result."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.hidden_source, self.source

    @property
    def largest(self) -> int:
        after = 4 * quarter_of(self.following_hidden) if self.following else 0
        read = self.size**2 * max(4 * quarter_of(self.hidden), self.inputs)
        return max(
            read,
            out_size(self.size, self.stride) ** 2 * max(0 if self.area else self.outputs, after),
        )

    @property
    def pooled(self) -> int:
        """Channels of means over 3x3 positions, which come before the others at stride 2."""
        return 0 if self.stride == 1 else self.inputs

    def weights(self, parts: Parts) -> Packed:
        (taps, between), (weight, bias) = (parts[name] for name in self.convolutions)
        # Nothing is cut between the two, so that the first's bias becomes part of the second's.
        groups = weight.reshape(2, len(weight) // 2, -1)
        sums = bias.view(2, -1, 1) + groups @ between.view(2, -1, 1)
        numbers = {"taps": taps, "weight": weight, "bias": sums.flatten()}
        if self.following:
            numbers["following"], numbers["following_bias"] = parts[self.following]
        return numbers

    def packed(self, numbers: Packed) -> Packed:
        weight = numbers["weight"].flatten(1)
        half, quarter = len(weight) // 2, quarter_of(self.hidden)
        # In the order of the channels behind the shuffle, which the product takes in two groups.
        place = places(self.hidden).view(2, -1).t().flatten()
        taps = weight.new_zeros(9, 4 * quarter)
        taps[:, place] = numbers["taps"].flatten(1).t()
        rows = weight.new_zeros(4 * quarter, filled(half))
        rows[place, :half] = weight.view(2, half, -1).transpose(1, 2).flatten(0, 1)
        biases = weight.new_zeros(2, filled(half))
        biases[:, :half] = numbers["bias"].view(2, half)
        packed = {"taps": taps, "weight": rows, "bias": biases}
        if self.following:
            packed |= self._pack_following(numbers, rows=self.pooled + half + filled(half))
        return packed

    def _pack_following(self, numbers: Packed, *, rows: int) -> Packed:
        """Return the next unit's first product: columns of a row's own group, or of both where
        groups have moved."""
        weight, bias = numbers["following"].flatten(1), numbers["following_bias"]
        half, quarter, place = (
            self.outputs // 2,
            quarter_of(self.following_hidden),
            places(self.following_hidden),
        )
        groups = weight.view(2, -1, half).transpose(1, 2)
        matrices = weight.new_zeros(rows, (4 if self.pooled else 2) * quarter)
        for group, columns in enumerate(place.view(2, -1)):
            own = columns if self.pooled else columns // (2 * quarter) * quarter + columns % quarter
            matrices[group * half : (group + 1) * half, own] = groups[group]
        biases = bias.new_zeros(4 * quarter)
        biases[place] = bias
        return {"following": matrices, "following_bias": biases}

    def run(self, packed: Packed, maps: Maps) -> None:
        x, short, tile = maps[self.hidden_source], maps[self.source], self.tile
        positions = len(x) // self.stride**2
        out = room(x, positions // self.area if self.area else positions, self.outputs)
        quarter = quarter_of(self.following_hidden) if self.following else 0
        next_out = room(x, positions, 4 * quarter) if self.following else out
        size = out_size(self.size, self.stride)
        launch(
            "shuffle_unit", math.ceil(positions / tile.positions),
            x, packed["taps"], packed["weight"], packed["bias"], short, out,
            packed.get("following", packed["weight"]), packed.get("following_bias", packed["bias"]), next_out,
            positions, tile=tile, HEIGHT=self.size, WIDTH=self.size, OUT_HEIGHT=size, OUT_WIDTH=size,
            STRIDE=self.stride, QUARTER=quarter_of(self.hidden), OUT=self.outputs, POOLED=self.pooled,
            FILLED_HALF=packed["weight"].shape[1], NEXT_QUARTER=quarter, AREA=self.area, BLOCK=tile.positions,
            BLOCK_OUT=tile.outer,
        )  # fmt: skip
        maps[self.goal] = out
        if self.following:
            maps[f"{self.goal}.hidden"] = next_out
