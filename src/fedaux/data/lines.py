"""Tables as CSV or JSON lines, whose rows hold an image, the path to one, or a text."""

from __future__ import annotations

import base64
import binascii
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Cell, Content
from fedaux.data.folders import part_files
from fedaux.data.tables import LABEL_COLUMNS, Table, find_column, find_content, joined_texts

LONGEST_PATH = 1000


def open_csv(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open comma-separated files with a header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field can be a whole image
    rows: list[tuple[str, Path, Mapping[str, Any]]] = []
    columns: list[str] = []
    files = part_files(path, part, section, suffix=".csv")
    for file in files:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = columns or list(reader.fieldnames or [])
            rows += [(f"{file}, row {row}", file, values) for row, values in enumerate(reader)]
    return _open_rows(files, columns, rows, section, texts=texts)


def open_jsonl(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open files with a JSON object a line."""
    rows: list[tuple[str, Path, Mapping[str, Any]]] = []
    files = part_files(path, part, section, suffix=".jsonl")
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        for row, line in enumerate(lines):
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, row {row}: not valid JSON ({error})") from error
            if not isinstance(values, dict):
                raise ValueError(f"{file}, row {row}: should be a JSON object with an image or a text, and a label")
            rows.append((f"{file}, row {row}", file, values))
    columns = list(dict.fromkeys(column for _, _, values in rows for column in values))
    return _open_rows(files, columns, rows, section, texts=texts)


def _open_rows(
    files: Sequence[Path],
    columns: Sequence[str],
    rows: Sequence[tuple[str, Path, Mapping[str, Any]]],
    section: Data | Auxiliary,
    *,
    texts: bool,
) -> Table | None:
    if not files:
        return None
    content = find_content(columns, section, texts=texts, where=files[0])
    label = None
    if isinstance(section, Data):
        label = find_column(
            columns, given=section.label_column, names=LABEL_COLUMNS, setting="data.label_column", where=files[0]
        )
    cells: list[Cell]
    if texts:
        cells = [(where, joined_texts([values.get(column) for column in content])) for where, _, values in rows]
    else:
        cells = [(where, _content(values.get(content[0]), folder=file.parent)) for where, file, values in rows]
    pictures = {held: None for _, held in cells if isinstance(held, Path) and held.is_file()}
    return Table(
        files=(*files, *pictures),
        size=len(cells),
        cells=lambda: iter(cells),
        labels=None if label is None else lambda: [values.get(label) for _, _, values in rows],
    )


def _content(value: Any, *, folder: Path) -> Content:
    """Return the image of a field: encoded in base 64, or the path to a file, relative to that of the table."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str) or not value:
        return None
    text = value.partition("base64,")[2] if value.startswith("data:") else value
    if text is value and len(value) <= LONGEST_PATH and (folder / value).is_file():
        return folder / value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return folder / value if len(value) <= LONGEST_PATH else b""
