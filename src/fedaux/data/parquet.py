"""Parquet files in the hub's layout: a column of encoded images or texts, and one of labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Entry
from fedaux.data.folders import part_files
from fedaux.data.tables import LABEL_COLUMNS, Table, find_content, find_label, joined_texts
from fedaux.data.wordnet import WNID
from fedaux.formatting import optional

BATCH = 1000


def open_parquet(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open the Parquet files of a part, with class names from the hub's metadata."""
    files = part_files(path, part, section, suffix=".parquet")
    if not files:
        return None
    opened = [parquet_file(file) for file in files]
    schema = opened[0].schema_arrow
    features = _features(schema.metadata or {})
    content = find_content(
        schema.names, section, texts=texts, where=files[0], typed=_of_type(features, "Image")
    )
    label = None
    if isinstance(section, Data):
        usual = (*LABEL_COLUMNS, *_of_type(features, "ClassLabel"))
        label = find_label(schema.names, section, where=files[0], names=usual)
    for file, others in zip(files, opened, strict=True):
        if missing := [
            name
            for name in (*content, label)
            if name is not None and name not in others.schema_arrow.names
        ]:
            raise ValueError(
                f"{file}: has no column {', '.join(missing)}; it has "
                f"{', '.join(others.schema_arrow.names)}; should have the columns of "
                f"{files[0].name}"
            )
    names = features.get(label or "", {}).get("names")
    return Table(
        files=tuple(files),
        size=sum(int(file.metadata.num_rows) for file in opened),
        entries=lambda: _texts(files, content) if texts else _cells(files, content[0]),
        labels=None if label is None else lambda: read_column(files, label),
        classes=tuple(str(name) for name in names) if names else None,
        wnids=_wnids(files, [one.schema_arrow.names for one in opened], features),
    )


def _wnids(
    files: Sequence[Path], columns: Sequence[Sequence[str]], features: dict[str, dict[str, Any]]
) -> Callable[[], list[Any]] | None:
    """Return how to read WordNet ids: from a column, or from labels whose classes are named so."""
    if all("wnid" in names for names in columns):
        return lambda: read_column(files, "wnid")
    classes = features.get("label", {}).get("names") or []
    if not any(map(WNID.fullmatch, classes)) or not all("label" in names for names in columns):
        return None
    ids = dict(enumerate(classes))
    return lambda: [ids.get(label, f"label {label}") for label in read_column(files, "label")]


def _cells(files: Sequence[Path], image: str) -> Iterator[Entry]:
    for where, (cell,) in _rows(files, [image]):
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        yield where, content if isinstance(content, bytes) else None


def _texts(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Entry]:
    return ((where, joined_texts(values)) for where, values in _rows(files, columns))


def read_column(files: Sequence[Path], name: str) -> list[Any]:
    """Return one column of all files, in order."""
    return [value for _, (value,) in _rows(files, [name])]


def _rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield location and values of each row. Raises ValueError for a damaged file."""
    errors = _errors()
    for file in files:
        row = 0
        batches = parquet_file(file).iter_batches(batch_size=BATCH, columns=list(columns))
        while True:
            try:
                if (batch := next(batches, None)) is None:
                    break
                values = [batch.column(column).to_pylist() for column in columns]
            except errors as error:
                raise ValueError(
                    f"{file}: damaged after row {row} ({error}); should be downloaded or written "
                    "again"
                ) from error
            for one in zip(*values, strict=True):
                yield f"{file}, row {row}", one
                row += 1


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return the hub's metadata of columns: types and class names."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: about for name, about in features.items() if isinstance(about, dict)}


def _of_type(features: dict[str, dict[str, Any]], kind: str) -> list[str]:
    return [name for name, about in features.items() if about.get("_type") == kind]


def parquet_file(file: Path) -> Any:
    """Return an opened Parquet file. Raises ValueError if it is unreadable."""
    needs = "source parquet needs the package pyarrow"
    parquet = optional("pyarrow.parquet", needs, extras="parquet")
    try:
        return parquet.ParquetFile(file)
    except _errors() as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from error


def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of pyarrow for damaged files; ValueError for invalid UTF-8."""
    from pyarrow import ArrowException

    return ArrowException, OSError, ValueError
