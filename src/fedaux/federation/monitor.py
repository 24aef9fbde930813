"""Health and metrics of a server or a node over HTTP: /health for probes, /metrics for Prometheus.

A monitor is a separate process, so that it also answers when the watched process does not. At each
request it checks TLS handshakes, listening ports, locks and files.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedaux.federation.status import FILE, PROCESS_GONE, is_locked, seconds_since

TIMEOUT = 5.0
"""Seconds to wait for a connection."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


@dataclass
class Report:
    """What a monitor found: problems make it unhealthy, metrics are numbers by name and labels."""

    problems: list[str] = field(default_factory=list)
    metrics: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def put(self, name: str, value: float, **labels: str) -> None:
        """Add a metric."""
        self.metrics.setdefault(f"fedaux_{name}", {})[tuple(labels.items())] = value


HELP = {
    "fedaux_healthy": "1 if /health answers 200.",
    "fedaux_server_reachable": "1 if the server completes a TLS handshake.",
    "fedaux_certificate_expires_seconds": "Seconds until the server's certificate expires.",
    "fedaux_run_running": "1 while a run is at work.",
    "fedaux_run_round": "The last round of a run.",
    "fedaux_run_rounds": "The number of rounds of a run.",
    "fedaux_run_accuracy": "Test accuracy of the last measured round.",
    "fedaux_run_silent_seconds": "Seconds since a run wrote its status.",
    "fedaux_clients": "Clients of a run by state.",
    "fedaux_client_rounds_answered": "Rounds that a client has answered.",
    "fedaux_client_silent_seconds": "Seconds since a client was last seen.",
    "fedaux_node_listening": "1 if the node's process listens on its local port.",
    "fedaux_budget_epsilon": "The node's privacy budget.",
    "fedaux_spent_epsilon": "What of the budget is spent.",
    "fedaux_releases": "Entries of the node's ledger.",
    "fedaux_disk_free_bytes": "Free space where state is written.",
}
"""Every metric; all are gauges."""


def server_report(folder: Path) -> Report:
    """Return the state of a federation's server: its TLS endpoint, and its latest run."""
    from fedaux.federation.flower_internals.processes import own_names, port_of

    found = Report()
    authority = folder / "certificates" / "ca.crt"
    (host,) = own_names(folder)
    _handshake(found, host, port_of(folder, simulation=False), authority)
    found.put("disk_free_bytes", shutil.disk_usage(folder).free)
    runs = sorted((folder / "runs").glob(f"*/{FILE}"), key=lambda file: file.stat().st_mtime)
    if runs:
        _run(found, runs[-1].parent)
    return found


def node_report(file: Path, *, superlink: str, certificate: Path, port: int) -> Report:
    """Return the state of a node: its process, the server as seen from here, and its ledger."""
    from fedaux.federation.node import load_node
    from fedaux.federation.policy import Guard

    found = Report()
    listening = _listens(port)
    found.put("node_listening", listening)
    if not listening:
        found.problems.append(f"the node does not listen on 127.0.0.1:{port}; is it running?")
    host, _, number = superlink.rpartition(":")
    _handshake(found, host.strip("[]"), int(number), certificate)
    try:
        config = load_node(file)
        guard = Guard(config)
        found.put("budget_epsilon", config.privacy.epsilon)
        found.put("spent_epsilon", guard.spent(guard.counted()))
        found.put("releases", len(guard.entries()))
        beside = next(place for place in (Path(config.state), file.parent) if place.exists())
        found.put("disk_free_bytes", shutil.disk_usage(beside).free)
        # Twice: an answer may leave between the reading of the two files.
        found.problems += guard.problems() and guard.problems()
    except (OSError, ValueError) as error:
        found.problems.append(str(error))
    return found


def _run(found: Report, directory: Path) -> None:
    """Add the state of a run, from its status file and its lock."""
    now, name = datetime.now(UTC), directory.name
    try:
        status: dict[str, Any] = json.loads((directory / FILE).read_text(encoding="utf-8"))
        run, clients = status["run"], status["clients"]
        silent = seconds_since(status["written"], now)
    except (OSError, ValueError, KeyError, TypeError) as error:
        found.problems.append(f"{directory / FILE}: not readable ({error!r})")
        return
    running = run["state"] == "running"
    if running and not is_locked(directory):
        found.problems.append(f"{directory}: {PROCESS_GONE}")
        running = False
    if run["state"] == "failed":
        found.problems.append(f"{directory}: the run failed: {run.get('reason', '')}")
    found.put("run_running", running, run=name)
    found.put("run_silent_seconds", silent, run=name)
    found.put("run_rounds", run["rounds"], run=name)
    for key in ("round", "accuracy"):
        if run.get(key) is not None:
            found.put(f"run_{key}", run[key], run=name)
    for state in ("unknown", "present", "busy", "missing"):
        count = sum(row["state"] == state for row in clients.values())
        found.put("clients", count, run=name, state=state)
    for client, row in clients.items():
        found.put("client_rounds_answered", row["rounds_answered"], run=name, client=client)
        if "last_seen" in row:
            seen = seconds_since(row["last_seen"], now)
            found.put("client_silent_seconds", seen, run=name, client=client)


def _handshake(found: Report, host: str, port: int, authority: Path) -> None:
    """Add whether a server completes a TLS handshake, and for how long its certificate holds."""
    reachable = False
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with (
            socket.create_connection((host, port), timeout=TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            until = ssl.cert_time_to_seconds(str((secure.getpeercert() or {})["notAfter"]))
        reachable = True
        left = until - datetime.now(UTC).timestamp()
        found.put("certificate_expires_seconds", left)
    except (OSError, KeyError) as error:  # SSLError is an OSError
        found.problems.append(f"no TLS connection to {host}:{port}: {error}")
    found.put("server_reachable", reachable)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT):
            return True
    except OSError:
        return False


def exposition(found: Report) -> str:
    """Return metrics in Prometheus' text format."""
    overall: dict[str, dict[Labels, float]] = {"fedaux_healthy": {(): not found.problems}}
    return "".join(_lines(overall | found.metrics))


def _lines(metrics: Mapping[str, Mapping[Labels, float]]) -> Iterator[str]:
    for name, samples in metrics.items():
        yield f"# HELP {name} {HELP[name]}\n# TYPE {name} gauge\n"
        for labels, value in samples.items():
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{name}{f'{{{shown}}}' if shown else ''} {float(value)!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def health(found: Report) -> str:
    """Return the body of /health."""
    return json.dumps({"healthy": not found.problems, "problems": found.problems}) + "\n"


def serve(look: Callable[[], Report], *, host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server that looks again at each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/health": (health, "application/json"), "/metrics": (exposition, PROMETHEUS)}
            if self.path not in pages:
                self.send_error(404, "there are /health and /metrics")
                return
            page, kind = pages[self.path]
            found = look()
            body = page(found).encode()
            self.send_response(503 if found.problems and page is health else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes come every few seconds: log nothing."""

    return ThreadingHTTPServer((host, port), Handler)
