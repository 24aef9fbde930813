"""Self-supervised pretraining of h0 on the auxiliary data, computed once per content and
settings."""

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
from fedaux.data.tensor_files import content_digest
from fedaux.pretrain.objectives import resolved
from fedaux.pretrain.store import (
    Card,
    H0Request,
    exclusive,
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
from fedaux.pretrain.training import (
    SAVE_SECONDS,
    EpochProgress,
    OnEpoch,
    Stopped,
    Training,
    pretrain,
)

__all__ = [
    "H0",
    "EpochProgress",
    "H0Request",
    "Stopped",
    "content_digest",
    "fitting_weights",
    "keep_probe",
    "pretrained",
    "pretrained_extractor",
    "shared_store",
]


@dataclass(frozen=True)
class H0:
    """A feature extractor, its card, its name in stores, and whether it was stored before."""

    weights: Weights
    card: Card
    stem: str
    stored: bool


def pretrained_extractor(
    request: H0Request, *, store: Path, shared: Path | None = None, on_epoch: OnEpoch | None = None
) -> Weights:
    """Return the weights of h0: from a given checkpoint, from a store, or by training.

    `store` is searched first and gets a copy; `shared` is a store for several processes.
    """
    if request.section.checkpoint is not None:
        return fitting_weights(
            Path(request.section.checkpoint),
            request.model,
            key="pretraining.checkpoint",
            prototype=request.prototype,
            image_shape=tuple(request.images.shape[1:]) if request.vocabulary is None else None,
            vocabulary=request.vocabulary,
        )
    return pretrained(request, store=store, shared=shared, on_epoch=on_epoch).weights


def pretrained(
    request: H0Request,
    *,
    store: Path | None = None,
    shared: Path | None = None,
    on_epoch: OnEpoch | None = None,
    save_seconds: float = SAVE_SECONDS,
) -> H0:
    """Return h0 from a store, or train and store it; interrupted training continues.

    Raises ValueError with the setting to reduce if the GPU is out of memory, and `Stopped` on
    Ctrl-C.
    """
    request = _with_initial_weights(request)
    settings = h0_settings(request)
    stem = f"{request.prototype.name}-{settings_digest(settings)}"
    if request.section.kind == "none":
        card = make_card(
            replace(request, images=request.images[:0]), settings=settings, losses=[], seconds=0.0
        )
        return H0(snapshot(request.model.features), card, stem, stored=False)
    name = f"{stem}.safetensors"

    def found(folder: Path | None) -> H0 | None:
        if folder is None or not (folder / name).exists():
            return None
        try:
            weights = fitting_weights(folder / name, request.model, key="pretrained features")
            card = (
                stored_card(folder / name) if folder == shared else read_card(folder / name) or {}
            )
        except ValueError as error:
            raise ValueError(f"{error}; remove this file, it will be computed again") from error
        return H0(weights, card, stem, stored=True)

    def trained(folder: Path | None) -> H0:
        progress = None if folder is None else folder / f"{stem}.progress.safetensors"
        try:
            training = _training(request)
            pretrain(training, progress=progress, save_seconds=save_seconds, on_epoch=on_epoch)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"pretraining of {request.prototype.name}: out of GPU memory. Reduce "
                f"pretraining.batch_size (now {request.section.batch_size}); this changes h0, so "
                "use "
                "a new run directory"
            ) from error
        weights = snapshot(request.model.features)
        card = make_card(
            request, settings=settings, losses=training.losses, seconds=training.seconds
        )
        if folder is not None:
            try:
                save_h0(
                    folder / name,
                    weights,
                    card,
                    beside=folder == shared,
                    vocabulary=request.vocabulary,
                )
            except OSError as error:
                if folder != shared:
                    raise
                warnings.warn(
                    f"{folder}: h0 cannot be stored ({error}); continuing without", stacklevel=2
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
    with exclusive(shared, stem):
        result = found(shared) or trained(shared)
    if store is not None:
        save_h0(
            store / name, result.weights, result.card, beside=False, vocabulary=request.vocabulary
        )
    return result


def keep_probe(h0: H0, probe: Mapping[str, Any], *, request: H0Request, shared: Path | None) -> H0:
    """Add the result of a probe to the card of h0, also in the shared store."""
    measured = replace(h0, card=h0.card | {"probe": dict(probe)})
    path = None if shared is None else shared / f"{h0.stem}.safetensors"
    if shared is not None and path is not None and path.exists() and measured.card != h0.card:
        with exclusive(shared, h0.stem):
            save_h0(path, h0.weights, measured.card, vocabulary=request.vocabulary)
    return measured


def _with_initial_weights(request: H0Request) -> H0Request:
    """Load the model's own checkpoint, if any, and resolve the kind of pretraining."""
    model, texts = request.model, request.vocabulary is not None
    section = resolved(request.section, model.features, texts=texts, given=model.given is not None)
    if model.given is not None:
        where = f"prototypes.model = {request.prototype.model!r}: its checkpoint"
        model.features.load_state_dict(fitted(model.given(), model, where=where))
    return replace(request, section=section)


def _training(request: H0Request) -> Training:
    prototype, device = request.prototype, request.images.device
    return Training(
        request.model.features,
        request.images,
        feature_width=request.model.feature_width,
        section=request.section,
        generator=seeding.torch_generator(
            request.seed, "pretraining", device=device, part=prototype.name
        ),
        compute=request.compute,
        key=(prototype.model, tuple(sorted(prototype.options.items()))),
        vocabulary=request.vocabulary,
    )
