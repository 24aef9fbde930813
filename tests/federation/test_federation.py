"""Federations of real processes on loopback, with TLS and node keys: parity, faults, bytes. `make
test-federation`."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import TINY
from helpers.paths import PROGRAMS

import fedaux
from fedaux.recipes import merged

pytest.importorskip("flwr", reason="needs the extra flower")
from helpers.harness import Federation, free_port, wait_for
from helpers.proxy import CountingProxy

pytestmark = pytest.mark.federation

HOSTILE = PROGRAMS / "hostile"
TELLS = (
    "accuracy",
    "loss",
    "local_loss",
    "clients_answered",
    "clients_dropped",
    "bytes_up",
    "bytes_down",
)
PATIENCE = 600.0
"""Seconds after which a test gives up; on an idle machine none takes a third of it."""


def recipe(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "tiny",
        "seeds": [0],
        "split": {"num_clients": 3, "alpha": 1.0},
        "federation": {"wait_seconds": 400.0, "deadline": 300.0},
        "engine": {"clients_at_once": 1},
    }
    return merged(merged(TINY, base), changes)


def simulated(settings: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    fedaux.run(fedaux.Experiment(**settings), out=out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(real: list[dict[str, Any]], simulation: list[dict[str, Any]]) -> None:
    assert len(real) == len(simulation)
    for one, other in zip(real, simulation, strict=True):
        assert {key: one[key] for key in TELLS} == {key: other[key] for key in TELLS}


def hostile(fault: str) -> dict[str, str]:
    paths = [str(HOSTILE), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "FEDAUX_FAULT": fault}


def test_three_nodes_over_tls_come_to_the_simulators_figures(tmp_path: Path) -> None:
    """With two methods; one lets clients rehearse public images, which cross once."""
    settings = recipe(method=["fedaux", "fedaux2"], rounds=2, rehearsal={"examples": 60})
    expected = simulated(settings, tmp_path / "simulated")
    with Federation(tmp_path / "trial", settings) as federation:
        began = time.monotonic()
        federation.start()
        # Somebody with a certificate of the right authority, and a key that nobody has registered.
        stranger = federation.folder / "stranger.key"
        from fedaux.federation.keys import write_node_key

        write_node_key(stranger)
        federation.ports[9] = free_port()
        (federation.folder / "nodes" / "node-9.toml").write_text(
            (federation.folder / "nodes" / "node-0.toml").read_text().replace("state-0", "state-9")
        )
        federation.start_node(9, key=stranger)
        federation.run()
        federation.wait_for_end(PATIENCE)
        print(f"three nodes, two methods: {time.monotonic() - began:.0f} s")
        same(federation.rows(), expected)
        assert [len(federation.ledger(client)) for client in range(3)] == [2, 2, 2]
        for client in range(3):
            (file,) = federation.folder.rglob(f"client-{client:05d}/rehearsed-*.safetensors")
            assert file.stat().st_size >= 60 * 64
        assert not federation.ledger(9)
        log = (federation.folder / "node-9.log").read_text()
        assert "SuperNode ID" not in log  # it was never let in
        nodes = json.loads((federation.out / "federation.json").read_text())["nodes"]
        public = [
            (federation.folder / f"node-{client}.key.pub").read_text().split()[1]
            for client in range(3)
        ]
        assert [nodes[str(client)].split()[1] for client in range(3)] == public
        assert (federation.out / "report.html").is_file()
        kept_private(federation.folder)
        wait_for(lambda: not left_in(federation.folder), 60, "the database forgets the answers")


def test_two_of_three_nodes_are_chosen_and_one_never_says_a_word(tmp_path: Path) -> None:
    """It is connected, and answers no greeting either: the others are chosen without it."""
    settings = recipe(
        rounds=3,
        participation_rate=0.67,
        federation={"wait_for": 2, "wait_seconds": 400.0, "deadline": 60.0},
    )
    with Federation(tmp_path / "trial", settings) as federation:
        federation.start(but=(1,))
        federation.start_node(1, env=hostile("mute"))
        federation.run()
        federation.wait_for_end(PATIENCE)
        rows = federation.rows()
        assert [row["round"] for row in rows] == [1, 2, 3]
        assert all(row["clients_answered"] == [0, 2] for row in rows)
        assert all(1 in row["clients_absent"] for row in rows)
        assert [len(federation.ledger(client)) for client in (0, 2)] == [1, 1]


def kept_private(folder: Path) -> None:
    """All but what this test itself writes is readable by its owner alone, and the bytecode of the
    app, which Flower compiles and which holds no data."""
    own = {".log", ".key", ".pub", ".toml"}
    for path in folder.rglob("*"):
        compiled = "__pycache__" in path.parts
        if path.suffix not in own and not path.is_symlink() and not compiled:
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def left_in(folder: Path) -> list[str]:
    """What of the clients' answers can be read in the server's database."""
    content = b"".join(file.read_bytes() for file in (folder / "flower").glob("link.db*"))
    return [word for word in ("data_offsets", "num_examples") if word.encode() in content]


def test_rounds_go_on_without_nodes_that_die_or_are_silent_and_with_late_ones(
    tmp_path: Path,
) -> None:
    """Client 0 is honest, 1 is killed in the first round, 2 never answers, 3 joins during the first
    round."""
    settings = recipe(
        rounds=8,
        split={"num_clients": 4, "alpha": 1.0},
        federation={"deadline": 60.0, "wait_for": 3, "wait_seconds": 400.0},
    )
    with Federation(tmp_path / "trial", settings) as federation:
        federation.start(but=(1, 2, 3))
        federation.start_node(1, env=hostile("slow"))
        federation.start_node(2, env=hostile("silent"))
        federation.run()

        def in_training() -> bool:
            file = federation.out / "nodes.json"
            clients = json.loads(file.read_text())["clients"] if file.exists() else {}
            return bool(clients) and clients["1"].get("doing") == "train"

        wait_for(in_training, PATIENCE, "the first round has begun", federation.logs)
        time.sleep(10)  # the message has arrived and is being worked on
        federation.kill("node-1")
        federation.start_node(3)  # while the others' deadline passes
        federation.wait_for_end(PATIENCE)
        rows = federation.rows()
        assert [row["round"] for row in rows] == list(range(1, 9))
        assert rows[0]["clients_asked"] == [0, 1, 2]
        assert rows[0]["clients_answered"] == [0]
        dropped = rows[0]["clients_dropped"]
        assert dropped["1"] in {"the node is disconnected", "no answer within 60 s"}
        assert dropped["2"] == "no answer within 60 s"
        # The silent node is connected, but nobody waits for it again: it would have to answer a
        # greeting first.
        assert all({1, 2} <= set(row["clients_absent"]) for row in rows[1:])
        assert 3 in rows[0]["clients_absent"]
        assert any(3 in row["clients_answered"] for row in rows[1:])
        assert len(federation.ledger(3)) == 1


def test_rubbish_is_refused_and_named(tmp_path: Path) -> None:
    settings = recipe(rounds=1, method=["fedavg"], split={"num_clients": 4, "alpha": 1.0})
    with Federation(tmp_path / "trial", settings) as federation:
        federation.start(but=(1, 2, 3))
        for client, fault in {1: "nan", 2: "shape", 3: "other"}.items():
            federation.start_node(client, env=hostile(fault))
        federation.run()
        federation.wait_for_end(PATIENCE)
        (row,) = federation.rows()
        assert row["clients_answered"] == [0]
        assert "holds NaN or infinity" in row["clients_dropped"]["1"]
        assert "bytes, which is not float32 [1000000000, 1000000000]" in row["clients_dropped"]["2"]
        assert row["clients_dropped"]["3"] == "answers as client 0"


def test_a_server_killed_twice_loses_nothing_and_spends_nothing_twice(tmp_path: Path) -> None:
    settings = recipe(split={"num_clients": 2, "alpha": 1.0})
    expected = simulated(settings, tmp_path / "simulated")
    with Federation(tmp_path / "trial", settings) as federation:
        federation.start()
        federation.run()
        # In the preparation: somebody has released already, and the server has not written it down.
        wait_for(
            lambda: federation.ledger(0) or federation.ledger(1),
            PATIENCE,
            "a release",
            federation.logs,
        )
        federation.kill("link")
        prepared = (federation.out / "cells" / "fedaux-seed0" / "state.json").exists()
        federation.kill("node-0")  # and a node is started anew at the same time
        federation.start_link()
        federation.restart_node(0)
        federation.run(resume=True)
        federation.wait_for_rounds(1, PATIENCE)
        time.sleep(2)  # into the next round
        federation.kill("link")
        kept = federation.rows()
        federation.start_link()
        federation.run(resume=True)
        federation.wait_for_end(PATIENCE)
        print(f"killed in the preparation (saved: {prepared}) and after round {len(kept)}")
        same(federation.rows(), expected)
        assert federation.rows()[: len(kept)] == kept
        assert [len(federation.ledger(client)) for client in range(2)] == [1, 1]


def test_bytes_of_one_node_are_the_simulators_account_and_its_figures_the_same(
    tmp_path: Path,
) -> None:
    """A model of 10 MB, counted at the socket: what Flower and TLS add must stay below 5 %."""
    settings = recipe(
        rounds=1,
        method=["fedavg"],
        split={"num_clients": 1, "alpha": 1.0},
        prototypes=[{"name": "resnet8", "model": "resnet8", "options": {}}],
        data={"size": 36, "test_fraction": 0.98},
        federation={"wire": "fp16"},
    )
    expected = simulated(settings, tmp_path / "simulated")
    with Federation(tmp_path / "trial", settings) as federation:
        federation.start(but=(0,))
        proxy = CountingProxy(federation.port)
        federation.start_node(0, superlink=f"127.0.0.1:{proxy.port}")
        federation.run()
        federation.wait_for_end(PATIENCE)
        proxy.close()
        (row,) = federation.rows()
        print(
            f"up {proxy.up} of {row['bytes_up']}, down {proxy.down} of "
            f"{row['bytes_down']}, {row['seconds']}"
        )
        same([row], expected)
        assert row["bytes_up"] > 9.5e6
        assert row["bytes_up"] <= proxy.up < 1.05 * row["bytes_up"]
        assert row["bytes_down"] <= proxy.down < 1.05 * row["bytes_down"]
