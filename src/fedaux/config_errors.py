"""All problems of a configuration at once, one line each, in terms of its keys."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
PATTERN_MEANING = {
    DIGEST_PATTERN: "should be a digest, 64 hexadecimal digits",
    NAME_PATTERN: "should be letters, digits, dots, dashes and underscores",
    DEVICE_PATTERN: "should be auto, cpu, cuda or cuda:N",
}
FORMER_DEFAULTS: dict[str, dict[str, Any]] = {
    "pretraining": {"redundancy": 0.005},
    "distillation": {"schedule": "constant", "cycle_steps": 25, "lowest_learning_rate": 0.0}
    | {"sharpening": 1.0, "clip": None, "averaging": None, "stopping": None},
    "bayesian": {"distribution": "gaussian", "concentration": 1.0},
    "batch_normalisation": {"teachers": "client", "server": "training", "images": 4096},
    "output": {"tensorboard": False},
}
"""Removed keys with their defaults, which the recipes in older run directories state."""
REMOVED_KEYS = {"distillation.negligible_weight": "0.2.0", "batch_normalisation": "0.3.0"} | {
    f"{table}.{key}": "0.3.0" for table, keys in FORMER_DEFAULTS.items() for key in keys
}
"""Keys of earlier versions, and the version that removed each."""
REMOVED_VALUES = {"pretraining.kind": {"barlow": "0.3.0", "next-token": "0.3.0"}}
"""Values of earlier versions, and the version that removed each."""


MOST_NESTED = 16
"""Tables and lists within each other in a TOML file."""
MOST_DOTS = 1000
"""In one key: the parser's memory grows with their square, to 14 GB for 200 kB of them."""


class ConfigError(ValueError):
    """All problems found in a configuration, one per line."""

    def __init__(self, problems: Iterable[str], *, origin: str = "") -> None:
        self.problems = list(problems)
        heading = f"{origin}: " if origin else ""
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n".join([f"{heading}{count} in the configuration", *self.problems]))


Fields = TypeVar("Fields", bound=BaseModel)


def parsed_toml(text: str, *, origin: Path) -> dict[str, Any]:
    """Return the values of a TOML text. Raises ConfigError."""
    if any(part.count(".") > MOST_DOTS for part in re.split(r"[=,{\n]", text)):
        raise ConfigError([f"{origin}: a key of more than {MOST_DOTS} parts"])
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"{origin}: not valid TOML ({error})"]) from error
    level: list[Any] = [raw]
    for _ in range(MOST_NESTED + 1):
        inside = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        ]
        level = [child for child in inside if isinstance(child, dict | list)]
        if not level:
            return raw
    raise ConfigError(
        [f"{origin}: tables and lists within each other; should be at most {MOST_NESTED} deep"]
    )


WHOLE = ("prototypes", "encoder")
"""Tables with a key that must be given."""
MOST_PROBLEMS = 200
"""Problems of a recipe that are all explained."""


def inspected(
    section: type[Fields], values: Mapping[str, Any]
) -> tuple[Fields, list[str], set[str]]:
    """Return the fields of a table, all problems, and the wrong keys; a field with a wrong value
    has its default, so that callers can check the others further."""
    raw = plain(values)
    known = list(keys_of(section))
    problems: list[str] = []
    wrong: set[tuple[str | int, ...]] = set()
    for _ in range(20):  # each pass removes the wrong keys; a removed key can uncover a missing one
        try:
            fields = section.model_validate(raw)
            break
        except ValidationError as error:
            items = error.errors(include_url=False)
            if len(items) > MOST_PROBLEMS:  # no recipe of a person: say so, and look at no other
                problems += [_explain(item, raw, known)[0] for item in items[:MOST_PROBLEMS]]
                return section(), [*problems, f"and {len(items) - MOST_PROBLEMS} more"], {""}
            # A list can be too short only because its items are wrong: report the items alone.
            outer = [item["loc"][:-1] for item in items]
            explained = [
                _explain(item, raw, known)
                for item in items
                if item["type"] != "too_short" or item["loc"] not in outer
            ]
            deeper = wrong | {location for _, location in explained}
            locations = []
            for line, location in explained:
                if not any(
                    other != location and other[: len(location)] == location for other in deeper
                ):
                    problems += [line] if line not in problems else []
                # Incomplete without a wrong or missing key: the whole table gets its default.
                locations.append(location[:1] if location[0] in WHOLE else location)
            for location in locations:
                _remove(raw, location)
            wrong.update(locations)
    else:
        raise AssertionError("removing wrong keys did not end")
    broken = {".".join(str(part) for part in location) for location in wrong}
    return fields, problems, broken


