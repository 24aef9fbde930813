"""Tables: data that was opened but not read, whatever its format; how it becomes images or token ids, and labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fedaux.config import Auxiliary, Data
from fedaux.data import cache
from fedaux.data.decoding import Block, Cell, Numbers, decode_all
from fedaux.data.texts import Texts, trimmed

MAX_CLASSES = 100_000
"""A class number beyond this is a mistake, such as an identifier taken for a label."""
ANY_GAPS = 1000
"""Up to so many classes a file of a few examples, such as a client's, may lack any of them."""
SEEN_SHARE = 0.1
"""Of more classes than that, so many must have an example."""
QUIET_SECONDS = 3.0
"""Decoding that takes longer says how far it is, as often as this."""


@dataclass(frozen=True)
class Table:
    """Rows of one part of a data set. `labels` and `cells` read them, in order; `classes` are names by class number.

    `bad` says of rows that cannot be read at all why; their cells and labels are empty. `wnids` reads the WordNet ids
    of the rows, where a column has them.
    """

    files: tuple[Path, ...]
    size: int
    cells: Callable[[], Iterator[Cell]]
    labels: Callable[[], Sequence[object]] | None = None
    classes: tuple[str, ...] | None = None
    bad: Mapping[int, str] = field(default_factory=dict)
    wnids: Callable[[], Sequence[Any]] | None = None


Opener = Callable[[str, str, Data | Auxiliary, bool], Table | None]
"""Opens the part `train` or `test` of a path for a section, for its images or for its texts, which the last argument
says; None where that part is not there."""

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name")
TEXT_COLUMNS = ("text", "sentence", "content", "review_body", "review", "document")
LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label")


@dataclass(frozen=True)
class Examples:
    """Images uint8 [N, C, H, W] or token ids int32 [N, L]; labels [N] in 0 .. classes - 1, or 0 if none are wanted."""

    images: Numbers
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    rows: NDArray[np.int64] | None = None
    """Their rows in the table [N]: bad ones may be left out."""


def key_of(section: Data | Auxiliary) -> str:
    """Return `data` or `auxiliary`, as settings of the section begin."""
    return "data" if isinstance(section, Data) else "auxiliary"


