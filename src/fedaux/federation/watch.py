"""A live view of a federation's nodes, from the status file in the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedaux.federation.status import FILE, PROCESS_GONE, VERSION, is_locked, seconds_since
from fedaux.running.remaining import duration

SILENT_SECONDS = 60.0
"""Silence of the server after which the view mentions it: it may be training, or may have
stopped."""
GRACE_SECONDS = 1.0
"""A run gives its directory free shortly before it writes how it ended."""
COLOURS = {"present": "green", "busy": "cyan", "missing": "red", "unknown": "yellow"}


def read_status(directory: Path) -> dict[str, Any]:
    """Return the status that the server last wrote. Raises ValueError if it is missing or not
    valid."""
    file = directory / FILE
    try:
        status: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{file}: there is no such file; the server writes it when a run starts"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file}: damaged, not readable as JSON ({error})") from error
    if status.get("version") != VERSION:
        raise ValueError(f"{file}: has version {status.get('version')}; should be {VERSION}")
    return status


def current_status(directory: Path) -> dict[str, Any]:
    """Return the status of a run; a run whose process is gone has failed. Raises ValueError."""
    status = read_status(directory)
    if _is_gone(status, directory):
        time.sleep(GRACE_SECONDS)
        status = read_status(directory)
    if _is_gone(status, directory):
        status["run"] |= {"state": "failed", "reason": PROCESS_GONE}
    return status


def _is_gone(status: Mapping[str, Any], directory: Path) -> bool:
    return status["run"]["state"] == "running" and not is_locked(directory)


def view(status: Mapping[str, Any], *, now: datetime) -> Group:
    """Return one line about the run and a table of the nodes."""
    run = status["run"]
    table = Table()
    numbers = {"client", "rounds", "epochs", "rejected"}
    for column in (
        *("client", "name", "state", "doing", "last seen", "rounds", "epochs", "rejected"),
        "remark",
    ):
        table.add_column(column, justify="right" if column in numbers else "left")
    for client, row in status["clients"].items():
        state = row["state"]
        doing = (
            f"{row['doing']} {row['round']}, {_ago(row['since'], now)}" if row.get("doing") else ""
        )
        seen = f"{_ago(row['last_seen'], now)} ago" if "last_seen" in row else "never"
        name, remark = (_printable(row.get(key, "")) for key in ("name", "reason"))
        table.add_row(
            client,
            name,
            Text(state, COLOURS[state]),
            doing,
            seen,
            str(row["rounds_answered"]),
            _epochs(row),
            str(row.get("rejected", "")),
            remark,
        )
    count = {
        state: sum(row["state"] == state for row in status["clients"].values()) for state in COLOURS
    }
    nodes = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    parts: list[RenderableType] = [
        Text(run_line(run, nodes, silent=seconds_since(status["written"], now))),
        table,
    ]
    if turned_away := status.get("turned_away"):
        parts.append(_turned_away(turned_away, now=now))
    return Group(*parts)


def _epochs(row: Mapping[str, Any]) -> str:
    """Return the local epochs that a client has answered for, and its present local epochs.

    How far it is in between it does not say: the time that examples take is private.
    """
    asked = row.get("epochs", 0) if row.get("doing") == "train" else 0
    return str(row.get("epochs_done", 0)) + (f" + {asked}" if asked else "")


def _turned_away(rows: Sequence[Mapping[str, Any]], *, now: datetime) -> Table:
    """Return a table of the nodes that were turned away, and why."""
    table = Table(title="turned away", title_justify="left")
    for column in ("node", "key", "when", "reason"):
        table.add_column(column)
    for row in rows:
        node, key, reason = (_printable(row[name]) for name in ("node", "key", "reason"))
        table.add_row(node, key, f"{_ago(row['when'], now)} ago", reason)
    return table


def run_line(run: Mapping[str, Any], nodes: str, *, silent: float) -> str:
    """Return the progress of the run in one line."""
    parts = [run["state"] + (f": {_printable(run['reason'])}" if run.get("reason") else "")]
    if "method" in run:
        parts.append(
            f"{run['method']}, seed {run['seed']}, round {run['round']} of {run['rounds']}"
        )
    if run.get("phase"):
        parts.append(run["phase"])
    if run.get("accuracy") is not None:
        parts.append(f"accuracy {100 * run['accuracy']:.1f} %")
    parts.append(nodes)
    if run["state"] == "running" and silent > SILENT_SECONDS:
        parts.append(f"nothing written for {silent:.0f} s")
    return "  ·  ".join(parts)


def watch(directory: Path, console: Console, *, once: bool, every: float = 1.0) -> str:
    """Show the nodes until the run ends; only once, as plain text, if there is no terminal.

    Returns the state of the run.
    """
    status = current_status(directory)
    if once or not console.is_terminal:
        console.print(view(status, now=datetime.now(UTC)))
        return str(status["run"]["state"])
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            live.update(view(status, now=datetime.now(UTC)), refresh=True)
            if status["run"]["state"] != "running":
                return str(status["run"]["state"])
            time.sleep(every)
            status = current_status(directory)


def _printable(text: str) -> Text:
    """Return a node's text without control characters."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def _ago(then: str, now: datetime) -> str:
    return duration(seconds_since(then, now))
