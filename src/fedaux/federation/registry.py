"""The public key of each client, as the server's operator registered it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedaux.files import read_json, save_json

REGISTRY = "members.json"
"""In the federation's folder."""


def registered(file: Path) -> dict[int, str]:
    """Return the public key of each client of a federation, from the file that `fedaux federate
    register` writes."""
    if not file.exists():
        return {}
    return {int(client): str(key) for client, key in read_json(file)["clients"].items()}


def register(file: Path, *, client: int, key: str, replace: bool = False) -> None:
    """Bind a client's number to a public key. Raises ValueError if either is bound already."""
    clients = registered(file)
    key = same_key(key)
    if (other := next((one for one, own in clients.items() if own == key), client)) != client:
        raise ValueError(f"--client {client}: this key is registered for client {other}")
    if clients.get(client, key) != key and not replace:
        raise ValueError(
            f"--client {client}: registered with another key, {fingerprint(clients[client])}; "
            "--replace gives the number to this key"
        )
    clients[client] = key
    named = {str(one): own for one, own in sorted(clients.items())}
    save_json(file, {"version": 1, "clients": named})


def fingerprint(key: str) -> str:
    """Return the short form of a public key, as `ssh-keygen -lf` prints it."""
    try:
        blob = base64.b64decode(key.split()[1], validate=True)
    except (IndexError, ValueError):
        return "no key"
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def key_of(public_key: bytes) -> str:
    """Return a node's public key as in its .pub file, without the comment; empty if it is not
    valid."""
    try:
        key = serialization.load_pem_public_key(public_key)
        text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, TypeError):
        return ""
    return text.decode()


def same_key(text: str) -> str:
    """Return a public key without its comment."""
    return " ".join(text.split()[:2])
