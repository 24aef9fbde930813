"""A node's process: what it says and when it ends, where Flower's own would stay silent."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import TINY
from helpers.paths import PROGRAMS

from fedaux.recipes import merged

pytest.importorskip("flwr", reason="needs the extra flower")
from helpers.harness import Federation, wait_for
from helpers.own_authority import write as write_own_certificates

from fedaux.federation.certificates import connection_lines
from fedaux.federation.flower_internals import supernode
from fedaux.federation.keys import write_certificates
from fedaux.federation.logs import JsonLines, Lines

NOW = datetime(2026, 11, 16, 12, 0, 0, tzinfo=UTC)


def stated(seconds_ahead: float) -> dict[str, str]:
    """Return the headers of a server's answer, seen from a clock that is ahead of it."""
    return {"date": format_datetime(NOW - timedelta(seconds=seconds_ahead), usegmt=True)}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(12, "12 s ahead of the server's"), (-400, "400 s behind the server's")],
)
def test_a_wrong_clock_is_told_from_a_wrong_key(seconds: float, words: str) -> None:
    ahead = supernode.ahead_of(stated(seconds), now=NOW)
    assert ahead == seconds
    said = supernode.refused(401, {}, "", skew=ahead)
    assert said is not None
    assert words in said
    assert "up to 5 s ahead and 305 s behind" in said
    for skew in (1.0, -200.0, None):
        key = supernode.refused(401, {}, "", skew=skew)
        assert key is not None
        assert "key is not registered any more" in key
    assert supernode.refused(200, {}, "", skew=ahead) is None


def test_reasons_why_a_node_cannot_join_are_told_apart() -> None:
    unknown, in_use = (
        supernode.refused(412, {}, json.dumps({"code": 1, "detail": "", "extra": extra}), skew=0.0)
        for extra in (supernode.UNREGISTERED, supernode.IN_USE)
    )
    assert unknown is not None
    assert "does not know this node's key" in unknown
    assert "fedaux federate register" in unknown  # Flower's own command binds no client's number
    assert in_use is not None
    assert "is in use" in in_use
    message = "SuperLink version 1.41.0 detected a mismatch: received SuperNode version 1.42.0."
    said = supernode.refused(200, {supernode.VERSION_HEADER: message}, "", skew=0.0)
    assert said is not None
    assert "1.41.0" in said
    assert "1.42.0" in said
    for text in ("", "[" * 100_000, "[]", "{}"):
        assert supernode.refused(412, {}, text, skew=0.0) is None


def test_a_clock_that_drifts_is_told_once_before_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = supernode.Watch(None, "")
    for ahead in [3] * 9 + [0] + [4] * 9:  # under load, an answer states an old time
        watch.look(200, stated(ahead), "", asked=NOW)
    assert not caplog.messages
    for ahead in [3] * 20 + [0] * 10 + [-100] * 20:
        watch.look(200, stated(ahead), "", asked=NOW)
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "this machine's clock is 3 s ahead of the server's",
        "this machine's clock is 100 s behind the server's",
    ]


def test_a_changed_policy_is_told_while_the_node_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import hashlib

    file = tmp_path / "node.toml"
    file.write_text("client = 0\n")
    watch = supernode.Watch(file, hashlib.sha256(file.read_bytes()).hexdigest())
    for _ in range(2):
        watch.look(200, {}, "", asked=NOW)
    assert not caplog.messages
    file.write_text("client = 12\n")
    for _ in range(2):
        watch.look(200, {}, "", asked=NOW)
    assert caplog.messages == [f"{file} changed; restart to apply"]


@pytest.mark.chance
@pytest.mark.slow
def test_a_node_ends_where_flower_gives_up_and_stays(tmp_path: Path) -> None:
    """Flower's command returns after a failed handshake, and its threads keep the process alive."""
    program = """
import threading, time
import flwr.supernode.cli as cli
from fedaux.federation.flower_internals import supernode
def give_up():
    threading.Thread(target=time.sleep, args=(600,)).start()
cli.flower_supernode = give_up
supernode.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "the connection to the server failed and Flower gave up" in done.stderr
    program = program.replace("time.sleep, args=(600,)", "lambda: 1 / 0")
    program = program.replace(".start()", ".start(); time.sleep(600)")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "a part of the node failed: division by zero" in done.stderr


def test_a_process_of_a_node_ends_after_it() -> None:
    program = """
