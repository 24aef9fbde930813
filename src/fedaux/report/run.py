"""The files of a run directory."""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

REQUIRED = (
    "config.toml",
    "environment.json",
)  # written before the first round; all else may still be missing
Array = npt.NDArray[Any]
Record = Mapping[str, Any]
Row = dict[str, Any]


class Point(NamedTuple):
    """One round of a learning curve: accuracy over the seeds that evaluated it."""

    round: int
    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Scores:
    """The content of ``scores.safetensors``: each client's weight on test examples, by class."""

    weights: Array
    method: str
    seed: str
    clients: list[int]


@dataclass(frozen=True)
class Run:
    """The files of a run directory; files that do not exist yet are empty."""

    name: str
    config_text: str
    config: Record
    environment: Record
    metrics: list[Row]
    ledger: Record
    summary: Record
    split: Record
    scores: Scores | None
    names: tuple[str, ...] = ()
    """The clients' names, if they have any."""
    noise_warnings: tuple[str, ...] = ()
    """Warnings, given before the run started, that noise drowns the scores."""
    notes: Record = field(default_factory=dict)
    """What loading the data skipped and warned of."""

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """Rounds recorded and rounds planned, over all seeds, for each method."""
        seeds = self.config.get("seeds", [0])
        planned = int(self.config.get("rounds", 0)) * (len(seeds) if isinstance(seeds, list) else 1)
        recorded = Counter(str(row["method"]) for row in self.metrics)
        methods = dict.fromkeys([*methods_of(self.config), *recorded])
        return {name: (recorded[name], planned) for name in methods}

    @property
    def complete(self) -> bool:
        """Whether the summary is complete and no planned round is missing."""
        return bool(self.summary.get("complete")) and all(
            done >= all_ for done, all_ in self.progress.values()
        )

    @property
    def updates_protected(self) -> bool:
        """Whether (epsilon, delta) covers the model updates, too."""
        return any(row.get("updates_protected") for row in self.summary.get("rows", []))


def read_run(directory: Path) -> Run:
    """Read a run directory, finished or not. Raises ValueError naming a wrong file."""
    directory = Path(directory)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "there is no such folder"
        raise ValueError(f"{directory}: {what}; should be a run directory, or a folder of them")
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{directory} is not a run directory, nor a folder of them: {' and '.join(missing)} "
            "missing"
        )
    text = (directory / "config.toml").read_text(encoding="utf-8", errors="replace")
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{directory / 'config.toml'} is not valid TOML: {error}") from error
    summary = _read_json(directory / "summary.json")
    return Run(
        name=str(summary.get("name") or config.get("name") or directory.resolve().name),
        config_text=text,
        config=config,
        environment=_read_json(directory / "environment.json"),
        metrics=_read_metrics(directory / "metrics.jsonl"),
        ledger=_read_json(directory / "ledger.json"),
        summary=summary,
        split=_read_json(directory / "split.json"),
        scores=_read_scores(directory / "scores.safetensors"),
        names=client_names(directory),
        noise_warnings=tuple(map(str, _read_json(directory / "warnings.json").get("noise", []))),
        notes=_read_json(directory / "data.json"),
    )


def client_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a run's clients: of their folders or, in a federation, of their nodes."""
    if names := _read_json(directory / "split.json").get("names"):
        return tuple(map(str, names))
    nodes = _read_json(directory / "nodes.json").get("clients", {})
    if not any(row.get("name") for row in nodes.values()):
        return ()
    return tuple(
        str(row.get("name") or f"client {client}")
        for client, row in sorted(nodes.items(), key=lambda one: int(one[0]))
    )


def curve_points(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return mean, minimum and maximum accuracy over seeds, for each method and evaluated round."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get("accuracy") is not None:
            found[str(row["method"])][int(row["round"])].append(float(row["accuracy"]))
    return {
        method: [
            Point(number, float(np.mean(values)), min(values), max(values), len(values))
            for number, values in sorted(rounds.items())
        ]
        for method, rounds in found.items()
    }


def methods_of(values: Mapping[str, Any]) -> list[str]:
    """Return the methods of a configuration, one or a list."""
    found = values.get("method", [])
    return [str(method) for method in found] if isinstance(found, list) else [str(found)]


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object from a JSON file, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} has a {type(value).__name__}; should be an object")
    return value


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rounds of ``metrics.jsonl``: the last line of a repeated round, without a
    truncated end."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rounds: dict[tuple[str, int, int], dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rounds[str(row["method"]), int(row["seed"]), int(row["round"])] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}, is not a valid round: {error!r}") from error
    return list(rounds.values())


def _read_scores(path: Path) -> Scores | None:
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="numpy") as file:
            words, weights = file.metadata() or {}, file.get_tensor("weights_by_class")
        clients = [int(client) for client in json.loads(words["clients"])]
        return Scores(weights, words["method"], words["seed"], clients)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has no valid certainty scores: {error!r}") from error
