"""Images in safetensors files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux.config import Auxiliary, Data
from fedaux.data.labelled import LabelledData, count_training, hold_out
from fedaux.data.tables import name_labels, refuse_gaps


def count_tensors(section: Data) -> int:
    """Return the number of training examples of a file."""
    tensors = _open(section.path, key="data.path", names=("images", "labels"))
    total = len(tensors["labels"])
    return total if "test_images" in tensors else count_training(total, section)


def load_tensors(section: Data) -> LabelledData:
    """Read images and labels, and test_images and test_labels if present."""
    key = f"data.path = {section.path}"
    tensors = _open(section.path, key="data.path", names=("images", "labels"))
    for part in ("", "test_") if "test_images" in tensors else ("",):
        name = f"{part}images"
        images = _checked(tensors[name], key=key, name=name)
        labels = tensors.get(f"{part}labels", torch.zeros(0))
        numbers = labels.ndim == 1 and not labels.dtype.is_floating_point
        if not numbers or len(labels) != len(images) or labels.min() < 0:
            raise ValueError(
                f"{key}: tensor {part}labels should be {len(images)} class numbers from 0 "
                "upwards, one per image"
            )
        try:
            refuse_gaps(labels.long().numpy(), rows=np.arange(len(labels)))
        except ValueError as error:
            raise ValueError(f"{key}: tensor {part}labels: {error}") from error
    if "test_images" not in tensors:
        test, train = hold_out(len(tensors["labels"]), fraction=section.test_fraction)
        for name in ("images", "labels"):
            tensors[f"test_{name}"], tensors[name] = tensors[name][test], tensors[name][train]
    labels, test_labels = tensors["labels"].long(), tensors["test_labels"].long()
    num_classes = int(torch.cat([labels, test_labels]).max()) + 1
    return LabelledData(
        images=tensors["images"],
        labels=labels,
        test_images=tensors["test_images"],
        test_labels=test_labels,
        classes=tuple(str(number) for number in range(num_classes)),
    )


def count_tensor_rows(section: Data) -> int:
    """Return the number of a node's images."""
    return load_tensor_rows(section)[1]


def load_tensor_rows(section: Data) -> tuple[LabelledData, int]:
    """Read images for a node's training, and their number; each row is named by its own label
    alone."""
    key = f"data.path = {section.path}"
    tensors = _open(section.path, key="data.path", names=("images", "labels"))
    images = _checked(tensors["images"], key=key, name="images")
    if tensors["labels"].shape != images.shape[:1]:
        raise ValueError(f"{key}: tensor labels should be {len(images)} numbers, one per image")
    labels, classes, bad = name_labels(tensors["labels"].tolist(), classes=None)
    good = [row for row in range(len(labels)) if row not in bad]
    numbers = torch.from_numpy(labels)[good]
    return LabelledData.for_training(images[good], numbers, classes), len(labels)


def load_public_tensors(section: Auxiliary) -> Tensor:
    """Read public images."""
    key = "auxiliary.path"
    tensors = _open(section.path, key=key, names=("images",))
    return _checked(tensors["images"], key=f"{key} = {section.path}", name="images")


def _open(path: str | None, *, key: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    assert path is not None, "checked before a run"
    try:
        with safe_open(Path(path), framework="pt") as file:
            held = sorted(file.keys())
            if missing := [name for name in names if name not in held]:
                raise ValueError(
                    f"{key} = {path}: has no tensor {', '.join(missing)}; it has "
                    f"{', '.join(held) or 'none'}"
                )
            return {name: file.get_tensor(name) for name in held}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error


def _checked(images: Tensor, *, key: str, name: str) -> Tensor:
    """Return the images. Raises ValueError for a wrong type or shape."""
    good = images.dtype == torch.uint8 and images.ndim == 4
    if not good or images.shape[1] not in (1, 3) or len(images) == 0:
        found = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        raise ValueError(
            f"{key}: tensor {name} is {found}; should be uint8 [examples, 1 or 3 channels, height, "
            "width]"
        )
    return images
