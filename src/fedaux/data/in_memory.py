"""Data that a Python program has in memory: torch datasets, tensors and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import GREY_MODES
from fedaux.data.labelled import LabelledData, count_training
from fedaux.data.sources import Source

NAME = "python"
"""The value of `data.source` and `auxiliary.source` for data in memory."""
IMAGES = "should be images, [channels, height, width] with 1 or 3 channels or [height, width]"


@dataclass(frozen=True)
class Examples:
    """Images uint8 [N, C, H, W], labels int64 [N], and the class names of the dataset, if any."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...] | None


def read_labelled(dataset: Any, *, name: str) -> Examples:
    """Read a dataset of (image, label) pairs once, or a pair of images [N, ...] and labels [N].

    Raises ValueError with `name` if an image or a label cannot be used.
    """
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if _is_pair_of_arrays(dataset):
        images, labels = _stacked(dataset[0], name=name), _numbers(dataset[1], name=name)
    else:
        labels_in_order: list[Any] = []

        def images_in_order() -> Iterable[Any]:
            for row, pair in enumerate(_rows(dataset, name=name)):
                if not isinstance(pair, tuple | list) or len(pair) != 2:
                    raise ValueError(
                        f"{name}: example {row} is {_shown(pair)}; should be (image, label)"
                    )
                labels_in_order.append(_plain(pair[1]))
                yield pair[0]

        images = _of_rows(images_in_order(), name=name)
        labels = _numbers(labels_in_order, name=name)
    if len(images) != len(labels):
        raise ValueError(f"{name}: {len(images)} images, but {len(labels)} labels")
    return Examples(images, labels, class_names(dataset))


def read_public(dataset: Any) -> Tensor:
    """Read public images once: a dataset of images or (image, ...) tuples, or an array [N, ...]."""
    name = "public"
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors[0]
    elif _is_pair_of_arrays(dataset):
        dataset = dataset[0]
    if isinstance(dataset, Tensor | np.ndarray):
        return _stacked(dataset, name=name)
    rows = (row[0] if isinstance(row, tuple | list) else row for row in _rows(dataset, name=name))
    return _of_rows(rows, name=name)


