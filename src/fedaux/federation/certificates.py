"""Checks of certificates before they are used: dates, names, key and chain."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedaux.federation.keys import AUTHORITY, SERVER

EXPIRY_WARNING = timedelta(days=30)
"""A certificate that ends earlier than this gets a warning."""
EXPIRED, NOT_YET, WRONG_NAMES = 10, 9, (62, 64)
"""OpenSSL's codes: its dates, and the host name or address that it is not valid for."""


def server_problems(folder: Path, *, names: Sequence[str]) -> list[str]:
    """Return the problems of the files of a server that nodes reach by these names.

    `folder` holds ca.crt, server.pem (the server's certificate first, then intermediate ones) and
    server.key.
    """
    from cryptography import x509

    now = datetime.now(UTC)
    authority_file, (certificate_file, key_file) = (
        folder / AUTHORITY[0],
        map(folder.joinpath, SERVER),
    )
    try:
        authorities, chain = _certificates(authority_file), _certificates(certificate_file)
        key = _public_key(key_file)
    except ValueError as error:
        return [str(error)]
    own, found = chain[0], []
    if own.public_key() != key:
        found.append(f"{key_file}: is not the key of the first certificate in {certificate_file}")
    for file, certificates in ((authority_file, authorities), (certificate_file, chain)):
        found += [line for one in certificates if (line := _date_problem(file, one, now=now))]
    try:
        san = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        held = [str(name.value) for name in san]
    except x509.ExtensionNotFound:
        held = []
    if not held:
        found.append(
            f"{certificate_file}: has no subject alternative name (SAN), which nodes require; "
            f"should name {', '.join(names)}"
        )
    known = {one.subject for one in (*chain[1:], *authorities)}
    if own.issuer not in known:
        found.append(
            f"{certificate_file}: its issuer {own.issuer.rfc4514_string()} is neither in this file "
            f"nor in {authority_file}: append the intermediate certificate, after the server's own"
        )
    if found:
        return found
    for name in names:
        try:
            _handshake(folder, name)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in WRONG_NAMES:
                shown = ", ".join(held)
                found.append(f"{certificate_file}: is not valid for {name}, only for {shown}")
            else:
                return [
                    f"{certificate_file}: {authority_file} does not confirm it "
                    f"({error.verify_message})"
                ]
        except ssl.SSLError as error:
            return [f"{certificate_file}: TLS rejects it ({error.reason or error})"]
    return found


def authority_problems(file: Path) -> list[str]:
    """Return the problems of the certificate by which a node recognises the server."""
    from cryptography import x509

    now = datetime.now(UTC)
    try:
        certificates = _certificates(file)
    except ValueError as error:
        return [str(error)]
    for one in certificates:
        try:
            authority = one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            authority = False
        if not authority:
            name = one.subject.rfc4514_string()
            return [f"{file}: {name} is not a certificate authority; should be the server's ca.crt"]
    return [line for one in certificates if (line := _date_problem(file, one, now=now))]


def warnings_of(file: Path) -> list[str]:
    """Return which certificates of a file end soon."""
    now = datetime.now(UTC)
    ends = min(one.not_valid_after_utc for one in _certificates(file))
    return (
        [f"Warning: {file} ends on {ends:%Y-%m-%d}; renew it."]
        if ends - now < EXPIRY_WARNING
        else []
    )


def connection_lines(superlink: str, authority: Path) -> list[str]:
    """Connect to a server as a node would; return what was found. Raises ValueError in words if TLS
    or the clock would keep the node out."""
    from fedaux.federation.flower_internals.supernode import AHEAD, BEHIND

    host, _, port = superlink.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(authority))
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=10, context=context)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        stated = answer.getheader("date")
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{superlink}: {_explained(error, host, authority)}") from error
    except (OSError, HTTPException) as error:
        raise ValueError(f"{superlink}: cannot be reached ({error})") from error
    finally:
        connection.close()
    lines = [f"{superlink}: its certificate is confirmed by {authority}."]
    if stated is not None:
        ahead = (datetime.now(UTC) - parsedate_to_datetime(stated)).total_seconds()
        if not -BEHIND < ahead < AHEAD:
            raise ValueError(
                f"this machine's clock differs from that of {superlink} by {ahead:+.0f} s; should "
                f"be at most {AHEAD:g} s ahead and {BEHIND:g} s behind: synchronise the clock"
            )
        lines.append(f"This machine's clock differs from the server's by {ahead:+.0f} s.")
    return lines


def _explained(error: ssl.SSLCertVerificationError, host: str, authority: Path) -> str:
    if error.verify_code == EXPIRED:
        return "its certificate has expired, or this machine's clock is wrong"
    if error.verify_code == NOT_YET:
        return "its certificate is not valid yet, or this machine's clock is wrong"
    if error.verify_code in WRONG_NAMES:
        return f"its certificate is not valid for {host}; the server needs one that names it (SAN)"
    return (
        f"{authority} does not confirm its certificate ({error.verify_message}): another authority "
        "issued it, or the server does not send the intermediate certificate"
    )


def _certificates(file: Path) -> list[Any]:
    from cryptography import x509

    try:
        return list(x509.load_pem_x509_certificates(file.read_bytes()))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file}: should hold certificates in PEM format ({error})") from error


def _public_key(file: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(file.read_bytes(), password=None).public_key()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except TypeError as error:
        raise ValueError(f"{file}: is encrypted; should be a key without a password") from error
    except ValueError as error:
        raise ValueError(f"{file}: should hold a private key in PEM format ({error})") from error


def _date_problem(file: Path, certificate: Any, *, now: datetime) -> str | None:
    name = certificate.subject.rfc4514_string()
    if now > certificate.not_valid_after_utc:
        return f"{file}: {name} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        begins = certificate.not_valid_before_utc
        return (
            f"{file}: {name} is not valid before {begins:%Y-%m-%d %H:%M} UTC; is the clock right?"
        )
    return None


def _handshake(folder: Path, name: str) -> None:
    """Let TLS itself judge, as at a node but without a network. Raises ssl.SSLError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / SERVER[0], folder / SERVER[1])
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cafile=str(folder / AUTHORITY[0]))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
