"""Decoded images and token ids on disk, found by the content of the files they came from, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedaux.data.decoding import Block, Numbers

VERSION = 2
"""Part of every key: raise it when images come out differently."""
CONTENT = "examples.bin"
"""The numbers themselves, one after another; about.json beside it says of which kind and shape."""
KINDS = {"uint8": np.uint8, "int32": np.int32}
ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Stored:
    """Decoded images (or token ids) [N, ...], the rows of their table they come from, why others are not among them."""

    images: Numbers
    rows: np.ndarray
    reasons: tuple[str, ...]


def folder() -> Path | None:
    """Return where decoded images are kept: below FEDAUX_CACHE, or ~/.cache/fedaux; None where it is set to nothing."""
    given = os.environ.get("FEDAUX_CACHE")
    if given == "":
        return None
    return (Path(given) if given else Path.home() / ".cache" / "fedaux") / "decoded"


def content_key(files: Sequence[Path], *, settings: Mapping[str, Any]) -> str:
    """Return a digest of the files' names below their common folder, their sizes, their content, and the settings."""
    common = os.path.commonpath([file.absolute().parent for file in files])
    digest = hashlib.sha256(json.dumps({"version": VERSION, **settings}, sort_keys=True).encode())
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        name = Path(file.absolute()).relative_to(common).as_posix()
        digest.update(
            f"\0{name}\0{file.stat().st_size}\0{content}".encode(errors="surrogateescape")
        )
    return digest.hexdigest()[:40]


def load(key: str) -> Stored | None:
    """Return what is stored under a key; None where there is nothing, or nothing whole."""
    parent = folder()
    if parent is None:
        return None
    try:
        return _map(parent / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: str, blocks: Iterable[Block]) -> Stored:
    """Write blocks of decoded images or token ids under a key and return them, mapped.

    They are written beside their place and take it at the end in one step, so that other processes see all or nothing;
    the first of several that write the same wins. Where nothing can be written, a temporary folder does.
    """
    parent = folder()
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
        unfinished = Path(tempfile.mkdtemp(prefix=".part-" if parent else "fedaux-", dir=parent))
    except OSError:
        parent = None
        unfinished = Path(tempfile.mkdtemp(prefix="fedaux-"))
    try:
        _write(unfinished, blocks)
        stored = _map(unfinished)  # which stays right whatever becomes of its name
        if parent is not None:
            _take_place(unfinished, parent / key)
        return stored
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _take_place(unfinished: Path, place: Path) -> None:
    """Give an entry its name, unless a whole one has it already; a damaged one makes room."""
    for _ in range(2):
        try:
            unfinished.rename(place)
            return
        except OSError:  # the name is taken
            if load(place.name) is not None:
                return
            with suppress(OSError):  # another process may be clearing it away, too
                place.rename(place.with_name(f".part-damaged-{unfinished.name}"))
            shutil.rmtree(place.with_name(f".part-damaged-{unfinished.name}"), ignore_errors=True)


def _write(place: Path, blocks: Iterable[Block]) -> None:
    shape: tuple[int, ...] = ()
    kind = "uint8"
    rows: list[int] = []
    reasons: list[str] = []
    with (place / CONTENT).open("wb") as stream:
        for block in blocks:
            if len(block.images):
                shape, kind = block.images.shape[1:], block.images.dtype.name
                stream.write(np.ascontiguousarray(block.images).data)
            rows += block.rows
            reasons += block.reasons.values()
        stream.flush()
        os.fsync(stream.fileno())
    np.save(place / "rows.npy", np.array(rows, dtype=np.int64), allow_pickle=False)
    about = {"shape": [len(rows), *shape], "kind": kind, "reasons": reasons}
    (place / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _map(place: Path) -> Stored:
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    shape, kind = tuple(about["shape"]), np.dtype(KINDS[about["kind"]])
    rows = np.load(place / "rows.npy", allow_pickle=False)
    size = kind.itemsize * int(np.prod(shape)) * bool(shape[0])
    if (place / CONTENT).stat().st_size != size or len(rows) != shape[0]:
        raise ValueError(f"{place}: not whole")
    if shape[0] == 0:
        return Stored(np.zeros((0, 1, 1, 1), dtype=np.uint8), rows, tuple(about["reasons"]))
    # Copy on write: torch wants to be allowed to write, and the file must not change.
    images = np.memmap(place / CONTENT, dtype=kind, mode="c", shape=shape)
    return Stored(images, rows, tuple(about["reasons"]))


def _remove_abandoned(parent: Path) -> None:
    """Remove what a killed process has left behind."""
    for unfinished in parent.glob(".part-*"):
        try:
            if time.time() - (unfinished / CONTENT).stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError:
            continue
