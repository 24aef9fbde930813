"""Trained models as files: safetensors that stand alone, each with a card that describes it."""

from __future__ import annotations

import json
import math
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import fedaux
from fedaux.config import Experiment, Prototype
from fedaux.config_errors import nearest
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.asks import unprotected_by
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.messages import Weights
from fedaux.data.labelled import LabelledData
from fedaux.data.vocabulary import METADATA
from fedaux.files import save_tensors
from fedaux.models import SHIPPED, model_options
from fedaux.models.bert import without_checkpoint
from fedaux.privacy.accounting import total_cost
from fedaux.privacy.ledger import NEIGHBOURS, worst_client
from fedaux.running import plugins
from fedaux.running.model_card import parse_card
from fedaux.running.run_directory import Progress, RunDirectory

FORMAT = "fedaux model 1"
FOLDER = "models"
RIGHT_FILE = (
    f"should be a file in the folder {FOLDER} of a run directory, or one written by `fedaux export "
    "--format safetensors`"
)
MODEL_UNPROTECTED = (
    " So the model itself is not differentially private: whoever holds it may learn something "
    "about single training examples."
)

INSIDE, ENCODER_FORMAT = "encoder.", "encoder_format"
"""Prefix of an encoder's tensors inside a model's file, and the key of its format."""
Card = dict[str, Any]
"""The description of a model, as JSON."""


def model_path(directory: RunDirectory, method: str, seed: int, prototype: str) -> Path:
    """Return the file of one model, with a name that every file system and URL accepts."""
    experiment = directory.experiment
    plain = [re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in experiment.method]
    place = experiment.method.index(method)
    repeated = plain[:place].count(plain[place])
    name = plain[place] + (f"_{repeated + 1}" if repeated else "")
    which = f"-{prototype}" if len(experiment.prototypes) > 1 else ""
    return directory.path / FOLDER / f"{name}-seed{seed}{which}.safetensors"


def write_models(
    directory: RunDirectory,
    method: str,
    seed: int,
    *,
    progress: Progress,
    data: LabelledData,
    compute: Compute,
) -> None:
    """Write the model of every prototype of a finished method and seed, if it keeps one."""
    experiment = directory.experiment
    if not (experiment.output.models and keeps_model(method)):
        return
    for prototype in experiment.prototypes:
        card = _card(experiment, prototype, method, seed, progress, data=data, compute=compute)
        words = {} if data.vocabulary is None else {METADATA: data.vocabulary.tokenizer}
        save_tensors(
            model_path(directory, method, seed, prototype.name),
            whole_network(progress, prototype.name),
            metadata={"format": FORMAT, "card": json.dumps(card)} | words,
        )


def keeps_model(method: str) -> bool:
    """Return whether a method ends with one model, not with one per client."""
    return method not in METHODS or asks_of(method).shares != "nothing"


def lacks_models(directory: RunDirectory, method: str, seed: int) -> bool:
    """Return whether a wanted file of a prototype is missing, as in runs of older versions."""
    if not (directory.experiment.output.models and keeps_model(method)):
        return False
    names = [prototype.name for prototype in directory.experiment.prototypes]
    return not all(model_path(directory, method, seed, name).is_file() for name in names)


def whole_network(progress: Progress, prototype: str) -> Weights:
    """Return the weights of f = head after features; in linear mode the features are h0's."""
    weights = progress.state.final[prototype]
    if any(name.startswith("features.") for name in weights):
        return weights
    frozen = progress.preparation.extractors.get(prototype, {})
    return {f"features.{name}": tensor for name, tensor in frozen.items()} | dict(weights)


