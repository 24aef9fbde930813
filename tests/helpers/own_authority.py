"""Certificates as an institution's own authority would issue them, with an intermediate one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedaux.federation.keys import _general_name

NAMES = ("server.example", "127.0.0.1")
NOW = datetime.now(UTC)


def issue(
    subject: str,
    issuer: tuple[Any, Any] | None,
    *,
    authority: bool,
    names: tuple[str, ...] = (),
    begins: datetime = NOW - timedelta(days=1),
    days: int = 300,
) -> tuple[Any, Any]:
    """Return a certificate and its key, as an institution's authority would issue it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, subject)])
    signer = key if issuer is None else issuer[1]
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if names:
        san = x509.SubjectAlternativeName([_general_name(one) for one in names])
        builder = builder.add_extension(san, critical=False)
    return builder.sign(signer, hashes.SHA256()), key


def pem(*certificates: Any) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def write(folder: Path, *, left_out: str = "", **leaf: Any) -> Path:
    """Write the files of a server whose certificate an intermediate authority has issued."""
    root = issue("Hospital Root", None, authority=True)
    middle = issue("Hospital Issuing", root, authority=True)
    own = issue("server", middle, authority=False, **({"names": NAMES} | leaf))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(pem(root[0]))
    chain = (own[0],) if left_out == "intermediate" else (own[0], middle[0])
    (folder / "server.pem").write_bytes(pem(*chain))
    key = issue("other", None, authority=True)[1] if left_out == "key" else own[1]
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "server.key").chmod(0o600)
    return folder
