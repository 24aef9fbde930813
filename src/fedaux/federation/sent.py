"""A node's record of what left it: one line of JSON per answer with tensors, chained by hashes.

    sent.jsonl   {"number", "when", "kind", "run", "round", "bytes", "digest", "request", "policy",
                  "entry" (its cost; null if none), "previous" (the hash of the line before)}

`bytes` and `digest` describe the safetensors that were sent. ledger.json holds a copy of the
last line and is written first: cutting, editing or rolling back one of the two files is detected.
A rollback of both to the same earlier moment is not; a hash that was noted elsewhere shows it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedaux.files import read_json

NAME, LEDGER = "sent.jsonl", "ledger.json"
START = "0" * 64
"""The hash before the first line."""
HOW_TO_GO_ON = (
    "restore sent.jsonl and ledger.json from the same backup, and lower privacy.epsilon by what "
    "was spent since; docs/deployment.md, A hospital's state"
)


def next_line(last: str | None, what: Mapping[str, Any]) -> str:
    """Return the line that follows the last one, without its end of line."""
    number = 1 if last is None else json.loads(last)["number"] + 1
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"number": number, "when": when, **what, "previous": hash_of(last)}
    return json.dumps(line, allow_nan=False)


def hash_of(line: str | None) -> str:
    """Return the SHA-256 of a line, which the next line repeats."""
    return START if line is None else hashlib.sha256(line.encode()).hexdigest()


def append(folder: Path, line: str) -> None:
    """Add a line and force it to disk."""
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(folder: Path, last: str | None) -> None:
    """Write what an interruption left out: the end of the last line, or all of it.

    Raises ValueError if the record does not end with the line that the ledger holds.
    """
    file = folder / NAME
    tail, torn = _tail(file)
    interrupted = last is not None and json.loads(last)["previous"] == hash_of(tail)
    if last is not None and interrupted and last.startswith(torn):
        if torn:
            os.truncate(file, file.stat().st_size - len(torn))
        append(folder, last)
        return
    if tail != last or torn:
        raise ValueError(f"{file}: {_mismatch(tail, last)}; {HOW_TO_GO_ON}")


def lines(folder: Path) -> Iterator[str]:
    """Return all complete lines of the record."""
    file = folder / NAME
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if line.endswith("\n"):
                yield line[:-1]


def ledger(folder: Path) -> dict[str, Any]:
    """Return the ledger of a node's state. Raises ValueError if it is damaged."""
    file = folder / LEDGER
    held: dict[str, Any] = read_json(file) if file.exists() else {"version": 1, "spent": []}
    return held


def problems(folder: Path, *, noted: str | None = None) -> list[str]:
    """Return what does not fit in the whole record: the chain, its end, the ledger's costs, and a
    hash that was noted earlier."""
    file, found, held = folder / NAME, [], ledger(folder)
    rows = {row["request"]: row["entry"] for row in held["spent"]}
    last: str | None = held.get("sent")
    previous: str | None = None
    hashes = {START}
    for number, line in enumerate(lines(folder), start=1):
        try:
            read = json.loads(line)
            chained = read["previous"] == hash_of(previous) and read["number"] == number
            entry, request = read["entry"], read["request"]
        except (ValueError, KeyError, TypeError):
            return [f"{file}, line {number}: cannot be read"]
        if not chained:
            return [f"{file}, line {number}: does not follow from the line before"]
        if entry is not None and rows.get(request) != entry:
            found.append(f"{file}, line {number}: its cost is not in ledger.json")
        previous = line
        hashes.add(hash_of(line))
    # An interruption between the two files leaves the ledger one line ahead.
    ahead = last is not None and json.loads(last)["previous"] == hash_of(previous)
    if previous != last and not ahead:
        found.append(f"{file}: {_mismatch(previous, last)}")
    hashes.add(hash_of(last))
    if noted is not None and noted not in hashes:
        found.append(f"{file}: has no line with the hash {noted}: it was rolled back or replaced")
    return found


def _tail(file: Path) -> tuple[str | None, str]:
    """Return the last complete line, and what follows it without an end of line."""
    if not file.exists():
        return None, ""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        length = 4096
        while True:
            start = max(0, size - length)
            opened.seek(start)
            content = opened.read()
            if start == 0 or content.count(b"\n") >= 2:
                break
            length *= 4
    *complete_lines, torn = content.decode("utf-8", errors="replace").split("\n")
    return (complete_lines[-1] if complete_lines else None), torn


def _mismatch(tail: str | None, last: str | None) -> str:
    ends, holds = (_number(line) for line in (tail, last))
    return (
        f"ends with line {ends}, and ledger.json holds line {holds}: one of the two files was cut, "
        "edited or rolled back"
    )


def _number(line: str | None) -> str:
    if line is None:
        return "0"
    try:
        return str(int(json.loads(line)["number"]))
    except (ValueError, KeyError, TypeError):
        return "?"
