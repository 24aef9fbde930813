"""Images of any file format become uint8 [C, H, W]: depth, transparency, colour and size are decided here."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.uint8] | NDArray[np.int32]
"""Pixels, or token ids."""
Content = bytes | str | Path | Pixels | None
Cell = tuple[str, Content]
"""Where an image or a text stands, for people, and what stands there: encoded, in a file, as pixels [C, H, W], as text,
or nothing."""

BLOCK = 1000
LARGE_BYTES = 20_000
"""From this size on decoders work long enough outside the interpreter for threads to pay."""
GREY_MODES = {"1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I"}


@dataclass(frozen=True)
class Block:
    """Some rows: the good images (or token ids) [n, ...], the numbers of their rows, and of each bad row the reason."""

    images: Numbers
    rows: list[int]
    reasons: dict[int, str]


def decode(content: Content, *, channels: int | None = None, side: int | None = None) -> Pixels:
    """Return one image [C, H, W], of `channels` 1 or 3 (None: its own) and resized to a square of `side`.

    Transparent pixels are laid on white, sixteen bits become eight by x / 257, photographs are turned upright as their
    camera noted, and an oblong image loses its longer ends before it is resized. Raises ValueError with a reason.
    """
    if content is None:
        raise ValueError("the image is missing")
    if isinstance(content, str):
        raise ValueError("is a text; without the table [text], rows hold images")
    if isinstance(content, np.ndarray):
        if channels in (None, len(content)) and (side is None or content.shape[1:] == (side, side)):
            return content
        return _finish(_from_pixels(content), channels=channels, side=side)
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
            if "exif" in picture.info:
                ImageOps.exif_transpose(picture, in_place=True)
            return _finish(picture, channels=channels, side=side)
    except Exception as error:  # decoders raise whatever a broken file makes them stumble over
        raise ValueError(f"cannot be decoded as an image ({error})") from error


def convert(images: Tensor, *, channels: int | None, side: int | None) -> Tensor:
    """Return images uint8 [N, C, H, W] with so many channels and of so many pixels a side; None leaves them."""
    if channels in (None, images.shape[1]) and (side is None or images.shape[2:] == (side, side)):
        return images
    if len(images) == 0:
        height, width = images.shape[2:] if side is None else (side, side)
        return images.new_zeros((0, channels or images.shape[1], height, width))
    return torch.from_numpy(
        np.stack([decode(image, channels=channels, side=side) for image in images.numpy()])
    )


def _from_pixels(pixels: Pixels) -> Image.Image:
    return Image.fromarray(
        pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    )


def _finish(picture: Image.Image, *, channels: int | None, side: int | None) -> Pixels:
    mode = "L" if (channels or (1 if picture.mode in GREY_MODES else 3)) == 1 else "RGB"
    if picture.mode in {"I", "F"} or picture.mode.startswith("I;16"):
        picture = _to_eight_bits(picture)
    if "transparency" in picture.info or picture.mode in {"LA", "La", "PA", "RGBA", "RGBa"}:
        above = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), above)
    if picture.mode != mode:
        picture = picture.convert(mode)
    width, height = picture.size
    if side is not None and (width, height) != (side, side):
        short = min(width, height)
        left, top = (width - short) // 2, (height - short) // 2
        # Cut before resizing, whose filter would otherwise look at what lies outside.
        middle = (
            picture.crop((left, top, left + short, top + short)) if width != height else picture
        )
        picture = middle.resize((side, side), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _to_eight_bits(picture: Image.Image) -> Image.Image:
    deep = np.asarray(picture)
    if picture.mode == "F" or deep.min() < 0 or deep.max() > 65535:
        raise ValueError("its pixels are not whole numbers of 8 or 16 bits; convert it first")
    return Image.fromarray(np.rint(deep / 257).astype(np.uint8))


def decode_all(
    cells: Iterator[Cell],
    *,
    bad_labels: Mapping[int, str],
    channels: int | None,
    side: int | None,
    size_key: str,
) -> Iterator[Block]:
    """Yield the rows in order, block by block; all take the channels and the size of the first good one.

    `size_key` is the setting that would resize images of different sizes.
    """
    numbered = enumerate(cells)
    passed: list[tuple[int, Cell]] = []
    first: Pixels | None = None
    for row, (where, content) in numbered:
        passed.append((row, (where, content)))
        if row not in bad_labels:
            try:
                first = decode(content, channels=channels, side=side)
                break
            except ValueError:
                continue
    shape = None if first is None else first.shape
    large = bool(passed) and _encoded_size(passed[-1][1][1]) > LARGE_BYTES

    def work(rows: list[tuple[int, Cell]]) -> Block:
        images, good = [], []
        reasons: dict[int, str] = {}
        for row, (where, content) in rows:
            try:
                if row in bad_labels:
                    raise ValueError(bad_labels[row])
                image = decode(content, channels=None if shape is None else shape[0], side=side)
                if image.shape != shape:
                    assert shape is not None, "a first good image was looked for"
                    raise ValueError(
                        f"{image.shape[2]}x{image.shape[1]} pixels, others have {shape[2]}x{shape[1]}; "
                        f"set {size_key} to resize them"
                    )
            except ValueError as error:
                reasons[row] = f"{where}: {error}"
                continue
            images.append(image)
            good.append(row)
        stacked = (
            np.stack(images) if images else np.zeros((0, *(shape or (1, 1, 1))), dtype=np.uint8)
        )
        return Block(stacked, good, reasons)

    everything = chain(passed, numbered)
    blocks = iter(lambda: list(islice(everything, BLOCK)), cast(list[tuple[int, Cell]], []))
    if (
        not large
    ):  # small images keep the interpreter busy, and threads would only wait for each other
        yield from map(work, blocks)
        return
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Block]] = deque()
        for rows in blocks:
            waiting.append(pool.submit(work, rows))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _encoded_size(content: Content) -> int:
    if isinstance(content, Path):
        return content.stat().st_size if content.is_file() else 0
    return len(content) if isinstance(content, bytes) else 0