def problems_in(section: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """Return a line for each wrong value of another table, such as a node's configuration."""
    raw = plain(values)
    try:
        section.model_validate(raw)
    except ValidationError as error:
        known = list(keys_of(section))
        return [_explain(item, raw, known)[0] for item in error.errors(include_url=False)]
    return []


def nearest(word: str, candidates: Iterable[str], *, most: int = 1) -> str:
    """Return `; did you mean X?`, with up to `most` names that are about equally near, or
    nothing."""
    found = difflib.get_close_matches(word, list(candidates), n=most, cutoff=0.6)
    near = [name for name in found if _likeness(word, name) >= _likeness(word, found[0]) - 0.1]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _likeness(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that a table may hold."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := section_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the table behind a field, or behind the items of a field."""
    kinds = (annotation, *get_args(annotation))
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )


def _explain(
    item: Any, raw: Mapping[str, Any], known: list[str]
) -> tuple[str, tuple[str | int, ...]]:
    """Return one of pydantic's errors as a line with the key, the value and the expectation."""
    location = tuple(
        part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-"))
    )
    location = _existing(location, raw)
    key = ".".join(str(part) for part in location)
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden" and key in REMOVED_KEYS:
        return f"{key}: removed in fedaux {REMOVED_KEYS[key]}; leave it out", location
    if kind == "extra_forbidden":
        name = str(location[-1])
        parent = ".".join(str(p) for p in location[:-1] if isinstance(p, str))
        siblings = [k for k in known if k.rpartition(".")[0] == parent]
        if parent and name in known:
            return f"{key}: unknown key; {name} belongs above the first table", location
        guess = nearest(key, siblings) or nearest(name, [k.rpartition(".")[2] for k in known])
        if guess and "." not in guess and parent == "":  # found by its last part: give the full key
            word = guess.removeprefix("; did you mean ").removesuffix("?")
            guess = f"; did you mean {next(k for k in known if k.rpartition('.')[2] == word)}?"
        return f"{key}: unknown key{guess}", location
    if kind == "missing":
        return f"{key}: missing", location
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    message = message.replace("should be a valid tuple", "should be a list")
    if kind == "model_type":
        message = f"should be a table, [{key}]"
    if kind == "too_short":
        message = f"should have at least {item['ctx']['min_length']} item"
    if kind == "string_too_short":
        message = "is empty; should be a name or a path, or left out"
    if kind == "string_pattern_mismatch":
        message = PATTERN_MEANING[item["ctx"]["pattern"]]
    if kind == "literal_error" and (version := REMOVED_VALUES.get(key, {}).get(str(value))):
        message = f"removed in fedaux {version}; {message}"
    return f"{key} = {shortened(value)}: {message}", location


def _existing(location: tuple[str | int, ...], raw: Any) -> tuple[str | int, ...]:
    """Remove what pydantic appends to the user's key, such as the member of a union."""
    kept: list[str | int] = []
    for part in location:
        if isinstance(raw, Mapping) and isinstance(part, str):
            kept.append(part)
            raw = raw.get(part)
        elif isinstance(raw, list | tuple) and isinstance(part, int) and part < len(raw):
            kept.append(part)
            raw = raw[part]
        elif not kept:
            kept.append(part)
        else:
            break
    return tuple(kept)


def touches(keys: set[str], broken: set[str]) -> bool:
    """Return whether keys and broken ones overlap."""
    return any(
        b == k or b.startswith(k + ".") or k.startswith(b + ".") or not b
        for k in keys
        for b in broken
    )


def shortened(value: object) -> str:
    """Return a value as JSON, of at most 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(table: Any) -> Any:
    """Return values as TOML represents them: dicts, lists and plain values."""
    if isinstance(table, BaseModel):
        return without_none(table.model_dump(mode="json"))
    if isinstance(table, Mapping):
        return {str(key): plain(value) for key, value in table.items()}
    return [plain(item) for item in table] if isinstance(table, list | tuple) else table


def _remove(raw: Any, location: tuple[str | int, ...]) -> None:
    for part in location[:-1]:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(raw, dict):
        raw.pop(location[-1], None)
    elif isinstance(raw, list) and isinstance(location[-1], int) and location[-1] < len(raw):
        del raw[location[-1]]


def without_none(value: Any) -> Any:
    """Return nested tables and lists without the keys that are None, which TOML lacks."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