@contextmanager
def found_by(setting: str, path: str) -> Iterator[None]:
    """Let what is said about a file at a path begin with the setting that led there; the rest is left as it is."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        behind = said.removeprefix(str(Path(path)))[:1] if said.startswith(str(Path(path))) else ""
        if behind not in {":", ",", "/"}:
            raise
        raise ValueError(
            f"{setting} = {path}: {said}" if behind == "/" else f"{setting} = {said}"
        ) from error


def read(
    table: Table,
    section: Data | Auxiliary,
    *,
    name: str,
    texts: Texts | None = None,
    size: int | None = None,
    row_by_row: bool = False,
) -> Examples:
    """Decode a table, or map what was decoded before; `name` says whose it is where nothing is left.

    With `texts` its cells are texts and become token ids, as wide as the longest of them. With `size` only the first
    good rows are decoded, so many where there are so many, and what comes after them is not looked at.
    `row_by_row` lets no row decide about another: each is named by its own label, and all may be bad.

    Raises ValueError naming file and row of the first bad row, unless bad ones are to be skipped: then says how many.
    """
    key = key_of(section)
    labels = np.zeros(table.size, dtype=np.int64)
    classes: tuple[str, ...] = ()
    bad: dict[int, str] = {}
    if isinstance(section, Data):
        assert table.labels is not None, "openers look for labels where they are needed"
        values = table.labels()
        try:
            name_rows = name_labels if row_by_row else number_labels
            labels, classes, bad = name_rows(values, classes=table.classes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    bad |= table.bad
    settings: dict[str, object] = {"source": section.source, "bad_labels": sorted(bad.items())}
    if texts is None:
        settings |= {
            "image_column": section.image_column,
            "channels": section.channels,
            "image_size": section.image_size,
        }
    else:
        settings |= {
            "text_column": section.text_column,
            "vocabulary": texts.vocabulary.digest,
            "length": texts.length,
        }
    if size is not None:
        settings["size"] = size
    place = cache.content_key(table.files, settings=settings)
    found = cache.load(place)
    if found is None:
        # Where a bad row stops everything, the first rows are the first good ones.
        cells = table.cells() if section.skip_bad else islice(table.cells(), size)
        if texts is None:
            blocks = decode_all(
                cells,
                bad_labels=bad,
                channels=section.channels,
                side=section.image_size,
                size_key=f"{key}.image_size",
            )
        else:
            blocks = texts.encode_all(cells, bad_labels=bad)
        if size is not None:
            blocks = _first(blocks, size)
        expected = min(table.size, size or table.size)
        found = cache.store(place, _watched(blocks, section, expected=expected, name=name))
    if found.reasons:
        if not section.skip_bad:
            raise ValueError(_advice(found.reasons[0], key))
        looked_at = len(found.rows) + len(found.reasons)
        _say(f"{name}: skipped {len(found.reasons)} of {looked_at} rows, first: {found.reasons[0]}")
    if len(found.rows) == 0 and row_by_row:
        side = section.image_size or 1
        return Examples(
            np.zeros((0, section.channels or 1, side, side), dtype=np.uint8), labels[:0], classes
        )
    if len(found.rows) == 0:
        nothing = "no images" if texts is None else "no texts"
        raise ValueError(
            f"{name}: {nothing}"
            + (f" but bad ones, first: {found.reasons[0]}" if found.reasons else "")
        )
    images = found.images if texts is None else trimmed(found.images)
    return Examples(images, labels[found.rows], classes, found.rows)


def number_labels(
    values: Sequence[object], *, classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...], dict[int, str]]:
    """Return class numbers [N], the names of the classes, and what is wrong with the label of some rows.

    Labels are names or numbers of `classes`; without these, whole numbers are class numbers from 0 upwards, and
    anything else is a name, the classes being the sorted names. Raises ValueError where numbers leave gaps that no
    classes would.
    """
    cleaned = [_clean(value) for value in values]
    if classes is None and not all(
        value is None or _number(value) is not None for value in cleaned
    ):
        cleaned = [None if value is None else str(value) for value in cleaned]
        classes = tuple(sorted({value for value in cleaned if isinstance(value, str)}))
    positions = {name: number for number, name in enumerate(classes or ())}
    limit = MAX_CLASSES if classes is None else len(classes)
    numbers = np.zeros(len(cleaned), dtype=np.int64)
    bad: dict[int, str] = {}
    for row, value in enumerate(cleaned):
        if value is None:
            bad[row] = "the label is missing"
            continue
        # Text is a name first: a class called 3 need not be the third.
        number = (
            positions[value] if isinstance(value, str) and value in positions else _number(value)
        )
        if number is None:
            bad[row] = f"the label {value} is none of the {limit} classes"
        elif not 0 <= number < limit:
            bad[row] = f"the label {value} is outside the range 0 .. {limit - 1}"
        else:
            numbers[row] = number
    if classes is None:
        good = np.array([row for row in range(len(numbers)) if row not in bad], dtype=np.int64)
        refuse_gaps(numbers[good], rows=good)
        classes = tuple(str(number) for number in range(int(numbers[good].max(initial=-1)) + 1))
    return numbers, classes, bad


def name_labels(
    values: Sequence[object], *, classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...], dict[int, str]]:
    """Return what `number_labels` does, the name of each row's class being a function of its own label.

    `number_labels` looks at all rows: one name among numbers makes names of all of them, and one high number is an
    error. At a node that would let one private example decide about the others.
    """
    names: dict[int, str] = {}
    for row, value in enumerate(map(_clean, values)):
        if value is None:
            continue
        number = (
            None if isinstance(value, str) and len(value) > 20 else _number(value)
        )  # Python refuses long ones
        if classes is None:
            names[row] = str(value if number is None else number)
        elif value in classes:
            names[row] = str(value)
        else:
            names[row] = (
                classes[number] if number is not None and 0 <= number < len(classes) else str(value)
            )
    held = tuple(sorted(set(names.values())))
    numbers = {name: number for number, name in enumerate(held)}
    labels = np.array(
        [numbers[names[row]] if row in names else 0 for row in range(len(values))], dtype=np.int64
    )
    return (
        labels,
        held,
        {row: "the label is missing" for row in range(len(values)) if row not in names},
    )


def refuse_gaps(labels: NDArray[np.int64], *, rows: NDArray[np.int64]) -> None:
    """Raise ValueError where hardly any of the class numbers up to the highest of the labels [N], of rows [N], occurs.

    One stray number, or identifiers in the place of labels, would otherwise make models with as many outputs.
    """
    count, seen = int(labels.max(initial=-1)) + 1, np.unique(labels)
    if count > ANY_GAPS and len(seen) < SEEN_SHARE * count:
        usual = f", the next is {seen[-2]}" if len(seen) > 1 else ""
        raise ValueError(
            f"row {rows[labels.argmax()]} has the label {count - 1}, the highest{usual}: that would be {count} "
            f"classes, of which {len(seen)} have an example; should be numbers from 0 upwards without such "
            "gaps, or names"
        )


def _clean(value: object) -> int | str | None:
    """Return a label as a number or a text, or None where it is missing."""
    if isinstance(value, float | np.floating):
        return (
            None if math.isnan(value) else int(value) if float(value).is_integer() else str(value)
        )
    if isinstance(value, int | np.integer):
        return int(value)
    return None if value is None else str(value).strip() or None


def _number(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if value.removeprefix("-").isdecimal() else None


def find_content(
    columns: Sequence[str],
    section: Data | Auxiliary,
    *,
    texts: bool,
    where: Path | str,
    typed: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the column that holds the images, or those that hold the texts; `typed` are of the right type."""
    key = key_of(section)
    if texts:
        where_to_say = f"{key}.text_column"
        given = section.text_column or (None,)
        return tuple(
            find_column(columns, given=one, names=TEXT_COLUMNS, setting=where_to_say, where=where)
            for one in given
        )
    names = (*IMAGE_COLUMNS, *typed)
    return (
        find_column(
            columns,
            given=section.image_column,
            names=names,
            setting=f"{key}.image_column",
            where=where,
        ),
    )


