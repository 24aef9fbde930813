"""A trained model: loads a file of `models/` and predicts classes of images or texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import DEVICE_PATTERN, PATTERN_MEANING, Data, Engine
from fedaux.config_errors import nearest
from fedaux.core.compute import Compute, choose_device, compute_for, has_bf16, inference_batch
from fedaux.core.messages import Weights
from fedaux.core.task import head_alone
from fedaux.data.texts import Texts
from fedaux.data.vocabulary import Vocabulary
from fedaux.fast import best_backend
from fedaux.models import MODELS, SHIPPED, SplitModel
from fedaux.running.model_files import Card, describe, find_model, read_model
from fedaux.running.model_inputs import Converter, Item, Items, collect

BLOCK = 1024
"""Inputs that are in memory at a time, at least."""


@dataclass(frozen=True)
class Predictions:
    """The predicted classes of some inputs, with probabilities [N, C] in the order of `classes`."""

    inputs: tuple[str, ...]
    """The file of each input, with its row in a table, or its position."""
    classes: tuple[str, ...]
    probabilities: Tensor
    skipped: tuple[tuple[str, str], ...] = ()
    """Inputs that could not be read, with the reason, if `skip_bad` asks to go on."""

    @property
    def labels(self) -> Tensor:
        """The numbers of the predicted classes [N]."""
        return self.probabilities.argmax(dim=1)

    @property
    def names(self) -> list[str]:
        """The names of the predicted classes."""
        return [self.classes[number] for number in self.labels.tolist()]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class PredictedBlock:
    """Some inputs of a long list, and their probabilities [n, C]."""

    items: list[Item]
    probabilities: Tensor


class TrainedModel:
    """A network with its weights, and what it expects of its inputs.

    `card` describes it: accuracy, privacy, classes, input; `module` is the plain `nn.Module`, whose
    inputs are scaled by `compute.floats`.
    """

    def __init__(
        self, module: SplitModel, card: Card, *, vocabulary: Vocabulary | None, compute: Compute
    ) -> None:
        self.card = card
        self.classes: tuple[str, ...] = tuple(card["classes"])
        self.compute = compute
        self.vocabulary = vocabulary
        self.module = compute.place(module).eval()
        self._texts = (
            None if vocabulary is None else Texts(vocabulary, int(card["input"]["length"]))
        )
        self._weights: Weights = self.module.state_dict()
        self._by_batch = card["batch_normalisation"] == "batch"
        measured_here = self._by_batch or card["device"] == compute.device.type
        self._batch_size = (
            int(card["batch_size"]) if measured_here else inference_batch(compute.device)
        )
        self._linear = card["mode"] == "linear"
        if self._linear:  # heads are computed in single precision
            single = replace(compute, precision=torch.float32)
            self._head = best_backend(single).predictor(head_alone(self.module))
            self._body = best_backend(compute).predictor(self.module.features)
        else:
            self._whole = best_backend(compute).predictor(self.module)

    def __repr__(self) -> str:
        return f"<TrainedModel {describe(self.card)}>"

    def predict(
        self,
        inputs: object,
        *,
        columns: Sequence[str] = (),
        encoding: str | None = None,
        skip_bad: bool = False,
    ) -> Predictions:
        """Return the classes of images or texts.

        `inputs` are paths of files, folders and tables (CSV, JSON Lines, Parquet); images of
        Pillow or pixels, uint8 [N, C, H, W]; or texts. A `str` is a path for a model of images.
        For a model of texts, a single `str` is a path if such a file or folder exists, and else a
        text; in a list, strings are texts and paths are `pathlib.Path`. `columns` and `encoding`
        are those of tables and text files. Raises ValueError at an input that cannot be read,
        unless `skip_bad`.
        """
        bad: dict[str, str] | None = {} if skip_bad else None
        items = self.collect(inputs, columns=columns, encoding=encoding)
        blocks = list(self.predict_blocks(items, bad=bad))
        parts = [block.probabilities for block in blocks]
        none = torch.zeros(0, len(self.classes), dtype=torch.float64)
        return Predictions(
            tuple(str(item) for block in blocks for item in block.items),
            self.classes,
            torch.cat([none, *parts]),
            tuple((bad or {}).items()),
        )

    def collect(
        self, inputs: object, *, columns: Sequence[str] = (), encoding: str | None = None
    ) -> Items:
        """Return the inputs that `predict` would read, one by one. Raises ValueError if one is
        missing."""
        usual = self.card["input"]["columns"]
        texts = self._texts is not None
        return collect(inputs, texts=texts, columns=columns, usual=usual, encoding=encoding)

    def predict_blocks(
        self, items: Items, *, bad: dict[str, str] | None = None
    ) -> Iterator[PredictedBlock]:
        """Yield predictions block by block; `bad` collects what cannot be read, by input."""
        about = self.card["input"]
        size = -(-BLOCK // self._batch_size) * self._batch_size  # the batches of an evaluation
        convert = Converter(
            self.card["input_shape"],
            texts=self._texts,
            exact_width=not any(
                getattr(part, "ignores_padding", False) for part in self.module.modules()
            ),
            resizes=about.get("resized", False),
            recolours=about.get("channels_converted", False),
            encoding=items.encoding,
        )
        stream = iter(items)
        while block := list(islice(stream, size)):
            good, examples = convert(block, bad=bad)
            logits = self.logits(examples).double().cpu()
            yield PredictedBlock(good, logits.softmax(dim=1))
        convert.warn()

    def logits(self, examples: Tensor) -> Tensor:
        """Return logits [N, C] of images, uint8 [N, C, H, W], or token ids, int32 [N, L]."""
        inputs = self.compute.place_inputs(examples)
        batch_size = self._batch_size
        if not self._linear:
            return self._whole(
                self._weights, inputs, batch_size=batch_size, by_batch=self._by_batch
            )
        features = self._body(self.module.features.state_dict(), inputs, batch_size=batch_size)
        head = {name: one for name, one in self._weights.items() if name.startswith("head.")}
        return self._head(head, features)


def load(
    path: Path | str,
    *,
    method: str | None = None,
    seed: int | None = None,
    prototype: str | None = None,
    device: str = "auto",
    module: SplitModel | None = None,
) -> TrainedModel:
    """Load a trained model: a file of `models/`, or a run directory that has one that matches.

    `module` is the network of a file whose model is not registered here. Nothing is unpickled.
    Raises ValueError if there are several models, or if the model is not known.
    """
    if not re.match(DEVICE_PATTERN, device):
        raise ValueError(f"--device {device} (device=): {PATTERN_MEANING[DEVICE_PATTERN]}")
    file = find_model(Path(path), method=method, seed=seed, prototype=prototype)
    weights, card, tokenizer = read_model(file)
    network = _built(card, file) if module is None else module
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{file}: its weights do not fit the model {card['model']!r} as it is here "
            f"({' '.join(str(error).split())[:200]}); it was written by fedaux "
            f"{card['versions']['fedaux']}"
        ) from error
    vocabulary = None if tokenizer is None else Vocabulary(tokenizer, str(file))
    compute = _compute(card, choose_device(device))
    return TrainedModel(network, card, vocabulary=vocabulary, compute=compute)


def _built(card: Card, file: Path) -> SplitModel:
    """Return the network of a card with random weights. Raises ValueError if it is unknown."""
    name, options = card["model"], dict(card["options"])
    if name not in MODELS:
        origin = card.get("plugin")
        added = (
            f"the plugin {origin['path']} (SHA-256 {origin['sha256'][:12]}...) added it"
            if origin
            else f"it is no model of fedaux{nearest(name, MODELS)}"
        )
        raise ValueError(
            f"{file}: its model {name!r} is not known here; {added}. Give the plugin's file with "
            "--plugin (fedaux.load_plugin), or the network with module="
        )
    if name in SHIPPED:
        options.pop("checkpoint", None)  # never a file or a download that a card names
    with seeding.initialisation(0, part=name):
        return MODELS[name](tuple(card["input_shape"]), len(card["classes"]), **options)


def _compute(card: Card, device: torch.device) -> Compute:
    """Return how to compute: in the precision of the run if it used such a device, else fp32."""
    about: dict[str, Any] = card["input"]
    half = device.type == card["device"] and card["precision"] == "bfloat16" and has_bf16(device)
    engine = Engine(precision="bf16" if half else "fp32", compile=False)
    data = Data(
        channel_mean=tuple(about.get("mean", ())),
        channel_deviation=tuple(about.get("deviation", ())),
    )
    return compute_for(engine, device, data)
