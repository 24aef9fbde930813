"""CSV and JSON Lines files with one image, path of an image, or text per row, and plain lines."""

from __future__ import annotations

import base64
import binascii
import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Content, Entry, is_decodable
from fedaux.data.folders import part_files
from fedaux.data.tables import Table, find_content, find_label, joined_texts
from fedaux.data.texts import NOT_UNICODE, encoding_of

MAX_PATH_LENGTH = 1000


@dataclass(frozen=True)
class Row:
    """A row: its location, file and values by column, or the reason why it is unreadable."""

    where: str
    file: Path
    values: Mapping[str, Any]
    problem: str | None = None


def open_csv(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open comma-separated files with a header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field can be a whole image
    columns: list[str] = []
    files = part_files(path, part, section, suffix=".csv")
    stream = _csv_rows(files, columns, encoding=section.encoding)
    rows = list(islice(stream, enough_rows(section)))
    return _open_rows(files, columns, rows, section, texts=texts)


def _csv_rows(files: Sequence[Path], columns: list[str], *, encoding: str | None) -> Iterator[Row]:
    """Yield the rows of all files; put the header of the first one into `columns`."""
    for file in files:
        # A strict decoder reads ahead and could not report the row.
        named = encoding_of(file, declared=encoding)
        errors = "surrogateescape" if named == "utf-8-sig" else "strict"
        with file.open(encoding=named, errors=errors, newline="") as stream:
            reader = csv.DictReader(stream)
            try:
                header = list(reader.fieldnames or [])
                if not all(map(_is_unicode, header)):
                    raise ValueError(f"{file}: its header is {NOT_UNICODE}")
                columns += header if not columns else []
                for number, values in enumerate(reader):
                    row = Row(f"{file}, row {number}", file, values)
                    yield (
                        row
                        if _is_unicode(_spelled(values))
                        else replace(row, values={}, problem=NOT_UNICODE)
                    )
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not valid {named} ({error})") from error
            except csv.Error as error:
                raise ValueError(
                    f"{file}, line {reader.line_num}: not valid CSV ({error})"
                ) from error


def open_jsonl(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open files with one JSON object per line."""
    files = part_files(path, part, section, suffix=".jsonl")
    stream = _jsonl_rows(files, encoding=section.encoding)
    rows = list(islice(stream, enough_rows(section)))
    columns = dict.fromkeys(column for row in rows for column in row.values)
    asked = section.text_column if texts else ()
    while not columns.keys() >= set(asked) and (row := next(stream, None)) is not None:
        columns |= dict.fromkeys(row.values)  # a column can first occur in a later row
    if isinstance(section, Data) and section.skip_bad:
        # Bad rows alone need not have the columns that are given.
        given = (section.image_column, section.label_column)
        columns |= dict.fromkeys(name for name in given if name is not None)
    return _open_rows(files, list(columns), rows, section, texts=texts)


def _jsonl_rows(files: Sequence[Path], *, encoding: str | None) -> Iterator[Row]:
    for file in files:
        named = encoding_of(file, declared=encoding)
        for number, line in enumerate(_lines(file, encoding=named)):
            yield row_of_json(line, where=f"{file}, row {number}", file=file)


def open_lines(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open files with one text per line; blank lines are left out."""
    if not texts:
        raise ValueError(f"{path}: the source lines has texts; add the table [text]")
    files = part_files(path, part, section, suffix=".txt")
    rows = list(islice(_text_rows(files, encoding=section.encoding), enough_rows(section)))
    return _open_rows(files, ["text"] if rows else [], rows, section, texts=texts)


def _text_rows(files: Sequence[Path], *, encoding: str | None) -> Iterator[Row]:
    for file in files:
        named = encoding_of(file, declared=encoding)
        for number, line in enumerate(_lines(file, encoding=named)):
            where = f"{file}, row {number}"
            try:
                yield Row(where, file, {"text": line.decode("utf-8-sig").strip()})
            except UnicodeDecodeError:
                yield Row(where, file, {}, NOT_UNICODE)


def _lines(file: Path, *, encoding: str) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank, in UTF-8."""
    if encoding == "utf-8-sig":
        with file.open("rb") as stream:
            yield from (line.removesuffix(b"\n") for line in stream if line.strip())
        return
    try:
        with file.open(encoding=encoding) as text:
            yield from (line.removesuffix("\n").encode() for line in text if line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not valid {encoding} ({error})") from error


def enough_rows(section: Data | Auxiliary) -> int | None:
    """Return how many rows need to be read; None for all.

    Classes depend on all rows of labelled data, rows of a noun can be anywhere, and each skipped
    row is replaced by a later one.
    """
    if isinstance(section, Data) or section.wordnet is not None or section.skip_bad:
        return None
    return section.size


def row_of_json(line: bytes, *, where: str, file: Path) -> Row:
    """Return a line of JSON as a row."""
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(where, file, {}, NOT_UNICODE)
    except (ValueError, RecursionError) as error:
        return Row(where, file, {}, f"not valid JSON ({error})")
    if not isinstance(values, dict):
        return Row(where, file, {}, "should be a JSON object with an image or a text, and a label")
    return Row(where, file, values)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no surrogates, which mark bytes that are not UTF-8."""
    return text.isascii() or not any("\udc80" <= character <= "\udcff" for character in text)


def _spelled(values: Mapping[str | None, Any]) -> str:
    """Return all fields of a row as one text."""
    return "".join(
        value if isinstance(value, str) else "".join(value or ()) for value in values.values()
    )


def _open_rows(
    files: Sequence[Path],
    columns: Sequence[str],
    rows: Sequence[Row],
    section: Data | Auxiliary,
    *,
    texts: bool,
) -> Table | None:
    if not files:
        return None
    bad = {number: row.problem for number, row in enumerate(rows) if row.problem is not None}
    if rows and len(bad) == len(rows) and not (columns and section.skip_bad):
        raise ValueError(f"{rows[0].where}: {rows[0].problem}")
    if not rows:
        found = "has a header and no rows" if columns else "is empty"
        raise ValueError(f"{files[0]}: {found}; should have a row for each example")
    content = find_content(columns, section, texts=texts, where=files[0])
    label = find_label(columns, section, where=files[0]) if isinstance(section, Data) else None
    entries: list[Entry]
    if texts:
        entries = [
            (row.where, joined_texts([row.values.get(column) for column in content]))
            for row in rows
        ]
    else:
        entries = [
            (row.where, content_of(row.values.get(content[0]), row.file.parent, section))
            for row in rows
        ]
    pictures = {held: None for _, held in entries if isinstance(held, Path) and is_decodable(held)}
    return Table(
        files=(*files, *pictures),
        size=len(entries),
        entries=lambda: iter(entries),
        labels=None if label is None else lambda: [row.values.get(label) for row in rows],
        bad=bad,
        wnids=None if "wnid" not in columns else lambda: [row.values.get("wnid") for row in rows],
    )


def content_of(value: Any, folder: Path, section: Data | Auxiliary) -> Content:
    """Return the image of a field: base64, or a path relative to the table's folder."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str) or not value:
        return None
    text = value.partition("base64,")[2] if value.startswith("data:") else value
    named = text is value and len(value) <= MAX_PATH_LENGTH
    if named and section.contained:
        named = _is_below(folder / value, folder)
    if named and is_decodable(folder / value):
        return folder / value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return folder / value if named else b""


def _is_below(file: Path, folder: Path) -> bool:
    """Return whether a file lies below a folder, links followed."""
    try:
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))
    except ValueError:  # no name of a file
        return False
