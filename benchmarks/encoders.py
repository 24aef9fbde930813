"""Features of JPEGs per second: the product beside a plain bf16 loop over torch's DataLoader.

    python benchmarks/encoders.py
    python benchmarks/encoders.py --images 200 --networks tiny --device cpu

The plain loop has `torch.compile`, channels last, bf16, pinned memory and one worker process per core;
both decode the same files with the same preprocessing, after a warm-up that compiles, and start
their workers each time. Weights are random. The product is measured twice: features of a list of
files, as the plain loop makes them, and a whole run's way from a folder to features in the cache,
with the list of files and their digests. Ratios are product over plain loop.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedaux.config import Auxiliary, Engine
from fedaux.core.compute import choose_device, compute_for
from fedaux.data import load_auxiliary
from fedaux.encoders import Encoder, Extractor, Images

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pooled(nn.Module):
    """A network of transformers to one vector per image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return features [N, F]."""
        outputs: Any = self.network(pixel_values=images)
        pooled: Tensor = outputs.pooler_output.flatten(1)
        return pooled


def vit(**shape: int) -> nn.Module:
    """Return a DINOv2 with random weights; without arguments a ViT-S/16."""
    transformers: Any = import_module("transformers")

    small = {
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "patch_size": 16,
    }
    return Pooled(
        transformers.Dinov2Model(transformers.Dinov2Config(**(small | shape), image_size=224))
    )


def resnet50() -> nn.Module:
    """Return a ResNet-50 with random weights."""
    transformers: Any = import_module("transformers")

    return Pooled(transformers.ResNetModel(transformers.ResNetConfig()))


def lite() -> nn.Module:
    """Return EfficientNet-lite0."""
    from fedaux.config import EncoderSection
    from fedaux.encoders.network import LITE, open_encoder

    return open_encoder(EncoderSection(source=LITE)).module


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vit-s": vit,
    "resnet50": resnet50,
    "efficientnet-lite0": lite,
    "tiny": lambda: vit(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
}


class Files(Dataset[Tensor]):
    """Decoded images of a folder, uint8."""

    def __init__(self, files: list[Path], inputs: Images) -> None:
        self._files, self._inputs = files, inputs

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor(self._inputs.pixels(self._files[row]))


def plain(
    encoder: Encoder, files: list[Path], *, device: torch.device, batch: int
) -> Callable[[], float]:
    """Return a function that runs the plain loop once and returns images per second."""
    assert isinstance(encoder.inputs, Images)
    gpu = device.type == "cuda"
    layout = torch.channels_last if gpu else torch.preserve_format
    module = encoder.module.to(device, memory_format=layout)  # type: ignore[call-overload]
    run = torch.compile(module) if gpu else module
    mean, deviation = (torch.tensor(one, device=device)[:, None, None] for one in (MEAN, DEVIATION))
    loader = DataLoader(
        Files(files, encoder.inputs),
        batch,
        num_workers=os.cpu_count() or 1,
        pin_memory=gpu,
        drop_last=False,
    )

    @torch.inference_mode()
    def once() -> float:
        began, found = time.perf_counter(), []
        for pixels in loader:
            placed = pixels.to(device, non_blocking=True).float() / 255
            placed = ((placed - mean) / deviation).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                found.append(run(placed).float().cpu())
        assert len(torch.cat(found)) == len(files)
        return len(files) / (time.perf_counter() - began)

    return once


def product(
    encoder: Encoder, folder: Path, files: list[Path], *, device: torch.device
) -> dict[str, Callable[[], float]]:
    """Return functions that make all features once, of a list of files and of a folder."""
    extractor = Extractor(encoder, compute_for(Engine(device=str(device)), device))

    def of_files() -> float:
        began = time.perf_counter()
        return len(extractor.features(files)) / (time.perf_counter() - began)

    def of_folder() -> float:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["FEDAUX_CACHE"] = cache
            began = time.perf_counter()
            section = Auxiliary(source="folder", path=str(folder))
            found = load_auxiliary(section, converter=extractor)
            return len(found) / (time.perf_counter() - began)

    return {"of files": of_files, "of a folder": of_folder}


def save_jpeg(file: Path, seed: int) -> None:
    """Write an image of 224 to 512 pixels a side."""
    draw = np.random.default_rng(seed)
    width, height = draw.integers(224, 513, 2)
    small = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    small.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(file)


def main() -> None:
    """Print images per second and their ratio for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument(
        "--networks", nargs="+", default=["vit-s", "resnet50", "efficientnet-lite0"]
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    chosen = parser.parse_args()
    device = choose_device(chosen.device)
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / f"{number:07d}.jpg" for number in range(chosen.images)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(save_jpeg, files, range(chosen.images)))
        for name in chosen.networks:
            inputs = Images(224, 224, MEAN, DEVIATION, shorter=256, interpolation="bicubic")
            encoder = Encoder(NETWORKS[name]().eval(), inputs, name)
            batch = 256 if device.type == "cuda" else 32
            runs = product(encoder, Path(place), files, device=device)
            runs["plain"] = plain(encoder, files, device=device, batch=batch)
            best = dict.fromkeys(runs, 0.0)
            for repeat in range(1 + chosen.repeats):  # the first one warms up
                for what, once in runs.items():
                    speed = once()
                    best[what] = max(best[what], speed) if repeat else 0.0
            shown = ", ".join(
                f"{what} {speed:.0f} (ratio {speed / best['plain']:.2f})"
                for what, speed in best.items()
            )
            print(f"{name}, images/s: {shown}", flush=True)


if __name__ == "__main__":
    main()