import sys
from fedaux.federation.flower_internals import supernode
supernode._end_with_node()
"""
    command = [sys.executable, "-c", program, "--parent-pid"]
    assert subprocess.run([*command, "2"], timeout=60).returncode == 1  # no child of that process
    with subprocess.Popen([*command, str(os.getpid())]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.kill()


def test_lines_of_a_log_have_their_time_and_no_colours() -> None:
    record = logging.LogRecord(
        "flwr", logging.WARNING, "", 0, "\x1b[93mfir\x1b]0;\rst\x1b[0m\nsecond", (), None
    )
    record.created = NOW.timestamp()
    assert Lines().format(record) == "2026-11-16T12:00:00.000+00:00 WARNING fir]0;st\n    second"
    assert json.loads(JsonLines().format(record)) == {
        "time": "2026-11-16T12:00:00.000+00:00",
        "level": "WARNING",
        "logger": "flwr",
        "message": "fir]0;st\nsecond",
    }


# Real processes.


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    settings: dict[str, Any] = merged(
        TINY, {"name": "tiny", "seeds": [0], "split": {"num_clients": 2, "alpha": 1.0}}
    )
    with Federation(tmp_path_factory.mktemp("watched") / "trial", settings) as started:
        write_own_certificates(started.folder / "certificates")
        started.start_link()
        started.register(0)
        yield started


def ended(federation: Federation, name: str) -> str:
    """Wait until a process ends, require status 1, and return its log."""
    process = federation.processes[name]
    wait_for(lambda: process.poll() is not None, 180, f"{name} ends", federation.logs)
    log = (federation.folder / f"{name}.log").read_text(errors="replace")
    assert process.returncode == 1, log
    assert "\x1b[" not in log
    assert "Traceback" not in log
    return log


def let_in(federation: Federation, client: int) -> bool:
    return "SuperNode ID" in (federation.folder / f"node-{client}.log").read_text()


@pytest.mark.federation
def test_a_node_says_why_it_cannot_join(federation: Federation) -> None:
    authority = federation.folder / "certificates" / "ca.crt"
    said = connection_lines(f"127.0.0.1:{federation.port}", authority)
    assert [line.split(" by ")[0] for line in said] == [
        f"127.0.0.1:{federation.port}: its certificate is confirmed",
        "This machine's clock differs from the server's",
    ]
    federation.start_node(1)
    assert "the server does not know this node's key" in ended(federation, "node-1")
    hostile = {"PYTHONPATH": os.pathsep.join([str(PROGRAMS / "hostile"), *sys.path])}
    federation.start_node(
        1, key=federation.folder / "node-0.key", env=hostile | {"FEDAUX_FAULT": "clock100"}
    )
    # The server states whole seconds, and renews them once per second or, if it is busy, later.
    assert re.search(r"clock is 10\d s ahead of the server's", ended(federation, "node-1"))


@pytest.mark.federation
def test_a_node_that_sees_a_bad_handshake_ends_so_that_it_can_be_restarted(
    federation: Federation,
) -> None:
    federation.start_node(0)
    wait_for(lambda: let_in(federation, 0), 120, "node 0 is let in", federation.logs)
    federation.start_node(1, key=federation.folder / "node-0.key")
    assert "this node's key is in use" in ended(federation, "node-1")
    assert federation.processes["node-0"].poll() is None
    certificates = federation.folder / "certificates"
    federation.kill("link")
    certificates.rename(federation.folder / "right")
    write_certificates(certificates, hosts=["127.0.0.1"], days=2)  # of another authority
    federation.start_link()
    log = ended(federation, "node-0")
    assert "the connection to the server failed and Flower gave up" in log
    assert "certificate verify failed" in log.lower()
    assert all(line[:2] == "20" or line[0] == " " for line in log.splitlines())
