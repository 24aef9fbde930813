"""Data without download: handwritten digits (labelled), rendered letters and noise (public)."""

from __future__ import annotations

import importlib.util
import math
import string
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

LETTERS = string.ascii_uppercase + string.ascii_lowercase

# An explicit list: matplotlib also has fonts without letters.
FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSans-BoldOblique "
    "DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-Oblique DejaVuSansMono-BoldOblique "
    "DejaVuSerif DejaVuSerif-Bold DejaVuSerif-Italic DejaVuSerif-BoldItalic "
    "STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta "
    "cmr10 cmb10 cmti10 cmss10 cmtt10 cmmi10"
)

GLYPH_SIDE = 64
BITMAP_SIDE = 32
IMAGE_SIDE = 8
INK_LEVELS = (BITMAP_SIDE // IMAGE_SIDE) ** 2
CHUNK = 1024


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return scikit-learn's digits: images uint8 [1797, 1, 8, 8] and labels int64 [1797]."""
    ink, labels = _digits()
    images = np.rint(ink * (255.0 / INK_LEVELS)).astype(np.uint8)
    return images.reshape(-1, 1, IMAGE_SIDE, IMAGE_SIDE), labels.astype(np.int64)


def _digits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ink [1797, 64] and labels [1797], from the file if possible: the import is slow."""
    found = importlib.util.find_spec("sklearn")
    for place in (found and found.submodule_search_locations) or ():
        file = Path(place, "datasets", "data", "digits.csv.gz")
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    ink, labels = load_digits(return_X_y=True)
    return ink, labels


def noise(
    size: int, *, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Draw images of a shape [C, H, W] with uniform pixels in 0..255: uint8 [size, C, H, W]."""
    return generator.integers(256, size=(size, *shape), dtype=np.uint8)


def letters(size: int, *, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Draw images of upper- and lower-case letters in the style of the digits: uint8 [size, 1, 8,
    8].

    A random letter, font and stroke width is slanted, rotated, bent, scaled and shifted into a
    bitmap of 32 x 32, and ink is counted in blocks of 4 x 4, as for the digits. No digit is
    rendered, but letters that look like digits (O, l, I, S, B, Z, ...) are included. The result
    depends on the generator and on matplotlib's fonts. Raises ValueError if `size` is negative.
    """
    return labelled_letters(size, generator=generator)[0]


def labelled_letters(
    size: int, *, generator: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw the images of `letters` with labels [size]: 0 for a or A to 25 for z or Z."""
    if size < 0:
        raise ValueError(f"size is the number of letters to draw and must be 0 or more, got {size}")
    catalogue = _catalogue()
    chosen = generator.integers(len(catalogue), size=size)
    needed, tile = np.unique(chosen, return_inverse=True)
    glyphs = np.zeros((len(needed), 1, GLYPH_SIDE, GLYPH_SIDE), dtype=np.uint8)
    for place, number in enumerate(needed):
        glyphs[place, 0] = _glyph(*catalogue[number])
    tiles = torch.from_numpy(glyphs)
    affine = _random_affine(size, generator=generator)
    bends = generator.normal(scale=0.05, size=(size, 2, 4, 4)).astype(np.float32)
    specks = generator.random(size=size).astype(np.float32) * 0.005

    images = np.empty((size, 1, IMAGE_SIDE, IMAGE_SIDE), dtype=np.uint8)
    for start in range(0, size, CHUNK):
        rows = slice(start, start + CHUNK)
        grid = functional.affine_grid(
            affine[rows], [len(affine[rows]), 1, BITMAP_SIDE, BITMAP_SIDE], align_corners=False
        )
        bend = functional.interpolate(
            torch.from_numpy(bends[rows]), size=BITMAP_SIDE, mode="bicubic", align_corners=True
        )
        ink = functional.grid_sample(
            tiles[tile[rows]].to(grid), grid + bend.permute(0, 2, 3, 1), align_corners=False
        )
        bitmap = ink > 127.5
        speck = (
            generator.random(size=bitmap.shape, dtype=np.float32) < specks[rows, None, None, None]
        )
        bitmap ^= torch.from_numpy(speck)
        share = functional.avg_pool2d(bitmap.float(), BITMAP_SIDE // IMAGE_SIDE)
        images[rows] = torch.round(share * 255.0).to(torch.uint8).numpy()
    which = [LETTERS.index(letter) % 26 for _, letter, _ in catalogue]
    return images, np.array(which, dtype=np.int64)[chosen]


def _random_affine(size: int, *, generator: np.random.Generator) -> Tensor:
    """Draw maps from image to glyph coordinates in [-1, 1]^2: [size, 2, 3]."""
    height = generator.uniform(0.85, 1.05, size)
    width = generator.uniform(0.55, 0.85, size)
    slant = generator.normal(0.0, 0.2, size)
    angle = np.clip(generator.normal(0.0, math.radians(6.0), size), -0.3, 0.3)
    shift = generator.normal(0.0, 0.04, (size, 2))

    cosine, sine = np.cos(angle), np.sin(angle)
    affine = np.empty((size, 2, 3), dtype=np.float32)
    affine[:, 0, 0] = (cosine - slant * sine) / width
    affine[:, 0, 1] = (sine + slant * cosine) / width
    affine[:, 1, 0] = -sine / height
    affine[:, 1, 1] = cosine / height
    affine[:, :, 2] = shift
    return torch.from_numpy(affine)


@lru_cache(maxsize=1)
def _catalogue() -> list[tuple[Path, str, int]]:
    """Return all combinations of font, letter and stroke width."""
    import matplotlib  # a slow import

    directory = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = [file for name in FONTS.split() if (file := directory / f"{name}.ttf").exists()]
    if not paths:
        raise FileNotFoundError(
            f"matplotlib should ship fonts such as DejaVuSans.ttf in {directory}, found none"
        )
    catalogue = []
    for path in paths:
        # A pen stroke is about 4 of 32 pixels wide: thin fonts need more.
        strokes = (0, 1) if "Bol" in path.name or path.name == "cmb10.ttf" else (1, 2, 3)
        catalogue += [(path, letter, stroke) for letter in LETTERS for stroke in strokes]
    return catalogue


@cache
def _font(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size=48)


@cache
def _glyph(path: Path, letter: str, stroke: int) -> NDArray[np.uint8]:
    """Render one letter, crop it to its ink and centre it in a square [64, 64]."""
    font = _font(path)
    left, top, right, bottom = (int(edge) for edge in font.getbbox(letter, stroke_width=stroke))
    canvas = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(canvas).text((-left, -top), letter, fill=255, font=font, stroke_width=stroke)
    # Wide letters are compressed to the square; narrow ones keep their shape.
    width = max(1, min(GLYPH_SIDE, round(canvas.width * GLYPH_SIDE / canvas.height)))
    square = Image.new("L", (GLYPH_SIDE, GLYPH_SIDE))
    square.paste(
        canvas.resize((width, GLYPH_SIDE), Image.Resampling.BILINEAR),
        ((GLYPH_SIDE - width) // 2, 0),
    )
    return np.asarray(square)
