"""Keys and certificates: the federation's certificate authority, the server's certificate, node key
pairs.

Private keys are created on the machine that uses them, readable only by their owner, and never
sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedaux.formatting import optional

AUTHORITY = ("ca.crt", "ca.key")
SERVER = ("server.pem", "server.key")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names by which the server's own processes reach it over TLS."""
AUTHORITY_DAYS = 3650


def write_certificates(
    folder: Path, *, hosts: Sequence[str], days: int, renew: bool = False
) -> list[Path]:
    """Create the authority and the server's certificate; with `renew`, only a new certificate.

    Raises ValueError if files would be overwritten, for wrong host names, and without the extra.
    """
    x509, _, ec, serialization = _cryptography()
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *LOCAL_NAMES])]
    if days < 1:
        raise ValueError(f"--days {days}: should be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    authority_file, authority_key_file = (folder / name for name in AUTHORITY)
    if renew:
        for file in (authority_file, authority_key_file):
            if not file.is_file():
                raise ValueError(
                    f"{file}: there is no such file; --renew needs the existing authority"
                )
        authority = x509.load_pem_x509_certificate(authority_file.read_bytes())
        authority_key = serialization.load_pem_private_key(
            authority_key_file.read_bytes(), password=None
        )
        for name in SERVER:
            (folder / name).unlink(missing_ok=True)
    else:
        refuse_existing([folder / name for name in (*AUTHORITY, *SERVER)])
        authority_key = ec.generate_private_key(ec.SECP384R1())
        subject = _name(f"fedaux federation, {folder.resolve().parent.name}")
        authority = _certificate(
            subject,
            subject,
            authority_key.public_key(),
            authority_key,
            days=AUTHORITY_DAYS,
            authority=True,
            names=(),
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(
        _name(hosts[0] if hosts else LOCAL_NAMES[0]),
        authority.subject,
        key.public_key(),
        authority_key,
        days=days,
        authority=False,
        names=names,
    )
    if not renew:
        write_private(authority_key_file, _pem(authority_key))
        authority_file.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    write_private(folder / SERVER[1], _pem(key))
    (folder / SERVER[0]).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return [folder / name for name in (*(() if renew else AUTHORITY), *SERVER)]


def write_node_key(path: Path, *, comment: str = "") -> Path:
    """Create a node's key pair in OpenSSH's format, for Flower; return the file of the public key.

    Raises ValueError if files would be overwritten, and without the extra.
    """
    _, _, ec, serialization = _cryptography()
    public = path.with_name(path.name + ".pub")
    refuse_existing([path, public])
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding, formats, plain = (
        serialization.Encoding,
        serialization.PrivateFormat,
        serialization.NoEncryption(),
    )
    write_private(path, key.private_bytes(encoding.PEM, formats.OpenSSH, plain))
    line = (
        key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    )
    public.write_text(f"{line} {comment}".rstrip() + "\n", encoding="utf-8")
    return public


def refuse_existing(files: Sequence[Path]) -> None:
    """Raise ValueError for the first file that exists."""
    for file in files:
        if file.exists():
            raise ValueError(f"{file} exists already and is not overwritten; move it first")


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can ever read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def require_private(path: Path) -> None:
    """Raise ValueError for a private key that others can read, with the command that mends it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise ValueError(
            f"{path}: a private key that others can read (mode {mode:04o}): "
            f"chmod 600 {shlex.quote(str(path))}"
        )


def make_private(folder: Path) -> None:
    """Take all rights on a folder and its content from everybody but the owner."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # a temporary file
                path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def _certificate(
    subject: Any,
    issuer: Any,
    public_key: Any,
    signing_key: Any,
    *,
    days: int,
    authority: bool,
    names: Sequence[Any],
) -> Any:
    x509, hashes, _, _ = _cryptography()
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not authority:
        usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(usage, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signing_key, hashes.SHA256())


def _general_name(host: str) -> Any:
    """Return an address or a host name for a certificate."""
    x509, *_ = _cryptography()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        parts = host.split(".")
        if not all(part and part.isascii() and part.replace("-", "").isalnum() for part in parts):
            raise ValueError(
                f"--host {host!r}: should be a host name or an address, without port or slashes"
            ) from None
        return x509.DNSName(host)


def _name(text: str) -> Any:
    x509, *_ = _cryptography()
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text[:64])])


def _pem(key: Any) -> bytes:
    *_, serialization = _cryptography()
    formats = serialization.PrivateFormat.PKCS8
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, formats, serialization.NoEncryption()
    )
    return pem


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """Return the parts of `cryptography` that are used here; Flower depends on it."""
    optional("cryptography", "keys and certificates need the extra", extras="flower")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return x509, hashes, ec, serialization
