"""Files and records that a sweep leaves."""

from __future__ import annotations

import json
from pathlib import Path


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def accuracies(directory: Path) -> list[tuple[str, int, int, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(row["method"], row["seed"], row["round"], row["accuracy"]) for row in rows]
