"""Self-supervised pretraining of h0 on the auxiliary data: computed once for given content and settings."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedaux import seeding
from fedaux.clients import Weights
from fedaux.compute import Compute
from fedaux.config import Pretraining, Prototype
from fedaux.data.vocabulary import Vocabulary
from fedaux.models import SplitModel
from fedaux.pretrain.objectives import resolved
from fedaux.pretrain.store import (
    Card,
    alone,
    content_digest,
    fitted,
    fitting_weights,
    h0_settings,
    make_card,
    read_card,
    save_h0,
    settings_digest,
    shared_store,
)
from fedaux.pretrain.training import SAVE_SECONDS, OnEpoch, Passed, pretrain
from fedaux.server import snapshot

__all__ = [
    "Passed",
    "begin",
    "content_digest",
    "fitting_weights",
    "pretrained",
    "pretrained_extractor",
    "shared_store",
]


def pretrained_extractor(
    prototype: Prototype,
    model: SplitModel,
    *,
    section: Pretraining,
    images: Tensor,
    content: str,
    seed: int,
    store: Path,
    shared: Path | None = None,
    compute: Compute | None = None,
    on_epoch: OnEpoch | None = None,
    vocabulary: Vocabulary | None = None,
) -> Weights:
    """Return h0 for a model: from a given checkpoint, from a store, or by training on images (uint8 [N, C, H, W]) or
    token ids (int32 [N, L]) of a vocabulary.

    `content` is the digest of the images; stores are keyed by it and by everything else that h0 depends on. `store` is
    looked into first and holds the result in the end; `shared` is one that several processes use.
    """
    if section.checkpoint is not None:
        return fitting_weights(
            Path(section.checkpoint),
            model,
            key="pretraining.checkpoint",
            prototype=prototype,
            image_shape=tuple(images.shape[1:]) if vocabulary is None else None,
            vocabulary=vocabulary,
        )
    section = begin(model, prototype, section=section, texts=vocabulary is not None)
    if section.kind == "none":
        return snapshot(model.features)
    weights, _ = pretrained(
        prototype,
        model,
        section=section,
        images=images,
        content=content,
        seed=seed,
        store=store,
        shared=shared,
        compute=compute,
        on_epoch=on_epoch,
        vocabulary=vocabulary,
    )
    return weights


def begin(model: SplitModel, prototype: Prototype, *, section: Pretraining, texts: bool) -> Pretraining:
    """Give the features the weights that others have trained, where the model has such; return what is to be done."""
    section = resolved(section, model.features, texts=texts, given=model.given is not None)
    if model.given is not None:
        where = f"prototypes.model = {prototype.model!r}: its checkpoint"
        model.features.load_state_dict(fitted(model.given(), model, where=where))
    return section


def pretrained(
    prototype: Prototype,
    model: SplitModel,
    *,
    section: Pretraining,
    images: Tensor,
    content: str,
    seed: int,
    store: Path | None = None,
    shared: Path | None = None,
    compute: Compute | None = None,
    on_epoch: OnEpoch | None = None,
    save_seconds: float = SAVE_SECONDS,
    vocabulary: Vocabulary | None = None,
) -> tuple[Weights, Card]:
    """Return h0 and its card from a store, or train it and keep it there; `pretrained_extractor` says where.

    Without any store it is trained. What was interrupted goes on from what it last saved.
    """
    section = begin(model, prototype, section=section, texts=vocabulary is not None)
    settings = h0_settings(
        prototype,
        model,
        section=section,
        content=content,
        seed=seed,
        device=images.device,
        compute=compute,
        vocabulary=vocabulary,
    )
    if section.kind == "none":
        card = make_card(prototype, settings=settings, images=images[:0], losses=[], seconds=0.0, vocabulary=vocabulary)
        return snapshot(model.features), card
    stem = f"{prototype.name}-{settings_digest(settings)}"
    name = f"{stem}.safetensors"

    def found(folder: Path | None) -> tuple[Weights, Card] | None:
        if folder is None or not (folder / name).exists():
            return None
        weights = fitting_weights(folder / name, model, key="pretrained features")
        return weights, read_card(folder / name) or {}

    def trained(folder: Path | None) -> tuple[Weights, Card]:
        progress = None if folder is None else folder / f"{stem}.progress.safetensors"
        training = pretrain(
            model.features,
            images,
            feature_width=model.feature_width,
            section=section,
            generator=seeding.torch_generator(seed, "pretraining", device=images.device, part=prototype.name),
            compute=compute,
            key=(prototype.model, tuple(sorted(prototype.options.items()))),
            progress=progress,
            save_seconds=save_seconds,
            on_epoch=on_epoch,
            vocabulary=vocabulary,
        )
        weights = snapshot(model.features)
        card = make_card(
            prototype,
            settings=settings,
            images=images,
            losses=training.losses,
            seconds=training.seconds,
            vocabulary=vocabulary,
        )
        if folder is not None:
            save_h0(folder / name, weights, card, beside=folder == shared, vocabulary=vocabulary)
        if progress is not None:
            progress.unlink(missing_ok=True)
        return weights, card

    result = found(store)
    if result is not None:
        return result
    if shared is None:
        return trained(store)
    with alone(shared, stem):
        result = found(shared) or trained(shared)
    if store is not None:
        save_h0(store / name, *result, beside=False, vocabulary=vocabulary)
    return result
