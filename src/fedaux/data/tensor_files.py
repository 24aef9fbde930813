"""Files of tensors, written atomically, and digests of tensors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedaux.files import replacing

CHECKSUM, CONTENT = "crc32", "content"
"""Keys of the metadata: of older files the checksum alone, of others the checksum and the order in
one, because several keys are written in any order."""


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically. Raises OSError if it cannot be written."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(on_cpu, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:  # it carries the system's error number in its text only
            said = re.search(r"os error (\d+)", str(error))
            number = int(said.group(1)) if said else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error


def save_checked(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically, with a checksum of its tensors and their order: sums
    over the tensors of a model are rounded in that order."""
    content = json.dumps({CHECKSUM: _checksum(tensors), "order": list(tensors)})
    save_tensors(path, tensors, metadata={CONTENT: content})


def load_checked(path: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of a file that `save_checked` wrote. Raises ValueError if they changed."""
    with safe_open(path, framework="pt") as file:
        about: dict[str, Any] = file.metadata() or {}
        about = json.loads(about[CONTENT]) if CONTENT in about else about
        stated = about.get(CHECKSUM)
        tensors = {name: file.get_tensor(name) for name in about.get("order", file.keys())}
    if stated is not None and stated != (found := _checksum(tensors)):
        raise ValueError(f"the checksum of its tensors is {found}, not {stated}")
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        value = zlib.crc32(data.numpy().data, zlib.crc32(name.encode(), value))
    return f"{value:08x}"


def content_digest(images: Tensor) -> str:
    """Return the digest of images by their shape and bytes."""
    digest = hashlib.blake2b(str(list(images.shape)).encode(), digest_size=16)
    digest.update(images.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the digest of weights by their names, types, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
