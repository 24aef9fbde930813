"""Files of random images."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RNG = np.random.default_rng


def pixels(size: int, *, side: int = 32, seed: int = 0) -> np.ndarray:
    return RNG(seed).integers(0, 256, (size, 3, side, side), dtype=np.uint8)


def png(image: np.ndarray, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).convert(mode).save(buffer, format="PNG")
    return buffer.getvalue()


def image_folder(place: Path, counts: dict[str, int], *, seed: int = 0) -> dict[str, np.ndarray]:
    made = {}
    for offset, (name, count) in enumerate(counts.items()):
        (place / name).mkdir(parents=True)
        made[name] = pixels(count, side=6, seed=seed + offset)
        for number, image in enumerate(made[name]):
            (place / name / f"{number}.png").write_bytes(png(image))
    return made


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
