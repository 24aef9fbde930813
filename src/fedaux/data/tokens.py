"""Texts that were tokenised before: safetensors files that carry their tokenizer, to work where there is no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux.config import Auxiliary, Data
from fedaux.data.labelled import LabelledData
from fedaux.data.texts import Texts
from fedaux.data.vocabulary import METADATA, Vocabulary, inside_of
from fedaux.files import save_tensors

SMALL = 2**15
"""Token ids below this are stored in two bytes."""
HoldOut = Callable[..., tuple[np.ndarray, np.ndarray]]


def save_tokens(folder: Path, data: LabelledData, public: Tensor) -> tuple[Path, Path]:
    """Write data.safetensors and auxiliary.safetensors for the source `tensors`; return their paths."""
    assert data.vocabulary is not None, "images have no tokens"
    carried = {METADATA: data.vocabulary.tokenizer}
    kind = torch.int16 if data.vocabulary.size <= SMALL else torch.int32
    private = {
        "texts": data.images.to(kind),
        "labels": data.labels,
        "test_texts": data.test_images.to(kind),
        "test_labels": data.test_labels,
    }
    places = folder / "data.safetensors", folder / "auxiliary.safetensors"
    save_tensors(places[0], private, metadata=carried | {"classes": json.dumps(list(data.classes))})
    save_tensors(places[1], {"texts": public.to(kind)}, metadata=carried)
    return places


def load_tokens(section: Data, texts: Texts, *, hold_out: HoldOut) -> LabelledData:
    """Read texts and labels (and test_texts, test_labels where the file has them) as token ids."""
    tensors, classes = _open(section.path, texts, key="data.path", names=("texts", "labels"))
    for part in ("", "test_") if "test_texts" in tensors else ("",):
        ids, labels = tensors[f"{part}texts"], tensors.get(f"{part}labels", torch.zeros(0))
        if (
            labels.ndim != 1
            or labels.dtype.is_floating_point
            or len(labels) != len(ids)
            or labels.min() < 0
        ):
            raise ValueError(
                f"data.path = {section.path}: tensor {part}labels should be {len(ids)} class numbers from 0 upwards, "
                "one a text"
            )
    if "test_texts" not in tensors:
        test, train = hold_out(len(tensors["labels"]), fraction=section.test_fraction)
        tensors["test_texts"], tensors["test_labels"] = (
            tensors["texts"][test],
            tensors["labels"][test],
        )
        tensors["texts"], tensors["labels"] = tensors["texts"][train], tensors["labels"][train]
    count = int(max(tensors["labels"].max(), tensors["test_labels"].max())) + 1
    names = (
        tuple(classes) if len(classes) >= count else tuple(str(number) for number in range(count))
    )
    return LabelledData(
        images=tensors["texts"],
        labels=tensors["labels"].long(),
        test_images=tensors["test_texts"],
        test_labels=tensors["test_labels"].long(),
        classes=names,
    )


def load_public_tokens(section: Auxiliary, texts: Texts) -> Tensor:
    """Read public texts as token ids."""
    return _open(section.path, texts, key="auxiliary.path", names=("texts",))[0]["texts"]


def carried_vocabulary(path: str | None, *, key: str) -> Vocabulary:
    """Return the vocabulary of a file of token ids; raise ValueError where it carries none."""
    assert path is not None, "checked before a run"
    found = inside_of(Path(path), key=key)
    if found is None:
        raise ValueError(
            f"{key} = {path}: carries no tokenizer; `fedaux tokenise` writes such files"
        )
    return found


def _open(
    path: str | None, texts: Texts, *, key: str, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors by name, texts cut to the length asked for, and names of classes where the file has them."""
    own = carried_vocabulary(path, key=key)
    assert path is not None
    if own.digest != texts.vocabulary.digest:
        raise ValueError(
            f"{key} = {path}: was tokenised by {own.origin}, and {texts.vocabulary.origin} is in use; should be one, "
            "text.vocabulary says which"
        )
    try:
        with safe_open(Path(path), framework="pt") as file:
            held = sorted(file.keys())
            if missing := [name for name in names if name not in held]:
                raise ValueError(
                    f"{key} = {path}: holds no tensor {', '.join(missing)}; it holds {', '.join(held)}"
                )
            tensors = {name: file.get_tensor(name) for name in held}
            classes = json.loads((file.metadata() or {}).get("classes", "[]"))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error
    for name in [name for name in tensors if name.endswith("texts")]:
        ids = tensors[name]
        if (
            ids.dtype not in (torch.int16, torch.int32)
            or ids.ndim != 2
            or len(ids) == 0
            or ids.shape[1] == 0
        ):
            kind = str(ids.dtype).removeprefix("torch.")
            raise ValueError(
                f"{key} = {path}: tensor {name} is {kind} {list(ids.shape)}; should be int16 or int32 [texts, tokens]"
            )
        if ids.min() < 0 or ids.max() >= texts.vocabulary.size:
            raise ValueError(
                f"{key} = {path}: tensor {name} should hold ids from 0 to {texts.vocabulary.size - 1}"
            )
        if ids.shape[1] > texts.length:
            raise ValueError(
                f"{key} = {path}: tensor {name} has {ids.shape[1]} tokens a text, more than the {texts.length} that "
                "[text] allows; should be tokenised anew, or allowed"
            )
        tensors[name] = ids.int()
    return tensors, [str(name) for name in classes]
