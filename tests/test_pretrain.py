from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedaux import seeding
from fedaux.clients import Weights
from fedaux.config import Augmentation, Auxiliary, Pretraining, Prototype
from fedaux.data import load_auxiliary
from fedaux.models import MODELS, SplitModel
from fedaux.pretrain import content_digest, pretrained_extractor
from fedaux.server import snapshot

IMAGES = load_auxiliary(Auxiliary(size=60))
PROTOTYPE = Prototype(name="cnn", model="cnn", options={"width": 4})


def model() -> SplitModel:
    with seeding.initialisation(0, part="cnn"):
        return MODELS["cnn"]((1, 8, 8), 10, width=4)


def extractor(store: Path, *, seed: int = 0, images: torch.Tensor = IMAGES, **changes: object) -> Weights:
    settings = {"epochs": 1, "batch_size": 20, "augmentation": Augmentation(flip=0.0)} | changes
    return pretrained_extractor(
        PROTOTYPE,
        model(),
        section=Pretraining(**settings),  # type: ignore[arg-type]
        images=images,
        content=content_digest(images),
        seed=seed,
        store=store,
    )


def equal(first: Weights, second: Weights) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_h0_is_trained_once_and_then_read(tmp_path: Path) -> None:
    first = extractor(tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    assert equal(first, extractor(tmp_path))
    assert path.stat().st_mtime_ns == written
    assert not equal(first, snapshot(model().features))
    assert equal(first, extractor(tmp_path / "elsewhere"))  # the seed decides, not the store


@pytest.mark.parametrize("change", [{"seed": 1}, {"epochs": 2}, {"images": IMAGES[:50]}, {"temperature": 0.1}])
def test_whatever_h0_depends_on_makes_another(tmp_path: Path, change: dict[str, object]) -> None:
    first = extractor(tmp_path)
    assert not equal(first, extractor(tmp_path, **change))  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 2


def test_without_pretraining_h0_is_the_initial_features(tmp_path: Path) -> None:
    assert equal(extractor(tmp_path, kind="none"), snapshot(model().features))


def test_a_checkpoint_is_used_in_the_models_precision(tmp_path: Path) -> None:
    given = {name: tensor.half() for name, tensor in extractor(tmp_path).items()}
    path = tmp_path / "h0.safetensors"
    save_file(given, path)
    loaded = extractor(tmp_path, checkpoint=str(path))
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.allclose(tensor, given[name].float()) for name, tensor in loaded.items())


def test_a_checkpoint_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    weights = snapshot(model().features)
    path = tmp_path / "h0.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if name != "0.weight"}, path)
    with pytest.raises(ValueError, match=r"h0.safetensors: holds no tensor 0\.weight"):
        extractor(tmp_path, checkpoint=str(path))
    save_file(weights | {"0.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(ValueError, match=r"shape \[2, 2\], the model's has \[4, 1, 3, 3\]"):
        extractor(tmp_path, checkpoint=str(path))
    save_file(weights | {"0.weight": torch.full((4, 1, 3, 3), float("nan"))}, path)
    with pytest.raises(ValueError, match="NaN"):
        extractor(tmp_path, checkpoint=str(path))
