"""The view of a federation's nodes."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.federate_trial import federate_command
from rich.console import Console

from fedaux.federation.status import StatusCallback
from fedaux.federation.watch import read_status, view, watch
from fedaux.running.run_directory import locked


def seen(status: dict[str, Any], *, later: float = 0.0) -> str:
    console = Console(width=140, record=True, file=StringIO())
    console.print(view(status, now=datetime.now(UTC) + timedelta(seconds=later)))
    return console.export_text()


def test_the_board_follows_every_client(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(method=SimpleNamespace(name="fedaux"), seed=0)
    board = StatusCallback(tmp_path, num_clients=4, rounds=5)
    assert {row["state"] for row in read_status(tmp_path)["clients"].values()} == {"unknown"}
    for client in range(3):
        board.seen(client, node_id=2**63 + client, name=f"hospital {client}")
    board.phase(task, 2, "train")
    board.asked([0, 1, 2], what="train", round=1, epochs=4)
    for client in range(3):
        board.answered(client)
    board.asked([0, 1, 2], what="train", round=2, epochs=4)
    board.answered(0)
    board.missing(1, "no answer within 600 s")
    status = read_status(tmp_path)
    assert [row["state"] for row in status["clients"].values()] == [
        "present",
        "missing",
        "busy",
        "unknown",
    ]
    assert status["clients"]["0"]["rounds_answered"] == 2
    assert status["clients"]["2"]["node"] == str(2**63 + 2)
    text = seen(status, later=80)
    assert "running  ·  fedaux, seed 0, round 2 of 5  ·  train" in text
    assert "1 present, 1 busy, 1 missing, 1 unknown" in text
    assert "nothing written for 8" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "no answer within 600 s" in lines["1"]
    assert "train 2, 8" in lines["2"]
    epochs = [lines[client].split("│")[7].strip() for client in "0123"]
    assert epochs == ["8", "4", "4 + 4", "0"]
    assert "never" in lines["3"]

    board.seen(1)  # it comes back
    board.gone([2, 3])
    board.round({"method": "fedaux", "seed": 0, "round": 2, "accuracy": 0.5})
    status = read_status(tmp_path)
    assert [row["state"] for row in status["clients"].values()] == [
        "present",
        "present",
        "missing",
        "unknown",
    ]
    assert status["clients"]["2"]["reason"] == "not connected"
    assert "reason" not in status["clients"]["1"]
    assert "accuracy 50.0 %" in seen(status)
    board.finished()
    assert seen(read_status(tmp_path)).startswith("finished")
    board.failed("the disk is full")
    assert "failed: the disk is full" in seen(read_status(tmp_path))


def test_rejected_answers_and_nodes_that_were_turned_away_are_shown(tmp_path: Path) -> None:
    board = StatusCallback(tmp_path, num_clients=2, rounds=5)
    for client in range(2):
        board.seen(client)
    board.asked([0, 1], what="train", round=1)
    for client in range(2):
        board.answered(client)
    dropped = {"1": "tensor head.weight holds NaN or infinity"}
    row: dict[str, Any] = {"method": "fedaux", "seed": 0, "round": 1, "accuracy": None}
    board.round(row | {"clients_dropped": dropped})
    for number in range(30):
        board.turned_away(number, key="SHA256:abc", reason="claims to be \x1b[2Jclient 0")
    status = read_status(tmp_path)
    assert status["clients"]["1"]["rejected"] == 1
    assert status["clients"]["1"]["state"] == "present"
    assert "rejected" not in status["clients"]["0"]
    assert [row["node"] for row in status["turned_away"]] == [str(n) for n in range(10, 30)]
    text = seen(status)
    assert "tensor head.weight holds NaN" in text
    assert "turned away" in text
    assert "claims to be ?[2Jclient 0" in text
    board.failed("every client refuses")
    done = federate_command("watch", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed: every client refuses" in done.stdout


def test_many_answers_are_not_as_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    board = StatusCallback(tmp_path, num_clients=100, rounds=1)
    monkeypatch.setattr(
        "fedaux.federation.status.save_json", lambda path, value: written.append(path)
    )
    board.asked(range(100), what="train", round=1)
    for client in range(100):
        board.answered(client)
    assert 1 <= len(written) < 50


def test_a_run_whose_process_was_killed_has_failed(tmp_path: Path) -> None:
    """`flwr run` ends with status 0 then, and the status file says "running" for ever."""
    lock = locked(tmp_path)
    StatusCallback(tmp_path, num_clients=2, rounds=1)
    assert federate_command("watch", ".", "--once", cwd=tmp_path).returncode == 0
    lock.close()
    done = federate_command("watch", ".", "--once", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed: the run's process is gone; continue with resume=true" in done.stdout


@pytest.mark.chance
def test_watch_goes_on_until_the_run_ends(tmp_path: Path) -> None:
    lock = locked(tmp_path)
    board = StatusCallback(tmp_path, num_clients=2, rounds=3)
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
    lock.close()
    board.finished()
    looking.join(20)
    assert not looking.is_alive()
    text = shown.getvalue()
    assert "train 1" in text
    assert "finished" in text
    assert text.index("busy") < text.rindex("finished")


def test_watch_says_what_it_cannot_read(tmp_path: Path) -> None:
    done = federate_command("watch", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nowhere/nodes.json: there is no such file")
    (tmp_path / "nodes.json").write_text(json.dumps({"version": 99}))
    assert "has version 99" in federate_command("watch", ".", cwd=tmp_path).stderr
    StatusCallback(tmp_path, num_clients=2, rounds=1).finished()
    done = federate_command("watch", ".", cwd=tmp_path)
    assert done.returncode == 0
    assert "finished  ·  2 unknown" in done.stdout


def test_names_from_the_network_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    board = StatusCallback(tmp_path, num_clients=1, rounds=1)
    board.seen(0, name="\x1b[2J[red]evil")
    text = seen(read_status(tmp_path))
    assert "\x1b" not in text
    assert "[red]evil" in text
