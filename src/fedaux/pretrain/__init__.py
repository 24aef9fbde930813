"""Self-supervised pretraining of h0 on the auxiliary data: computed once for given content and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedaux import seeding
from fedaux.clients import Weights
from fedaux.compute import Compute
from fedaux.config import Pretraining, Prototype
from fedaux.files import save_tensors
from fedaux.models import SplitModel
from fedaux.pretrain.contrastive import pretrain_contrastive
from fedaux.server import snapshot

OnEpoch = Callable[[int, float], None]


def pretrained_extractor(
    prototype: Prototype,
    model: SplitModel,
    *,
    section: Pretraining,
    images: Tensor,
    content: str,
    seed: int,
    store: Path,
    compute: Compute | None = None,
    on_epoch: OnEpoch | None = None,
) -> Weights:
    """Return h0 for a model: from a given checkpoint, from the store, or by training on images (uint8 [N, C, H, W]).

    `content` is the digest of the images; the store is keyed by it and by everything else that h0 depends on.
    """
    if section.checkpoint is not None:
        return fitting_weights(Path(section.checkpoint), model, key="pretraining.checkpoint")
    if section.kind == "none":
        return snapshot(model.features)
    settings = {
        "content": content,
        "model": prototype.model,
        "options": prototype.options,
        "pretraining": section.model_dump(mode="json"),
        "seed": seed,
        "prototype": prototype.name,
        "device": images.device.type,
    }
    if compute is not None:
        channels = {"mean": compute.mean, "deviation": compute.deviation}
        settings |= {key: value.flatten().tolist() for key, value in channels.items() if value is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    path = store / f"{prototype.name}-{digest}.safetensors"
    if path.exists():
        return fitting_weights(path, model, key="pretrained features")
    pretrain_contrastive(
        model.features,
        images,
        feature_width=model.feature_width,
        epochs=section.epochs,
        batch_size=section.batch_size,
        learning_rate=section.learning_rate,
        temperature=section.temperature,
        projection_widths=section.projection_widths,
        augmentation=section.augmentation,
        generator=seeding.torch_generator(seed, "pretraining", device=images.device, part=prototype.name),
        normalise=None if compute is None else compute.normalised,
        on_epoch=on_epoch,
    )
    weights = snapshot(model.features)
    save_tensors(path, weights, metadata={"settings": json.dumps(settings, sort_keys=True)})
    return weights


def content_digest(images: Tensor) -> str:
    """Return the digest of images by their shape and bytes."""
    digest = hashlib.blake2b(str(list(images.shape)).encode(), digest_size=16)
    digest.update(images.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def fitting_weights(path: Path, model: SplitModel, *, key: str) -> Weights:
    """Load weights that fit the model's features, in its precision; say what does not fit."""
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error
    expected = model.features.state_dict()
    weights: Weights = {}
    for name, tensor in expected.items():
        if name not in loaded:
            if name.endswith("num_batches_tracked"):  # a counter that many checkpoints leave out
                weights[name] = tensor.clone()
                continue
            raise ValueError(f"{key} = {path}: holds no tensor {name}, which the model's features need")
        if loaded[name].shape != tensor.shape:
            raise ValueError(
                f"{key} = {path}: tensor {name} has shape {list(loaded[name].shape)}, "
                f"the model's has {list(tensor.shape)}"
            )
        weights[name] = loaded[name].to(dtype=tensor.dtype, device=tensor.device)
        if tensor.is_floating_point() and not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(f"{key} = {path}: tensor {name} holds NaN or infinity")
    return weights
