"""Writes the trained models of a run: safetensors that stand alone, each with a card."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import fedaux
from fedaux.config import Experiment, Prototype
from fedaux.core.algorithms import asks_of
from fedaux.core.asks import unprotected_by
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.messages import Weights
from fedaux.data.labelled import LabelledData
from fedaux.data.tensor_files import save_tensors
from fedaux.data.vocabulary import METADATA
from fedaux.models import SHIPPED, model_options
from fedaux.models.bert import without_checkpoint
from fedaux.models.standardised import whole
from fedaux.predict.files import FOLDER, FORMAT, Card, keeps_model
from fedaux.privacy.accounting import total_cost
from fedaux.privacy.ledger import NEIGHBOURS, worst_client
from fedaux.running import plugins
from fedaux.running.run_directory import Progress, RunDirectory

MODEL_UNPROTECTED = (
    " So the model itself is not differentially private: whoever holds it may learn something "
    "about single training examples."
)


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
    return whole(frozen, weights)


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
    return {
        "name": experiment.name,
        "method": method,
        "seed": seed,
        "prototype": prototype.name,
        **_architecture(prototype, data.input_shape),
        "mode": experiment.mode,
        "input": _input(experiment, data),
        "classes": list(data.classes),
        "batch_normalisation": "stored",
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
    spent = worst_client(entries, accountant=total_cost)
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
