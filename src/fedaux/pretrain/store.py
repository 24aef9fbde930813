"""Stores of h0: files keyed by data, model and settings, each with a card that describes it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedaux.config import Data, Pretraining, Prototype
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.weights import below, flat
from fedaux.data.tensor_files import save_tensors, weights_digest
from fedaux.data.vocabulary import METADATA, Vocabulary
from fedaux.files import read_json, save_json
from fedaux.models import MODELS, SplitModel, model_options

PROCEDURE = 2
"""Increased when the same settings give another h0."""
CARD_FORMAT = 1
CHECKPOINT_ADVICE = (
    "should be made by `fedaux pretrain` of this recipe without pretraining.checkpoint"
)
"""Advice for a checkpoint that does not fit."""
CARD_FIELDS = {
    "epochs": (int,),
    "seconds": (int, float),
    "loss": (int, float, type(None)),
    "probe": (dict, type(None)),
}
"""Required fields of cards in the shared store, and their types."""

Card = dict[str, Any]
"""The description of an h0, as JSON."""


def shared_store(kind: Literal["pretrained", "features"] = "pretrained") -> Path | None:
    """Return a folder that all runs of a user share, in FEDAUX_CACHE or ~/.cache/fedaux.

    None if FEDAUX_CACHE is empty or the folder is not writable.
    """
    given = os.environ.get("FEDAUX_CACHE")
    if given == "":
        return None
    folder = (Path(given) if given else Path.home() / ".cache" / "fedaux") / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("not writable")
    except OSError as error:
        what = "h0 is" if kind == "pretrained" else "features are"
        warnings.warn(
            f"FEDAUX_CACHE: {folder} is not writable ({error}); {what} not shared between runs",
            stacklevel=2,
        )
        return None
    return folder


@dataclass(frozen=True)
class H0Request:
    """A requested h0: its data, initial weights and settings."""

    prototype: Prototype
    model: SplitModel
    """The model with initial weights; its features are trained in place."""
    section: Pretraining
    images: Tensor
    """Public images, uint8 [N, C, H, W], or token ids, int32 [N, L], of `vocabulary`."""
    content: str
    """Digest of `images`."""
    seed: int
    compute: Compute | None = None
    vocabulary: Vocabulary | None = None


def h0_settings(request: H0Request) -> dict[str, Any]:
    """Return everything that h0 depends on: data, initial weights, settings, seed, precision."""
    prototype, compute = request.prototype, request.compute
    words = {} if request.vocabulary is None else {"vocabulary": request.vocabulary.digest}
    channels = {} if compute is None else {"mean": compute.mean, "deviation": compute.deviation}
    return (
        {
            "procedure": PROCEDURE,
            "content": request.content,
            "model": prototype.model,
            "options": prototype.options,
            "start": weights_digest(request.model.features.state_dict()),
            # `redundancy` is a setting of 0.2.0, whose h0 are to be found.
            "pretraining": request.section.model_dump(mode="json", exclude={"checkpoint"})
            | {"redundancy": 0.005},
            "seed": request.seed,
            "prototype": prototype.name,
            "device": request.images.device.type,
            "precision": str(torch.float32 if compute is None else compute.precision).removeprefix(
                "torch."
            ),
        }
        | {key: value.flatten().tolist() for key, value in channels.items() if value is not None}
        | words
    )


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the digest of settings, part of a file name."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def make_card(
    request: H0Request, *, settings: Mapping[str, Any], losses: list[float], seconds: float
) -> Card:
    """Return the card of a newly trained h0."""
    import fedaux  # imports this module

    prototype, images, vocabulary = request.prototype, request.images, request.vocabulary
    if vocabulary is None:
        inputs: Card = {"image_shape": list(images.shape[1:])}
    else:
        about = {"digest": vocabulary.digest, "size": vocabulary.size, "origin": vocabulary.origin}
        inputs = {"vocabulary": about}
    return inputs | {
        "format": CARD_FORMAT,
        "prototype": prototype.name,
        "model": prototype.model,
        "options": dict(prototype.options),
        "data": {"digest": settings["content"], "count": len(images)},
        "pretraining": settings["pretraining"],
        "seed": settings["seed"],
        "channel_mean": settings.get("mean", []),
        "channel_deviation": settings.get("deviation", []),
        "device": settings["device"],
        "precision": settings["precision"],
        "epochs": len(losses),
        "loss": losses[-1] if losses else None,
        "seconds": seconds,
        "probe": None,
        "versions": {
            "fedaux": fedaux.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def save_h0(
    path: Path,
    weights: Weights,
    card: Card,
    *,
    beside: bool = True,
    vocabulary: Vocabulary | None = None,
) -> None:
    """Write weights with their card and tokenizer in the metadata, and the card as PATH.json
    too."""
    words = {} if vocabulary is None else {METADATA: vocabulary.tokenizer}
    save_tensors(path, weights, metadata={"card": json.dumps(card, sort_keys=True)} | words)
    if beside:
        save_json(path.with_suffix(".json"), card)


def save_several(
    path: Path, parts: Mapping[str, tuple[Weights, Card]], *, vocabulary: Vocabulary | None = None
) -> None:
    """Write the h0 of several prototypes into one file, tensors named PROTOTYPE/TENSOR."""
    tensors = flat({name: weights for name, (weights, _) in parts.items()})
    cards = {name: card for name, (_, card) in parts.items()}
    save_h0(path, tensors, {"format": CARD_FORMAT, "prototypes": cards}, vocabulary=vocabulary)


def read_card(path: Path) -> Card | None:
    """Return the card of a file, from PATH.json or its metadata; None if there is none.

    Raises ValueError if the card is not a JSON object.
    """
    beside = path.with_suffix(".json")
    if beside.is_file():
        card = read_json(beside)
    else:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("card")
        if text is None:
            return None
        try:
            card = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: its card is damaged ({error})") from error
    if not isinstance(card, dict):
        raise ValueError(
            f"{beside if beside.is_file() else path}: the card should be a JSON object, is "
            f"{card!r:.60}"
        )
    return card


def stored_card(path: Path) -> Card:
    """Return the card of a file in the shared store. Raises ValueError if fields are missing."""
    card = read_card(path) or {}
    if wrong := [
        key
        for key, kinds in CARD_FIELDS.items()
        if key not in card or not isinstance(card[key], kinds)
    ]:
        beside = path.with_suffix(".json")
        raise ValueError(
            f"{beside if beside.is_file() else path}: damaged, its card lacks {', '.join(wrong)}"
        )
    return card


def probe_line(card: Card) -> str | None:
    """Return the result of a probe in %, and its data; None if the card has none."""
    probe = card.get("probe")
    if not isinstance(probe, dict):
        return None
    if not isinstance(linear := probe.get("linear"), float):
        return None
    line = f"h0 of {card.get('prototype')}, seed {card.get('seed')}: "
    line += f"linear probe {100 * linear:.1f} %"
    data = probe.get("data")
    if not isinstance(data, dict):  # cards of earlier versions have a digest only
        return line
    return f"{line} ({data.get('test_examples')} test examples, {data.get('source')})"


def fitting_weights(
    path: Path,
    model: SplitModel,
    *,
    key: str,
    prototype: Prototype | None = None,
    image_shape: tuple[int, ...] | None = None,
    vocabulary: Vocabulary | None = None,
    data: Data | None = None,
) -> Weights:
    """Load weights for the model's features, in its precision.

    Raises ValueError if they do not fit the model or, with a card, `prototype`, `image_shape`,
    `vocabulary` and the normalisation of `data`.
    """
    try:
        loaded = load_file(path)
        card = read_card(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error
    if card is not None and prototype is not None:
        several = card.get("prototypes")
        if isinstance(several, dict):
            if prototype.name not in several:
                raise ValueError(
                    f"{key} = {path}: has h0 of the prototypes {', '.join(several)}, not of "
                    f"{prototype.name}; {CHECKPOINT_ADVICE}, or prototypes.name be one of those"
                )
            card = several[prototype.name]
            loaded = below(f"{prototype.name}/", loaded)
        assert card is not None
        _refuse_other_card(
            card,
            f"{key} = {path}",
            prototype=prototype,
            image_shape=image_shape,
            vocabulary=vocabulary,
            data=data,
        )
    try:
        return fitted(loaded, model, where=f"{key} = {path}")
    except ValueError as error:
        if prototype is None:
            raise
        raise ValueError(f"{error}; {CHECKPOINT_ADVICE}") from error


def fitted(loaded: Mapping[str, Tensor], model: SplitModel, *, where: str) -> Weights:
    """Return the tensors of the model's features, in its precision. Raises ValueError."""
    expected = model.features.state_dict()
    weights: Weights = {}
    for name, tensor in expected.items():
        if name not in loaded:
            if name.endswith("num_batches_tracked"):  # missing in many checkpoints
                weights[name] = tensor.clone()
                continue
            raise ValueError(
                f"{where}: has no tensor {name}, so it is no h0 of the model that prototypes.model "
                "names"
            )
        if loaded[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(loaded[name].shape)}, the model's has "
                f"{list(tensor.shape)}"
            )
        weights[name] = loaded[name].to(dtype=tensor.dtype, device=tensor.device)
        if tensor.is_floating_point() and not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(f"{where}: tensor {name} has NaN or infinity")
    return weights


