"""Certificates of an institution's own authority: accepted if they are right, named if not."""

from __future__ import annotations

import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.federate_trial import federate_command, write_trial

pytest.importorskip("cryptography", reason="needs the extra flower")
from helpers.own_authority import NAMES, NOW, write

from fedaux.federation.certificates import (
    authority_problems,
    connection_lines,
    server_problems,
    warnings_of,
)
from fedaux.federation.flower_internals.processes import link_arguments
from fedaux.federation.keys import write_certificates


def test_an_own_authority_with_an_intermediate_certificate_is_fine(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert server_problems(folder, names=NAMES) == []
    assert authority_problems(folder / "ca.crt") == []
    assert warnings_of(folder / "server.pem") == []
    assert len(warnings_of(write(tmp_path / "soon", days=10) / "server.pem")) == 1
    write_certificates(tmp_path / "ours", hosts=["server.example"], days=30)
    assert server_problems(tmp_path / "ours", names=NAMES) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"begins": NOW - timedelta(days=400)}, "server.pem: CN=server expired on "),
        ({"begins": NOW + timedelta(days=1)}, "server.pem: CN=server is not valid before "),
        ({"names": ()}, "has no subject alternative name (SAN)"),
        ({"names": ("server.example",)}, "is not valid for 127.0.0.1, only for server.example"),
        ({"left_out": "intermediate"}, "append the intermediate certificate, after the server's"),
        ({"left_out": "key"}, "server.key: is not the key of the first certificate in"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    problems = server_problems(write(tmp_path, **changes), names=NAMES)
    assert len(problems) == 1
    assert words in problems[0]


def test_another_authority_and_rubbish_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    other = write(tmp_path / "other")  # of the same name
    (folder / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    (problem,) = server_problems(folder, names=NAMES)
    assert "ca.crt does not confirm it" in problem
    (folder / "server.pem").write_text("rubbish")
    (problem,) = server_problems(folder, names=NAMES)
    assert "server.pem: should hold certificates in PEM format" in problem
    (problem,) = authority_problems(other / "server.pem")
    assert "is not a certificate authority" in problem


def test_link_and_check_look_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "hospitals"
    node = write_trial(folder)
    write(folder / "certificates", left_out="intermediate")
    with pytest.raises(ValueError, match="append the intermediate certificate"):
        link_arguments(folder, host="0.0.0.0", port=8000, simulation=False)
    done = federate_command("check", str(folder), cwd=tmp_path)
    assert done.returncode == 2
    assert "append the intermediate certificate" in done.stderr
    write(folder / "certificates", names=("server.example",))
    with pytest.raises(ValueError, match=r"not valid for 127.0.0.1, only for server.example"):
        link_arguments(folder, host="0.0.0.0", port=8000, simulation=False)
    write(folder / "certificates")
    assert link_arguments(folder, host="0.0.0.0", port=8000, simulation=False)
    assert federate_command("check", str(folder), cwd=tmp_path).returncode == 0
    (node.parent / "ca.crt").write_text("rubbish")
    done = federate_command("check", str(node), cwd=tmp_path)
    assert done.returncode == 2
    assert "ca.crt: should hold certificates in PEM format" in done.stderr


class Healthy(BaseHTTPRequestHandler):
    ahead = 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        from email.utils import format_datetime

        return format_datetime(datetime.now(UTC) - timedelta(seconds=self.ahead), usegmt=True)

    def log_message(self, *_: object) -> None:
        pass


def test_check_connects_as_a_node_would(tmp_path: Path) -> None:
    folder = write(tmp_path / "right")
    wrong = write(tmp_path / "wrong", names=("server.example",))
    for files, ahead, words in (
        (folder, 0.0, "its certificate is confirmed by"),
        (folder, 60.0, "clock differs from that of 127.0.0.1"),
        (wrong, 0.0, "is not valid for 127.0.0.1"),
        (write(tmp_path / "old", days=1, begins=NOW - timedelta(days=9)), 0.0, "has expired"),
        (write(tmp_path / "short", left_out="intermediate"), 0.0, "intermediate certificate"),
    ):
        server = HTTPServer(
            ("127.0.0.1", 0), type("Shifted", (Healthy,), {"ahead": ahead}), bind_and_activate=True
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files / "server.pem", files / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            said = " ".join(connection_lines(f"127.0.0.1:{server.server_port}", files / "ca.crt"))
        except ValueError as error:
            said = str(error)
        thread.join()
        server.server_close()
        assert words in said
    with pytest.raises(ValueError, match="cannot be reached"):
        connection_lines(f"127.0.0.1:{server.server_port}", folder / "ca.crt")