def class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return `dataset.classes` as torchvision has them, also through Subset and the like."""
    for _ in range(10):
        if (names := getattr(dataset, "classes", None)) is not None:
            return tuple(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return None


@dataclass(frozen=True)
class InMemory:
    """Clients, public and test data; each as read, or None for what the experiment states."""

    clients: Mapping[str, Examples] | None
    public: Tensor | None
    test: Examples | None

    @property
    def num_classes(self) -> int:
        """Number of classes by name, or by the largest label if the data has no names."""
        parts = [*(self.clients or {}).values(), *([self.test] if self.test else [])]
        names = {name for part in parts for name in part.classes or ()}
        return max(len(names), *(int(part.labels.max()) + 1 for part in parts))

    def source(self, *, num_classes: int) -> Source:
        """Return a source whose paths are the names of clients.

        Data without names has the classes 0 to num_classes - 1, or the names of the other data.
        """
        named = self._named(num_classes)

        def load(section: Data) -> LabelledData:
            assert section.path is not None, "checked before a run"
            assert self.clients is not None, "the source is named only with clients"
            own = self.clients[section.path]
            classes = named(own)
            if self.test is None:
                data = LabelledData.for_training(own.images, own.labels, classes)
                return data.held_out(section.test_fraction)
            # All clients share the test data: the first one brings it.
            first = section.path == next(iter(self.clients))
            size = len(self.test.labels) if first else 0
            positions = {name: number for number, name in enumerate(classes)}
            every = [*classes, *(name for name in named(self.test) if name not in positions)]
            numbers = torch.tensor([every.index(name) for name in named(self.test)])
            return LabelledData(
                own.images,
                own.labels,
                self.test.images[:size],
                numbers[self.test.labels[:size]],
                tuple(every),
            )

        def count(section: Data) -> int:
            assert section.path is not None, "checked before a run"
            assert self.clients is not None, "the source is named only with clients"
            total = len(self.clients[section.path].labels)
            return total if self.test is not None else count_training(total, section)

        def public(section: Auxiliary) -> Tensor:
            assert self.public is not None, "the source is named only with public data"
            return self.public[: section.size]

        return Source(
            needs_path=True,
            path_on_disk=False,
            takes_test=True,
            count_labelled=count if self.clients is not None else None,
            load_labelled=load if self.clients is not None else None,
            load_auxiliary=public if self.public is not None else None,
        )

    def _named(self, num_classes: int) -> Callable[[Examples], tuple[str, ...]]:
        parts = [*(self.clients or {}).values(), *([self.test] if self.test else [])]
        lists = list(dict.fromkeys(part.classes for part in parts if part.classes is not None))
        bare = [part for part in parts if part.classes is None]
        if bare and len(lists) > 1:
            raise ValueError(
                "clients: some datasets have class names (`classes`) that differ, others have "
                "none; give all of them names"
            )
        default = lists[0] if lists else tuple(map(str, range(num_classes)))
        for part in parts:
            if int(part.labels.max()) >= len(part.classes or default):
                raise ValueError(
                    f"clients: a label is {int(part.labels.max())}, but there are "
                    f"{len(part.classes or default)} classes"
                )
        return lambda part: part.classes or default


def _rows(dataset: Any, *, name: str) -> Iterable[Any]:
    if isinstance(dataset, DataLoader):
        raise ValueError(f"{name}: is a DataLoader; should be its dataset, loader.dataset")
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes | Mapping) or not (sized or isinstance(dataset, Iterable)):
        raise ValueError(f"{name}: is {_shown(dataset)}; should be a torch Dataset or an array")
    # A map-style Dataset need not end iteration with IndexError.
    rows = (dataset[row] for row in range(len(dataset))) if sized else iter(dataset)
    return rows


def _is_pair_of_arrays(dataset: Any) -> bool:
    return (
        isinstance(dataset, tuple | list)
        and len(dataset) == 2
        and all(isinstance(part, Tensor | np.ndarray) for part in dataset)
        and dataset[0].ndim > 2
        and dataset[1].ndim == 1
    )


def _of_rows(rows: Iterable[Any], *, name: str) -> Tensor:
    images = [_image(row, name=f"{name}: example {place}") for place, row in enumerate(rows)]
    if not images:
        raise ValueError(f"{name}: is empty")
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        found = " and ".join(sorted(str(list(shape)) for shape in shapes))
        raise ValueError(f"{name}: images have the shapes {found}; resize them to one")
    return torch.stack(images)


def _image(image: Any, *, name: str) -> Tensor:
    """Return one image as uint8 [C, H, W]."""
    if isinstance(image, Image.Image):
        image = np.array(image.convert("L" if image.mode in GREY_MODES else "RGB"))
    if not isinstance(image, Tensor | np.ndarray):
        raise ValueError(f"{name}: is {_shown(image)}; {IMAGES}")
    return _stacked(torch.as_tensor(image)[None], name=name)[0]


def _stacked(images: Tensor | NDArray[Any], *, name: str) -> Tensor:
    """Return images as uint8 [N, C, H, W]: from [N, H, W], [N, H, W, C], or floats in [0, 1]."""
    tensor = torch.as_tensor(images).detach().cpu()
    if tensor.ndim == 3:
        tensor = tensor[:, None]
    if tensor.ndim == 4 and tensor.shape[1] not in (1, 3) and tensor.shape[3] in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2)
    if tensor.ndim != 4 or tensor.shape[1] not in (1, 3) or len(tensor) == 0:
        raise ValueError(f"{name}: examples have the shape {list(tensor.shape[1:])}; {IMAGES}")
    if tensor.is_floating_point():
        low, high = tensor.min().item(), tensor.max().item()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"{name}: pixels are from {low:g} to {high:g}; floats should be in [0, 1]. Leave "
                "normalisation to the settings data.channel_mean and data.channel_deviation"
            )
        tensor = (tensor * 255).round()
    elif tensor.dtype is not torch.uint8 and not (tensor.min() >= 0 and tensor.max() <= 255):
        raise ValueError(f"{name}: whole numbers should be pixels from 0 to 255")
    return tensor.to(torch.uint8).contiguous()


def _numbers(labels: Any, *, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(0, 0)
    whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    if tensor.ndim != 1 or not whole or len(tensor) == 0 or tensor.min() < 0:
        raise ValueError(f"{name}: labels should be whole numbers from 0 upwards, one per example")
    return tensor.long()


def _plain(label: Any) -> Any:
    """Return a label as a Python number, if it is a tensor or array of one."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        array = np.asarray(label)
        return array.item() if array.size == 1 else label
    return label


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
