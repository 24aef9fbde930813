"""Where data comes from. A source is a row: how to count its training examples cheaply, and how to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux import seeding
from fedaux.config import Auxiliary, Data
from fedaux.data import embedded, parquet


@dataclass(frozen=True)
class LabelledData:
    """Labelled images, uint8 until a batch is formed: images [N, C, H, W], labels [N] in 0 .. classes - 1."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    validation: tuple[Tensor, Tensor] | None = None
    """Images and labels that the server holds."""

    def to(self, device: torch.device) -> LabelledData:
        """Return the data on a device."""
        return LabelledData(
            self.images.to(device),
            self.labels.to(device),
            self.test_images.to(device),
            self.test_labels.to(device),
            self.classes,
            None if self.validation is None else (self.validation[0].to(device), self.validation[1].to(device)),
        )

    def with_validation(self, size: int) -> LabelledData:
        """Return the data with so many training examples at the server; the same for every seed."""
        if size == 0:
            return self
        order = torch.from_numpy(seeding.generator(0, "server validation").permutation(len(self.labels)))
        held, rest = order[:size].sort().values, order[size:].sort().values
        return replace(
            self,
            images=self.images[rest],
            labels=self.labels[rest],
            validation=(self.images[held], self.labels[held]),
        )


@dataclass(frozen=True)
class Source:
    """What a data set can be used for, and how. `count` must be quick: it is asked before anything runs."""

    needs_path: bool = False
    count_labelled: Callable[[Data], int] | None = None
    load_labelled: Callable[[Data], LabelledData] | None = None
    load_auxiliary: Callable[[Auxiliary], Tensor] | None = None


def load_labelled(section: Data) -> LabelledData:
    """Load the clients' data and the test data."""
    load = SOURCES[section.source].load_labelled
    assert load is not None, "checked before a run"
    return load(section).with_validation(section.server_validation)


def load_auxiliary(section: Auxiliary) -> Tensor:
    """Load the public unlabeled images, uint8 [N, C, H, W]."""
    load = SOURCES[section.source].load_auxiliary
    assert load is not None, "checked before a run"
    return load(section)


def _load_digits(section: Data) -> LabelledData:
    images, labels = embedded.digits()
    test, train = _hold_out(len(labels), fraction=section.test_fraction)
    return LabelledData(
        images=torch.from_numpy(images[train]),
        labels=torch.from_numpy(labels[train]),
        test_images=torch.from_numpy(images[test]),
        test_labels=torch.from_numpy(labels[test]),
        classes=tuple(str(digit) for digit in range(10)),
    )


def _load_letters(section: Auxiliary) -> Tensor:
    # A public data set is a fixed thing: its content does not depend on the seed of a run.
    return torch.from_numpy(embedded.letters(section.size or 5000, generator=seeding.generator(0, "letters")))


