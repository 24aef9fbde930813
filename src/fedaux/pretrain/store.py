"""Where h0 is kept, so that it is computed once: files by content of data, model and settings, each with its card."""

from __future__ import annotations

import fcntl
import hashlib
import json
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

from fedaux.config import Pretraining, Prototype
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.data.vocabulary import METADATA, Vocabulary
from fedaux.files import read_json, save_json, save_tensors, weights_digest
from fedaux.models import MODELS, SplitModel, model_options

PROCEDURE = 2
"""Raised whenever the same settings come to give another h0."""
CARD_FORMAT = 1
MAKE_ONE = (
    "should be what `fedaux pretrain` makes of this recipe when pretraining.checkpoint is left out"
)
"""What to do about a checkpoint that does not fit."""
TOLD = {
    "epochs": (int,),
    "seconds": (int, float),
    "loss": (int, float, type(None)),
    "probe": (dict, type(None)),
}
"""What cards in the shared store are asked for, and what it may be."""

Card = dict[str, Any]
"""What is known about an h0, as JSON can say it."""


def shared_store(kind: Literal["pretrained", "features"] = "pretrained") -> Path | None:
    """Return a folder that all runs of a user share, in FEDAUX_CACHE or ~/.cache/fedaux; None where there is none.

    FEDAUX_CACHE set to nothing means that nothing is shared.
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
            f"FEDAUX_CACHE: {folder} cannot be used, {what} not shared between runs ({error})",
            stacklevel=2,
        )
        return None
    return folder


@dataclass(frozen=True)
class Wanted:
    """An h0 that somebody wants: what it is trained on, where it begins, and how."""

    prototype: Prototype
    model: SplitModel
    """Whose features have their initial weights, and are trained in place."""
    section: Pretraining
    images: Tensor
    """Public images, uint8 [N, C, H, W], or token ids, int32 [N, L], of `vocabulary`."""
    content: str
    """Their digest: stores are keyed by it and by everything else that h0 depends on."""
    seed: int
    compute: Compute | None = None
    vocabulary: Vocabulary | None = None


def h0_settings(wanted: Wanted) -> dict[str, Any]:
    """Return everything that h0 depends on: data, model with its initial weights, settings, seed, arithmetic."""
    prototype, compute = wanted.prototype, wanted.compute
    words = {} if wanted.vocabulary is None else {"vocabulary": wanted.vocabulary.digest}
    channels = {} if compute is None else {"mean": compute.mean, "deviation": compute.deviation}
    return (
        {
            "procedure": PROCEDURE,
            "content": wanted.content,
            "model": prototype.model,
            "options": prototype.options,
            "start": weights_digest(wanted.model.features.state_dict()),
            "pretraining": wanted.section.model_dump(mode="json", exclude={"checkpoint"}),
            "seed": wanted.seed,
            "prototype": prototype.name,
            "device": wanted.images.device.type,
            "precision": str(torch.float32 if compute is None else compute.precision).removeprefix(
                "torch."
            ),
        }
        | {key: value.flatten().tolist() for key, value in channels.items() if value is not None}
        | words
    )


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the name of what these settings make."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def make_card(
    wanted: Wanted, *, settings: Mapping[str, Any], losses: list[float], seconds: float
) -> Card:
    """Return the card of an h0 that has just been trained; nobody has probed it yet."""
    import fedaux  # whose version it is, and which imports this

    prototype, images, vocabulary = wanted.prototype, wanted.images, wanted.vocabulary
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
    """Write weights with their card inside, and beside them as PATH.json unless the folder should hold weights only.

    Text models are worth nothing without their tokenizer, so that goes inside, too.
    """
    words = {} if vocabulary is None else {METADATA: vocabulary.tokenizer}
    save_tensors(path, weights, metadata={"card": json.dumps(card, sort_keys=True)} | words)
    if beside:
        save_json(path.with_suffix(".json"), card)


def save_several(
    path: Path, parts: Mapping[str, tuple[Weights, Card]], *, vocabulary: Vocabulary | None = None
) -> None:
    """Write the h0 of several prototypes into one file, tensors named PROTOTYPE/TENSOR."""
    tensors = {
        f"{name}/{key}": tensor
        for name, (weights, _) in parts.items()
        for key, tensor in weights.items()
    }
    cards = {name: card for name, (_, card) in parts.items()}
    save_h0(path, tensors, {"format": CARD_FORMAT, "prototypes": cards}, vocabulary=vocabulary)


def read_card(path: Path) -> Card | None:
    """Return the card of a file: the one beside it, or else the one inside; None where it has none.

    Raises:
        ValueError: a card that is not JSON, or not a table.
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
            f"{beside if beside.is_file() else path}: the card should be a table, is {card!r:.60}"
        )
    return card


