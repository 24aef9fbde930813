"""Decode images of any format to uint8 [C, H, W]: depth, transparency, colour and size."""

from __future__ import annotations

import io
import math
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.uint8] | NDArray[np.int32] | NDArray[np.float16]
"""Pixels, token ids, or features."""
Fit = Callable[[Image.Image], Image.Image]
"""Resizes an image in the mode L or RGB."""
Content = bytes | str | Path | Pixels | None
Entry = tuple[str, Content]
"""Location of an image or text, for messages, and its content: encoded, a file, pixels [C, H, W], a
text, or None."""

BLOCK = 1000
LARGE_BYTES = 20_000
"""Encoded size from which threads speed up decoding."""
ORIENTATION = 0x0112
"""The EXIF tag of the camera's orientation."""
SWAPPED_ORIENTATIONS = {5, 6, 7, 8}
"""Orientations that swap width and height."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What Pillow may open: of the others some run programs, and few are ever used for data."""
MOST_BYTES = 100_000_000
"""Largest encoded image."""
MOST_PIXELS = 30_000_000
"""Largest image, so that no file needs more than 250 MB; mammograms have 28 million."""
MOST_WEBP_PIXELS = 2**23
"""Its decoder holds four copies."""
LONGEST_SIDE = 2**15
MOST_SCANS = 100
"""Scans of a JPEG. Each takes as long as the image, and forty bytes; cameras write at most ten."""
TILE = 0x0142, 0x0143
"""The TIFF tags of the size of a tile, which is decoded as a whole."""
LARGE_PIXELS = 2**22
"""Size from which an image is converted strip by strip, and shrunk on the way."""
STRIP_PIXELS = 2**20
_ONE_LARGE = Lock()
"""Held while a large image is decoded, so that threads do not add up their memory."""
GREY_MODES = {"1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I"}


@dataclass(frozen=True)
class DecodedBlock:
    """Decoded images or token ids [n, ...], their row numbers, and the reason for each bad row."""

    images: Numbers
    rows: list[int]
    reasons: dict[int, str]
    lost: dict[str, str] = field(default_factory=dict)
    """What decoding dropped without being asked, and the first image where it did: a key of
    LOSSES."""


LOSSES = {
    "colour": "coloured images became grey, as the first image is; set {key}.channels to 3, or to "
    "1 to keep this",
    "frames": "images with several frames; only the first frame is used",
}


def decode(
    content: Content,
    *,
    channels: int | None = None,
    side: int | None = None,
    lost: set[str] | None = None,
    fit: Fit | None = None,
) -> Pixels:
    """Return one image [C, H, W] with `channels` 1 or 3 (None: its own), `side` pixels square.

    With `fit` it decides the size instead, and `side` is the longest side that it needs.

    Transparent pixels get a white background, 16 bits become 8 by x / 257, EXIF orientation is
    applied, and the centre square is cropped before resizing. `lost` gets the keys of LOSSES that
    apply. Raises ValueError with a reason.
    """
    if content is None:
        raise ValueError("the image is missing")
    if isinstance(content, str):
        raise ValueError("is a text, not an image; for texts, add the table [text]")
    if isinstance(content, np.ndarray):
        same = side is None or content.shape[1:] == (side, side)
        if channels in (None, len(content)) and same and fit is None:
            return content
        return _finish(from_pixels(content), channels=channels, side=side, fit=fit)
    try:
        with opened(content) as picture:
            if picture.format in {"JPEG", "MPO"} and (scans := _scans(picture)) > MOST_SCANS:
                raise ValueError(f"{scans} scans; should be at most {MOST_SCANS}")
            if side is not None and _pixels(picture) > LARGE_PIXELS:
                picture.draft(None, (4 * side, 4 * side))  # a JPEG is decoded to no more
            with _ONE_LARGE if _pixels(picture) > LARGE_PIXELS else nullcontext():
                if "exif" in picture.info:
                    ImageOps.exif_transpose(picture, in_place=True)
                if lost is not None:
                    lost |= _losses(picture, channels=channels)
                return _finish(picture, channels=channels, side=side, fit=fit)
    except Exception as error:  # broken files cause errors of any type
        raise ValueError(f"cannot be decoded as an image ({error})") from error


def is_decodable(file: Path) -> bool:
    """Return whether a path names a regular file of a size that `opened` accepts."""
    try:
        about = file.stat()
    except (OSError, ValueError):  # no name of a file, or not allowed
        return False
    return stat.S_ISREG(about.st_mode) and 0 < about.st_size <= MOST_BYTES


