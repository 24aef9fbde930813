"""Files that are either the old version or the new one, whatever happens in between."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def save_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _commit(temporary, path)


def save_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity are refused, JSON has none."""
    save_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, temporary, metadata=dict(metadata or {}))
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    _commit(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _commit(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
