"""Datasets of the Hugging Face hub, through the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data
from fedaux.data.checkpoints import hub_name
from fedaux.data.decoding import Entry
from fedaux.data.folders import no_such_split, part_names
from fedaux.data.tables import LABEL_COLUMNS, Table, find_content, find_label, joined_texts, key_of
from fedaux.formatting import optional


def open_hub(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open a split of a dataset, downloaded if needed."""
    key = key_of(section)
    splits = _load(path, section.subset, key=key)
    named = section.test if isinstance(section, Data) and part == "test" else None
    if named is not None and named not in splits:
        raise ValueError(
            f"data.test = {named!r}: {path} has no such split; it has {', '.join(splits)}"
        )
    chosen = named or next((name for name in part_names(part, section) if name in splits), None)
    if chosen is None:
        if part == "test":
            return None
        raise no_such_split(path, section, there=list(splits))
    return _open_split(splits[chosen], section, texts=texts, where=f"{path}, split {chosen}")


def _open_split(split: Any, section: Data | Auxiliary, *, texts: bool, where: str) -> Table:
    from datasets import ClassLabel, Image

    kinds = {
        kind: [name for name, feature in split.features.items() if isinstance(feature, kind)]
        for kind in (Image, ClassLabel)
    }
    content = find_content(
        split.column_names, section, texts=texts, where=where, typed=kinds[Image]
    )
    label = None
    if isinstance(section, Data):
        usual = (*LABEL_COLUMNS, *kinds[ClassLabel])
        label = find_label(split.column_names, section, where=where, names=usual)
    encoded = split.select_columns(list(content))
    if not texts:
        encoded = encoded.cast_column(content[0], Image(decode=False))

    def entries() -> Iterator[Entry]:
        for row, values in enumerate(encoded):
            if texts:
                yield f"{where}, row {row}", joined_texts([values[column] for column in content])
                continue
            cell = values[content[0]] or {}
            yield (
                f"{where}, row {row}",
                cell.get("bytes") or (Path(cell["path"]) if cell.get("path") else None),
            )

    names = split.features[label].names if label in kinds[ClassLabel] else None
    return Table(
        files=tuple(Path(file["filename"]) for file in split.cache_files),
        size=len(split),
        entries=entries,
        labels=None if label is None else lambda: list(split[label]),
        classes=tuple(names) if names else None,
        wnids=None if "wnid" not in split.column_names else lambda: list(split["wnid"]),
    )


def _load(path: str, subset: str | None, *, key: str) -> dict[str, Any]:
    needs = "source huggingface needs the package datasets"
    datasets = optional("datasets", needs, extras="data")
    name, revision = hub_name(path, key=f"{key}.path")
    try:
        return dict(datasets.load_dataset(name, subset, revision=revision))
    except (OSError, ValueError, RuntimeError) as error:
        chosen = f" and {key}.subset = {subset!r}" if subset else ""
        raise ValueError(
            f"{key}.path = {path!r}{chosen}: the hub is not available or has no such dataset; "
            "without "
            "a network, use a downloaded folder with the source parquet "
            f"({type(error).__name__}: {error})"
        ) from error
