"""Trained models as files: safetensors that stand alone, each with a card that describes it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux.config_errors import nearest
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.predict.card import parse_card

FORMAT = "fedaux model 1"
FOLDER = "models"
RIGHT_FILE = (
    f"should be a file in the folder {FOLDER} of a run directory, or one written by `fedaux export "
    "--format safetensors`"
)

INSIDE, ENCODER_FORMAT = "encoder.", "encoder_format"
"""Prefix of an encoder's tensors inside a model's file, and the key of its format."""
Card = dict[str, Any]
"""The description of a model, as JSON."""


def keeps_model(method: str) -> bool:
    """Return whether a method ends with one model, not with one per client."""
    return method not in METHODS or asks_of(method).shares != "nothing"


def read_model(path: Path) -> tuple[dict[str, Tensor], Card, dict[str, str]]:
    """Return weights, card and metadata of a file. Raises ValueError if it is not a model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            card = _parsed(path, metadata)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error  # of a type of numbers that torch does not know
    return weights, card, metadata


def read_card(path: Path) -> Card:
    """Return the card of a model's file alone."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return _parsed(path, metadata)


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable safetensors file ({error}); {RIGHT_FILE}")


def _parsed(path: Path, metadata: Mapping[str, str]) -> Card:
    """Return the card in a file's metadata. Raises ValueError if there is none."""
    found = metadata.get("format")
    if found != FORMAT:
        other = f" of the format {found!r}" if str(found).startswith("fedaux model") else ""
        raise ValueError(f"{path}: is no trained model{other}; {RIGHT_FILE} (format {FORMAT!r})")
    try:
        return parse_card(metadata.get("card", ""))
    except ValueError as error:
        raise ValueError(f"{path}: its card is damaged ({error})") from error


def find_model(
    place: Path, *, method: str | None = None, seed: int | None = None, prototype: str | None = None
) -> Path:
    """Return the file of a model: the given one, or the file of a run's method, seed and prototype.

    Raises ValueError with a list of the run's models if several or none match.
    """
    asked = {"method": method, "seed": seed, "prototype": prototype}
    wanted = {key: value for key, value in asked.items() if value is not None}
    if place.is_file():
        if wanted:
            raise ValueError(
                f"--{next(iter(wanted))} ({next(iter(wanted))}=): {place} is one model; "
                "should be left out, or should be given with a run directory"
            )
        return place
    if not place.is_dir():
        raise ValueError(f"{place}: not found; should be a run directory or a file of a model")
    runs = sorted(child.name for child in place.iterdir() if (child / FOLDER).is_dir())
    if runs or (place / "sweep.json").is_file():
        raise ValueError(
            f"{place}: is a folder of runs; should be one of them: "
            f"{', '.join(runs) or 'none has models'}"
        )
    files = sorted((place / FOLDER).glob("*.safetensors"))
    cards = {file: card for file in files if keeps_model((card := read_card(file))["method"])}
    recipe = _recipe(place)
    alone = [method] if method else list(recipe.get("method", ()))
    if alone and not any(map(keeps_model, alone)):
        names = " and ".join(dict.fromkeys(card["method"] for card in cards.values()))
        raise ValueError(
            f"{place}: {alone[0]} trains one model per client and keeps none; "
            f"choose {names or 'another method, and run it'}"
        )
    if not cards and not recipe.get("output", {}).get("models", True):
        raise ValueError(
            f"{place}: has no trained models, because its config.toml has output.models = false; "
            f"`fedaux run {place / 'config.toml'} --set output.models=true --out {place} --resume` "
            "writes them"
        )
    if not cards:
        raise ValueError(
            f"{place}: has no trained models; a run writes them when a method has finished. "
            "`fedaux run --resume` finishes a run, and adds the models to one of an older version"
        )
    for key, value in wanted.items():
        held = list(dict.fromkeys(str(card[key]) for card in cards.values()))
        if str(value) not in held:
            guess = nearest(str(value), held)
            raise ValueError(
                f"--{key} {value} ({key}=): {place} has no such model; it has "
                f"{', '.join(held)}{guess}"
            )
    found = [
        file
        for file, card in cards.items()
        if all(card[key] == value for key, value in wanted.items())
    ]
    if len(found) == 1:
        return found[0]
    differing = [f"--{key}" for key in asked if len({str(cards[file][key]) for file in found}) > 1]
    lines = [f"  {describe(cards[file])}: {file}" for file in found or cards]
    how = f"choose one with {' and '.join(differing)}" if found else "no model matches; it has"
    raise ValueError("\n".join([f"{place} has {len(cards)} models; {how}", *lines]))


def _recipe(place: Path) -> dict[str, Any]:
    """Return the recipe of a run directory; empty if it has none."""
    recipe = place / "config.toml"
    return tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}


def describe(card: Card) -> str:
    """Return a model in one line: what it is and how good."""
    accuracy = card["accuracy"]["last"]
    measured = "not measured"
    if accuracy is not None:
        measured = f"test accuracy of its run {100 * accuracy:.1f} %"
    return f"{card['method']}, seed {card['seed']}, {card['prototype']}, {measured}"