def _refuse_other_card(
    card: Mapping[str, Any],
    where: str,
    *,
    prototype: Prototype,
    image_shape: tuple[int, ...] | None,
    vocabulary: Vocabulary | None,
    data: Data | None,
) -> None:
    """Raise ValueError if a card has another model, options, normalisation, image shape or
    vocabulary."""
    model = card.get("model", prototype.model)
    if model != prototype.model:
        raise ValueError(
            f"{where}: is for the model {model}, the prototype {prototype.name} is "
            f"{prototype.model}; {CHECKPOINT_ADVICE}, or prototypes.model be {model}"
        )
    defaults = model_options(model) if model in MODELS else {}
    options, own = (
        defaults | dict(card.get("options", prototype.options)),
        defaults | prototype.options,
    )
    different = sorted(
        name for name in options.keys() | own.keys() if options.get(name) != own.get(name)
    )
    if different:
        stored = ", ".join(f"{name} = {options.get(name)}" for name in different)
        found = ", ".join(f"{name} = {own.get(name)}" for name in different)
        raise ValueError(
            f"{where}: is for {model} with {stored}, the prototype {prototype.name} has {found}; "
            f"{CHECKPOINT_ADVICE}, or prototypes.options be the same"
        )
    words = card.get("vocabulary")
    if vocabulary is not None and words is not None and words.get("digest") != vocabulary.digest:
        raise ValueError(
            f"{where}: was trained with the vocabulary of {words.get('origin')}, not of "
            f"{vocabulary.origin}; should be the same, set text.vocabulary to this file"
        )
    shape = card.get("image_shape")
    if image_shape is not None and shape is not None and list(shape) != list(image_shape):
        raise ValueError(
            f"{where}: is for images of {list(shape)}, not {list(image_shape)}; "
            f"{CHECKPOINT_ADVICE}, or image_size and channels of data and auxiliary be the same"
        )
    if data is None or image_shape is None:
        return
    for setting, default in (("channel_mean", 0.0), ("channel_deviation", 1.0)):
        none = (default,) * image_shape[0]
        trained, wanted = tuple(card.get(setting) or none), getattr(data, setting) or none
        # Cards hold numbers in single precision.
        same = all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(trained, wanted, strict=False))
        if setting in card and not same:
            numbers = ", ".join(f"{number:.6g}" for number in trained)
            raise ValueError(
                f"data.{setting} = {list(getattr(data, setting))}: {where} was trained with "
                f"[{numbers}]; should be the same"
            )


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[None]:
    """Lock a name of a store; other processes print a warning and wait."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(
                f"{path}: waiting for another process with the same pretraining", stacklevel=3
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # without file locks, the work may be done twice, but files are atomic
        yield
