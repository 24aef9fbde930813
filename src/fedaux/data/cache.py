"""Cache of decoded images and token ids on disk, keyed by the content of their files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fedaux.data.decoding import DecodedBlock, Numbers

VERSION = 3
"""Part of every key; increase it when decoding changes."""
CONTENT = "examples.bin"
"""The raw numbers; about.json has their type and shape."""
KINDS = {"uint8": np.uint8, "int32": np.int32, "float16": np.float16}
ABANDONED_SECONDS = 24 * 3600
MANY = 2000
"""Files from which another process digests them."""


@dataclass(frozen=True)
class Stored:
    """Decoded images or token ids [N, ...], their rows, and the reasons for missing rows."""

    images: Numbers
    rows: np.ndarray
    reasons: tuple[str, ...]
    lost: Mapping[str, str] = field(default_factory=dict)
    """What decoding dropped, and where first: DecodedBlock.lost."""


def folder() -> Path | None:
    """Return the cache folder, in FEDAUX_CACHE or ~/.cache/fedaux; None if that is empty."""
    given = os.environ.get("FEDAUX_CACHE")
    if given == "":
        return None
    return (Path(given) if given else Path.home() / ".cache" / "fedaux") / "decoded"


class Key:
    """The name of an entry: what its files are called, how large they are and what is made of them,
    and what they hold."""

    def __init__(self, files: Sequence[Path], *, settings: Mapping[str, Any]) -> None:
        self._names = [str(file.absolute()) for file in files]
        ends = (min(self._names, default="/"), max(self._names, default="/"))
        common = len(os.path.commonpath([Path(end).parent for end in ends]))
        digest = hashlib.sha256(f"{VERSION}{json.dumps(settings, sort_keys=True)}".encode())
        times = hashlib.sha256()
        for name in self._names:
            found = Path(name).stat()
            relative = name[common:].lstrip(os.sep)
            digest.update(f"\0{relative}\0{found.st_size}".encode(errors="surrogateescape"))
            times.update(found.st_mtime_ns.to_bytes(16, "big", signed=True))
        self._outline = digest.hexdigest()[:20]
        self.moment = f"{self._outline}-{times.hexdigest()[:20]}"
        """Names what is not finished, without a look into the files."""
        self._meanwhile: Connection | None = None

    def may_exist(self) -> bool:
        """Whether there is an entry of such files, so that they are worth reading for the key."""
        parent = folder()
        return parent is not None and any(parent.glob(f"{self._outline}-*"))

    def read_meanwhile(self) -> None:
        """Let another process read many files while the caller reads them, too.

        A daemon starts no child; without a cache, nobody asks for the key.
        """
        if len(self._names) >= MANY and folder() and not current_process().daemon:
            self._meanwhile, sender = Pipe(duplex=False)
            arguments = (sender, self._names)
            get_context("fork").Process(target=_send, args=arguments, daemon=True).start()
            sender.close()

    def __call__(self) -> str:
        """Return the key. Reads all files, unless another process does."""
        content = None
        if self._meanwhile is not None:
            with suppress(EOFError):  # it has died
                content = self._meanwhile.recv()
        return f"{self._outline}-{content or _content(self._names)}"


def _send(sender: Connection, names: Sequence[str]) -> None:
    with suppress(OSError, KeyboardInterrupt):
        sender.send(_content(names))


def _content(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        try:
            with Path(name).open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except PermissionError:  # decoding says so, row by row
            digest.update(b"not readable")
    return digest.hexdigest()[:20]


def load(key: str) -> Stored | None:
    """Return the entry of a key; None if it is missing or incomplete."""
    parent = folder()
    if parent is None:
        return None
    try:
        return _map(parent / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: str | Key, blocks: Iterable[DecodedBlock]) -> Stored:
    """Write blocks of decoded images or token ids atomically, and return them memory-mapped.

    If several processes write the same entry, the first wins. If the cache is not writable, a
    temporary folder is used.
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
        stored = _map(unfinished)  # stays valid when the folder is renamed or removed
        if parent is not None:
            _take_place(unfinished, parent / (key if isinstance(key, str) else key()))
        return stored
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _take_place(unfinished: Path, place: Path) -> None:
    """Rename an entry to its key, unless a complete one exists; replace a damaged one."""
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


def _write(place: Path, blocks: Iterable[DecodedBlock]) -> None:
    shape: tuple[int, ...] = ()
    kind = "uint8"
    rows: list[int] = []
    reasons: list[str] = []
    lost: dict[str, str] = {}
    with (place / CONTENT).open("wb") as stream:
        for block in blocks:
            if len(block.images):
                shape, kind = block.images.shape[1:], block.images.dtype.name
                stream.write(np.ascontiguousarray(block.images).data)
            rows += block.rows
            reasons += block.reasons.values()
            lost = block.lost | lost
        stream.flush()
        os.fsync(stream.fileno())
    np.save(place / "rows.npy", np.array(rows, dtype=np.int64), allow_pickle=False)
    about = {"shape": [len(rows), *shape], "kind": kind, "reasons": reasons, "lost": lost}
    (place / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _map(place: Path) -> Stored:
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    shape, kind = tuple(about["shape"]), np.dtype(KINDS[about["kind"]])
    rows = np.load(place / "rows.npy", allow_pickle=False)
    size = kind.itemsize * int(np.prod(shape)) * bool(shape[0])
    if (place / CONTENT).stat().st_size != size or len(rows) != shape[0]:
        raise ValueError(f"{place}: incomplete")
    found = (tuple(about["reasons"]), about["lost"])
    if shape[0] == 0:
        return Stored(np.zeros((0, 1, 1, 1), dtype=np.uint8), rows, *found)
    # Copy on write: torch needs a writable array, and the file must not change.
    images = np.memmap(place / CONTENT, dtype=kind, mode="c", shape=shape)
    return Stored(images, rows, *found)


def _remove_abandoned(parent: Path) -> None:
    """Remove unfinished entries of killed processes."""
    for unfinished in parent.glob(".part-*"):
        try:
            if time.time() - (unfinished / CONTENT).stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError:
            continue
