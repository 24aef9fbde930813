"""Tables of any file format, and how they become images or token ids, and labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedaux.config import Auxiliary, Data
from fedaux.data import cache, notes
from fedaux.data.decoding import LOSSES, DecodedBlock, Entry, Numbers, decode_all, usual_size

MAX_CLASSES = 100_000
"""Larger class numbers are an error, such as ids used as labels."""
MOST_CLASSES_WITH_GAPS = 1000
"""Up to this many classes, any of them may be missing in a file."""
LEAST_SEEN_SHARE = 0.1
"""Share of the classes that must have an example if there are more."""
SIZED_ROWS = 1000
"""Rows whose sizes are compared at least, if only the first rows are used."""
SHOWN_BAD = 5
"""Bad rows that an error names."""
PROGRESS_SECONDS = 3.0
"""Time between two lines of progress while decoding."""


@dataclass(frozen=True)
class Table:
    """Rows of one part of a dataset, read in order by `entries` and `labels`.

    `classes` are names by class number, `bad` the reasons for unreadable rows, and `wnids` reads
    the WordNet ids of the rows, if there is such a column. `warnings` are printed when it is read.
    """

    files: tuple[Path, ...]
    size: int
    entries: Callable[[], Iterator[Entry]]
    labels: Callable[[], Sequence[object]] | None = None
    classes: tuple[str, ...] | None = None
    bad: Mapping[int, str] = field(default_factory=dict)
    wnids: Callable[[], Sequence[Any]] | None = None
    warnings: tuple[str, ...] = ()


class Converter(Protocol):
    """Makes numbers [N, ...] of the entries of a table: token ids of texts, or features."""

    reads_texts: bool

    def settings(self, section: Data | Auxiliary) -> dict[str, object]:
        """Return everything besides the files that the numbers depend on."""

    def finished(self, numbers: Numbers) -> Numbers:
        """Return stored numbers as they are used."""

    def nothing(self) -> Numbers:
        """Return the numbers of no entries."""

    def encode_all(
        self,
        entries: Iterator[Entry],
        *,
        bad_labels: Mapping[int, str],
        encoding: str | None = None,
        place: str | None = None,
        expected: int = 0,
    ) -> Iterator[DecodedBlock]:
        """Yield the rows in order, in blocks; `place` names them in the cache."""


Opener = Callable[[str, str, Data | Auxiliary, bool], Table | None]
"""Opens the part `train` or `test` of a path for a section, as images or (True) as texts; None if
the part is missing."""

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name")
TEXT_COLUMNS = ("text", "sentence", "content", "review_body", "review", "document")
LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label")


@dataclass(frozen=True)
class Examples:
    """Images uint8 [N, C, H, W] or token ids int32 [N, L]; labels [N], 0 without classes."""

    images: Numbers
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    rows: NDArray[np.int64] | None = None
    """Their rows in the table [N]."""


def key_of(section: Data | Auxiliary) -> str:
    """Return `data` or `auxiliary`, the prefix of the section's settings."""
    return "data" if isinstance(section, Data) else "auxiliary"


class BadRows(ValueError):
    """Rows that cannot be used: the reasons of the first ones, and how many there are."""

    def __init__(self, reasons: Sequence[str], *, bad: int, key: str) -> None:
        self.reasons, self.bad, self.key = reasons[:SHOWN_BAD], bad, key
        advice = f"({key}.skip_bad = true skips such rows)"
        first = f"; the first {SHOWN_BAD} are" if bad > SHOWN_BAD else ""
        lines = [f"{bad} rows are bad {advice}{first}:", *self.reasons]
        super().__init__("\n  ".join(lines) if bad > 1 else f"{reasons[0]} {advice}")

    @classmethod
    def joined(cls, several: Sequence[BadRows]) -> BadRows:
        """Return one error for several tables."""
        return cls(
            [reason for one in several for reason in one.reasons],
            bad=sum(one.bad for one in several),
            key=several[0].key,
        )


def reworded(error: ValueError, *, old: str = "", new: str) -> ValueError:
    """Return an error that begins with `new` instead of `old`."""
    if isinstance(error, BadRows):
        reasons = [
            new + reason.removeprefix(old) if reason.startswith(old) else reason
            for reason in error.reasons
        ]
        return BadRows(reasons, bad=error.bad, key=error.key)
    return ValueError(new + str(error).removeprefix(old))


