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