def _card(
    experiment: Experiment,
    prototype: Prototype,
    method: str,
    seed: int,
    progress: Progress,
    *,
    data: LabelledData,
    compute: Compute,
) -> Card:
    accuracies = [
        row["accuracy_by_prototype"][prototype.name]
        for row in progress.rows
        if prototype.name in row["accuracy_by_prototype"]
    ]
    normalisation = experiment.batch_normalisation.server
    return {
        "name": experiment.name,
        "method": method,
        "seed": seed,
        "prototype": prototype.name,
        **_architecture(prototype, data.input_shape),
        "mode": experiment.mode,
        "input": _input(experiment, data),
        "classes": list(data.classes),
        "batch_normalisation": "batch" if normalisation == "batch" else "stored",
        "batch_size": experiment.evaluation.batch_size or inference_batch(compute.device),
        "rounds": progress.state.round,
        "accuracy": {
            "last": accuracies[-1] if accuracies else None,
            "max": max(accuracies, default=None),
            "test_examples": len(data.test_labels),
        },
        "privacy": _privacy(experiment, method, progress),
        "config_sha256": experiment.sha256(),
        "device": compute.device.type,
        "precision": str(compute.precision).removeprefix("torch."),
        "versions": {
            "fedaux": fedaux.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _architecture(prototype: Prototype, shape: Sequence[int]) -> Card:
    """Return what builds the network again: its name, all options, the shape of its inputs."""
    name, options = prototype.model, dict(prototype.options)
    if name in SHIPPED and options.get("checkpoint"):  # a folder that others do not have
        name, (shape, options) = "bert", without_checkpoint((shape[0], shape[1]), options)
    defaults = {
        key: value
        for key, value in model_options(name).items()
        if isinstance(value, bool | int | float | str)
    }
    added = [plugin for plugin in plugins.LOADED.values() if name in plugin.rows["MODELS"]]
    own = {"plugin": {"path": added[0].path, "sha256": added[0].sha256}} if added else {}
    return {"model": name, "options": defaults | options, "input_shape": list(shape)} | own


def _input(experiment: Experiment, data: LabelledData) -> Card:
    section = experiment.data
    if data.encoder is not None:
        texts = data.encoder["inputs"]["kind"] == "text"
        image = [section.image_column] if section.image_column else []
        columns = list(section.text_column) if texts else image
        return {"encoder": dict(data.encoder), "columns": columns, **data.encoder["inputs"]}
    if data.images.ndim == 2 and data.vocabulary is None:
        return {"kind": "features", "columns": list(section.feature_column)}
    if data.vocabulary is not None:
        assert experiment.text is not None, "texts have a section"
        words = data.vocabulary
        return {
            "kind": "text",
            "length": experiment.text.length,
            "columns": list(section.text_column),
            "tokenizer": {"size": words.size, "digest": words.digest, "origin": words.origin},
        }
    return {
        "kind": "image",
        "scaling": "(pixels / 255 - mean) / deviation, by channel",
        "mean": list(section.channel_mean),
        "deviation": list(section.channel_deviation),
        "resized": section.image_size is not None,
        "channels_converted": section.channels is not None,
        "columns": [section.image_column] if section.image_column else [],
    }


def _privacy(experiment: Experiment, method: str, progress: Progress) -> Card:
    """Return the cost of this method and seed for the client with the largest one."""
    state = progress.state
    entries = [*(released.entry for released in state.releases.values()), *state.ledger]
    spent = worst_client(entries, compose=total_cost)
    epsilon, delta = spent or (None, None)
    asks = asks_of(method, experiment)
    protected = experiment.local.privacy is not None
    return {
        "epsilon": "inf" if epsilon is not None and math.isinf(epsilon) else epsilon,
        "delta": delta,
        "mechanism": asks.all_releases[0].mechanism if asks.all_releases else None,
        "updates_protected": protected if asks.trains else None,
        "neighbours": NEIGHBOURS,
        "not_protected": unprotected_by([asks], experiment)
        + (MODEL_UNPROTECTED if asks.trains and not protected else ""),
    }


def read_model(path: Path) -> tuple[dict[str, Tensor], Card, dict[str, str]]:
    """Return weights, card and metadata of a file. Raises ValueError if it is no model."""
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
    """Return the file of a model: the given one, or that of a run's method, seed and prototype.

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
