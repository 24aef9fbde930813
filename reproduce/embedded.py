"""Data of the quick versions, without downloads: digits, letters, photographs and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.data import embedded
from fedaux.data.tensor_files import save_tensors

PUBLIC_SIZE = 3000
TRAINING_SIZE, TEST_SIZE = 2600, 520


def settings(name: str, section: str, folder: Path) -> dict[str, Any]:
    """Return the settings of `data` or `auxiliary` that read an embedded data set; its files go
    into a folder."""
    if (name, section) in {("digits", "data"), ("letters", "auxiliary")}:
        return {f"{section}.source": name}
    if name == "noise":
        return {"auxiliary.source": name, "auxiliary.size": PUBLIC_SIZE}
    tensors = MAKERS[name, section]()
    path = folder / f"{name}-{section}.safetensors"
    if not path.exists():
        save_tensors(path, tensors)
    size = {"auxiliary.size": len(tensors["images"])} if section == "auxiliary" else {}
    return {f"{section}.source": "tensors", f"{section}.path": str(path.resolve())} | size


def photographs() -> NDArray[np.uint8]:
    """Return grey pieces [N, 1, 8, 8] of the two photographs that come with scikit-learn, at
    random places."""
    from sklearn.datasets import load_sample_images  # late: runs on data of files do without

    generator = seeding.generator(0, "photographs")
    pieces = []
    for picture in load_sample_images().images:
        grey = np.asarray(picture, dtype=np.float64).mean(axis=2)
        grey = grey[: grey.shape[0] // 4 * 4, : grey.shape[1] // 4 * 4]
        grey = grey.reshape(grey.shape[0] // 4, 4, grey.shape[1] // 4, 4).mean(axis=(1, 3))
        for row, column in zip(
            generator.integers(grey.shape[0] - 8, size=PUBLIC_SIZE // 2),
            generator.integers(grey.shape[1] - 8, size=PUBLIC_SIZE // 2),
            strict=True,
        ):
            pieces.append(grey[row : row + 8, column : column + 8])
    return np.asarray(np.rint(np.stack(pieces))[:, None], dtype=np.uint8)


def _public(images: NDArray[np.uint8]) -> dict[str, Tensor]:
    return {"images": torch.from_numpy(images)}


def _labelled_letters() -> dict[str, Tensor]:
    images, labels = (
        torch.from_numpy(array)
        for array in embedded.labelled_letters(
            TRAINING_SIZE + TEST_SIZE, generator=seeding.generator(0, "labelled letters")
        )
    )
    return {
        "images": images[:TRAINING_SIZE],
        "labels": labels[:TRAINING_SIZE],
        "test_images": images[TRAINING_SIZE:],
        "test_labels": labels[TRAINING_SIZE:],
    }


MAKERS: Mapping[tuple[str, str], Callable[[], dict[str, Tensor]]] = {
    ("photographs", "auxiliary"): lambda: _public(photographs()),
    ("digits", "auxiliary"): lambda: _public(embedded.digits()[0]),
    ("letters", "data"): _labelled_letters,
}
