"""What guards a federation: keys and certificates, and processes that let in and run nothing
else."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.federate_trial import federate_command, write_trial
from helpers.programs import run_program

from fedaux.federation.flower_internals import processes
from fedaux.federation.folder import write_folder
from fedaux.federation.keys import make_private, write_certificates, write_node_key

# Keys and certificates.


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    pytest.importorskip("cryptography")
    write_certificates(tmp_path / "certificates", hosts=["server.example", "192.0.2.7"], days=30)
    return tmp_path / "certificates"


def handshake(folder: Path, *, authority: Path, name: str) -> None:
    """Let TLS itself judge the certificate, strictly, without a network."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=str(authority))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=name)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client_side.version() == "TLSv1.3"


@pytest.mark.parametrize("name", ["server.example", "192.0.2.7", "localhost", "127.0.0.1"])
def test_tls_takes_the_certificate_for_every_name(releases: Path, name: str) -> None:
    handshake(releases, authority=releases / "ca.crt", name=name)


def test_tls_refuses_other_names_and_other_authorities(releases: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(releases, authority=releases / "ca.crt", name="elsewhere.example")
    write_certificates(tmp_path / "other", hosts=["server.example"], days=30)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(releases, authority=tmp_path / "other/ca.crt", name="server.example")


def test_private_keys_are_private_and_nothing_is_overwritten(
    releases: Path, tmp_path: Path
) -> None:
    write_node_key(tmp_path / "node.key", comment="a")
    for key in (releases / "ca.key", releases / "server.key", tmp_path / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    before = (releases / "ca.crt").read_bytes(), (tmp_path / "node.key").read_bytes()
    with pytest.raises(ValueError, match=r"ca.crt exists already"):
        write_certificates(releases, hosts=["server.example"], days=30)
    with pytest.raises(ValueError, match=r"node.key exists already"):
        write_node_key(tmp_path / "node.key")
    assert ((releases / "ca.crt").read_bytes(), (tmp_path / "node.key").read_bytes()) == before


def test_a_private_key_that_others_can_read_is_refused(releases: Path, tmp_path: Path) -> None:
    write_node_key(tmp_path / "node.key")
    (tmp_path / "node.key").chmod(0o640)
    with pytest.raises(ValueError, match=r"others can read \(mode 0640\): chmod 600 /.*/node.key"):
        processes.node_command(
            tmp_path / "node.toml",
            superlink="a:1",
            certificate=releases / "ca.crt",
            key=tmp_path / "node.key",
            port=1,
        )
    (releases / "server.key").chmod(0o604)
    with pytest.raises(ValueError, match=r"chmod 600 /.*/server.key"):
        processes.link_arguments(tmp_path, host="127.0.0.1", port=1, simulation=False)


def test_files_and_folders_are_the_owners_alone(tmp_path: Path) -> None:
    """Files that commands write, whatever the shell's umask is, and older files."""
    done = federate_command("init", "hospitals", "--clients", "2", "--trial", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "hospitals" / "flower" / "link.db").touch(mode=0o644)
    (tmp_path / "hospitals" / "runs").mkdir(mode=0o755)
    make_private(tmp_path / "hospitals")
    for path in (tmp_path / "hospitals").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
def test_the_servers_database_forgets_what_it_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore import sql_mixin
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", vars(sql_mixin)["SQLITE_PRAGMAS"])
    database = tmp_path / "link.db"
    secret = b"weights of hospital 7" * 1000

    def on_disk() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.glob("link.db*"))

    cut = processes.forget_deleted(database, every=3600.0)
    store = SqlObjectStore(str(database), verify=False)
    store.initialize()
    number = hashlib.sha256(secret).hexdigest()
    store.preregister(1, ObjectTree(object_id=number))
    store.put(number, secret)
    assert secret[:500] in on_disk()
    store.delete_objects_in_run(1)
    cut()
    assert secret[:500] not in on_disk()
    assert b"hospital 7" not in on_disk()


def test_renewal_keeps_the_authority_that_nodes_have(releases: Path) -> None:
    authority, old = (releases / "ca.crt").read_bytes(), (releases / "server.pem").read_bytes()
    write_certificates(releases, hosts=["new.example"], days=30, renew=True)
    assert (releases / "ca.crt").read_bytes() == authority
    assert (releases / "server.pem").read_bytes() != old
    handshake(releases, authority=releases / "ca.crt", name="new.example")
    (releases / "ca.key").unlink()
    with pytest.raises(ValueError, match=r"ca.key: there is no such file; --renew"):
        write_certificates(releases, hosts=["new.example"], days=30, renew=True)


@pytest.mark.parametrize("host", ["https://server", "server:8000", "", "a..b", "sérver"])
def test_names_of_servers_are_names(host: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(ValueError, match="should be a host name or an address"):
        write_certificates(tmp_path / "certificates", hosts=[host], days=30)


def test_node_keys_are_what_flower_reads(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )

    public = write_node_key(tmp_path / "node.key", comment="hospital")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert load_ssh_public_key(public.read_bytes()) == private.public_key()
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


# The processes.


def answer_to(
    path: str, *, client: str | None, server: str = "198.51.100.1", kind: str = "http"
) -> str:
    """Return "passed" or what the guard said."""
    sent: list[MutableMapping[str, Any]] = []

    async def application(*_: object) -> None:
        sent.append({"type": "passed"})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "path": path,
        "client": client and (client, 1234),
        "server": (server, 8000),
    }
    asyncio.run(processes.RemoteNodesOnly(application)(scope, receive, send))
    return str(sent[0].get("status", sent[0]["type"]))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
        "/v1/fleet",
    ],
)
def test_other_machines_may_not_start_runs_or_register_nodes(path: str) -> None:
    assert answer_to(path, client="203.0.113.9") == "403"
    assert answer_to(path, client="2001:db8::9") == "403"
    assert answer_to(path, client=None) == "403"
    assert answer_to(path, client="not an address") == "403"
    for own in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "198.51.100.1"):
        assert answer_to(path, client=own) == "passed", own


