"""What people type around a federation: folder, keys, guarded processes, the view of the nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedaux.composition import tight_composition
from fedaux.config import ConfigError
from fedaux.data import load_labelled
from fedaux.dpsgd import update_entry
from fedaux.engines.flower.node import load_node
from fedaux.engines.flower.policy import Guard
from fedaux.engines.flower.work import own_data
from fedaux.execute import split_for
from fedaux.federate import processes
from fedaux.federate.checking import _score_entry, check_node
from fedaux.federate.folder import port_of, write_folder
from fedaux.federate.keys import write_certificates, write_node_key
from fedaux.federate.status import NodeBoard
from fedaux.federate.watch import read_status, view, watch
from fedaux.reading import load_experiment

ROOT = Path(__file__).parents[1]


def fedaux_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedaux", "federate", *arguments]
    environment = os.environ | {"COLUMNS": "140"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)


# The folder.


def test_a_trial_has_everything_and_its_recipe_is_the_simulators(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "hospitals", recipe="demo", clients=3, trial=True)
    folder = tmp_path / "hospitals"
    assert sorted(path.relative_to(folder).as_posix() for path in files) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    experiment = load_experiment(folder / "app/recipe.toml")
    assert (experiment.name, experiment.method, experiment.seeds) == ("hospitals", ("fedaux",), (0,))
    assert (experiment.split.num_clients, experiment.participation_rate) == (3, 1.0)
    assert experiment.pretraining == load_experiment(ROOT / "recipes/demo.toml").pretraining
    for client in range(3):
        node = tomllib.loads((folder / f"nodes/node-{client}.toml").read_text())
        assert node["client"] == client
        assert node["privacy"]["noise"] == "simulated"
        assert (node["privacy"]["epsilon"], node["privacy"]["delta"]) == (0.5, 1e-5)
        assert node["split"] == {"num_clients": 3, "alpha": 0.01, "seed": 0}
    assert not (folder / "nodes/node-3.toml").exists()
    assert "client" not in tomllib.loads((folder / "nodes/simulation.toml").read_text())
    project = tomllib.loads((folder / "app/pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert set(project["tool"]["flwr"]["app"]["config"]) == {"recipe", "out", "resume", "set"}


def test_without_trial_nodes_read_their_own_data_and_protect_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "hospitals", recipe="demo", clients=2, trial=False)
    node = tomllib.loads((tmp_path / "hospitals/nodes/node-1.toml").read_text())
    assert node["privacy"]["noise"] == "secure"
    assert node["privacy"]["mechanisms"] == ["mean"]
    assert "split" not in node
    assert node["data"]["path"] == "/path/to/your/images"


def test_an_own_recipe_keeps_its_settings_and_its_clients_get_their_paths(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'method = ["fedaux", "fedavg+p"]\nseeds = [0, 1]\nrounds = 2\n[certainty]\nepsilon = 0.25\n'
        '[data]\nsource = "folder"\nimage_size = 16\ntest = "tests"\n'
        'clients = ["/data/a", "/data/b"]\n[local.privacy]\nnoise_multiplier = 2.0\n'
    )
    write_folder(tmp_path / "clinics", recipe=str(tmp_path / "own.toml"), clients=None, trial=False)
    recipe = tomllib.loads((tmp_path / "clinics/app/recipe.toml").read_text())
    assert (recipe["rounds"], recipe["certainty"]["epsilon"]) == (2, 0.25)
    assert "clients" not in recipe["data"]
    assert recipe["split"]["num_clients"] == 2
    assert recipe["name"] == "own"
    node = tomllib.loads((tmp_path / "clinics/nodes/node-1.toml").read_text())
    assert node["data"] == {"source": "folder", "image_size": 16, "path": "/data/b"}
    assert node["privacy"]["epsilon"] == 0.5  # two seeds of the one method that releases scores
    assert node["privacy"]["plain_updates"] is False
    with pytest.raises(ValueError, match=r"--clients 3: the recipe's data.clients names 2"):
        write_folder(tmp_path / "other", recipe=str(tmp_path / "own.toml"), clients=3, trial=False)
    with (tmp_path / "own.toml").open("a") as file:
        file.write("[split]\nnum_clients = 3\n")
    with pytest.raises(ConfigError, match=r"split\.num_clients = 3: data\.clients names 2; should be 2, or left out"):
        write_folder(tmp_path / "other", recipe=str(tmp_path / "own.toml"), clients=None, trial=False)


def test_nothing_is_overwritten_and_names_are_checked(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/note").write_text("mine")
    done = fedaux_command("init", "used", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'used'} is there already, and is not overwritten; choose another name\n"
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["note"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "x"}, "no such file, nor such a recipe"),
        ({"clients": 0}, "--clients 0: should be at least 1"),
        ({"port": 70000}, "--port 70000: should be"),
    ]
    settings: dict[str, Any] = {"recipe": "demo", "clients": 2, "trial": True}
    for changes, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            write_folder(tmp_path / "new", **(settings | changes))
    with pytest.raises(ValueError, match="should be a letter, then"):
        write_folder(tmp_path / "3_hospitals", recipe="demo", clients=2, trial=True)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_the_server_listens_where_flower_will_look(tmp_path: Path) -> None:
    write_folder(tmp_path / "hospitals", recipe="demo", clients=2, trial=True, port=8123)
    assert port_of(tmp_path / "hospitals", simulation=False) == 8123
    assert port_of(tmp_path / "hospitals", simulation=True) == 8223


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_builds_the_app_and_no_secret_travels(tmp_path: Path) -> None:
    build = pytest.importorskip("flwr.cli.build")
    import io
    import zipfile

    write_folder(tmp_path / "hospitals", recipe="demo", clients=3, trial=True)
    bundle = zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(tmp_path / "hospitals/app")))
    names = {name for name in bundle.namelist() if not name.startswith(".info")}
    modules = {f"fedaux_app/{name}.py" for name in ("__init__", "server_app", "client_app")}
    assert names == {"pyproject.toml", "recipe.toml", *modules}


# What a node would do.


@pytest.fixture
def node(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hospitals", recipe="demo", clients=3, trial=True)
    return tmp_path / "hospitals/nodes/node-1.toml"


def changed(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def text_of(parts: list[Any]) -> str:
    console = Console(width=140, record=True, file=StringIO())
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return console.export_text()


def test_check_says_what_a_node_holds_and_what_would_leave_it(node: Path) -> None:
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    text = text_of(said)
    experiment = load_experiment(node.parents[1] / "app/recipe.toml")
    labelled = load_labelled(experiment.data)
    held = np.asarray(labelled.labels)[split_for(experiment, labelled, 0)[1]]
    assert willing
    assert f"Client 1: {len(held)} examples, images 1 x 8 x 8" in text
    for label, count in zip(*np.unique(held, return_counts=True), strict=True):
        assert re.search(rf"│ {label} +│ +{count} │", text)
    assert "NOT PRIVATE: privacy.noise = simulated" in text
    assert "A trial: [split] gives this node" in text
    assert "(ε, δ) = (0.5, 1e-05), 1 time, one a seed" in text
    assert "Within the budget: together ε = 0.5 at δ = 1e-05." in text
    assert not (node.parent / "state-1").exists()  # looking leaves nothing behind


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("epsilon = 0.5", "epsilon = 0.4", "certainty.epsilon = 0.5: this node's budget is 0.4"),
        ('["mean"]', '["paper"]', "certainty.mechanism = mean: this node allows paper"),
        ("plain_updates = true", "plain_updates = false", "updates without DP-SGD do not leave this node"),
    ],
)
def test_check_foretells_a_refusal(node: Path, old: str, new: str, reason: str) -> None:
    changed(node, old, new)
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    assert not willing
    assert f"REFUSED: {reason}" in text_of(said)
    assert check_node(node)[1]  # of itself, nothing is wrong with the node


def test_check_counts_what_was_spent_before_and_what_training_would_cost(node: Path) -> None:
    pytest.importorskip("dp_accounting")
    config = load_node(node)
    entry = _score_entry(load_experiment(node.parents[1] / "app/recipe.toml"), config.number, 474)
    Guard(config).store_release("0" * 64, torch.zeros(3), entry)
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    assert not willing
    assert "of which 0.5 is spent (1 releases" in text_of(said)
    assert "REFUSED: all of it" in text_of(said)

    (node.parents[1] / "dp.toml").write_text(
        'method = ["fedavg"]\nrounds = 4\n[split]\nnum_clients = 3\n[local.privacy]\nnoise_multiplier = 40.0\n'
    )
    changed(node, "epsilon = 0.5", "epsilon = 5.0")
    said, willing = check_node(node, recipe=str(node.parents[1] / "dp.toml"))
    experiment = load_experiment(node.parents[1] / "dp.toml")
    examples = len(own_data(config).labels)
    update = update_entry(experiment.local, num_examples=examples, client=1, noise="simulated")
    assert willing
    assert f"together ε = {tight_composition([entry, *[update] * 4], delta=1e-5):.4g} " in text_of(said)


def test_the_exit_status_of_check_is_the_nodes_answer(node: Path) -> None:
    changed(node, "epsilon = 0.5", "epsilon = 0.4")
    done = fedaux_command("check", str(node), "--recipe", str(node.parents[1] / "app/recipe.toml"), cwd=node.parent)
    assert done.returncode == 1
    assert "REFUSED: certainty.epsilon = 0.5: this node's budget is 0.4" in done.stdout


def test_check_tells_all_mistakes_at_once(node: Path) -> None:
    changed(node, "epsilon = 0.5", "epsilonn = 0.5")
    changed(node, 'noise = "simulated"', 'noise = "loud"')
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*did you mean privacy.epsilon\?"):
        check_node(node)


# Keys and certificates.


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
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
def test_tls_takes_the_certificate_for_every_name(certificates: Path, name: str) -> None:
    handshake(certificates, authority=certificates / "ca.crt", name=name)


def test_tls_refuses_other_names_and_other_authorities(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(certificates, authority=certificates / "ca.crt", name="elsewhere.example")
    write_certificates(tmp_path / "other", hosts=["server.example"], days=30)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certificates, authority=tmp_path / "other/ca.crt", name="server.example")


def test_private_keys_are_private_and_nothing_is_overwritten(certificates: Path, tmp_path: Path) -> None:
    write_node_key(tmp_path / "node.key", comment="a")
    for key in (certificates / "ca.key", certificates / "server.key", tmp_path / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    before = (certificates / "ca.crt").read_bytes(), (tmp_path / "node.key").read_bytes()
    with pytest.raises(ValueError, match=r"ca.crt is there already"):
        write_certificates(certificates, hosts=["server.example"], days=30)
    with pytest.raises(ValueError, match=r"node.key is there already"):
        write_node_key(tmp_path / "node.key")
    assert ((certificates / "ca.crt").read_bytes(), (tmp_path / "node.key").read_bytes()) == before


def test_renewal_keeps_the_authority_that_nodes_have(certificates: Path) -> None:
    authority, old = (certificates / "ca.crt").read_bytes(), (certificates / "server.pem").read_bytes()
    write_certificates(certificates, hosts=["new.example"], days=30, renew=True)
    assert (certificates / "ca.crt").read_bytes() == authority
    assert (certificates / "server.pem").read_bytes() != old
    handshake(certificates, authority=certificates / "ca.crt", name="new.example")
    (certificates / "ca.key").unlink()
    with pytest.raises(ValueError, match=r"ca.key: there is no such file; --renew"):
        write_certificates(certificates, hosts=["new.example"], days=30, renew=True)


@pytest.mark.parametrize("host", ["https://server", "server:8000", "", "a..b", "sérver"])
def test_names_of_servers_are_names(host: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(ValueError, match="should be a host name or an address"):
        write_certificates(tmp_path / "certificates", hosts=[host], days=30)


def test_node_keys_are_what_flower_reads(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    public = write_node_key(tmp_path / "node.key", comment="hospital")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert load_ssh_public_key(public.read_bytes()) == private.public_key()
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


# The guards.


def answer_to(path: str, *, client: str | None, server: str = "198.51.100.1", kind: str = "http") -> str:
    """Return "passed" or what the guard said."""
    sent: list[MutableMapping[str, Any]] = []

    async def application(*_: object) -> None:
        sent.append({"type": "passed"})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client and (client, 1234), "server": (server, 8000)}
    asyncio.run(processes.FromOutsideFleetOnly(application)(scope, receive, send))
    return str(sent[0].get("status", sent[0]["type"]))


@pytest.mark.parametrize(
    "path",
    ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet"],
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
    assert answer_to("/v1/fleet/pull-messages", client="203.0.113.9", kind="websocket") == "websocket.close"
    assert answer_to("/v1/control/../fleet/x", client="203.0.113.9") == "403"


def test_a_node_replaces_every_command_that_runs_what_it_is_sent(tmp_path: Path) -> None:
    constant = pytest.importorskip("flwr.supercore.constant")
    folder = processes.write_commands(tmp_path / "commands")
    assert {path.name for path in folder.iterdir()} == set(constant.TASK_TYPE_TO_COMMAND.values())
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

    from fedaux.federate.clientapp import REPLACED, guard

    # Whatever reads the bundle in Flower's process goes through a name that is replaced.
    names = {instruction.argval for instruction in dis.get_instructions(runtime.run_clientapp)}
    assert set(REPLACED) <= names
    stand_in = SimpleNamespace(**{name: getattr(runtime, name) for name in REPLACED})
    guard(stand_in)
    assert all(getattr(stand_in, name) is not getattr(runtime, name) for name in REPLACED)
    with pytest.raises(RuntimeError, match="has no install_from_fab"):
        guard(SimpleNamespace())


PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from fedaux.federate import processes, warm
folder = processes.write_commands(Path("commands"))
cold = subprocess.run([folder / "flwr-clientapp", "--help"], capture_output=True, text=True)
assert cold.returncode == 0 and "Run a Flower ClientApp" in cold.stdout, cold
own = os.environ | warm.start(Path(sys.argv[1]))
print(own["FEDAUX_WARM"])
said = []
for arguments in (["--help"], ["--no-such-option"], ["--help"]):
    began = time.monotonic()
    done = subprocess.run([folder / "flwr-clientapp", *arguments], env=own, capture_output=True, text=True)
    print(done.returncode, round(time.monotonic() - began, 3))
    said.append(done.stdout + done.stderr)
assert said[0] == said[2] == cold.stdout
assert "flwr-clientapp: error: " in said[1], said[1]
arguments = ["--insecure", "--token", "x", "--runtime-api-address", "192.0.2.1:9"]
hanging = subprocess.Popen([folder / "flwr-clientapp", *arguments], env=own, stderr=subprocess.DEVNULL)
def forks():
    warm_processes = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [f for p in warm_processes for f in Path(f"/proc/{p}/task/{p}/children").read_text().split()]
while not forks():
    time.sleep(0.05)
hanging.kill(); hanging.wait()
ends = time.monotonic() + 20
while forks():
    assert time.monotonic() < ends, "the fork outlives the process that asked"
    time.sleep(0.05)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_warm_process_answers_like_a_new_one_and_ends_with_its_node(node: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(node)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    socket, *answers = done.stdout.splitlines()
    assert [answer.split()[0] for answer in answers] == ["0", "2", "0"]
    ends = time.monotonic() + 20
    while Path(socket).parent.exists():
        assert time.monotonic() < ends, "the warm process outlives the node"
        time.sleep(0.1)


def test_flower_is_kept_quiet_unless_the_user_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    done = fedaux_command("link", "hospitals", cwd=tmp_path)
    assert done.returncode == 2
    assert "certificates/ca.crt: there is no such file; fedaux federate certificates" in done.stderr
    assert "`fedaux federate init` makes the folder" in fedaux_command("link", ".", cwd=tmp_path).stderr
    (tmp_path / "ca.crt").touch()
    with pytest.raises(ValueError, match=r"--key .*: there is no such file"):
        processes.node_command(
            tmp_path / "node.toml", superlink="a:1", certificate=tmp_path / "ca.crt", key=tmp_path / "no", port=1
        )
    (tmp_path / "node.key").touch()
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
    with pytest.raises(ValueError, match=r"pip install 'fedaux\[flower,privacy\]'"):
        processes.require_flower()
    with pytest.raises(ValueError, match=r"privacy.noise = secure: needs OpenDP, pip install 'fedaux\[privacy\]'"):
        processes.require_secure_noise()


# The view of the nodes.


def seen(status: dict[str, Any], *, later: float = 0.0) -> str:
    console = Console(width=140, record=True, file=StringIO())
    console.print(view(status, now=datetime.now(UTC) + timedelta(seconds=later)))
    return console.export_text()


def test_the_board_follows_every_client(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(method=SimpleNamespace(name="fedaux"), seed=0)
    board = NodeBoard(tmp_path, num_clients=4, rounds=5)
    assert {row["state"] for row in read_status(tmp_path)["clients"].values()} == {"unknown"}
    for client in range(3):
        board.seen(client, node_id=2**63 + client, name=f"hospital {client}")
    board.phase(task, 2, "train")
    board.asked([0, 1, 2], what="train", round=2)
    board.answered(0)
    board.missing(1, "no answer within 600 s")
    status = read_status(tmp_path)
    assert [row["state"] for row in status["clients"].values()] == ["present", "missing", "busy", "unknown"]
    assert status["clients"]["0"]["rounds_answered"] == 1
    assert status["clients"]["2"]["node"] == str(2**63 + 2)
    text = seen(status, later=90)
    assert "running  ·  fedaux, seed 0, round 2 of 5  ·  train" in text
    assert "1 present, 1 busy, 1 missing, 1 unknown" in text
    assert "nothing written for 9" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "no answer within 600 s" in lines["1"]
    assert "train 2, 9" in lines["2"]
    assert "never" in lines["3"]

    board.seen(1)  # it comes back
    board.gone([2, 3])
    board.round({"method": "fedaux", "seed": 0, "round": 2, "accuracy": 0.5})
    status = read_status(tmp_path)
    assert [row["state"] for row in status["clients"].values()] == ["present", "present", "missing", "unknown"]
    assert status["clients"]["2"]["reason"] == "not connected"
    assert "reason" not in status["clients"]["1"]
    assert "accuracy 50.0 %" in seen(status)
    board.finished()
    assert seen(read_status(tmp_path)).startswith("finished")
    board.failed("the disk is full")
    assert "failed: the disk is full" in seen(read_status(tmp_path))


def test_many_answers_are_not_as_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    board = NodeBoard(tmp_path, num_clients=100, rounds=1)
    monkeypatch.setattr("fedaux.files.save_json", lambda path, value: written.append(path))
    board.asked(range(100), what="train", round=1)
    for client in range(100):
        board.answered(client)
    assert 1 <= len(written) < 50


def test_watch_goes_on_until_the_run_ends(tmp_path: Path) -> None:
    board = NodeBoard(tmp_path, num_clients=2, rounds=3)
    shown = StringIO()
    looking = threading.Thread(
        target=watch,
        args=(tmp_path, Console(file=shown, force_terminal=True, width=120)),
        kwargs={"once": False, "every": 0.05},
    )
    looking.start()
    board.seen(0, name="north")
    board.asked([0], what="train", round=1)
    time.sleep(0.3)
    assert looking.is_alive()
    board.answered(0)
    board.finished()
    looking.join(20)
    assert not looking.is_alive()
    text = shown.getvalue()
    assert "train 1" in text
    assert "finished" in text
    assert text.index("busy") < text.rindex("finished")


def test_watch_says_what_it_cannot_read(tmp_path: Path) -> None:
    done = fedaux_command("watch", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nowhere/nodes.json: there is no such file")
    (tmp_path / "nodes.json").write_text(json.dumps({"version": 99}))
    assert "is of version 99" in fedaux_command("watch", ".", cwd=tmp_path).stderr
    NodeBoard(tmp_path, num_clients=2, rounds=1).finished()
    done = fedaux_command("watch", ".", cwd=tmp_path)
    assert done.returncode == 0
    assert "finished  ·  2 unknown" in done.stdout


def test_names_from_the_network_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    board = NodeBoard(tmp_path, num_clients=1, rounds=1)
    board.seen(0, name="\x1b[2J[red]evil")
    text = seen(read_status(tmp_path))
    assert "\x1b" not in text
    assert "[red]evil" in text