@contextmanager
def opened(content: bytes | Path) -> Iterator[Image.Image]:
    """Open an encoded image, without its pixels. Raises ValueError unless it is a regular file or
    bytes of a size and of one of `FORMATS` that can be decoded safely, and what Pillow raises."""
    if isinstance(content, bytes):
        stream: BinaryIO = io.BytesIO(content)
        size = len(content)
    else:
        number = os.open(content, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for ever
        stream = os.fdopen(number, "rb")
        about = os.fstat(number)
        size = about.st_size
        if not stat.S_ISREG(about.st_mode):
            stream.close()
            raise ValueError("is no regular file")
    with stream:
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"{size} bytes; should be at most {MOST_BYTES}, and not empty")
        with Image.open(stream, formats=FORMATS) as picture:
            most = MOST_WEBP_PIXELS if picture.format == "WEBP" else MOST_PIXELS
            tile = math.prod(getattr(picture, "tag_v2", {}).get(tag, 1) for tag in TILE)
            if max(_pixels(picture), tile) > most or max(picture.size) > LONGEST_SIDE:
                width, height = picture.size
                found = f"{width}x{height}" if tile <= most else f"a tile of {tile}"
                raise ValueError(
                    f"{found} pixels; should be at most {most} in all and {LONGEST_SIDE} on a side"
                )
            yield picture


def _pixels(picture: Image.Image) -> int:
    return picture.size[0] * picture.size[1]


def _scans(picture: Image.Image) -> int:
    """Return the number of scans of a JPEG, in whose data the marker of a scan does not occur."""
    stream: BinaryIO = picture.fp  # type: ignore[attr-defined]
    place = stream.tell()
    stream.seek(0)
    found = sum(block.count(b"\xff\xda") for block in iter(lambda: stream.read(2**20), b""))
    stream.seek(place)
    return found


def picture_size(content: Content) -> tuple[int, int] | None:
    """Return (height, width) of an image without decoding its pixels; None if unreadable."""
    if isinstance(content, np.ndarray):
        return content.shape[1], content.shape[2]
    if content is None or isinstance(content, str):
        return None
    try:
        with opened(content) as picture:
            width, height = picture.size
            turned = picture.getexif().get(ORIENTATION, 1) in SWAPPED_ORIENTATIONS
            return (width, height) if turned else (height, width)
    except Exception:  # broken files cause errors of any type
        return None


def usual_size(entries: Iterator[Entry]) -> tuple[int, int] | None:
    """Return the most frequent (height, width); of equally frequent ones, the first."""
    counts = Counter(size for _, content in entries if (size := picture_size(content)))
    return counts.most_common(1)[0][0] if counts else None


def _losses(picture: Image.Image, *, channels: int | None) -> set[str]:
    found = {"frames"} if getattr(picture, "is_animated", False) else set()
    if channels == 1 and picture.mode not in GREY_MODES:
        for strip in _strips(picture):
            pixels = np.asarray(strip.convert("RGB"))
            if (pixels != pixels[..., :1]).any():
                return found | {"colour"}
    return found