def stored_card(path: Path) -> Card:
    """Return the card of a file in the shared store; raise ValueError where it does not tell what is asked."""
    card = read_card(path) or {}
    if wrong := [
        key for key, kinds in TOLD.items() if key not in card or not isinstance(card[key], kinds)
    ]:
        beside = path.with_suffix(".json")
        raise ValueError(
            f"{beside if beside.is_file() else path}: damaged, its card does not tell {', '.join(wrong)}"
        )
    return card


def probe_line(card: Card) -> str | None:
    """Say what a probe has measured, in %, and on what; None where a card does not tell."""
    probe = card.get("probe")
    if not isinstance(probe, dict):
        return None
    figures = [probe.get(key) for key in ("linear", "neighbours")]
    if not all(isinstance(figure, float) for figure in figures):
        return None
    linear, neighbours = (f"{100 * figure:.1f} %" for figure in figures if figure is not None)
    line = f"h0 of {card.get('prototype')}, seed {card.get('seed')}: linear probe {linear}, neighbours {neighbours}"
    data = probe.get("data")
    if not isinstance(data, dict):  # cards once had its digest alone
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
) -> Weights:
    """Load weights that fit the model's features, in its precision; say what does not fit.

    Where the file has a card, and `prototype`, `image_shape` and `vocabulary` are given, they are compared.
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
                    f"{key} = {path}: holds h0 of the prototypes {', '.join(several)}, none for {prototype.name}; "
                    f"{MAKE_ONE}, or prototypes.name one of those"
                )
            card = several[prototype.name]
            prefix = f"{prototype.name}/"
            loaded = {
                name.removeprefix(prefix): value
                for name, value in loaded.items()
                if name.startswith(prefix)
            }
        assert card is not None
        _refuse_other_card(
            card,
            f"{key} = {path}",
            prototype=prototype,
            image_shape=image_shape,
            vocabulary=vocabulary,
        )
    try:
        return fitted(loaded, model, where=f"{key} = {path}")
    except ValueError as error:
        if prototype is None:
            raise
        raise ValueError(f"{error}; {MAKE_ONE}") from error


def fitted(loaded: Mapping[str, Tensor], model: SplitModel, *, where: str) -> Weights:
    """Return the tensors that the model's features need, in their precision; raise ValueError where they do not fit."""
    expected = model.features.state_dict()
    weights: Weights = {}
    for name, tensor in expected.items():
        if name not in loaded:
            if name.endswith("num_batches_tracked"):  # a counter that many checkpoints leave out
                weights[name] = tensor.clone()
                continue
            raise ValueError(f"{where}: holds no tensor {name}, which the model's features need")
        if loaded[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(loaded[name].shape)}, the model's has {list(tensor.shape)}"
            )
        weights[name] = loaded[name].to(dtype=tensor.dtype, device=tensor.device)
        if tensor.is_floating_point() and not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(f"{where}: tensor {name} holds NaN or infinity")
    return weights


def _refuse_other_card(
    card: Mapping[str, Any],
    where: str,
    *,
    prototype: Prototype,
    image_shape: tuple[int, ...] | None,
    vocabulary: Vocabulary | None,
) -> None:
    """Raise ValueError where a card tells of another model, other options, another shape of images or other words."""
    model = card.get("model", prototype.model)
    if model != prototype.model:
        raise ValueError(
            f"{where}: its card says model {model}, the prototype {prototype.name} is {prototype.model}; {MAKE_ONE}, "
            f"or prototypes.model {model}"
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
        said = ", ".join(f"{name} = {options.get(name)}" for name in different)
        found = ", ".join(f"{name} = {own.get(name)}" for name in different)
        raise ValueError(
            f"{where}: its card says {model} with {said}, the prototype {prototype.name} has {found}; {MAKE_ONE}, or "
            "prototypes.options as the card has them"
        )
    words = card.get("vocabulary")
    if vocabulary is not None and words is not None and words.get("digest") != vocabulary.digest:
        raise ValueError(
            f"{where}: was trained with the vocabulary of {words.get('origin')}, and that of {vocabulary.origin} is in "
            "use; should be its own, which text.vocabulary = this file takes out of it"
        )
    shape = card.get("image_shape")
    if image_shape is not None and shape is not None and list(shape) != list(image_shape):
        raise ValueError(
            f"{where}: its card says images of {list(shape)}, those here are {list(image_shape)}; {MAKE_ONE}, or "
            "image_size and channels of data and auxiliary such that images are as the card has them"
        )


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Let one process at a time do what is inside; others wait, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(
                f"{path}: another process pretrains the same; waiting for it", stacklevel=3
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: files are replaced in one step, so at worst the work is done twice
        yield