@contextmanager
def found_by(setting: str, path: str) -> Iterator[None]:
    """Prefix error messages about a path with its setting."""
    try:
        yield
    except ValueError as error:
        message = error.reasons[0] if isinstance(error, BadRows) else str(error)
        start = str(Path(path))
        after = message.removeprefix(start)[:1] if message.startswith(start) else ""
        if after not in {":", ",", "/"}:
            raise
        place = f"{setting} = {path}: " if after == "/" else f"{setting} = "
        raise reworded(error, new=place) from error


def read(
    table: Table,
    section: Data | Auxiliary,
    *,
    name: str,
    converter: Converter | None = None,
    size: int | None = None,
    row_by_row: bool = False,
) -> Examples:
    """Decode a table, or load it from the cache; `name` is its name in messages.

    With `row_by_row` no row decides about another: each is named by its own label, and all may be
    bad.

    A `converter` makes token ids of texts, or features. With `size`, only the first `size` good
    rows are decoded. Raises BadRows with files and rows; with `skip_bad`, prints how many were
    skipped.
    """
    key = key_of(section)
    labels = np.zeros(table.size, dtype=np.int64)
    classes: tuple[str, ...] = ()
    bad: dict[int, str] = {}
    if isinstance(section, Data):
        assert table.labels is not None, "openers find the labels"
        values = table.labels()
        try:
            name_rows = name_labels if row_by_row else number_labels
            labels, classes, bad = name_rows(values, classes=table.classes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    bad |= table.bad
    # At a node, no row may decide about another; image_size is declared there.
    most_decide = section.skip_bad and section.image_size is None and not row_by_row
    settings: dict[str, object] = {"source": section.source, "bad_labels": sorted(bad.items())}
    if converter is None:
        settings |= {
            "image_column": section.image_column,
            "channels": section.channels,
            "image_size": section.image_size,
            "most_decide": most_decide,
        }
    else:
        settings |= converter.settings(section)
    if size is not None:
        settings["size"] = size
    place = cache.Key(table.files, settings=settings)
    found = cache.load(place()) if place.may_exist() else None
    if found is None:
        place.read_meanwhile()
        # Without skip_bad, the first rows are the first good ones.
        entries = table.entries() if section.skip_bad else islice(table.entries(), size)
        expected = min(table.size, size or table.size)
        if converter is None:
            blocks = decode_all(
                entries,
                bad_labels=bad,
                channels=section.channels,
                side=section.image_size,
                size_key=f"{key}.image_size",
                size=usual_size(islice(table.entries(), size and max(size, SIZED_ROWS)))
                if most_decide
                else None,
            )
        else:
            blocks = converter.encode_all(
                entries,
                bad_labels=bad,
                encoding=section.encoding,
                place=place.moment,
                expected=expected,
            )
        if size is not None:
            blocks = _first_rows(blocks, size)
        found = cache.store(place, _with_progress(blocks, section, expected=expected, name=name))
    if found.reasons:
        if not section.skip_bad:
            raise BadRows(found.reasons, bad=len(found.reasons), key=key)
        notes.skip(
            name,
            skipped=len(found.reasons),
            rows=len(found.rows) + len(found.reasons),
            reasons=found.reasons,
            setting=f"{key}.skip_bad",
        )
    for warning in table.warnings:
        notes.warn(f"{name}: {warning}")
    for kind, where in found.lost.items():
        notes.warn(f"{name}: {LOSSES[kind].format(key=key)} (first: {where})")
    if len(found.rows) == 0 and row_by_row:
        shape = (0, section.channels or 1, *[section.image_size or 1] * 2)
        nothing = np.zeros(shape, dtype=np.uint8) if converter is None else converter.nothing()
        return Examples(nothing, labels[:0], classes)
    if len(found.rows) == 0:
        kind = "texts" if converter is not None and converter.reads_texts else "images"
        bad_row = f"; first bad row: {found.reasons[0]}" if found.reasons else ""
        raise ValueError(f"{name}: no {kind}{bad_row}")
    images = found.images if converter is None else converter.finished(found.images)
    return Examples(images, labels[found.rows], classes, found.rows)


def number_labels(
    values: Sequence[object], *, classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...], dict[int, str]]:
    """Return class numbers [N], class names, and the problems of labels by row.

    Labels are names or numbers of `classes`. Without `classes`, whole numbers are class numbers,
    and other labels are names, sorted. Raises ValueError for large gaps between numbers.
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
        # A class named "3" need not have the number 3.
        number = (
            positions[value] if isinstance(value, str) and value in positions else _number(value)
        )
        if number is None:
            bad[row] = f"the label {value} is not one of the {limit} classes"
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
    """Return what `number_labels` does, the name of each row's class being a function of its own
    label.

    `number_labels` looks at all rows: one name among numbers makes names of all of them, and one
    high number is an error. At a node that would let one private example decide about the others.
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
    """Raise ValueError if most class numbers up to the highest label have no example.

    A wrong number, or ids as labels, would otherwise give models with too many outputs.
    """
    count, seen = int(labels.max(initial=-1)) + 1, np.unique(labels)
    if count > MOST_CLASSES_WITH_GAPS and len(seen) < LEAST_SEEN_SHARE * count:
        usual = f", the next is {seen[-2]}" if len(seen) > 1 else ""
        raise ValueError(
            f"row {rows[labels.argmax()]} has the label {count - 1}, the highest{usual}: only "
            f"{len(seen)} of {count} classes would have an example; should be numbers from 0 "
            "upwards "
            "without such gaps, or names"
        )


