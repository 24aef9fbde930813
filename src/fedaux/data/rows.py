"""A node's own rows: each is found, counted and read without a look at any other.

A node's data is a sequence of rows, of which any may be replaced by any other:

    csv, jsonl   a line, ended by a line feed, and the file that it names; the first line of a CSV
                 file, its header, is public
    folder       a name in a class folder, whatever it is

So n is the number of lines or names, and a row that cannot be read is bad.
"""

from __future__ import annotations

import csv
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fedaux.config import Data
from fedaux.data.decoding import is_decodable
from fedaux.data.folders import part_files
from fedaux.data.lines import Row, content_of, row_of_json
from fedaux.data.tables import Table, find_content, find_label
from fedaux.data.texts import NOT_UNICODE

MOST_ROW_BYTES = 2**25
"""Longest line."""
TOO_LONG = f"longer than {MOST_ROW_BYTES} bytes"


def open_csv_rows(section: Data) -> Table:
    """Open comma-separated files with a header; a row is a line."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field can be a whole image
    return _open_lines(section, suffix=".csv", read=_csv_rows)


def open_jsonl_rows(section: Data) -> Table:
    """Open files with one JSON object per line."""
    return _open_lines(section, suffix=".jsonl", read=_jsonl_rows)


def _open_lines(
    section: Data, *, suffix: str, read: Callable[[Path, Data], Iterator[Row]]
) -> Table:
    assert section.path is not None, "checked before"
    files = part_files(section.path, "train", section, suffix=suffix)
    rows = [row for file in files for row in read(file, section)]
    entries = [
        (row.where, content_of(row.values.get(IMAGE), row.file.parent, section)) for row in rows
    ]
    pictures = {held: None for _, held in entries if isinstance(held, Path) and is_decodable(held)}
    bad = {number: row.problem for number, row in enumerate(rows) if row.problem is not None}
    return Table(
        files=(*files, *pictures),
        size=len(rows),
        entries=lambda: iter(entries),
        labels=lambda: [row.values.get(LABEL) for row in rows],
        bad=bad,
    )


IMAGE, LABEL = "image", "label"
"""Keys of the values of a row."""


def _csv_rows(file: Path, section: Data) -> Iterator[Row]:
    lines = _lines(file)
    try:
        header = _fields(next(lines, b""), encoding="utf-8-sig")
    except ValueError as error:
        raise ValueError(f"{file}: its header is {error}") from error
    (image,) = find_content(header, section, texts=False, where=file)
    label = find_label(header, section, where=file)
    for number, line in enumerate(lines):
        where = f"{file}, row {number}"
        try:
            fields = _fields(line)
            if len(fields) != len(header):
                raise ValueError(f"{len(fields)} fields in the line; should be {len(header)}")
            held = dict(zip(header, fields, strict=True))
            yield Row(where, file, {IMAGE: held[image], LABEL: held[label]})
        except ValueError as error:
            yield Row(where, file, {}, str(error))


def _fields(line: bytes | None, *, encoding: str = "utf-8") -> list[str]:
    """Return the fields of a line. Raises ValueError if it is not whole by itself."""
    if line is None:
        raise ValueError(TOO_LONG)
    try:
        return next(csv.reader([line.decode(encoding)], strict=True), [])
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UNICODE) from error
    except csv.Error as error:
        raise ValueError(f"not valid CSV in a line of its own ({error})") from error


def _jsonl_rows(file: Path, section: Data) -> Iterator[Row]:
    assert section.image_column is not None, "load_node requires it"
    assert section.label_column is not None, "load_node requires it"
    for number, line in enumerate(_lines(file)):
        where = f"{file}, row {number}"
        if line is None:
            yield Row(where, file, {}, TOO_LONG)
            continue
        row = row_of_json(line, where=where, file=file)
        image, label = (row.values.get(key) for key in (section.image_column, section.label_column))
        problem = row.problem
        if problem is None and not isinstance(label, str | int | float | None):
            problem = "the label is neither a text nor a number"
        if problem is None and isinstance(label, str) and not _is_encodable(label):
            problem = f"the label is {NOT_UNICODE}"
        yield Row(where, file, {IMAGE: image, LABEL: None if problem else label}, problem)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(file: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file, None for one that is too long. Raises ValueError if the last one
    has no end: the boundaries of a row must not depend on the row."""
    with file.open("rb") as stream:
        while line := stream.readline(MOST_ROW_BYTES):
            whole = line.endswith(b"\n") or len(line) < MOST_ROW_BYTES
            while len(line) == MOST_ROW_BYTES and not line.endswith(b"\n"):
                line = stream.readline(MOST_ROW_BYTES)
            if not line.endswith(b"\n"):
                raise ValueError(f"{file}: the last line has no line break at its end; add one")
            yield line.removesuffix(b"\n").removesuffix(b"\r") if whole else None


def open_folder_rows(section: Data) -> Table:
    """Open class folders in the path, or in its folder `split`; a row is a name in one of them.

    Links are not followed: they could lead to another row.
    """
    assert section.path is not None, "checked before"
    place = Path(section.path) / (section.split or "")
    if not place.is_dir():
        raise ValueError(f"{place}: should be a folder with one folder per class")
    classes = sorted(folder.name for folder in place.iterdir() if folder.is_dir())
    found = sorted(
        (file.name, number, file)
        for number, name in enumerate(classes)
        for file in (place / name).iterdir()
    )
    problems = ((row, _no_image(file)) for row, (_, _, file) in enumerate(found))
    bad = {row: why for row, why in problems if why is not None}
    return Table(
        files=tuple(
            file for row, (_, _, file) in enumerate(found) if row not in bad and is_decodable(file)
        ),
        size=len(found),
        entries=lambda: ((str(file), file) for _, _, file in found),
        labels=lambda: [number for _, number, _ in found],
        classes=tuple(classes),
        bad=bad,
    )


def _no_image(file: Path) -> str | None:
    """Return why a name in a class folder is no image by its kind."""
    mode = file.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "is a link, which a node does not follow"
    if stat.S_ISDIR(mode):
        return "is a folder; images should lie in the folder of their class itself"
    return None if stat.S_ISREG(mode) else "is no regular file"
