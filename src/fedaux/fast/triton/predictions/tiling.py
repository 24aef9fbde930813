"""How predictions are cut into programs: what measured best on an H200, in bf16, on batches of 4096
images.

A block of MobileNetV2 is one kernel where there is a tile for it, and two where there are tiles for
its halves. One kernel, which repeats the expansion for each tap, wins as long as the wide map is
large or its channels are few: on 32x32 and 16x16, on 8x8 up to 192 channels, and where stride 2
leaves a quarter of the positions.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a step is cut: positions and channels that a program works on at a time."""

    positions: int
    inner: int
    """Channels that are summed over, or hidden ones, at a time; 0 where that is all of a group."""
    outer: int
    """Channels of the output at a time; 0 where that is all."""
    warps: int
    stages: int
    """Loads under way. One where a program convolves: with more, the compiler reads all nine
    taps past the cache."""
    registers: int | None = None
    """Of a thread, at most; the compiler's choice otherwise."""


MOBILENETV2 = {
    "stem": Tile(64, 32, 16, 4, 3),
    "block 1 narrow": Tile(128, 16, 16, 4, 1),
    "block 2": Tile(32, 16, 0, 1, 1),
    **dict.fromkeys(("block 3", "block 4", "block 5", "block 6"), Tile(128, 32, 0, 4, 1, 168)),
    "block 7": Tile(128, 32, 0, 4, 1),
    **dict.fromkeys(("block 8", "block 9", "block 10", "block 11"), Tile(64, 32, 0, 4, 1)),
    **dict.fromkeys(("block 12 expand", "block 13 expand"), Tile(128, 64, 128, 4, 3)),
    **dict.fromkeys(("block 12 narrow", "block 13 narrow"), Tile(64, 32, 64, 4, 1)),
    "block 14": Tile(64, 32, 0, 4, 1),
    **dict.fromkeys(
        ("block 15 expand", "block 16 expand", "block 17 expand"), Tile(128, 16, 64, 4, 3)
    ),
    **dict.fromkeys(("block 15 narrow", "block 16 narrow"), Tile(64, 64, 128, 8, 1)),
    "block 17 narrow": Tile(64, 32, 256, 8, 1),
    "last": Tile(128, 64, 256, 8, 3),
}

SHUFFLENET = {
    "stem": Tile(64, 32, 32, 4, 3),
    "first": Tile(64, 32, 64, 4, 3),
    "unit 1": Tile(64, 0, 32, 4, 2),
    **{f"unit {number}": Tile(64, 0, 64, 4, 2) for number in range(2, 13)},
    **{f"unit {number}": Tile(128, 0, 64, 8, 2) for number in range(13, 17)},
}
