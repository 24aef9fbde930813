"""Images or token ids in safetensors files; token ids with their tokenizer in the metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux.config import Auxiliary, Data
from fedaux.data.labelled import LabelledData, count_training, hold_out
from fedaux.data.tables import name_labels, refuse_gaps
from fedaux.data.tensor_files import save_tensors
from fedaux.data.texts import Texts
from fedaux.data.vocabulary import METADATA, Vocabulary, inside_of

MAX_INT16_IDS = 2**15
"""Vocabularies up to this size are stored as int16."""


def save_tokens(folder: Path, data: LabelledData, public: Tensor) -> tuple[Path, Path]:
    """Write data.safetensors and auxiliary.safetensors for the source `tensors`."""
    assert data.vocabulary is not None, "images have no tokens"
    tokenizer = {METADATA: data.vocabulary.tokenizer}
    kind = torch.int16 if data.vocabulary.size <= MAX_INT16_IDS else torch.int32
    private = {
        "texts": data.images.to(kind),
        "labels": data.labels,
        "test_texts": data.test_images.to(kind),
        "test_labels": data.test_labels,
    }
    classes = {"classes": json.dumps(list(data.classes))}
    paths = folder / "data.safetensors", folder / "auxiliary.safetensors"
    save_tensors(paths[0], private, metadata=tokenizer | classes)
    save_tensors(paths[1], {"texts": public.to(kind)}, metadata=tokenizer)
    return paths


def count_tensors(section: Data, texts: bool = False) -> int:
    """Return the number of training examples of a file."""
    content = "texts" if texts else "images"
    tensors, _ = _open(section.path, key="data.path", names=(content, "labels"))
    total = len(tensors["labels"])
    return total if f"test_{content}" in tensors else count_training(total, section)


def load_tensors(section: Data, texts: Texts | None = None) -> LabelledData:
    """Read images or texts and labels, and test_images or test_texts and test_labels if present."""
    content = "images" if texts is None else "texts"
    key = f"data.path = {section.path}"
    if texts is not None:
        _check_vocabulary(section.path, texts, key="data.path")
    tensors, names = _open(section.path, key="data.path", names=(content, "labels"))
    for part in ("", "test_") if f"test_{content}" in tensors else ("",):
        name = f"{part}{content}"
        examples = tensors[name] = _checked(tensors[name], texts, key=key, name=name)
        labels = tensors.get(f"{part}labels", torch.zeros(0))
        numbers = labels.ndim == 1 and not labels.dtype.is_floating_point
        if not numbers or len(labels) != len(examples) or labels.min() < 0:
            raise ValueError(
                f"{key}: tensor {part}labels should be {len(examples)} class numbers from 0 "
                "upwards, one per example"
            )
        if texts is None:
            try:
                refuse_gaps(labels.long().numpy(), rows=np.arange(len(labels)))
            except ValueError as error:
                raise ValueError(f"{key}: tensor {part}labels: {error}") from error
    if f"test_{content}" not in tensors:
        test, train = hold_out(len(tensors["labels"]), fraction=section.test_fraction)
        for name in (content, "labels"):
            tensors[f"test_{name}"], tensors[name] = tensors[name][test], tensors[name][train]
    labels, test_labels = tensors["labels"].long(), tensors["test_labels"].long()
    num_classes = int(torch.cat([labels, test_labels]).max()) + 1
    if len(names) < num_classes:
        names = [str(number) for number in range(num_classes)]
    return LabelledData(
        images=tensors[content],
        labels=labels,
        test_images=tensors[f"test_{content}"],
        test_labels=test_labels,
        classes=tuple(names),
    )


def count_tensor_rows(section: Data) -> int:
    """Return the number of a node's images."""
    return load_tensor_rows(section)[1]


def load_tensor_rows(section: Data) -> tuple[LabelledData, int]:
    """Read images for a node's training, and their number; each row is named by its own label
    alone."""
    key = f"data.path = {section.path}"
    tensors, _ = _open(section.path, key="data.path", names=("images", "labels"))
    images = _checked(tensors["images"], None, key=key, name="images")
    if tensors["labels"].shape != images.shape[:1]:
        raise ValueError(f"{key}: tensor labels should be {len(images)} numbers, one per image")
    labels, classes, bad = name_labels(tensors["labels"].tolist(), classes=None)
    good = [row for row in range(len(labels)) if row not in bad]
    numbers = torch.from_numpy(labels)[good]
    return LabelledData.for_training(images[good], numbers, classes), len(labels)


def load_public_tensors(section: Auxiliary, texts: Texts | None = None) -> Tensor:
    """Read public images or texts."""
    content, key = "images" if texts is None else "texts", "auxiliary.path"
    if texts is not None:
        _check_vocabulary(section.path, texts, key=key)
    tensors, _ = _open(section.path, key=key, names=(content,))
    return _checked(tensors[content], texts, key=f"{key} = {section.path}", name=content)


def carried_vocabulary(path: str | None, *, key: str) -> Vocabulary:
    """Return the vocabulary of a file of token ids. Raises ValueError if it has none."""
    assert path is not None, "checked before a run"
    found = inside_of(Path(path), key=key)
    if found is None:
        raise ValueError(
            f"{key} = {path}: has no tokenizer; should be written by `fedaux tokenise`"
        )
    return found


def _check_vocabulary(path: str | None, texts: Texts, *, key: str) -> None:
    own = carried_vocabulary(path, key=key)
    if own.digest != texts.vocabulary.digest:
        raise ValueError(
            f"{key} = {path}: was tokenised with {own.origin}, not with {texts.vocabulary.origin}; "
            "should be the same, see text.vocabulary"
        )


def _open(
    path: str | None, *, key: str, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a file by name, and its class names if it has any."""
    assert path is not None, "checked before a run"
    try:
        with safe_open(Path(path), framework="pt") as file:
            held = sorted(file.keys())
            if missing := [name for name in names if name not in held]:
                raise ValueError(
                    f"{key} = {path}: has no tensor {', '.join(missing)}; it has "
                    f"{', '.join(held) or 'none'}"
                )
            classes = json.loads((file.metadata() or {}).get("classes", "[]"))
            return {name: file.get_tensor(name) for name in held}, [str(name) for name in classes]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error


def _checked(examples: Tensor, texts: Texts | None, *, key: str, name: str) -> Tensor:
    """Return images, or token ids as int32. Raises ValueError for a wrong type, shape or range."""
    found = f"{key}: tensor {name} is {str(examples.dtype).removeprefix('torch.')}"
    found += f" {list(examples.shape)}"
    if texts is None:
        good = examples.dtype == torch.uint8 and examples.ndim == 4
        if not good or examples.shape[1] not in (1, 3) or len(examples) == 0:
            raise ValueError(f"{found}; should be uint8 [examples, 1 or 3 channels, height, width]")
        return examples
    if (
        examples.dtype not in (torch.int16, torch.int32)
        or examples.ndim != 2
        or 0 in examples.shape
    ):
        raise ValueError(f"{found}; should be int16 or int32 [texts, tokens]")
    if examples.min() < 0 or examples.max() >= texts.vocabulary.size:
        raise ValueError(
            f"{key}: tensor {name} should have ids from 0 to {texts.vocabulary.size - 1}"
        )
    if examples.shape[1] > texts.length:
        raise ValueError(
            f"{key}: tensor {name} has {examples.shape[1]} tokens per text, more than the "
            f"{texts.length} of [text]; tokenise it again, or increase the length"
        )
    return examples.int()
