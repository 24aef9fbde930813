"""The record of what left a node: complete, chained, and found out where it was tampered with."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import tiny
from helpers.federate_trial import federate_command

from fedaux.federation.node import NodeConfig, load_node
from fedaux.federation.policy import Guard
from fedaux.privacy.ledger import SCORES, LedgerEntry

ENTRY = LedgerEntry(3, 100, "mean", SCORES, 0.02, 0.5, 0.1, 1e-5, "secure")


def node(folder: Path) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text('client = 3\nclasses = ["a"]\n[data]\nsource = "digits"\n')
    return load_node(file)


def send(config: NodeConfig, number: int, *, entry: LedgerEntry | None = None) -> None:
    """Record a release that costs something, or an update that does not."""
    guard = Guard(config)
    with guard.alone():
        if entry is not None:
            guard.store_release(f"{number}", torch.zeros(1), entry, run="r")
        guard.record_sent(
            kind="release" if entry else "update",
            request=f"{number}",
            run="r fedaux 0",
            round=None if entry else number,
            data=b"tensors",
            entry=entry,
        )


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    own = node(tmp_path)
    send(own, 0, entry=ENTRY)
    send(own, 1)
    send(own, 2)
    return own


def test_everything_that_left_is_there_with_time_size_and_digest(config: NodeConfig) -> None:
    lines = Guard(config).sent_lines()
    assert [line["number"] for line in lines] == [1, 2, 3]
    assert [line["round"] for line in lines] == [None, 1, 2]
    assert {line["digest"] for line in lines} == {hashlib.sha256(b"tensors").hexdigest()}
    assert {line["bytes"] for line in lines} == {7}
    assert {line["policy"] for line in lines} == {config.digest}
    assert Guard(config).problems() == []
    assert (config.folder / "sent.jsonl").stat().st_mode & 0o077 == 0


def cut(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))


def cut_the_first(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def edited(file: Path) -> None:
    file.write_text(file.read_text().replace('"bytes": 7', '"bytes": 8', 1))


def added(file: Path) -> None:
    line = file.read_text().splitlines()[-1]
    held = json.loads(line)
    held |= {"number": 4, "previous": hashlib.sha256(line.encode()).hexdigest()}
    with file.open("a") as opened:
        opened.write(json.dumps(held) + "\n")


def removed(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("change", [cut, cut_the_first, edited, added, removed])
def test_a_changed_record_is_found_out(config: NodeConfig, change: Any) -> None:
    change(config.folder / "sent.jsonl")
    assert Guard(config).problems()


@pytest.mark.parametrize("change", [cut, added, removed])
def test_a_node_whose_record_was_cut_sends_nothing(config: NodeConfig, change: Any) -> None:
    change(config.folder / "sent.jsonl")
    with (
        pytest.raises(ValueError, match="one of the two files was cut, edited or rolled back"),
        Guard(config).alone(),
    ):
        pytest.fail("the node goes on")


def test_a_ledger_that_is_rolled_back_or_removed_is_found_out(config: NodeConfig) -> None:
    ledger = config.folder / "ledger.json"
    old = ledger.read_text()
    send(config, 3, entry=ENTRY)
    ledger.write_text(old)
    assert "ends with line 4, and ledger.json holds line 3" in " ".join(Guard(config).problems())
    with pytest.raises(ValueError, match="rolled back"), Guard(config).alone():
        pytest.fail("the node goes on")
    ledger.unlink()
    with pytest.raises(ValueError, match="rolled back"), Guard(config).alone():
        pytest.fail("the node goes on")


def test_a_cost_that_is_taken_out_of_the_ledger_is_found_out(config: NodeConfig) -> None:
    ledger = config.folder / "ledger.json"
    held = json.loads(ledger.read_text())
    held["spent"] = []
    ledger.write_text(json.dumps(held))
    assert "line 1: its cost is not in ledger.json" in " ".join(Guard(config).problems())


def test_both_rolled_back_are_found_out_by_a_hash_that_was_noted(config: NodeConfig) -> None:
    files = [config.folder / name for name in ("ledger.json", "sent.jsonl")]
    old = [file.read_text() for file in files]
    send(config, 3, entry=ENTRY)
    noted = Guard(config).head()
    assert Guard(config).problems(noted=noted) == []
    for file, text in zip(files, old, strict=True):
        file.write_text(text)
    assert Guard(config).problems() == []  # nothing on this disk can tell
    assert "rolled back or replaced" in Guard(config).problems(noted=noted)[0]


@pytest.mark.parametrize("torn", [0, 40])
def test_an_interruption_between_the_two_files_is_mended(
    config: NodeConfig, torn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def stop(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:torn])
        raise OSError("the machine stops here")

    monkeypatch.setattr(os, "write", stop)
    with pytest.raises(OSError, match="stops here"):
        send(config, 3)
    monkeypatch.undo()
    assert Guard(config).problems() == []
    send(config, 4)
    assert [line["round"] for line in Guard(config).sent_lines()] == [None, 1, 2, 3, 4]
    assert Guard(config).problems() == []


def test_a_ledger_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    config = node(tmp_path)
    config.folder.mkdir(parents=True)
    row = {"kind": "release", "request": "0", "when": "", "entry": ENTRY.to_json()}
    (config.folder / "ledger.json").write_text(json.dumps({"version": 1, "spent": [row]}))
    send(config, 1)
    assert Guard(config).problems() == []
    assert len(Guard(config).sent_lines()) == 1


def test_the_command_shows_and_verifies(config: NodeConfig, tmp_path: Path) -> None:
    done = federate_command("ledger", "node.toml", cwd=tmp_path)
    assert done.returncode == 0
    assert "3 answers left" in done.stdout
    assert Guard(config).head() in done.stdout
    rows = federate_command("ledger", "node.toml", "--json", cwd=tmp_path).stdout
    assert [json.loads(row)["number"] for row in rows.splitlines()] == [1, 2, 3]
    assert federate_command("ledger", "node.toml", "--noted", "0" * 63, cwd=tmp_path).returncode
    cut(config.folder / "sent.jsonl")
    done = federate_command("ledger", "node.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert "one of the two files was cut, edited or rolled back" in done.stderr


def test_every_update_of_a_run_is_recorded_before_it_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    from helpers.loopback import LoopbackGrid, write_nodes

    from fedaux.federation.server import federate

    caplog.set_level("INFO", "fedaux.node")
    experiment = tiny(
        rounds=2,
        split={"num_clients": 1, "alpha": 1.0},
        federation={"authenticated": False},
        engine={"clients_at_once": 1},
    )
    files = write_nodes(tmp_path / "nodes", experiment)
    grid = LoopbackGrid(files)
    left: list[tuple[int, str]] = []

    def listen(reply: Any) -> Any:
        for record in ("release", "weights"):
            if record in reply.content:
                data = reply.content[record]["tensors"].data
                left.append((len(data), hashlib.sha256(data).hexdigest()))
        return reply

    grid.change = {1000: listen}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    guard = Guard(load_node(files[1000]))
    lines = guard.sent_lines()
    assert [(line["bytes"], line["digest"]) for line in lines] == left
    assert [(line["kind"], line["round"]) for line in lines] == [
        ("release", None),
        ("update", 1),
        ("update", 2),
    ]
    token = json.loads((tmp_path / "run" / "federation.json").read_text())["run"]
    assert {line["run"] for line in lines} == {f"{token} fedaux 0"}
    assert guard.problems() == []
    logged = [record.message for record in caplog.records if record.name == "fedaux.node"]
    assert logged[0].startswith(
        f"run {token} plans 1 releases of certainty scores by mean, epsilon = 1 at delta = 1e-05 "
        "each; 2 updates without differential privacy; public data: "
    )
    assert "certainty scores by mean; epsilon = 1 at delta = 1e-05; total epsilon = 1" in logged[1]
    assert "update of round 2, without differential privacy; total epsilon = 1" in logged[-1]
    assert guard.head() in logged[-1]
