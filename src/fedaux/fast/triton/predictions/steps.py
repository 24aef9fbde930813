"""Steps of a prediction, each one kernel: what it needs of the weights, and its launch. Those of
MobileNetV2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedaux.fast.depthwise import out_size
from fedaux.fast.triton.predictions.packing import Packed, Packs, filled, matrix, taps, vector
from fedaux.fast.triton.predictions.tiling import Tile

Parts = Mapping[str, tuple[Tensor, Tensor]]
"""Weight [C', C, h, w] and bias [C'] of each convolution with its normalisation inside, in
single precision."""
Maps = dict[str, Tensor]
"""Activations by name, rows [positions, C] each."""


class Step(Packs, Protocol):
    """One kernel of a network."""

    tile: Tile

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the maps that it reads."""

    @property
    def largest(self) -> int:
        """Numbers of one image in the largest map that it reads or writes."""

    def weights(self, parts: Parts) -> Packed:
        """Return the numbers that its kernel needs, before they are packed."""

    def run(self, packed: Packed, maps: Maps) -> None:
        """Read some maps, and leave others there."""


def run(steps: Sequence[Step], packed: Mapping[str, Packed], maps: Maps) -> None:
    """Run steps one after another; maps that none of the later ones reads are given up."""
    last = {name: place for place, step in enumerate(steps) for name in step.reads}
    for place, step in enumerate(steps):
        step.run(packed[step.name], maps)
        for name in step.reads:
            if last[name] == place:
                del maps[name]


@cache
def program(name: str) -> Any:
    """Return a kernel; only where it is to run, since Triton is needed for it."""
    from fedaux.fast.triton.predictions import programs

    return getattr(programs, name)


def launch(name: str, programs: int, *arguments: Any, tile: Tile, **constants: Any) -> None:
    """Launch a kernel on the current device."""
    program(name)[(programs,)](
        *arguments,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        **constants,
    )


def room(like: Tensor, rows: int, channels: int) -> Tensor:
    """Return room for [rows, channels] of the same type."""
    return torch.empty(rows, channels, dtype=like.dtype, device=like.device)