def _strips(picture: Image.Image, *, multiple: int = 1) -> Iterator[Image.Image]:
    """Yield a large image in strips, from top to bottom, of a multiple of that many rows but for
    the last one; a small image as it is."""
    if _pixels(picture) <= LARGE_PIXELS:
        yield picture
        return
    width, height = picture.size
    rows = multiple * max(1, STRIP_PIXELS // (width * multiple))
    for top in range(0, height, rows):
        yield picture.crop((0, top, width, min(height, top + rows)))


def convert(images: Tensor, *, channels: int | None, side: int | None) -> Tensor:
    """Convert images uint8 [N, C, H, W] to a number of channels and a side; None keeps them."""
    if channels in (None, images.shape[1]) and (side is None or images.shape[2:] == (side, side)):
        return images
    if len(images) == 0:
        height, width = images.shape[2:] if side is None else (side, side)
        return images.new_zeros((0, channels or images.shape[1], height, width))
    return torch.from_numpy(
        np.stack([decode(image, channels=channels, side=side) for image in images.numpy()])
    )


def from_pixels(pixels: Pixels) -> Image.Image:
    """Return pixels [C, H, W] as a picture."""
    return Image.fromarray(
        pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    )


def _finish(
    picture: Image.Image, *, channels: int | None, side: int | None, fit: Fit | None = None
) -> Pixels:
    mode = "L" if (channels or (1 if picture.mode in GREY_MODES else 3)) == 1 else "RGB"
    if _pixels(picture) <= LARGE_PIXELS:
        picture = _flattened(picture, mode=mode)
    else:
        picture = _shrunk(picture, mode=mode, side=side)
    width, height = picture.size
    if fit is not None:
        picture = fit(picture)
    elif side is not None and (width, height) != (side, side):
        short = min(width, height)
        left, top = (width - short) // 2, (height - short) // 2
        # Crop first: the resize filter must not see pixels outside the square.
        middle = (
            picture.crop((left, top, left + short, top + short)) if width != height else picture
        )
        picture = middle.resize((side, side), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _shrunk(picture: Image.Image, *, mode: str, side: int | None) -> Image.Image:
    """Return a large image in `mode`, at a fraction of its size that leaves at least four pixels
    for one of `side`."""
    width, height = picture.size
    factor = max(1, min(width, height) // (4 * side)) if side else 1
    small = Image.new(mode, (-(-width // factor), -(-height // factor)))
    top = 0
    for strip in _strips(picture, multiple=factor):
        part = _flattened(strip, mode=mode).reduce(factor)
        small.paste(part, (0, top))
        top += part.size[1]
    return small


def _flattened(picture: Image.Image, *, mode: str) -> Image.Image:
    """Return an image in the mode L or RGB: 8 bits, and white where it is transparent."""
    if picture.mode in {"I", "F"} or picture.mode.startswith("I;16"):
        picture = _to_eight_bits(picture)
    if "transparency" in picture.info or picture.mode in {"LA", "La", "PA", "RGBA", "RGBa"}:
        above = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), above)
    return picture if picture.mode == mode else picture.convert(mode)


def _to_eight_bits(picture: Image.Image) -> Image.Image:
    deep = np.asarray(picture)
    if picture.mode == "F" or deep.min() < 0 or deep.max() > 65535:
        raise ValueError("pixels are not 8- or 16-bit integers; convert it first")
    return Image.fromarray(np.rint(deep / 257).astype(np.uint8))


def decode_all(
    entries: Iterator[Entry],
    *,
    bad_labels: Mapping[int, str],
    channels: int | None,
    side: int | None,
    size_key: str,
    size: tuple[int, int] | None = None,
) -> Iterator[DecodedBlock]:
    """Yield the rows in order, in blocks; all get the channels and size of the first good one.

    With `size`, only images of this height and width are good. `size_key` is the setting that
    resizes images.
    """
    numbered = enumerate(entries)
    passed: list[tuple[int, Entry]] = []
    first: Pixels | None = None
    for row, (where, content) in numbered:
        passed.append((row, (where, content)))
        if row not in bad_labels:
            try:
                found = decode(content, channels=channels, side=side)
                if size in (None, found.shape[1:]):
                    first = found
                    break
            except ValueError:
                continue
    shape = None if first is None else first.shape
    others = f"{passed[-1][1][0]} has" if size is None and passed else "most have"
    large = bool(passed) and encoded_size(passed[-1][1][1]) > LARGE_BYTES

    def work(rows: list[tuple[int, Entry]]) -> DecodedBlock:
        images, good = [], []
        reasons: dict[int, str] = {}
        lost: dict[str, str] = {}
        for row, (where, content) in rows:
            dropped: set[str] = set()
            try:
                if row in bad_labels:
                    raise ValueError(bad_labels[row])
                image = decode(
                    content,
                    channels=None if shape is None else shape[0],
                    side=side,
                    lost=dropped,
                )
                if image.shape != shape:
                    assert shape is not None, "a first good image was looked for"
                    raise ValueError(
                        f"{image.shape[2]}x{image.shape[1]} pixels, {others} "
                        f"{shape[2]}x{shape[1]}; set {size_key} to resize them"
                    )
            except ValueError as error:
                reasons[row] = f"{where}: {error}"
                continue
            images.append(image)
            good.append(row)
            for kind in dropped:
                if kind != "colour" or channels is None:
                    lost.setdefault(kind, where)
        stacked = (
            np.stack(images) if images else np.zeros((0, *(shape or (1, 1, 1))), dtype=np.uint8)
        )
        return DecodedBlock(stacked, good, reasons, lost)

    everything = chain(passed, numbered)
    blocks = iter(lambda: list(islice(everything, BLOCK)), cast(list[tuple[int, Entry]], []))
    if not large:  # threads do not help with small images because of the interpreter lock
        yield from map(work, blocks)
        return
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[DecodedBlock]] = deque()
        for rows in blocks:
            waiting.append(pool.submit(work, rows))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def encoded_size(content: Content) -> int:
    """Return the number of bytes of an encoded image; 0 for pixels and texts."""
    if isinstance(content, Path):
        return content.stat().st_size if content.is_file() else 0
    return len(content) if isinstance(content, bytes) else 0
