"""One random stream per (seed, purpose, round, client, part): results do not depend on the order.

A stream is derived from the hash of its name, so a new client, round or purpose changes no other
stream. Only this module uses torch's global generator, and it restores its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def stream_key(seed: int, purpose: str, *, round: int = 0, client: int = 0, part: str = "") -> int:
    """Return the 128-bit key of a stream."""
    name = f"{seed}|{purpose}|{round}|{client}|{part}".encode()
    return int.from_bytes(
        hashlib.blake2b(name, digest_size=16, person=b"fedaux-seeding").digest(), "little"
    )


def generator(
    seed: int, purpose: str, *, round: int = 0, client: int = 0, part: str = ""
) -> np.random.Generator:
    """Return the stream as a NumPy generator (the same on every machine and device)."""
    key = stream_key(seed, purpose, round=round, client=client, part=part)
    return np.random.Generator(np.random.Philox(key=key))


def torch_generator(
    seed: int, purpose: str, *, device: torch.device | str = "cpu", part: str = ""
) -> torch.Generator:
    """Return the stream as a torch generator on a device, for draws that must be made there."""
    import torch

    key = stream_key(seed, purpose, part=part)
    return torch.Generator(device=device).manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)


@contextmanager
def initialisation(seed: int, *, part: str) -> Iterator[None]:
    """Seed torch's global generator for a model's initial weights, and restore it afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            stream_key(seed, "weights", part=part) & 0x7FFF_FFFF_FFFF_FFFF
        )
        yield
