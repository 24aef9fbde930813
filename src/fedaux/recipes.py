"""Recipes: experiments in TOML files, changed by `key=value`, and the reference of all keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedaux.config import ConfigError, Experiment, ExperimentFields, inspect, known_keys
from fedaux.config_errors import nearest, parsed_toml, section_in


def load_experiment(recipe: Path | str, *, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file, the name of a shipped recipe, or TOML text.

    A string with a line break, or with `=` and not ending in `.toml`, is TOML text; its `extends`
    is relative to the current folder. `overrides` are `key=value`. Raises ConfigError, or
    ValueError for an unknown name.
    """
    if isinstance(recipe, str) and _is_toml(recipe):
        origin, raw = "TOML text", _extended(recipe, Path("TOML text"), ())
        problems = apply_overrides(raw, overrides)
    else:
        path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
        origin = str(path)
        raw, problems = read_recipe(path, overrides=overrides)
    problems += inspect(raw)[1]
    if problems:
        raise ConfigError(problems, origin=origin)
    return Experiment(**raw)


def _is_toml(text: str) -> bool:
    return "\n" in text or ("=" in text and not text.endswith(".toml"))


def read_recipe(path: Path, *, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the raw values of a TOML file with `key=value` overrides, and the problems of these.

    A recipe can start from another with `extends = "cifar10"`, given by name or by a path relative
    to its own. Tables are merged, other values are replaced. The default name is the file's.
    """
    raw = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", path.stem), **_read_with_base(path, ())}
    return raw, apply_overrides(raw, overrides)


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply `key=value` overrides to raw values; return their problems, and whether two keys of
    one table state the network."""
    problems = [problem for override in overrides for problem in _apply_override(raw, override)]
    for other in sorted(_others(raw)) if "model" in raw else ():
        given = f"model = {raw['model']!r}: {other} states the network, too"
        problems.append(f"{given}; should be one of them")
    return problems


def _others(table: Mapping[str, Any]) -> set[str]:
    """Return the keys besides `model` that state the network."""
    encoder = table.get("encoder")
    source = isinstance(encoder, dict) and "source" in encoder
    return ({"prototypes"} & table.keys()) | ({"encoder"} if source else set())


def replaced(base: Mapping[str, Any], changes: Mapping[str, Any]) -> set[str]:
    """Return the keys of a recipe that state another network than changes do."""
    if "model" in changes:
        return _others(base)
    return {"model"} & base.keys() if _others(changes) else set()


def find_recipe(name: str, *, beside: Path = Path()) -> Path:
    """Return the file of a recipe, given by path or by the name of one that ships with fedaux."""
    if (path := beside / name).is_file():
        return path
    shipped = shipped_recipes()
    if name not in shipped:
        if path.is_dir():
            own = path / "config.toml"
            hint = f"; the recipe of its run is {own}" if own.is_file() else ""
            raise ValueError(f"{name}: is a folder; should be a recipe, a TOML file{hint}")
        files_there = [str(file.relative_to(beside)) for file in path.parent.glob("*.toml")]
        guess = nearest(name, [*files_there, *shipped])
        guess = guess or f"; the recipes are {', '.join(shipped)}"
        raise ValueError(f"{name}: no such file or recipe{guess}")
    return shipped[name][0]


def shipped_recipes() -> dict[str, tuple[Path, str]]:
    """Return the file of each recipe that ships, by name, and what it is about: its comment up to
    the first colon or full stop."""
    found = {}
    for entry in files("fedaux").joinpath("recipes").iterdir():
        comment = re.match(r"(?:#.*\n)*", entry.read_text(encoding="utf-8"))
        about = " ".join((comment.group() if comment else "").replace("#", " ").split())
        name = entry.name.removesuffix(".toml")
        found[name] = (Path(str(entry)), re.split(r"[:.](?:\s|$)", about)[0])
    return dict(sorted(found.items()))


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 ({error}); should be saved as UTF-8"]) from error
    return _extended(text, path, seen)


def _extended(text: str, path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a TOML text, merged into the values of the recipe that it extends."""
    raw = parsed_toml(text, origin=path)
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(
            [f"extends = {base!r}: should be the name or the path of a recipe"], origin=str(path)
        )
    found = find_recipe(base, beside=path.parent).resolve()
    if found in (*seen, path.resolve()):
        raise ConfigError(
            [f"extends = {base!r}: {found} extends this recipe in turn"], origin=str(path)
        )
    return merged(_read_with_base(found, (*seen, path.resolve())), raw)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested table with changes: tables are merged, everything else is replaced."""
    gone = replaced(base, changes)
    result = {key: value for key, value in base.items() if key not in gone}
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _apply_override(raw: dict[str, Any], override: str) -> list[str]:
    """Apply one `key=value` to the raw configuration; return its problems. `key=` unsets the
    key, which then has its default."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return [f"--set {override}: should be key=value, for example --set local.epochs=5"]
    key, text = ".".join(parts), text.strip()
    if not text and key not in known_keys():
        return [f"{key}: unknown key{nearest(key, known_keys())}"]
    table: Any = raw
    for part in parts[:-1]:
        if not text and part not in table:
            return []  # is not set
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return [f"{key}: {part} is not a table"]
    if text.startswith("[") and not text.endswith("]"):
        return [f"--set {override}: a list should end with ]; quote it if it has spaces"]
    second = re.search(r"[,;]\s*([a-z_.]+)\s*=", text)
    if second and text[0] not in "[{\"'" and second.group(1) in known_keys():
        return [f"--set {override}: should be one setting; repeat --set for {second.group(1)}"]
    if (toml := _json_as_toml(text)) is not None:
        return [f"--set {override}: is JSON, and values are TOML; should be --set '{key}={toml}'"]
    if text:
        for gone in replaced(raw, {parts[0]: dict.fromkeys(parts[1:])}):
            del raw[gone]
        table[parts[-1]] = parse_value(text)
    else:
        table.pop(parts[-1], None)
    return []


def _json_as_toml(text: str) -> str | None:
    """Return the TOML of a value that is JSON and no TOML, or None."""

    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key} = {toml(own)}' for key, own in value.items())}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(toml, value))}]"
        return "" if value is None else json.dumps(value, ensure_ascii=False)

    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        try:
            return toml(json.loads(text))
        except ValueError:
            return None
    return None


def parse_value(text: str) -> Any:
    """Parse a TOML value; anything else is a string, also inside [a, b]."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(part.strip()) for part in _split(text[1:-1]) if part.strip()]
        return text


def keys_of(override: str) -> set[str]:
    """Return the settings that KEY=VALUE changes: for a table, its entries."""
    key, _, text = override.partition("=")
    return set(flatten({key.strip(): parse_value(text)}))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"split.alpha": 0.01, ...} of a nested table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def reference(section: type[BaseModel] = ExperimentFields, key: str = "") -> str:
    """Return every key with its default and meaning, as Markdown tables."""
    heading = f"## `[{'[prototypes]' if key == 'prototypes' else key}]`" if key else "## Top level"
    about = [(section.__doc__ or "").strip(), ""] if key else []
    lines = [heading, "", *about, "| key | default | meaning |", "|---|---|---|"]
    deeper = []
    for name, field in section.model_fields.items():
        if inner := section_in(field.annotation):
            deeper.append(reference(inner, f"{key}.{name}" if key else name))
            continue
        default = "required" if field.is_required() else _toml_like(field.default)
        about_field = " ".join((field.description or "").split())  # a row of a table is one line
        lines.append(f"| `{name}` | {default} | {about_field} |")
    return "\n".join([*lines, "", *deeper])


def _toml_like(value: Any) -> str:
    return "–" if value is None else f"`{json.dumps(value)}`"