def _clean(value: object) -> int | str | None:
    """Return a label as a number or a text, or None if it is missing."""
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
    """Return the column of the images, or the columns of the texts; `typed` have the right type."""
    key = key_of(section)
    if texts:
        given = section.text_column or (None,)
        return tuple(
            find_column(
                columns, given=one, names=TEXT_COLUMNS, setting=f"{key}.text_column", where=where
            )
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
    """Return the texts of a row's columns joined; None without any."""
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
    """Return the given column, or the first with one of the usual names."""
    held = ", ".join(columns) or "none"
    if given is not None:
        if given not in columns:
            raise ValueError(f"{setting} = {given!r}: {where} has no such column; it has {held}")
        return given
    for name in names:
        if name in columns:
            return name
    raise ValueError(f"{where}: has no column {names[0]}; it has {held}; set {setting}")


def find_label(
    columns: Sequence[str],
    section: Data,
    *,
    where: Path | str,
    names: Sequence[str] = LABEL_COLUMNS,
) -> str:
    """Return the given column of labels, or the first with one of the usual names."""
    given, setting = section.label_column, "data.label_column"
    return find_column(columns, given=given, names=names, setting=setting, where=where)


def _first_rows(blocks: Iterator[DecodedBlock], size: int) -> Iterator[DecodedBlock]:
    """Yield `size` good rows, and the bad ones before the last of them."""
    left = size
    for block in blocks:
        if len(block.rows) >= left:
            reasons = {
                row: reason for row, reason in block.reasons.items() if row < block.rows[left - 1]
            }
            yield DecodedBlock(block.images[:left], block.rows[:left], reasons)
            return
        left -= len(block.rows)
        yield block


def _with_progress(
    blocks: Iterator[DecodedBlock], section: Data | Auxiliary, *, expected: int, name: str
) -> Iterator[DecodedBlock]:
    """Yield the blocks and print progress. Raises BadRows at the end without skip_bad."""
    began = printed = time.monotonic()
    done = 0
    reasons: list[str] = []
    for block in blocks:
        reasons += block.reasons.values()
        done += len(block.rows) + len(block.reasons)
        now = time.monotonic()
        if now - printed >= PROGRESS_SECONDS and done < expected:
            printed = now
            speed = done / (now - began)
            rest = f"{speed:.0f} per second, ETA {(expected - done) / speed:.0f} s"
            notes.say(f"{name}: {done} of {expected} rows decoded, {rest}")
        yield block
    if reasons and not section.skip_bad:
        raise BadRows(reasons, bad=len(reasons), key=key_of(section))