def test_nodes_are_let_in_to_their_interface_alone() -> None:
    assert answer_to("/v1/fleet/pull-messages", client="203.0.113.9") == "passed"
    assert answer_to("/health", client="203.0.113.9") == "passed"
    assert answer_to("/healthy", client="203.0.113.9") == "403"
    assert (
        answer_to("/v1/fleet/pull-messages", client="203.0.113.9", kind="websocket")
        == "websocket.close"
    )
    assert answer_to("/v1/control/../fleet/x", client="203.0.113.9") == "403"


def test_a_node_replaces_every_command_that_runs_what_it_is_sent(tmp_path: Path) -> None:
    constant = pytest.importorskip("flwr.supercore.constant")
    folder = processes.write_commands(tmp_path / "commands")
    commands = {path.name for path in folder.iterdir()}
    assert commands == {*constant.TASK_TYPE_TO_COMMAND.values(), "flower-superexec"}
    refused = subprocess.run([folder / "flwr-agentapp"], capture_output=True, text=True, timeout=20)
    assert refused.returncode == 1
    assert "refused" in refused.stderr
    found = subprocess.run(
        ["sh", "-c", "command -v flwr-clientapp"],
        env=processes.environment(tmp_path, first=[folder]),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert found.stdout.strip() == str(folder / "flwr-clientapp")


def test_the_client_process_never_touches_the_app_it_is_sent() -> None:
    runtime = pytest.importorskip("flwr.supernode.runtime.run_clientapp")
    import dis

    from fedaux.federation.flower_internals.clientapp import REPLACED, guard

    # Whatever reads the bundle in Flower's process goes through a name that is replaced.
    names = {instruction.argval for instruction in dis.get_instructions(runtime.run_clientapp)}
    assert set(REPLACED) <= names
    stand_in = SimpleNamespace(**{name: getattr(runtime, name) for name in REPLACED})
    guard(stand_in)
    assert all(getattr(stand_in, name) is not getattr(runtime, name) for name in REPLACED)
    with pytest.raises(RuntimeError, match="has no install_from_fab"):
        guard(SimpleNamespace())


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return write_trial(tmp_path / "hospitals")


@pytest.mark.chance
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_warm_process_answers_like_a_new_one_and_ends_with_its_node(
    node: Path, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    done = run_program("warm_process.py", str(node), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    socket, *answers = done.stdout.splitlines()
    assert [answer.split()[0] for answer in answers] == ["0", "2", "0"]
    ends = time.monotonic() + 20
    while Path(socket).parent.exists():
        assert time.monotonic() < ends, "the warm process outlives the node"
        time.sleep(0.1)


def test_flower_is_kept_quiet_unless_the_user_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in processes.QUIET:
        monkeypatch.delenv(name, raising=False)
    environment = processes.environment(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert processes.environment(tmp_path)["FLWR_TELEMETRY_ENABLED"] == "1"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    write_folder(tmp_path / "hospitals", recipe="demo", clients=2, trial=True)
    done = federate_command("link", "hospitals", cwd=tmp_path)
    assert done.returncode == 2
    assert "certificates/ca.crt: there is no such file; fedaux federate certificates" in done.stderr
    assert "`fedaux federate init` creates" in federate_command("link", ".", cwd=tmp_path).stderr
    (tmp_path / "ca.crt").touch()
    with pytest.raises(ValueError, match=r"--key .*: there is no such file"):
        processes.node_command(
            tmp_path / "node.toml",
            superlink="a:1",
            certificate=tmp_path / "ca.crt",
            key=tmp_path / "no",
            port=1,
        )
    (tmp_path / "node.key").touch(mode=0o600)
    for wrong in ("server", "server:", ":8000", "server:x"):
        with pytest.raises(ValueError, match="should be HOST:PORT"):
            processes.node_command(
                tmp_path / "node.toml",
                superlink=wrong,
                certificate=tmp_path / "ca.crt",
                key=tmp_path / "node.key",
                port=1,
            )


def test_extras_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[flower,privacy\]'"):
        processes.require_flower()
    with pytest.raises(
        ValueError, match=r"privacy.noise = secure: needs OpenDP, pip install -e '\.\[privacy\]'"
    ):
        processes.require_secure_noise()
