"""Who is there: the server writes RUN_DIR/nodes.json as a federation goes on, `fedaux federate watch` reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedaux.core.task import Task

FILE = "nodes.json"
VERSION = 1
LEAST_SECONDS = 0.5
"""Between two writings of what is not urgent: a hundred answers are not a hundred files."""


class NodeBoard:
    """The state of every client and of the run, written in one step after a change. It is a callback too.

    A client is `unknown` until its node is heard of, then `present`, `busy` while something was asked of it, and
    `missing` when it did not answer or is no longer connected.
    """

    def __init__(self, directory: Path, *, num_clients: int, rounds: int) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._written = 0.0
        self._run: dict[str, Any] = {"state": "running", "rounds": rounds, "since": _now()}
        self._clients: dict[int, dict[str, Any]] = {
            client: {"state": "unknown", "rounds_answered": 0} for client in range(num_clients)
        }
        self._write(urgent=True)

    def seen(self, client: int, *, node_id: int | None = None, name: str = "") -> None:
        """A node is connected and speaks for this client."""
        with self._lock:
            row = self._clients[client]
            if new := row["state"] in {"unknown", "missing"}:
                row["state"] = "present"
                row.pop("reason", None)
            row["last_seen"] = _now()
            # Flower's node ids have 64 bits, more than the numbers of JSON can hold everywhere.
            row |= ({} if node_id is None else {"node": str(node_id)}) | (
                {"name": name} if name else {}
            )
        self._write(urgent=new)

    def asked(self, clients: Iterable[int], *, what: str, round: int) -> None:
        """Something was asked of these clients: they are busy until they answer or are given up."""
        with self._lock:
            for client in clients:
                self._clients[client] |= {
                    "state": "busy",
                    "doing": what,
                    "round": round,
                    "since": _now(),
                }
                self._clients[client].pop("reason", None)
        self._write(urgent=True)

    def answered(self, client: int) -> None:
        """A client has answered."""
        with self._lock:
            row = self._clients[client]
            row["rounds_answered"] += row.pop("doing", None) == "train"
            row |= {"state": "present", "last_seen": _now()}
            row.pop("since", None)
        self._write()

    def missing(self, client: int, reason: str) -> None:
        """A client was given up: it did not answer in time, refused, or its node has failed."""
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
        """Note what the server is doing."""
        with self._lock:
            self._run |= {
                "method": task.method.name,
                "seed": task.seed,
                "round": round,
                "phase": name,
            }
        self._write(urgent=True)

    def round(self, row: Mapping[str, Any]) -> None:
        """Note a finished round."""
        with self._lock:
            self._run |= {key: row[key] for key in ("method", "seed", "round")}
            if row["accuracy"] is not None:
                self._run["accuracy"] = row["accuracy"]
        self._write(urgent=True)

    def finished(self) -> None:
        """The run has come to its end."""
        with self._lock:
            self._run |= {"state": "finished", "phase": ""}
        self._write(urgent=True)

    def failed(self, reason: str) -> None:
        """The run has stopped before its end."""
        with self._lock:
            self._run |= {"state": "failed", "phase": "", "reason": reason}
        self._write(urgent=True)

    def _write(self, *, urgent: bool = False) -> None:
        from fedaux.files import (
            save_json,
        )  # which loads torch, and whoever only reads the file needs none

        with self._lock:
            if not urgent and time.monotonic() - self._written < LEAST_SECONDS:
                return
            clients = {str(client): dict(row) for client, row in self._clients.items()}
            save_json(
                self._path,
                {"version": VERSION, "written": _now(), "run": dict(self._run), "clients": clients},
            )
            self._written = time.monotonic()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
