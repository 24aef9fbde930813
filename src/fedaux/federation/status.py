"""The status file RUN_DIR/nodes.json: the server writes it, and `fedaux federate watch` shows
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedaux.files import save_json

if TYPE_CHECKING:
    from fedaux.core.task import Task

FILE = "nodes.json"
VERSION = 1
LEAST_SECONDS = 0.5
"""Least time between two writes that are not urgent: a hundred answers need not be a hundred
writes."""
MOST_TURNED_AWAY = 20
"""Nodes that were turned away and are listed, the latest."""
PROCESS_GONE = "the run's process is gone; continue with resume=true"
"""Reason for a run whose status is `running` and whose directory no process has locked."""


class StatusCallback:
    """Writes the state of every client and of the run atomically after each change.

    A client is `unknown` until its node connects, then `present`, `busy` while it has a request,
    and `missing` if it did not answer or is no longer connected. Answers that could not be used are
    counted as `rejected`. Nodes that were turned away are listed with the reason.
    """

    def __init__(self, directory: Path, *, num_clients: int, rounds: int) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._written = 0.0
        self._run: dict[str, Any] = {"state": "running", "rounds": rounds, "since": _now()}
        self._clients: dict[int, dict[str, Any]] = {
            client: {"state": "unknown", "rounds_answered": 0} for client in range(num_clients)
        }
        self._turned_away: dict[int, dict[str, Any]] = {}
        self._write(urgent=True)

    def seen(self, client: int, *, node_id: int | None = None, name: str = "") -> None:
        """The node of this client is connected."""
        with self._lock:
            row = self._clients[client]
            if new := row["state"] in {"unknown", "missing"}:
                row["state"] = "present"
                row.pop("reason", None)
            row["last_seen"] = _now()
            # Flower's node ids have 64 bits, too many for JSON numbers in some readers.
            row |= ({} if node_id is None else {"node": str(node_id)}) | (
                {"name": name} if name else {}
            )
        self._write(urgent=new)

    def names(self) -> dict[int, str]:
        """Return the names of clients whose nodes have one, without control characters."""
        with self._lock:
            named = {one: str(row["name"]) for one, row in self._clients.items() if "name" in row}
        return {
            client: "".join(letter if letter.isprintable() else "?" for letter in name)
            for client, name in named.items()
        }

    def asked(self, clients: Iterable[int], *, what: str, round: int, epochs: int = 0) -> None:
        """These clients have a request, to train for `epochs` if it is one to train."""
        with self._lock:
            for client in clients:
                self._clients[client] |= {
                    "state": "busy",
                    "doing": what,
                    "round": round,
                    "epochs": epochs,
                    "since": _now(),
                }
                self._clients[client].pop("reason", None)
        self._write(urgent=True)

    def answered(self, client: int) -> None:
        """A client has answered."""
        with self._lock:
            row = self._clients[client]
            row["rounds_answered"] += row.pop("doing", None) == "train"
            row["epochs_done"] = row.get("epochs_done", 0) + row.pop("epochs", 0)
            row |= {"state": "present", "last_seen": _now()}
            row.pop("since", None)
        self._write()

    def rejected(self, client: int, reason: str) -> None:
        """A client's answer could not be used."""
        with self._lock:
            row = self._clients[client]
            row |= {"state": "present", "reason": reason, "last_seen": _now()}
            row["rejected"] = row.get("rejected", 0) + 1
            row.pop("doing", None)
            row.pop("since", None)
        self._write(urgent=True)

    def turned_away(self, node_id: int, *, key: str, reason: str) -> None:
        """A node was turned away; `key` is the fingerprint of its public key."""
        with self._lock:
            self._turned_away.pop(node_id, None)
            row = {"node": str(node_id), "key": key, "reason": reason, "when": _now()}
            self._turned_away[node_id] = row
            for oldest in list(self._turned_away)[:-MOST_TURNED_AWAY]:
                del self._turned_away[oldest]
        self._write(urgent=True)

    def missing(self, client: int, reason: str) -> None:
        """A client did not answer in time, refused, or its node failed."""
        with self._lock:
            row = self._clients[client]
            row |= {"state": "missing", "reason": reason}
            row.pop("doing", None)
            row.pop("since", None)
        self._write(urgent=True)

    def gone(self, clients: Iterable[int]) -> None:
        """The nodes of these clients are no longer connected."""
        for client in clients:
            if self._clients[client]["state"] in {"present", "busy"}:
                self.missing(client, "not connected")

    def phase(self, task: Task, round: int, name: str) -> None:
        """Record the phase of the run."""
        with self._lock:
            self._run |= {
                "method": task.method.name,
                "seed": task.seed,
                "round": round,
                "phase": name,
            }
        self._write(urgent=True)

    def round(self, row: Mapping[str, Any]) -> None:
        """Record a finished round."""
        with self._lock:
            self._run |= {key: row[key] for key in ("method", "seed", "round")}
            if row["accuracy"] is not None:
                self._run["accuracy"] = row["accuracy"]
        for client, reason in row.get("clients_dropped", {}).items():
            if "reason" not in self._clients[int(client)]:  # the answer was readable, not usable
                self.rejected(int(client), reason)
        self._write(urgent=True)

    def finished(self) -> None:
        """The run is finished."""
        with self._lock:
            self._run |= {"state": "finished", "phase": ""}
        self._write(urgent=True)

    def failed(self, reason: str) -> None:
        """The run stopped with an error."""
        with self._lock:
            self._run |= {"state": "failed", "phase": "", "reason": reason}
        self._write(urgent=True)

    def _write(self, *, urgent: bool = False) -> None:
        with self._lock:
            if not urgent and time.monotonic() - self._written < LEAST_SECONDS:
                return
            clients = {str(client): dict(row) for client, row in self._clients.items()}
            save_json(
                self._path,
                {
                    "version": VERSION,
                    "written": _now(),
                    "run": dict(self._run),
                    "clients": clients,
                    "turned_away": list(self._turned_away.values()),
                },
            )
            self._written = time.monotonic()


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a run directory; True if unknown."""
    table = Path("/proc/locks")
    if not table.exists():
        return True
    try:
        number = (directory / ".lock").stat().st_ino
    except FileNotFoundError:
        return False
    # Of "1: FLOCK ADVISORY WRITE 1234 fe:01:5678 0 EOF", the last number of the sixth word.
    held = (line.split()[5:6] for line in table.read_text(encoding="ascii").splitlines())
    return any(word.rpartition(":")[2] == str(number) for words in held for word in words)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_since(then: str, now: datetime) -> float:
    """Return the seconds since a time of the status file; 0 if it is later than `now`."""
    return max(0.0, (now - datetime.fromisoformat(then)).total_seconds())
