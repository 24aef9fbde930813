"""A trained model: loads a file of `models/` as a network with its preprocessing."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from fedaux import seeding
from fedaux.config import EncoderSection
from fedaux.config_errors import DEVICE_PATTERN, PATTERN_MEANING, nearest
from fedaux.core.compute import choose_device
from fedaux.data.decoding import Content, decode, from_pixels
from fedaux.data.texts import text_of
from fedaux.data.vocabulary import METADATA, Vocabulary
from fedaux.encoders import Encoder, Images, from_json, open_encoder, token_ids, unpacked
from fedaux.models import MODELS, SHIPPED, SplitModel
from fedaux.models.fit import Unfit, check_weights
from fedaux.predict.files import (
    ENCODER_FORMAT,
    INSIDE,
    Card,
    describe,
    find_model,
    read_model,
)


class TrainedModel(nn.Module):
    """Maps pixels, uint8 [N, C, H, W], token ids [N, L], or features [N, F], to probabilities
    [N, C].

    `card` describes the model: accuracy, privacy, classes, input; `module` is the plain network,
    which maps normalised images or token ids to logits.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        module: SplitModel,
        card: Card,
        *,
        vocabulary: Vocabulary | None,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__()
        about = card["input"]
        self.module = module
        self.encoder = encoder
        self.card = card
        self.classes: tuple[str, ...] = tuple(card["classes"])
        self.vocabulary = vocabulary
        self.ignores_padding = any(
            getattr(part, "ignores_padding", False) for part in module.modules()
        )
        self.kind: str = about["kind"]
        """`image`, `text` or `features`."""
        channels = card["input_shape"][0] if self.kind == "image" and encoder is None else 1
        for name, usual in (("mean", 0.0), ("deviation", 1.0)):
            numbers = torch.tensor(about.get(name) or [usual] * channels)
            self.register_buffer(name, numbers[:, None, None], persistent=False)
        self.eval()

    def __repr__(self) -> str:
        return f"<TrainedModel {describe(self.card)}>"

    def forward(self, examples: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        examples = examples.to(self.mean.device)
        if self.kind == "image":
            examples = (examples.float() / 255.0 - self.mean) / self.deviation
        return torch.softmax(self.module(examples), dim=1)

    def preprocess(
        self, content: Content | Image.Image | NDArray[Any], *, encoding: str | None = None
    ) -> Tensor:
        """Return one input as the model takes it: pixels, uint8 [C, H, W], or token ids [L].

        An image is a file, its bytes, pixels, or a picture of Pillow; one of another size or
        colour than in training is converted. A text is a `str`, or a file in UTF-8 or `encoding`.
        Raises ValueError if it cannot be read.
        """
        if self.kind == "features":
            return _features_in(content, width=self._shape[0])
        if self.kind == "text":
            if isinstance(content, Image.Image):
                raise ValueError("is a model of texts; should get a str or a path, not an image")
            text = text_of(content, encoding=encoding)
            if self.encoder is not None:
                return token_ids(self.encoder, [text])[0]
            assert self.vocabulary is not None, "its file has it"
            (ids,) = self.vocabulary.encode([text], length=self.card["input"]["length"])
            return torch.from_numpy(ids if self.ignores_padding else ids[: self._shape[0]])
        if isinstance(content, Image.Image):
            stream = io.BytesIO()
            content.save(stream, "png")
            content = stream.getvalue()
        if self.encoder is not None and isinstance(self.encoder.inputs, Images):
            content = Path(content) if isinstance(content, str) else content
            return torch.tensor(self.encoder.inputs.pixels(content))
        channels, height, width = self._shape
        pixels = decode(
            Path(content) if isinstance(content, str) else content,
            channels=channels,
            side=height if height == width else None,
        )
        if pixels.shape[1:] != (height, width):
            size, filter = (width, height), Image.Resampling.BILINEAR
            fitted = np.asarray(ImageOps.fit(from_pixels(pixels), size, filter))
            pixels = fitted[None] if channels == 1 else fitted.transpose(2, 0, 1)
        return torch.tensor(pixels)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self.card["input_shape"])

    def predict(self, *_: object, **__: object) -> NoReturn:
        """Raise: fedaux 0.2.0 was the last version in which a model read files by itself."""
        raise AttributeError(
            "TrainedModel.predict was removed after fedaux 0.2.0: use "
            "model(model.preprocess(image)[None]) for one input, `fedaux predict` for files"
        )


