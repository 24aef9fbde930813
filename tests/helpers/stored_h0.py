"""A tiny extractor h0 from the store."""

from __future__ import annotations

from pathlib import Path

import torch

from fedaux import seeding
from fedaux.config import Augmentation, Auxiliary, Pretraining, Prototype
from fedaux.core.messages import Weights
from fedaux.data import load_auxiliary
from fedaux.models import MODELS, SplitModel
from fedaux.pretrain import H0Request, content_digest, pretrained_extractor

IMAGES = load_auxiliary(Auxiliary(size=60))


PROTOTYPE = Prototype(name="cnn", model="cnn", options={"width": 4})


def model() -> SplitModel:
    with seeding.initialisation(0, part="cnn"):
        return MODELS["cnn"]((1, 8, 8), 10, width=4)


def extractor(
    store: Path,
    *,
    seed: int = 0,
    images: torch.Tensor = IMAGES,
    shared: Path | None = None,
    **changes: object,
) -> Weights:
    settings = {"epochs": 1, "batch_size": 20, "augmentation": Augmentation(flip=0.0)} | changes
    section = Pretraining(**settings)  # type: ignore[arg-type]
    return pretrained_extractor(
        wanted(model(), section, images, seed=seed), store=store, shared=shared
    )


def wanted(
    made: SplitModel, section: Pretraining, images: torch.Tensor = IMAGES, *, seed: int = 0
) -> H0Request:
    return H0Request(
        PROTOTYPE, made, section=section, images=images, content=content_digest(images), seed=seed
    )


def equal(first: Weights, second: Weights) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())
