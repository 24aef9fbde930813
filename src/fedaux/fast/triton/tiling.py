"""How the products of a training step are cut into programs: what measured best on an H200, by
rule."""

from __future__ import annotations

from typing import Literal, NamedTuple

PROCESSORS = 132
"""Of the GPU that the rules were found on; they only weigh programs against it."""
LEAST_PROGRAMS = 100
"""Fewer programs would leave too many processors idle."""

Direction = Literal["forward", "backward"]


class Tile(NamedTuple):
    """How a product of [channels, positions] is cut."""

    channels: int
    positions: int
    warps: int
    stages: int


class Split(NamedTuple):
    """How a weight's gradient is cut: [outputs, inputs] of so many taps, from sums over
    positions in splits."""

    outputs: int
    inputs: int
    positions: int
    taps: int
    splits: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """What there is to cut: one convolution of several clients."""

    clients: int
    positions: int
    """Of the output, of one client."""
    outputs: int
    inputs: int
    kernel: int
    stride: int


def tile_of(shape: Shape, direction: Direction) -> Tile:
    """Return how a convolution or the gradient of its input is cut.

    Three stages leave room for two programs on a processor; where there are not so many, four hide
    more of the waiting.
    """
    forward = direction == "forward"
    width = shape.outputs if forward else shape.inputs
    kinds = 1 if forward or shape.stride == 1 else 4
    if width < 128:
        return Tile(64, 128, 4, 3)
    programs = shape.clients * (shape.positions // 128) * (width // 128) * kinds
    if programs > PROCESSORS:
        return Tile(128, 128, 8 if forward else 4, 3)
    if programs < LEAST_PROGRAMS and kinds == 1:
        return Tile(128, 64, 4, 4) if forward else Tile(64, 64, 4, 4)
    return Tile(128, 128, 8, 4) if kinds == 1 else Tile(128, 64, 4, 4)


def split_of(shape: Shape) -> Split:
    """Return how the gradient of a convolution's weight is cut."""
    if shape.kernel == 1:
        return _split(shape, 64, 64, taps=1, programs=PROCESSORS, warps=4, stages=4)
    if shape.outputs < 128:
        return _split(shape, 64, 64, taps=3, programs=PROCESSORS, warps=4, stages=4)
    inputs = min(128, shape.inputs)
    if _tiles(shape, 128, inputs, taps=1) < PROCESSORS // 2:
        return _split(shape, 128, inputs, taps=1, programs=PROCESSORS, warps=4, stages=4)
    return _split(shape, 128, 64, taps=3, programs=PROCESSORS, warps=8, stages=3)


def _tiles(shape: Shape, outputs: int, inputs: int, *, taps: int) -> int:
    return (
        shape.clients
        * (shape.outputs // outputs)
        * (shape.inputs // inputs)
        * (shape.kernel**2 // taps)
    )


def _split(
    shape: Shape, outputs: int, inputs: int, *, taps: int, programs: int, warps: int, stages: int
) -> Split:
    splits = max(1, programs // _tiles(shape, outputs, inputs, taps=taps))
    return Split(outputs, inputs, 64, taps, splits, warps, stages)