def load(
    path: Path | str,
    *,
    method: str | None = None,
    seed: int | None = None,
    prototype: str | None = None,
    device: str = "auto",
    module: SplitModel | None = None,
    encoder: str | None = None,
) -> TrainedModel:
    """Load a trained model: a file of `models/`, or a run directory that has one that matches.

    `module` is the network of a file whose model is not registered here, and `encoder` where its
    encoder is, if it is not inside; nothing is downloaded for it. Nothing is unpickled.
    Raises ValueError if there are several models, or if the model is not known.
    """
    if not re.match(DEVICE_PATTERN, device):
        raise ValueError(f"--device {device} (device=): {PATTERN_MEANING[DEVICE_PATTERN]}")
    file = find_model(Path(path), method=method, seed=seed, prototype=prototype)
    weights, card, metadata = read_model(file)
    if card["batch_normalisation"] == "batch":
        raise ValueError(
            f"{file}: was evaluated with the statistics of each batch (batch_normalisation.server "
            "= 'batch'), so that its prediction for an image depends on other images; fedaux "
            "0.2.0 was the last version that predicts with such a model"
        )
    used = None
    if "encoder" in card["input"]:
        inside = {
            name.removeprefix(INSIDE): weights.pop(name)
            for name in [name for name in weights if name.startswith(INSIDE)]
        }
        used = encoder_of(card, inside, metadata, file=file, source=encoder)
    try:
        network = _built(card, file, weights) if module is None else module
        network.load_state_dict(weights)
    except Unfit as error:
        raise _unfit(file, card, str(error)) from error
    except RuntimeError as error:
        raise _unfit(file, card, " ".join(str(error).split())[:200]) from error
    tokenizer = None if used is not None else metadata.get(METADATA)
    vocabulary = None if tokenizer is None else _vocabulary(tokenizer, card, file)
    if used is None and (vocabulary is not None) != (card["input"]["kind"] == "text"):
        raise ValueError(f"{file}: its card is damaged (a tokenizer belongs to texts, and to them)")
    if used is not None:
        features = nn.Sequential(used.module, Halved())
        network = SplitModel(features, network.head, feature_width=network.feature_width)
    made = TrainedModel(network, card, vocabulary=vocabulary, encoder=used)
    return made.to(choose_device(device))


class Halved(nn.Module):
    """Rounds features to half precision, as in training."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the features [N, F]."""
        return features.half().float()


def encoder_of(
    card: Card,
    inside: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    file: Path,
    source: str | None = None,
) -> Encoder:
    """Return the encoder of a model: inside its file, given as `source`, or where its run found it.

    Raises ValueError if it is not there or has another digest.
    """
    about = card["input"]["encoder"]
    if inside:
        found = unpacked(inside, metadata, where=str(file), format_key=ENCODER_FORMAT)
    else:
        section = EncoderSection(source=source or about["source"])
        found = open_encoder(section, key="--encoder (encoder=)", download=False)
    found = replace(found, inputs=from_json(about["inputs"]))
    if found.digest != about["digest"]:
        raise ValueError(
            f"{file}: was trained with the encoder {about['source']} of digest "
            f"{about['digest'][:12]}..., and {found.source} has {found.digest[:12]}...; give the "
            "same one with --encoder (encoder=)"
        )
    return found


def _features_in(content: object, *, width: int) -> Tensor:
    """Return features [F]. Raises ValueError for anything else."""
    if not isinstance(content, Tensor | np.ndarray) or tuple(content.shape) != (width,):
        raise ValueError(f"is a model of features; should get {width} numbers in an array")
    return torch.as_tensor(content).float()


def _unfit(file: Path, card: Card, why: str) -> ValueError:
    return ValueError(
        f"{file}: its weights do not fit the model {card['model']!r} as it is here ({why}); it was "
        f"written by fedaux {card['versions']['fedaux']}"
    )


def _vocabulary(tokenizer: str, card: Card, file: Path) -> Vocabulary:
    """Return the tokenizer of a file. Raises ValueError if the card names another one."""
    vocabulary = Vocabulary(tokenizer, str(file))
    if vocabulary.digest != (card["input"].get("tokenizer") or {}).get("digest"):
        raise ValueError(f"{file}: damaged (its tokenizer is not the one of its card)")
    vocabulary.check()
    if vocabulary.size > card["input_shape"][1]:
        raise ValueError(f"{file}: damaged (its tokenizer has more tokens than its network)")
    return vocabulary


def _built(card: Card, file: Path, weights: Mapping[str, Tensor]) -> SplitModel:
    """Return the network of a card with random weights. Raises ValueError if it is unknown, or its
    weights are not these."""
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

    def build() -> SplitModel:
        return MODELS[name](tuple(card["input_shape"]), len(card["classes"]), **options)

    try:
        check_weights(build, weights)
    except Unfit:
        raise
    except Exception as error:  # a network of others need not be one that can be built on meta
        if name in SHIPPED:
            raise Unfit(" ".join(str(error).split())[:200]) from error
    with seeding.initialisation(0, part=name):
        return build()
