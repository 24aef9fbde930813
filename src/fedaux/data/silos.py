"""Clients with their own files (`data.clients`); nothing is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedaux.config import Data
from fedaux.data.labelled import LabelledData, renumbered, union_of_classes
from fedaux.data.texts import padded


def client_sections(section: Data) -> list[Data]:
    """Return one section per client, or the section itself without `clients`."""
    if not section.clients:
        return [section]
    return [section.model_copy(update={"path": path, "clients": ()}) for path in section.clients]


def joined(
    silos: Sequence[LabelledData], *, names: Sequence[str], shared_test: bool
) -> LabelledData:
    """Concatenate the clients' data; classes are the union by name, texts are padded.

    The test data are all clients' test data, or `shared_test` of the first. Raises ValueError if
    images
    differ in shape.
    """
    if silos[0].vocabulary is not None:
        return _joined(_equally_wide(silos), shared_test=shared_test)
    shape = silos[0].images.shape[1:]
    for name, silo in zip(names, silos, strict=True):
        if silo.images.shape[1:] != shape:
            raise ValueError(
                f"data.clients: images of {name} are {list(silo.images.shape[1:])}, images of "
                f"{names[0]} {list(shape)}; should be equal, set data.image_size and data.channels"
            )
    return _joined(silos, shared_test=shared_test)


def _equally_wide(silos: Sequence[LabelledData]) -> list[LabelledData]:
    width = max(part.shape[1] for silo in silos for part in (silo.images, silo.test_images))
    return [
        replace(
            silo,
            images=padded(silo.images, width=width),
            test_images=padded(silo.test_images, width=width),
        )
        for silo in silos
    ]


def _joined(silos: Sequence[LabelledData], *, shared_test: bool) -> LabelledData:
    classes = union_of_classes([silo.classes for silo in silos])
    ends = np.cumsum([len(silo.labels) for silo in silos])
    tested = silos[:1] if shared_test else silos
    return LabelledData(
        images=torch.cat([silo.images for silo in silos]),
        labels=torch.cat([_numbered(silo.labels, silo, classes) for silo in silos]),
        test_images=torch.cat([silo.test_images for silo in tested]),
        test_labels=torch.cat([_numbered(silo.test_labels, silo, classes) for silo in tested]),
        classes=classes,
        clients=tuple(
            np.arange(end - len(silo.labels), end) for end, silo in zip(ends, silos, strict=True)
        ),
        vocabulary=silos[0].vocabulary,
    )


def _numbered(labels: torch.Tensor, silo: LabelledData, classes: tuple[str, ...]) -> torch.Tensor:
    return torch.from_numpy(renumbered(labels.numpy(), silo.classes, classes))