@dataclass(kw_only=True)
class Pointwise:
    """A product of channels with a bias and a ReLU; `area`: means over so many positions, an
    image's, of its result."""

    single: ClassVar[frozenset[str]] = frozenset({"bias"})
    name: str
    tile: Tile
    convolution: str
    source: str
    goal: str
    inputs: int
    outputs: int
    size: int
    """Height and width of the map."""
    cut: str
    area: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def largest(self) -> int:
        return self.size**2 * max(self.inputs, 0 if self.area else self.outputs)

    def weights(self, parts: Parts) -> Packed:
        weight, bias = parts[self.convolution]
        return {"weight": weight, "bias": bias}

    def packed(self, numbers: Packed) -> Packed:
        return {"weight": matrix(numbers["weight"]), "bias": vector(numbers["bias"])}

    def run(self, packed: Packed, maps: Maps) -> None:
        x, tile = maps[self.source], self.tile
        positions = len(x)
        out = room(x, positions // self.area if self.area else positions, self.outputs)
        launch(
            "pointwise", math.ceil(self.outputs / tile.outer) * math.ceil(positions / tile.positions),
            x, packed["weight"], packed["bias"], out, positions, tile=tile, C=self.inputs, OUT=self.outputs,
            FILLED_OUT=packed["weight"].shape[1], CUT=self.cut, AREA=self.area, BLOCK=tile.positions,
            BLOCK_IN=min(tile.inner, filled(self.inputs)), BLOCK_OUT=tile.outer,
        )  # fmt: skip
        maps[self.goal] = out


@dataclass(kw_only=True)
class Block:
    """What the two ways to compute the depthwise part of an inverted residual share."""

    name: str
    tile: Tile
    convolutions: tuple[str, ...]
    """Those that it computes, the projection last."""
    source: str
    goal: str
    inputs: int
    hidden: int
    outputs: int
    size: int
    """Height and width of the input."""
    stride: int
    adds: bool

    def sizes(self) -> dict[str, int]:
        """Return what either kernel is made for."""
        out = out_size(self.size, self.stride)
        return {
            "HEIGHT": self.size,
            "WIDTH": self.size,
            "OUT_HEIGHT": out,
            "OUT_WIDTH": out,
            "STRIDE": self.stride,
            "OUT": self.outputs,
            "FILLED_OUT": filled(self.outputs),
        }


@dataclass(kw_only=True)
class Narrowing(Block):
    """Depthwise convolution and projection of an inverted residual, whose wide map `source` is;
    `short` its input."""

    single: ClassVar[frozenset[str]] = frozenset({"between", "bias"})
    short: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source, self.short) if self.adds else (self.source,)

    @property
    def largest(self) -> int:
        return max(self.size**2 * self.hidden, out_size(self.size, self.stride) ** 2 * self.outputs)

    def weights(self, parts: Parts) -> Packed:
        (first, between), (last, bias) = (parts[name] for name in self.convolutions)
        return {"taps": first, "between": between, "weight": last, "bias": bias}

    def packed(self, numbers: Packed) -> Packed:
        return {
            "taps": taps(numbers["taps"]),
            "between": vector(numbers["between"]),
            "weight": matrix(numbers["weight"]),
            "bias": vector(numbers["bias"]),
        }

    def run(self, packed: Packed, maps: Maps) -> None:
        x, tile = maps[self.source], self.tile
        out = room(x, len(x) // self.stride**2, self.outputs)
        launch(
            "depthwise_pointwise", math.ceil(self.outputs / tile.outer) * math.ceil(len(out) / tile.positions),
            x, packed["taps"], packed["between"], packed["weight"], packed["bias"],
            maps[self.short] if self.adds else x, out, len(out), tile=tile, **self.sizes(), C=self.hidden,
            FILLED=filled(self.hidden), ADDS=self.adds, BLOCK=tile.positions, BLOCK_IN=tile.inner,
            BLOCK_OUT=tile.outer,
        )  # fmt: skip
        maps[self.goal] = out


@dataclass(kw_only=True)
class Residual(Block):
    """A whole inverted residual."""

    single: ClassVar[frozenset[str]] = frozenset({"expand_bias", "taps", "between", "bias"})

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def largest(self) -> int:
        return max(self.size**2 * self.inputs, out_size(self.size, self.stride) ** 2 * self.outputs)

    def weights(self, parts: Parts) -> Packed:
        """Return them such that ReLU6 is a cut at 1, with what such cuts would hide in the last
        bias: not a number."""
        (wide, wide_bias), (first, between), (narrow, bias) = (
            parts[name] for name in self.convolutions
        )
        largest = torch.stack(torch._foreach_norm([wide, wide_bias, first, between], math.inf))
        wide, wide_bias, between, narrow = torch._foreach_mul(
            [wide, wide_bias, between, narrow], [1 / 6, 1 / 6, 1 / 6, 6.0]
        )
        return {
            "expand": wide,
            "expand_bias": wide_bias,
            "taps": first,
            "between": between,
            "weight": narrow,
            "bias": bias + (0.0 * largest).sum(),
        }

    def packed(self, numbers: Packed) -> Packed:
        return {
            "expand": matrix(numbers["expand"]),
            "expand_bias": vector(numbers["expand_bias"]),
            "taps": taps(numbers["taps"]),
            "between": vector(numbers["between"]),
            "weight": matrix(numbers["weight"]),
            "bias": vector(numbers["bias"]),
        }

    def run(self, packed: Packed, maps: Maps) -> None:
        x, tile = maps[self.source], self.tile
        out = room(x, len(x) // self.stride**2, self.outputs)
        launch(
            "inverted_residual", math.ceil(len(out) / tile.positions),
            x, packed["expand"], packed["expand_bias"], packed["taps"], packed["between"], packed["weight"],
            packed["bias"], out, len(out), tile=tile, **self.sizes(), C=self.inputs, HIDDEN=self.hidden,
            FILLED=filled(self.inputs), FILLED_HIDDEN=filled(self.hidden), ADDS=self.adds, BLOCK=tile.positions,
            BLOCK_HIDDEN=tile.inner,
        )  # fmt: skip
        maps[self.goal] = out
