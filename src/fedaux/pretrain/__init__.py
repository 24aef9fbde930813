"""Self-supervised pretraining of h0 on the auxiliary data: computed once for given content and settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedaux import seeding
from fedaux.core.messages import Weights
from fedaux.core.weights import snapshot
from fedaux.files import content_digest
from fedaux.pretrain.objectives import resolved
from fedaux.pretrain.store import (
    Card,
    Wanted,
    alone,
    fitted,
    fitting_weights,
    h0_settings,
    make_card,
    read_card,
    save_h0,
    settings_digest,
    shared_store,
    stored_card,
)
from fedaux.pretrain.training import SAVE_SECONDS, OnEpoch, Passed, Stopped, Training, pretrain

__all__ = [
    "H0",
    "Passed",
    "Stopped",
    "Wanted",
    "content_digest",
    "fitting_weights",
    "keep_probe",
    "pretrained",
    "pretrained_extractor",
    "shared_store",
]


@dataclass(frozen=True)
class H0:
    """A feature extractor, what is known about it, what stores call it, and whether it was there already."""

    weights: Weights
    card: Card
    stem: str
    stored: bool


def pretrained_extractor(
    wanted: Wanted, *, store: Path, shared: Path | None = None, on_epoch: OnEpoch | None = None
) -> Weights:
    """Return the weights of h0: from a given checkpoint, from a store, or by training.

    `store` is looked into first and holds the result in the end; `shared` is one that several processes use.
    """
    if wanted.section.checkpoint is not None:
        return fitting_weights(
            Path(wanted.section.checkpoint),
            wanted.model,
            key="pretraining.checkpoint",
            prototype=wanted.prototype,
            image_shape=tuple(wanted.images.shape[1:]) if wanted.vocabulary is None else None,
            vocabulary=wanted.vocabulary,
        )
    return pretrained(wanted, store=store, shared=shared, on_epoch=on_epoch).weights


def pretrained(
    wanted: Wanted,
    *,
    store: Path | None = None,
    shared: Path | None = None,
    on_epoch: OnEpoch | None = None,
    save_seconds: float = SAVE_SECONDS,
) -> H0:
    """Return h0 from a store, or train it and keep it there; `pretrained_extractor` says where.

    Without any store it is trained. What was interrupted goes on from what it last saved. Raises ValueError that names
    the setting to lower where a GPU's memory is not enough, and on Ctrl-C `Stopped`.
    """
    wanted = _begun(wanted)
    settings = h0_settings(wanted)
    stem = f"{wanted.prototype.name}-{settings_digest(settings)}"
    if wanted.section.kind == "none":
        card = make_card(
            replace(wanted, images=wanted.images[:0]), settings=settings, losses=[], seconds=0.0
        )
        return H0(snapshot(wanted.model.features), card, stem, stored=False)
    name = f"{stem}.safetensors"

    def found(folder: Path | None) -> H0 | None:
        if folder is None or not (folder / name).exists():
            return None
        try:
            weights = fitting_weights(folder / name, wanted.model, key="pretrained features")
            card = (
                stored_card(folder / name) if folder == shared else read_card(folder / name) or {}
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; remove that file, nothing is lost but the time to make it again"
            ) from error
        return H0(weights, card, stem, stored=True)

    def trained(folder: Path | None) -> H0:
        progress = None if folder is None else folder / f"{stem}.progress.safetensors"
        try:
            training = _training(wanted)
            pretrain(training, progress=progress, save_seconds=save_seconds, on_epoch=on_epoch)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"pretraining of {wanted.prototype.name}: the GPU's memory is not enough. Lower "
                f"pretraining.batch_size (now {wanted.section.batch_size}); that is another h0, so a run that was "
                "begun starts anew in another directory"
            ) from error
        weights = snapshot(wanted.model.features)
        card = make_card(
            wanted, settings=settings, losses=training.losses, seconds=training.seconds
        )
        if folder is not None:
            try:
                save_h0(
                    folder / name,
                    weights,
                    card,
                    beside=folder == shared,
                    vocabulary=wanted.vocabulary,
                )
            except OSError as error:
                if folder != shared:
                    raise
                warnings.warn(
                    f"{folder}: h0 cannot be kept there, going on with it ({error})", stacklevel=2
                )
                return H0(weights, card, stem, stored=False)
        if progress is not None:
            progress.unlink(missing_ok=True)
        return H0(weights, card, stem, stored=False)

    result = found(store)
    if result is not None:
        return result
    if shared is None:
        return trained(store)
    with alone(shared, stem):
        result = found(shared) or trained(shared)
    if store is not None:
        save_h0(
            store / name, result.weights, result.card, beside=False, vocabulary=wanted.vocabulary
        )
    return result


def keep_probe(h0: H0, probe: Mapping[str, Any], *, wanted: Wanted, shared: Path | None) -> H0:
    """Return h0 with what a probe has measured on its card, and write that to the shared store where it has this h0."""
    measured = replace(h0, card=h0.card | {"probe": dict(probe)})
    path = None if shared is None else shared / f"{h0.stem}.safetensors"
    if shared is not None and path is not None and path.exists() and measured.card != h0.card:
        with alone(shared, h0.stem):
            save_h0(path, h0.weights, measured.card, vocabulary=wanted.vocabulary)
    return measured


def _begun(wanted: Wanted) -> Wanted:
    """Give the features the weights that others have trained, where the model has such, and resolve what to do."""
    model, texts = wanted.model, wanted.vocabulary is not None
    section = resolved(wanted.section, model.features, texts=texts, given=model.given is not None)
    if model.given is not None:
        where = f"prototypes.model = {wanted.prototype.model!r}: its checkpoint"
        model.features.load_state_dict(fitted(model.given(), model, where=where))
    return replace(wanted, section=section)


def _training(wanted: Wanted) -> Training:
    prototype, device = wanted.prototype, wanted.images.device
    return Training(
        wanted.model.features,
        wanted.images,
        feature_width=wanted.model.feature_width,
        section=wanted.section,
        generator=seeding.torch_generator(
            wanted.seed, "pretraining", device=device, part=prototype.name
        ),
        compute=wanted.compute,
        key=(prototype.model, tuple(sorted(prototype.options.items()))),
        vocabulary=wanted.vocabulary,
    )
