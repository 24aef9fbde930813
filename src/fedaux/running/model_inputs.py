"""What a trained model is asked to predict: images, texts, files, folders and tables."""

from __future__ import annotations

import codecs
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedaux.config import Auxiliary
from fedaux.data.decoding import (
    GREY_MODES,
    LARGE_BYTES,
    Content,
    Pixels,
    decode,
    encoded_size,
    from_pixels,
)
from fedaux.data.folders import IMAGE_SUFFIXES, TEXT_SUFFIXES, files_below
from fedaux.data.lines import open_csv, open_jsonl
from fedaux.data.parquet import open_parquet
from fedaux.data.tables import SHOWN_BAD, Opener, Table
from fedaux.data.texts import Texts, padded, text_of, trimmed

TABLES: dict[str, Opener] = {".csv": open_csv, ".jsonl": open_jsonl, ".parquet": open_parquet}
"""Readers of tables by the end of a file's name."""


@dataclass(frozen=True)
class Item:
    """One input: its file or position, its row if the file is a table, and its content."""

    path: str
    row: int | None
    content: Content
    problem: str | None = None
    """Why a row of a table cannot be read."""

    def __str__(self) -> str:
        return self.path if self.row is None else f"{self.path}, row {self.row}"


@dataclass(frozen=True)
class Items:
    """Inputs in order, read while they are used."""

    size: int
    parts: Sequence[Iterable[Item]]
    encoding: str | None = None
    """That of text files that are neither UTF-8 nor marked as UTF-16."""

    def __iter__(self) -> Iterator[Item]:
        for part in self.parts:
            yield from part


def collect(
    inputs: object,
    *,
    texts: bool,
    columns: Sequence[str],
    usual: Sequence[str],
    encoding: str | None = None,
) -> Items:
    """Return the inputs of `predict`: one or a sequence of images, texts, paths.

    For models of texts, a `str` is a text, or the path of an existing file or folder if it is the
    only input; otherwise it is a path. `columns` of tables are those to read; `usual` are the
    columns that the model was trained on. Raises ValueError for other types.
    """
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError as error:
            raise ValueError(
                f"--encoding {encoding} (encoding=): should be an encoding of Python, such as "
                "latin-1 or cp1252"
            ) from error
    if isinstance(inputs, str) and os.path.exists(inputs):  # noqa: PTH110 (the other raises)
        inputs = Path(inputs)
    if isinstance(inputs, Tensor):
        inputs = inputs.cpu().numpy()
    if isinstance(inputs, np.ndarray):
        inputs = inputs[None] if inputs.ndim == 3 else inputs
    several = isinstance(inputs, Sequence | np.ndarray) and not isinstance(inputs, str)
    parts: list[Sequence[Item] | Rows] = []
    listed: Iterable[Any] = inputs if several else [inputs]  # type: ignore[assignment]
    for number, one in enumerate(listed):
        if isinstance(one, Path) or (isinstance(one, str) and not texts):
            opened = partial(_opened, texts=texts, columns=columns, usual=usual, encoding=encoding)
            parts += _of_path(Path(one), texts=texts, opened=opened)
        else:
            parts.append([Item(str(number), None, _content(one, texts=texts))])
    return Items(sum(len(part) for part in parts), parts, encoding)


class Rows:
    """The rows of a table."""

    def __init__(self, file: Path, table: Table) -> None:
        self._file, self._table = file, table

    def __len__(self) -> int:
        return self._table.size

    def __iter__(self) -> Iterator[Item]:
        for row, (_, content) in enumerate(self._table.entries()):
            yield Item(str(self._file), row, content, self._table.bad.get(row))


def _content(one: Any, *, texts: bool) -> Content:
    if texts:
        if isinstance(one, str):
            return one
        raise ValueError(f"is a model of texts; should get texts or paths, not {_kind(one)}")
    if isinstance(one, Image.Image):
        stream = io.BytesIO()
        one.save(stream, "png")
        return stream.getvalue()
    pixels = one.cpu().numpy() if isinstance(one, Tensor) else one
    if (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.ndim == 3
        and len(pixels) in (1, 3)
    ):
        return pixels
    raise ValueError(
        f"is a model of images; should get paths, images of Pillow, or pixels uint8 [N, C, H, W] "
        f"with 1 or 3 channels, not {_kind(pixels)}"
    )


def _kind(one: object) -> str:
    if isinstance(one, np.ndarray):
        return f"{one.dtype} {list(one.shape)}"
    return type(one).__name__


def _of_path(
    place: Path, *, texts: bool, opened: Callable[[Opener, Path], Table]
) -> list[Sequence[Item] | Rows]:
    if not place.exists():
        raise ValueError(f"{place}: not found")
    if not place.is_dir():
        opener = TABLES.get(place.suffix.lower())
        if opener is None:
            return [[Item(str(place), None, place)]]
        return [Rows(place, opened(opener, place))]
    suffixes = TEXT_SUFFIXES if texts else IMAGE_SUFFIXES
    if files := files_below(place, suffixes=suffixes):
        return [[Item(str(file), None, file) for file in files]]
    tables = files_below(place, suffixes=TABLES)
    if not tables:
        kinds = ", ".join(sorted({*suffixes, *TABLES}))
        raise ValueError(f"{place}: has no {'texts' if texts else 'images'} ({kinds})")
    return [part for file in tables for part in _of_path(file, texts=texts, opened=opened)]


