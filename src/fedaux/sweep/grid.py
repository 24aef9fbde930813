"""Expand a recipe with lists to a grid of experiments, one cell for every combination.

The type of a field decides whether a list is swept over. For a single-valued field (`split.alpha`)
it is; for a list-valued field (`method`, `seeds`, `data.channel_mean`) only a list of lists is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from fedaux.config import ConfigError, Experiment, ExperimentFields, inspect
from fedaux.config_errors import plain, section_in, shortened
from fedaux.recipes import replaced

FIXED_KEYS = {
    "name": "is the name of the sweep; cells are named after their settings",
    "output.directory": "is the directory of the whole sweep",
    "engine.device": "should be one device; use --devices for several",
}
MAX_NAME_LENGTH = 120


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the name of its directory, its swept settings, and its experiment."""

    name: str
    settings: Mapping[str, Any]
    experiment: Experiment

    @property
    def rounds(self) -> int:
        """Total number of rounds of all methods and seeds."""
        return self.experiment.rounds * len(self.experiment.method) * len(self.experiment.seeds)


def expand(raw: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for every combination of the swept keys; the last key varies fastest.

    Raises ConfigError with the problems of all cells.
    """
    axes, problems = axes_of(raw)
    if "split.alpha" in axes and (raw.get("data") or {}).get("clients"):
        del axes["split.alpha"]
        problems["split.alpha"] = (
            "split.alpha: has no effect beside data.clients, which states what each client holds"
        )
    table = plain(raw)
    for key in problems:  # check the other keys too
        _remove(table, key)
    lines = list(problems.values())
    try:
        cells = cells_of(
            table, [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        )
    except ConfigError as error:
        lines += error.problems
    if lines:
        raise ConfigError(lines)
    return cells


def cells_of(raw: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """Return a cell for each point, {dotted key: value}: the recipe with these values.

    Raises ConfigError with the problems of all cells, each once.
    """
    from fedaux.running.preflight import problems_of

    listed = [dict(plain(point)) for point in points]
    tables = [_with_settings(raw, point) for point in listed]
    names = cell_names(listed)
    found: dict[str, list[str]] = {}
    for name, table in zip(names, tables, strict=True):
        fields, problems = inspect(table)
        for line in dict.fromkeys([*problems, *problems_of(fields)]):
            found.setdefault(line, []).append(name)
    for name, times in Counter(names).items():
        if times > 1:
            found.setdefault(f"{times} cells have the same settings", []).append(name)
    if not listed:
        found["the grid is empty: there is no cell to run"] = []
    if found:
        raise ConfigError([_with_cells(line, of, number=len(names)) for line, of in found.items()])
    return [
        Cell(name, point, Experiment(**table))
        for name, point, table in zip(names, listed, tables, strict=True)
    ]


def axes_of(raw: Mapping[str, Any]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the values of each swept key, and a line for each invalid list, by dotted key."""
    axes: dict[str, list[Any]] = {}
    problems: dict[str, str] = {}
    for key, annotation, values in _lists(plain(raw), ExperimentFields, ""):
        if is_list(annotation):
            inner = [isinstance(value, list) for value in values]
            if not any(inner):
                continue  # its value
            if not all(inner):
                problems[key] = (
                    f"{key} = {shortened(values)}: mixes lists and other items; should be one "
                    "list, or a list of lists to sweep over"
                )
                continue
        if reason := FIXED_KEYS.get(key):
            problems[key] = f"{key} = {shortened(values)}: cannot be swept over; it {reason}"
        elif not values:
            problems[key] = f"{key} = []: nothing to sweep over; should have at least 1 item"
        elif repeated := [value for place, value in enumerate(values) if value in values[:place]]:
            problems[key] = (
                f"{key} = {shortened(values)}: {shortened(repeated[0])} appears more than once"
            )
        else:
            axes[key] = values
    return axes, problems


def is_list(annotation: Any) -> bool:
    """Return whether a field is list-valued."""
    origin = get_origin(annotation)
    if origin in (tuple, list) or annotation in (tuple, list):
        return True
    parts = (
        get_args(annotation)[:1]
        if origin is Annotated
        else ()
        if origin is dict
        else get_args(annotation)
    )
    return any(is_list(part) for part in parts)


def _lists(
    table: Mapping[str, Any], section: type[BaseModel], prefix: str
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield key, type and value of every list in a recipe; unknown keys are skipped."""
    for name, value in table.items():
        key, field = prefix + name, section.model_fields.get(name)
        if field is None:
            continue
        inner = section_in(field.annotation)
        if isinstance(value, list) and (inner is None or is_list(field.annotation)):
            yield key, field.annotation, value
            for place, item in enumerate(value):
                if inner is not None and isinstance(item, Mapping):
                    yield from _lists(item, inner, f"{key}.{place}.")
        elif isinstance(value, Mapping) and inner is not None:
            yield from _lists(value, inner, f"{key}.")
        elif isinstance(value, Mapping):  # options of an architecture: each a single value
            yield from (
                (f"{key}.{option}", Any, item)
                for option, item in value.items()
                if isinstance(item, list)
            )


def _with_settings(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with values set at dotted keys; numbers are indices of lists."""
    table = deepcopy(plain(raw))
    for key, value in settings.items():
        *parents, last = first, *others = key.split(".")
        for gone in replaced(table, {first: dict.fromkeys(others)}):
            del table[gone]
        place: Any = table
        try:
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
            place[int(last) if isinstance(place, list) else last] = deepcopy(value)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError([f"{key}: is no key of the recipe"]) from error
    return dict(table)


def _remove(table: Any, key: str) -> None:
    first, _, rest = key.partition(".")
    if isinstance(table, list):
        _remove(table[int(first)], rest)
    elif rest:
        _remove(table.get(first, {}), rest)
    else:
        table.pop(first, None)


def cell_names(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a readable directory name per point: `alpha=0.01,epsilon=0.1`.

    Different values with the same text, such as paths with the same file name, get a digest.
    """
    keys = list(dict.fromkeys(key for point in points for key in point))
    ends = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    readings: dict[tuple[str, str], set[str]] = {}
    for point in points:
        for key, value in point.items():
            readings.setdefault((key, value_name(value)), set()).add(_exact(value))

    def part(key: str, value: Any) -> str:
        text = value_name(value)
        return f"{short[key]}={text}" + (
            "" if len(readings[key, text]) == 1 else f"-{_digest(_exact(value))}"
        )

    names = [
        ",".join(part(key, value) for key, value in point.items()) or "all" for point in points
    ]
    return [
        name
        if len(name) <= MAX_NAME_LENGTH
        else f"{name[: MAX_NAME_LENGTH - 9]}-{_digest(_exact(dict(point)))}"
        for name, point in zip(names, points, strict=True)
    ]


def value_name(value: Any) -> str:
    """Return a value as part of a file name; of a path only the last part."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list):
        return "_".join(map(value_name, value))
    if isinstance(value, Mapping):
        return value_name(value["name"]) if "name" in value else _digest(_exact(value))
    text = Path(value).name if isinstance(value, str) and "/" in value else str(value)
    return re.sub(r"[^A-Za-z0-9._+-]", "-", text) or "none"


def _exact(value: Any) -> str:
    """Return a unique text for a value; 1 and 1.0 are the same."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _with_cells(line: str, cells: Sequence[str], *, number: int) -> str:
    """Return a problem with the cells that have it, unless all do."""
    if len(cells) in (0, number):
        return line
    others = len(cells) - 1
    more = "" if not others else f" and {others} other cell{'s' if others > 1 else ''}"
    return f"{cells[0]}{more}: {line}"
