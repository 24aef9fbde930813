"""Experiment: everything a run depends on, validated, from TOML or Python. Defaults stand here and nowhere else."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"
PATTERN_MEANING = {
    NAME_PATTERN: "should be letters, digits, dots, dashes and underscores",
    DEVICE_PATTERN: "should be auto, cpu, cuda or cuda:N",
}

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[tuple[float, float], Field(strict=False)]


def _as_tuple(value: object) -> object:
    """Let one name stand for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class ConfigError(ValueError):
    """Every problem found in a configuration, one line each."""

    def __init__(self, problems: Iterable[str], *, origin: str = "") -> None:
        self.problems = list(problems)
        heading = f"{origin}: " if origin else ""
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n".join([f"{heading}{count} in the configuration", *self.problems]))


class Section(BaseModel):
    """A table of the configuration: unknown keys and wrong types are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class Data(Section):
    """The clients' labelled data."""

    source: str = "digits"
    path: str | None = None
    test_fraction: Fraction = 0.2


class Auxiliary(Section):
    """The server's public unlabeled data D_aux, split into negatives D- and the distill set."""

    source: str = "letters"
    path: str | None = None
    size: Count | None = None
    negatives_fraction: Fraction = 0.2


class Split(Section):
    """How the labelled data is spread over the clients (appendix, Data Splitting Methodology)."""

    num_clients: Count = 20
    alpha: Positive = 0.01


class Prototype(Section):
    """A model architecture, and which clients hold it: named ones, or a share of those not named."""

    name: Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)]
    model: str
    clients: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)] | None = None
    share: Positive = 1.0
    options: dict[str, bool | int | float | str] = {}


class Augmentation(Section):
    """Random views for contrastive pretraining; the defaults are those of SimCLR."""

    crop_scale: Interval = (0.08, 1.0)
    crop_ratio: Interval = (0.75, 4 / 3)
    flip: Probability = 0.5
    rotation: NonNegative = 0.0
    shear: NonNegative = 0.0
    jitter: Probability = 0.8
    brightness: NonNegative = 0.4
    contrast: NonNegative = 0.4
    saturation: NonNegative = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    greyscale: Probability = 0.2


class Pretraining(Section):
    """Self-supervised training of h0 on the auxiliary data."""

    kind: Literal["contrastive", "none"] = "contrastive"
    checkpoint: str | None = None
    epochs: Count = 100
    batch_size: Annotated[int, Field(ge=2)] = 512
    learning_rate: Positive = 1e-3
    temperature: Positive = 0.5
    projection_widths: Annotated[tuple[Count, Count], BeforeValidator(_as_tuple)] = (512, 128)
    augmentation: Augmentation = Augmentation()


class Certainty(Section):
    """The private release that certainty scores are computed from."""

    mechanism: str = "mean"
    epsilon: Positive = 0.1
    delta: Fraction = 1e-5
    components: Count = 64
    sharpness: Positive = 0.25
    regularisation: Positive = 0.1


class Local(Section):
    """Local training of one client in one round."""

    epochs: Count = 1
    batch_size: Count = 32
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: Positive = 1e-3
    proximal: NonNegative = 0.01


class Distillation(Section):
    """Distillation of the averaged model on the teacher's soft labels (Eq. 1)."""

    epochs: Count = 1
    batch_size: Count = 128
    learning_rate: Positive = 5e-5


class Evaluation(Section):
    """When the server's models are measured on the test data. The last round always is."""

    every: Count = 1
    batch_size: Count = 1024


class Engine(Section):
    """Where the work is done."""

    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    threads: Count | None = None


class Output(Section):
    """Where the run directory goes; runs/NAME when not given."""

    directory: str | None = None


class ExperimentFields(Section):
    """The fields of an experiment, each validated on its own."""

    name: Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)] = "experiment"
    method: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_as_tuple)] = ("fedaux",)
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_as_tuple)] = (0,)
    rounds: Count = 100
    participation_rate: Annotated[float, Field(gt=0, le=1)] = 0.4
    data: Data = Data()
    auxiliary: Auxiliary = Auxiliary()
    split: Split = Split()
    prototypes: Annotated[tuple[Prototype, ...], Field(min_length=1), BeforeValidator(_as_tuple)] = (
        Prototype(name="cnn", model="cnn"),
    )
    pretraining: Pretraining = Pretraining()
    certainty: Certainty = Certainty()
    local: Local = Local()
    distillation: Distillation = Distillation()
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    output: Output = Output()

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as TOML can hold it: no None, lists for tuples."""
        table: dict[str, Any] = _without_none(self.model_dump(mode="json"))
        return table

    def sha256(self) -> str:
        """Return the digest of what the results depend on; output and engine do not belong to it."""
        content = {key: value for key, value in self.to_dict().items() if key not in {"output", "engine"}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Experiment(ExperimentFields):
    """Everything a run depends on. Raises ConfigError with all problems at once."""

    def __init__(self, **values: Any) -> None:
        _, problems = inspect(values)
        if problems:
            raise ConfigError(problems)
        super().__init__(**_copy(values))


def load_experiment(path: Path, *, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file, with `key=value` overrides. Raises ConfigError with all problems."""
    raw, problems = read_recipe(path, overrides=overrides)
    problems += inspect(raw)[1]
    if problems:
        raise ConfigError(problems, origin=str(path))
    return Experiment(**raw)


def read_recipe(path: Path, *, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the raw values of a TOML file with `key=value` overrides applied, and the problems of the latter."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid TOML ({error})"]) from error
    return raw, [problem for override in overrides for problem in _apply_override(raw, override)]


