"""Atomic files: old or new content after an interruption, never half."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".*.part"
"""Pattern of files that are being written; a killed process leaves them."""


def save_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Raises ValueError for NaN and infinity."""
    save_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError with the path if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged, not readable as JSON ({error})") from error


def refuse_unwritable(path: Path, *, key: str) -> None:
    """Raise ValueError with the option's name if a file could not be written.

    A temporary file is created and removed in the nearest existing folder.
    """
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise ValueError(f"{key} {path}: is a folder; should be a file in it")
        folder = next(place for place in path.absolute().parents if place.exists())
        if not folder.is_dir():
            raise ValueError(
                f"{key} {path}: {folder} is a file; should be a folder, to hold {path.name}"
            )
        trial = folder / _temporary_name(path)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(
            f"{key} {path}: {folder} is not writable ({error.strerror}); should be a file in a "
            "writable folder"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file; on success, flush it to disk and move it to the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_temporary_name(path))
    try:
        yield temporary
        _force_to_disk(temporary)
        temporary.replace(path)
        _force_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> str:
    return f".{path.name}.{os.getpid()}.part"


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