def _hold_out(size: int, *, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of test and training examples where a source has no test set: the same for every seed."""
    order = seeding.generator(0, "test set").permutation(size)
    num_test = min(max(1, round(fraction * size)), size - 1)
    return np.sort(order[:num_test]), np.sort(order[num_test:])


def _open_tensors(path: str | None, *, key: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Read named tensors of a safetensors file; errors name the setting, the file and what it holds."""
    assert path is not None, "checked before a run"
    try:
        with safe_open(Path(path), framework="pt") as file:
            held = sorted(file.keys())
            missing = [name for name in names if name not in held]
            if missing:
                raise ValueError(
                    f"{key} = {path}: holds no tensor {', '.join(missing)}; it holds {', '.join(held) or 'nothing'}"
                )
            return {name: file.get_tensor(name) for name in held}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error


def _check_images(images: Tensor, *, key: str, name: str) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise ValueError(
            f"{key}: tensor {name} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; "
            f"should be uint8 [examples, 1 or 3 channels, height, width]"
        )
    return images


def _count_tensors(section: Data) -> int:
    tensors = _open_tensors(section.path, key="data.path", names=("images", "labels"))
    total = len(tensors["labels"])
    return total if "test_images" in tensors else total - len(_hold_out(total, fraction=section.test_fraction)[0])


def _load_tensors(section: Data) -> LabelledData:
    """Read images and labels (and test_images, test_labels where the file has them) of a safetensors file."""
    tensors = _open_tensors(section.path, key="data.path", names=("images", "labels"))
    key = f"data.path = {section.path}"
    for part in ("", "test_") if "test_images" in tensors else ("",):
        images, labels = tensors[f"{part}images"], tensors.get(f"{part}labels", torch.zeros(0))
        _check_images(images, key=key, name=f"{part}images")
        if labels.ndim != 1 or labels.dtype.is_floating_point or len(labels) != len(images) or labels.min() < 0:
            raise ValueError(
                f"{key}: tensor {part}labels should be {len(images)} class numbers from 0 upwards, one an image"
            )
    if "test_images" not in tensors:
        test, train = _hold_out(len(tensors["labels"]), fraction=section.test_fraction)
        tensors["test_images"], tensors["test_labels"] = tensors["images"][test], tensors["labels"][test]
        tensors["images"], tensors["labels"] = tensors["images"][train], tensors["labels"][train]
    num_classes = int(max(tensors["labels"].max(), tensors["test_labels"].max())) + 1
    return LabelledData(
        images=tensors["images"],
        labels=tensors["labels"].long(),
        test_images=tensors["test_images"],
        test_labels=tensors["test_labels"].long(),
        classes=tuple(str(number) for number in range(num_classes)),
    )


def _load_auxiliary_tensors(section: Auxiliary) -> Tensor:
    images = _open_tensors(section.path, key="auxiliary.path", names=("images",))["images"]
    return _first(_check_images(images, key=f"auxiliary.path = {section.path}", name="images"), section.size)


def _load_parquet(section: Data) -> LabelledData:
    """Read train-*.parquet and test-*.parquet of a folder; without the latter, test data is held out."""
    assert section.path is not None, "checked before a run"
    images, labels = parquet.read_images(parquet.parquet_files(section.path, part="train"), key="data.path")
    if labels is None:
        raise ValueError(f"data.path = {section.path}: has no column label")
    test_files = parquet.parquet_files(section.path, part="test") if Path(section.path).is_dir() else []
    if test_files:
        test_images, test_labels = parquet.read_images(test_files, key="data.path")
    else:
        test, train = _hold_out(len(labels), fraction=section.test_fraction)
        test_images, test_labels, images, labels = images[test], labels[test], images[train], labels[train]
    if test_labels is None or min(labels.min(), test_labels.min()) < 0:
        raise ValueError(f"data.path = {section.path}: column label should hold class numbers from 0 upwards")
    return LabelledData(
        images=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        test_images=torch.from_numpy(test_images),
        test_labels=torch.from_numpy(test_labels),
        classes=tuple(str(number) for number in range(int(max(labels.max(), test_labels.max())) + 1)),
    )


def _count_parquet(section: Data) -> int:
    assert section.path is not None, "checked before a run"
    total = parquet.count_rows(parquet.parquet_files(section.path, part="train"))
    has_test = Path(section.path).is_dir() and parquet.parquet_files(section.path, part="test")
    return total if has_test else total - len(_hold_out(total, fraction=section.test_fraction)[0])


def _load_auxiliary_parquet(section: Auxiliary) -> Tensor:
    assert section.path is not None, "checked before a run"
    files = parquet.parquet_files(section.path, part="train")
    return _first(torch.from_numpy(parquet.read_images(files, key="auxiliary.path")[0]), section.size)


def _first(images: Tensor, size: int | None) -> Tensor:
    if size is not None and size > len(images):
        raise ValueError(f"auxiliary.size = {size}: the file has {len(images)} images")
    return images[:size]


SOURCES: dict[str, Source] = {
    "digits": Source(
        count_labelled=lambda section: 1797 - len(_hold_out(1797, fraction=section.test_fraction)[0]),
        load_labelled=_load_digits,
    ),
    "letters": Source(load_auxiliary=_load_letters),
    "tensors": Source(
        needs_path=True,
        count_labelled=_count_tensors,
        load_labelled=_load_tensors,
        load_auxiliary=_load_auxiliary_tensors,
    ),
    "parquet": Source(
        needs_path=True,
        count_labelled=_count_parquet,
        load_labelled=_load_parquet,
        load_auxiliary=_load_auxiliary_parquet,
    ),
}