def inspect(values: Mapping[str, Any]) -> tuple[ExperimentFields, list[str]]:
    """Return the fields of an experiment and all problems; where a value is wrong, the field holds the default.

    The fields are there so that callers can look for further problems in one go.
    """
    raw = _copy(values)
    problems: list[str] = []
    wrong: set[tuple[str | int, ...]] = set()
    for _ in range(20):  # each pass removes the wrong keys; a removed key can uncover a missing one
        try:
            fields = ExperimentFields.model_validate(raw)
            break
        except ValidationError as error:
            locations = []
            for item in error.errors(include_url=False):
                line, location = _explain(item, raw)
                problems += [line] if line not in problems else []
                # A prototype cannot stand without its wrong key, so the whole list goes back to the default.
                locations.append(location[:1] if location[0] == "prototypes" else location)
            for location in locations:
                _remove(raw, location)
            wrong.update(locations)
    else:
        raise AssertionError("removing wrong keys did not end")
    broken = {".".join(str(part) for part in location) for location in wrong}
    problems += [line for keys, line in _joint_problems(fields) if not _touches(keys, broken)]
    return fields, problems


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"split.alpha": 0.01, ...} of a nested table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?` or nothing."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _joint_problems(experiment: ExperimentFields) -> list[tuple[set[str], str]]:
    """Return the problems that lie between keys, each with the keys it joins."""
    found: list[tuple[set[str], str]] = []
    clients = experiment.split.num_clients
    for key in ("method", "seeds"):
        values = getattr(experiment, key)
        repeated = sorted({str(value) for value in values if values.count(value) > 1})
        if repeated:
            found.append(({key}, f"{key} = {list(values)}: {', '.join(repeated)} appears more than once"))
    names = [prototype.name for prototype in experiment.prototypes]
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(({"prototypes"}, f"prototypes.name = {name!r}: used by more than one prototype"))
    owner: dict[int, str] = {}
    for prototype in experiment.prototypes:
        for client in prototype.clients or ():
            if client >= clients:
                line = f"prototypes.clients = {client}: there are {clients} clients, numbered 0 to {clients - 1}"
                found.append(({"prototypes", "split.num_clients"}, line))
            elif owner.setdefault(client, prototype.name) != prototype.name:
                line = f"prototypes.clients = {client}: given to both {owner[client]!r} and {prototype.name!r}"
                found.append(({"prototypes"}, line))
    if all(prototype.clients is not None for prototype in experiment.prototypes) and len(owner) < clients:
        left = [client for client in range(clients) if client not in owner]
        shown = ", ".join(map(str, left[:5])) + (", ..." if len(left) > 5 else "")
        line = (
            f"prototypes.clients: no prototype for client {shown}; name them, or leave `clients` out of one prototype"
        )
        found.append(({"prototypes", "split.num_clients"}, line))
    augmentation = experiment.pretraining.augmentation
    for key, upper in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
        low, high = getattr(augmentation, key)
        if not 0 < low <= high <= upper:
            name = f"pretraining.augmentation.{key}"
            found.append(({name}, f"{name} = [{low}, {high}]: should be two rising numbers above 0, at most {upper:g}"))
    return found


def _explain(item: Any, raw: Mapping[str, Any]) -> tuple[str, tuple[str | int, ...]]:
    """Turn one of pydantic's errors into a line that names the key, the value and what would be right."""
    location = tuple(part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    location = _existing(location, raw)
    key = ".".join(str(part) for part in location)
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        known = known_keys()
        name = str(location[-1])
        parent = ".".join(str(p) for p in location[:-1] if isinstance(p, str))
        siblings = [k for k in known if k.rpartition(".")[0] == parent]
        guess = nearest(key, siblings) or nearest(name, [k.rpartition(".")[2] for k in known])
        if guess and "." not in guess and parent == "":  # found by its last word: name its whole path
            word = guess.removeprefix("; did you mean ").removesuffix("?")
            guess = f"; did you mean {next(k for k in known if k.rpartition('.')[2] == word)}?"
        return f"{key}: unknown key{guess}", location
    if kind == "missing":
        return f"{key}: missing", location
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    message = message.replace("a valid dictionary or instance of", "a table, see")
    if kind == "too_short":
        message = f"should have at least {item['ctx']['min_length']} item"
    if kind == "string_pattern_mismatch":
        message = PATTERN_MEANING[item["ctx"]["pattern"]]
    return f"{key} = {_short(value)}: {message}", location


def _existing(location: tuple[str | int, ...], raw: Any) -> tuple[str | int, ...]:
    """Cut off what pydantic adds behind the user's own key, such as the member of a union."""
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


def known_keys() -> list[str]:
    """Return every dotted key a recipe may hold."""
    return list(_keys_of(ExperimentFields, ""))


def _keys_of(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys_of(kind, f"{prefix}{name}.")


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _touches(keys: set[str], broken: set[str]) -> bool:
    return any(b == k or b.startswith(k + ".") or k.startswith(b + ".") or not b for k in keys for b in broken)


def _apply_override(raw: dict[str, Any], override: str) -> list[str]:
    """Write one `key=value` into the raw configuration; return what is wrong with it."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return [f"--set {override}: should be key=value, for example --set local.epochs=5"]
    table: Any = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return [f"{key.strip()}: {part} is not a table"]
    table[parts[-1]] = _parse_value(text.strip())
    return []


def _parse_value(text: str) -> Any:
    """Read a TOML value; words that are none are strings, also inside [a, b]."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [_parse_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        return text


def _copy(table: Any) -> Any:
    if isinstance(table, BaseModel):
        return _without_none(table.model_dump(mode="json"))
    if isinstance(table, Mapping):
        return {str(key): _copy(value) for key, value in table.items()}
    return [_copy(item) for item in table] if isinstance(table, list | tuple) else table


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


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
