"""Labelled images or texts in memory: training and test data, with class names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.config import Data
from fedaux.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class LabelledData:
    """Labelled images, uint8 [N, C, H, W], texts as token ids, int32 [N, L], or features, float32
    [N, F]; labels [N]."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    validation: tuple[Tensor, Tensor] | None = None
    """Labelled images at the server."""
    clients: tuple[NDArray[np.int64], ...] | None = None
    """The training examples of each client, if the data is not split at random."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of the token ids."""
    encoder: Mapping[str, Any] | None = None
    """The card of the encoder that made features."""

    @classmethod
    def for_training(cls, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> LabelledData:
        """Return data without test examples."""
        return cls(images, labels, images[:0], labels[:0], classes)

    def held_out(self, fraction: float) -> LabelledData:
        """Move a share of the training examples to the test data; see `hold_out`."""
        test, train = map(torch.from_numpy, hold_out(len(self.labels), fraction=fraction))
        images, labels = self.images, self.labels
        return replace(
            LabelledData.for_training(images[train], labels[train], self.classes),
            test_images=images[test],
            test_labels=labels[test],
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Input shape of models: (channels, height, width) or (tokens, vocabulary)."""
        return input_shape(self.images, self.vocabulary)

    def to(self, device: torch.device) -> LabelledData:
        """Return the data on a device."""
        return replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
            validation=(
                None
                if self.validation is None
                else (self.validation[0].to(device), self.validation[1].to(device))
            ),
        )

    def with_validation(self, size: int) -> LabelledData:
        """Move `size` training examples to the server; the same for every seed."""
        if size == 0:
            return self
        order = torch.from_numpy(
            seeding.generator(0, "server validation").permutation(len(self.labels))
        )
        held, rest = order[:size].sort().values, order[size:].sort().values
        clients = self.clients
        if clients is not None:
            moved = np.full(len(self.labels), -1)
            moved[rest.numpy()] = np.arange(len(rest))
            clients = tuple(moved[part][moved[part] >= 0] for part in clients)
        return replace(
            self,
            images=self.images[rest],
            labels=self.labels[rest],
            validation=(self.images[held], self.labels[held]),
            clients=clients,
        )


def hold_out(size: int, *, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return indices of test and training examples, the same for every seed."""
    order = seeding.generator(0, "test set").permutation(size)
    num_test = min(max(1, round(fraction * size)), size - 1) if fraction > 0 else 0
    return np.sort(order[:num_test]), np.sort(order[num_test:])


def count_training(total: int, section: Data) -> int:
    """Return how many of all examples remain for training if a test set is held out."""
    return total - len(hold_out(total, fraction=section.test_fraction)[0])


def input_shape(examples: Tensor, vocabulary: Vocabulary | None) -> tuple[int, ...]:
    """Return the input shape of models: (C, H, W) of images, (L, vocabulary) of token ids."""
    return tuple(examples.shape[1:]) if vocabulary is None else (examples.shape[1], vocabulary.size)


def union_of_classes(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the union of class names: in the order of a list that has all, else sorted."""
    every = {name for names in lists for name in names}
    for names in lists:
        if len(names) == len(every):
            return names
    return tuple(
        sorted(
            every,
            key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
        )
    )


def renumbered(
    labels: NDArray[np.int64], own: tuple[str, ...], union: tuple[str, ...]
) -> NDArray[np.int64]:
    """Convert labels [N] from positions in `own` to positions in `union`."""
    numbers = {name: number for number, name in enumerate(union)}
    return np.array([numbers[name] for name in own], dtype=np.int64)[labels]