def _opened(
    opener: Opener,
    file: Path,
    *,
    texts: bool,
    columns: Sequence[str],
    usual: Sequence[str],
    encoding: str | None,
) -> Table:
    """Open a table: the given columns, else those of the training data, else the usual names."""
    wishes = [columns] if columns else [usual, ()] if usual else [()]
    key, first = "text_column" if texts else "image_column", ""
    for wish in wishes:
        chosen = {} if not wish else {key: tuple(wish)} if texts else {key: wish[0]}
        section = Auxiliary(
            source=file.suffix[1:].lower(), path=str(file), encoding=encoding, **chosen
        )
        try:
            table = opener(str(file), "train", section, texts)
        except ValueError as error:
            first = first or str(error)  # about the columns of the training, if they are known
            if wish is not wishes[-1]:
                continue
            said = first.replace(f"auxiliary.{key}", "--column (columns=)")
            raise ValueError(_with_option(said)) from error
        assert table is not None, "a file is its own training part"
        return table
    raise AssertionError("the last wish returns or raises")


def _with_option(problem: str) -> str:
    """Return a problem with the option of `predict` instead of a recipe's setting."""
    return problem.replace("set `encoding`", "give --encoding (encoding=)")


class Converter:
    """Makes inputs what the model was trained on, and counts what had to be changed."""

    def __init__(
        self,
        shape: Sequence[int],
        *,
        texts: Texts | None,
        exact_width: bool,
        resizes: bool,
        recolours: bool,
        encoding: str | None = None,
    ) -> None:
        self._shape = tuple(shape)
        self._texts = texts
        self._exact_width = exact_width
        self._resizes = resizes
        self._recolours = recolours
        self._encoding = encoding
        self._converted = 0
        self._seen = 0
        self._first = ""

    def __call__(
        self, items: Sequence[Item], *, bad: dict[str, str] | None
    ) -> tuple[list[Item], Tensor]:
        """Return the readable items and their examples, uint8 [n, C, H, W] or token ids [n, L].

        Raises ValueError with unreadable ones, unless `bad` collects the reasons.
        """
        good: list[Item] = []
        made: list[Any] = []
        unreadable: dict[str, str] = {}
        for item, found in zip(items, self._read(items), strict=True):
            if isinstance(found, ValueError):
                unreadable[str(item)] = str(found)
                continue
            good.append(item)
            made.append(found)
            if self._texts is None:
                self._count(item)
        if unreadable and bad is None:
            lines = [f"{item}: {why}" for item, why in islice(unreadable.items(), SHOWN_BAD)]
            advice = "(--skip-bad, skip_bad=True, leaves such inputs out)"
            if len(unreadable) == 1:
                raise ValueError(f"{lines[0]} {advice}")
            count = f"{len(unreadable)} of {len(items)} inputs cannot be read {advice}, such as:"
            raise ValueError("\n  ".join([count, *lines]))
        if bad is not None:
            bad |= unreadable
        if self._texts is None:
            empty = np.zeros((0, *self._shape), dtype=np.uint8)
            return good, torch.from_numpy(np.stack(made) if made else empty)
        encoded = self._texts.vocabulary.encode(made, length=self._texts.length)
        ids, width = torch.from_numpy(trimmed(encoded)), self._shape[0]
        return good, padded(ids[:, :width], width=width) if self._exact_width else ids

    def _read(self, items: Sequence[Item]) -> list[Any]:
        """Return the pixels or text of each item, or its error; large images in threads."""

        def read(item: Item) -> Any:
            try:
                if item.problem is not None:
                    raise ValueError(item.problem)
                if self._texts is None:
                    return self._pixels(item)
                return text_of(item.content, encoding=self._encoding)
            except ValueError as error:
                return ValueError(_with_option(str(error)))

        if self._texts is not None or not items or encoded_size(items[0].content) <= LARGE_BYTES:
            return [read(item) for item in items]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(read, items))

    def warn(self) -> None:
        """Warn once if images had another size or colour than those of the training."""
        if self._converted:
            channels, height, width = self._shape
            colour = "grey" if channels == 1 else "colour"
            warnings.warn(
                f"{self._converted} of {self._seen} images were not {width}x{height} {colour}, "
                f"which the model was trained on, and were converted; first: {self._first}",
                stacklevel=3,
            )

    def _pixels(self, item: Item) -> Pixels:
        channels, height, width = self._shape
        square = height == width
        pixels = decode(item.content, channels=channels, side=height if square else None)
        if pixels.shape[1:] != (height, width):
            size, filter = (width, height), Image.Resampling.BILINEAR
            fitted = np.asarray(ImageOps.fit(from_pixels(pixels), size, filter))
            pixels = fitted[None] if channels == 1 else fitted.transpose(2, 0, 1)
        return pixels

    def _count(self, item: Item) -> None:
        """Count an image, and whether it had to be converted as no training image was."""
        self._seen += 1
        channels, height, width = _found_shape(item.content)
        resized = (height, width) != self._shape[1:] and not self._resizes
        if resized or (channels != self._shape[0] and not self._recolours):
            self._converted += 1
            about = f"{width}x{height} {'grey' if channels == 1 else 'colour'}"
            self._first = self._first or f"{item} ({about})"


def _found_shape(content: Content) -> tuple[int, ...]:
    """Return channels, height and width of a decodable image, from its header alone."""
    if isinstance(content, np.ndarray):
        return tuple(content.shape)
    assert isinstance(content, bytes | Path), "decoded before"
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
        width, height = picture.size
        return 1 if picture.mode in GREY_MODES else 3, height, width
