"""Parquet files as the Hugging Face hub lays them out: a column of encoded images or of texts, and one of labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Cell
from fedaux.data.folders import part_files
from fedaux.data.tables import LABEL_COLUMNS, Table, find_column, find_content, joined_texts

BATCH = 1000


def open_parquet(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open the Parquet files of a part: sizes from their footers, class names from what the hub wrote beside them."""
    files = part_files(path, part, section, suffix=".parquet")
    if not files:
        return None
    opened = [_open(file) for file in files]
    schema = opened[0].schema_arrow
    features = _features(schema.metadata or {})
    content = find_content(schema.names, section, texts=texts, where=files[0], typed=_of_type(features, "Image"))
    label = None
    if isinstance(section, Data):
        label = find_column(
            schema.names,
            given=section.label_column,
            names=(*LABEL_COLUMNS, *_of_type(features, "ClassLabel")),
            setting="data.label_column",
            where=files[0],
        )
    names = features.get(label or "", {}).get("names")
    return Table(
        files=tuple(files),
        size=sum(int(file.metadata.num_rows) for file in opened),
        cells=lambda: _texts(files, content) if texts else _cells(files, content[0]),
        labels=None if label is None else lambda: _column(files, label),
        classes=tuple(str(name) for name in names) if names else None,
    )


def _cells(files: Sequence[Path], image: str) -> Iterator[Cell]:
    for file in files:
        row = 0
        for batch in _open(file).iter_batches(batch_size=BATCH, columns=[image]):
            for cell in batch.column(0).to_pylist():
                content = cell.get("bytes") if isinstance(cell, dict) else cell
                yield f"{file}, row {row}", content if isinstance(content, bytes) else None
                row += 1


def _texts(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Cell]:
    for file in files:
        row = 0
        for batch in _open(file).iter_batches(batch_size=BATCH, columns=list(columns)):
            for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                yield f"{file}, row {row}", joined_texts(values)
                row += 1


def _column(files: Sequence[Path], name: str) -> list[object]:
    return [value for file in files for value in _open(file).read(columns=[name]).column(0).to_pylist()]


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return what the hub's libraries write about columns into a file: their types and the names of classes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: about for name, about in features.items() if isinstance(about, dict)}


def _of_type(features: dict[str, dict[str, Any]], kind: str) -> list[str]:
    return [name for name, about in features.items() if about.get("_type") == kind]


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("source parquet needs the package pyarrow: pip install 'fedaux[parquet]'") from error
    return pyarrow.parquet


def _open(file: Path) -> Any:
    parquet = _pyarrow_parquet()
    from pyarrow import ArrowInvalid

    try:
        return parquet.ParquetFile(file)
    except ArrowInvalid as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from error