def joined_texts(values: Sequence[object]) -> str | None:
    """Return the texts of a row's columns as one; None where there are none."""
    texts = [str(value) for value in values if value is not None]
    return " ".join(texts) if texts else None


def find_column(
    columns: Sequence[str],
    *,
    given: str | None,
    names: Sequence[str],
    setting: str,
    where: Path | str,
) -> str:
    """Return the column that a setting gives, or the first that has one of the usual names."""
    held = ", ".join(columns) or "none"
    if given is not None:
        if given not in columns:
            raise ValueError(f"{setting} = {given!r}: {where} has no such column; it has {held}")
        return given
    for name in names:
        if name in columns:
            return name
    raise ValueError(
        f"{where}: has no column {names[0]}; it has {held}; say with {setting} which one it is"
    )


def _first(blocks: Iterator[Block], size: int) -> Iterator[Block]:
    """Pass so many good rows on, and the bad ones before the last of them."""
    left = size
    for block in blocks:
        if len(block.rows) >= left:
            reasons = {
                row: reason for row, reason in block.reasons.items() if row < block.rows[left - 1]
            }
            yield Block(block.images[:left], block.rows[:left], reasons)
            return
        left -= len(block.rows)
        yield block


def _watched(
    blocks: Iterator[Block], section: Data | Auxiliary, *, expected: int, name: str
) -> Iterator[Block]:
    """Pass blocks on, stop at the first bad row unless these are skipped, and say how far it is."""
    began = spoke = time.monotonic()
    done = 0
    for block in blocks:
        if block.reasons and not section.skip_bad:
            raise ValueError(_advice(next(iter(block.reasons.values())), key_of(section)))
        done += len(block.rows) + len(block.reasons)
        now = time.monotonic()
        if now - spoke >= QUIET_SECONDS and done < expected:
            spoke = now
            rest = (now - began) / done * (expected - done)
            _say(f"{name}: {done} of {expected} rows decoded, ETA {rest:.0f} s")
        yield block


def _advice(reason: str, key: str) -> str:
    return f"{reason} ({key}.skip_bad = true leaves such rows out)"


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
