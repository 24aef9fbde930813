"""Results files: one small JSON file per cell, in `reproduce/results/`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaux.files import read_json, save_text
from reproduce.cells import Cell

FOLDER = Path(__file__).parent / "results"
KEYS = {
    "cell": str,
    "label": list,
    "command": str,
    "settings": dict,
    "edition": int,
    "data": str,
    "public": str,
    "h0": dict,
    "commit": str,
    "device": str,
    "versions": dict,
    "seconds": float,
    "side_by_side": int,
    "accuracy": list,
}
"""The keys of a results file. `accuracy`: test accuracy in % after each round; `h0`: the digest of
its file, by name; `seconds`: of all rounds and the preparation, `side_by_side` at once."""


def file_of(cell: Cell, folder: Path) -> Path:
    """Return the results file of a cell."""
    return folder / f"{cell.name}.json"


def read_all(*folders: Path) -> dict[str, dict[str, Any]]:
    """Return the results in folders by the cell's name; of two, that of the later folder."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            found[file.relative_to(folder).with_suffix("").as_posix()] = checked(file)
    return found


def checked(file: Path) -> dict[str, Any]:
    """Return a results file. Raises ValueError if something is missing or not what it should be."""
    result: dict[str, Any] = read_json(file)
    for key, kind in KEYS.items():
        if not isinstance(result.get(key), kind):
            raise ValueError(f"{file}: {key} should be a {kind.__name__}, not {result.get(key)!r}")
    if len(result["accuracy"]) != result["settings"].get("rounds", 1):
        raise ValueError(f"{file}: {len(result['accuracy'])} accuracies; should be one per round")
    return result


def save(cell: Cell, folder: Path, result: Mapping[str, Any]) -> None:
    """Write a results file: a line per key."""
    lines = [f" {json.dumps(key)}: {json.dumps(result[key], ensure_ascii=False)}" for key in KEYS]
    save_text(file_of(cell, folder), "{\n" + ",\n".join(lines) + "\n}\n")


def is_current(cell: Cell, result: Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> bool:
    """Return whether a result is of the cell's present settings and of its method's edition."""
    if result is None or result["edition"] != cell.edition:
        return False
    present = json.loads(json.dumps(cell.settings(overrides)))
    return bool(result["settings"] == present)


def commit() -> str:
    """Return the commit of the checkout, with `+changes` if its sources differ from it.

    Raises ValueError outside a git checkout.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ":/src")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"--commit: missing, and git does not know it ({error})") from error
